"""Prints a plan in the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_spmd.planning.contents import KINDS
from lightning_spmd.planning.facts import pattern
from lightning_spmd.planning.search import Search, described
from lightning_spmd.planning.units import bytes_text, count_text, nodes_text, seconds_text

ROWS = 10
"""Of a table whose rows have no end."""
_BAR = 30
_STEPS = " ▁▂▃▄▅▆▇█"
Facts = Mapping[str, Any]


def print_plan(facts: Facts, console: Console) -> None:
    """Print a plan.

    Args:
        facts: ``facts_of`` an outlook.
        console: the console.
    """
    for part in (_header, _memory, _holders, _time, _messages, _modules):
        console.print(part(facts))
    for remark in facts["remarks"]:
        console.print(Text(f"- {remark}"), soft_wrap=True)


def print_search(found: Search, console: Console) -> None:
    """Print the results of a search, the best first.

    Args:
        found: the results.
        console: the console.
    """
    columns = ("layout", "batch of a data rank", "memory", "step", "waiting", "MFU", "samples a second")
    table = _table(f"Layouts for the same global batch, {found.seconds:.0f} s", *columns)
    for candidate in [c for c in found.built if c.outlook is not None][:ROWS]:
        o = candidate.outlook
        if o is not None:
            memory = bytes_text(o.needed_bytes) + ("" if o.fits else " TOO MUCH")
            table.add_row(
                described(candidate.options), str(o.rows), memory, seconds_text(o.step_seconds),
                f"{o.exposed / (o.step_seconds or 1.0):.0%}", f"{o.mfu:.1%}", count_text(o.rows_per_second),
            )  # fmt: skip
    console.print(table)
    for candidate in [c for c in found.built if c.outlook is None]:
        console.print(Text(f"- {described(candidate.options)} cannot be: {candidate.reason}"), soft_wrap=True)
    if found.others:
        nearest = "; ".join(described(c.options) for c in found.others[:3])
        console.print(Text(f"- {len(found.others)} more were only estimated, for lack of time; next: {nearest}"))


def measured_rows(facts: Facts) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Head and rows of what was predicted and measured.

    Args:
        facts: ``measured`` of a plan's facts.
    """
    rows: list[Sequence[str]] = []
    names = {
        "step": "batch", "processor": "time of a core", "computing": "operators", "communicating": "communication",
        "exposed": "waiting for communication", "between": "between graphs",
        "memory": "memory of a step", "process": "all memory",
    }  # fmt: skip
    for key, name in names.items():
        row = facts.get(key)
        if row is None or row["measured"] is None:
            continue
        text = bytes_text if key in ("memory", "process") else seconds_text
        low, high = (row["tenth"], row["ninetieth"]) if key == "step" else _ends(key, row)
        spread = "" if low is None or high is None else f"{text(low)} to {text(high)}"
        ratio = f"{row['predicted'] / row['measured']:.2f}" if row["predicted"] and row["measured"] else ""
        predicted = "" if key == "between" else text(row["predicted"])
        rows.append((name, predicted, text(row["measured"]), spread, ratio))
    return ("what", "predicted", "measured", "from, to", "predicted / measured"), rows


def _ends(key: str, row: Facts) -> tuple[float | None, float | None]:
    """The least and the most of several ranks; of the time of a collective the least is the one that counts."""
    times = row.get("by_rank", ())
    return (min(times), max(times)) if len(times) > 1 and key != "communicating" else (None, None)


def wait_rows(facts: Facts) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Head and rows of the largest waits; likewise."""
    rows: list[Sequence[str]] = []
    for wait in facts["waits"]:
        others = f" (least {seconds_text(wait['least'])})" if "least" in wait else ""
        rows.append(
            (
                wait["side"], f"{seconds_text(wait['seconds'])}{others}", str(wait["rank"]), wait["kind"],
                bytes_text(wait["size"]), wait["of"],
            )
        )  # fmt: skip
    return ("side", "waits", "rank", "collective", "bytes", "of"), rows


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return table


def _header(facts: Facts) -> Text:
    run = facts["run"]
    mesh = " × ".join(f"{name} {size}" for name, size in run["mesh"].items() if size > 1) or "one device"
    options = ", ".join(f"{k}={_short(v)}" for k, v in run["options"].items()) or "defaults"
    links = f"{run['within']['name']} inside a node" + (
        f", {run['between']['name']} between" if run["nodes"] > 1 else ""
    )
    lines = [
        f"{run['ranks']} × {run['device']['name']} ({nodes_text(run)}; {links})",
        f"mesh: {mesh}; strategy: {options}",
        f"precision {run['precision']}; batch {run['rows']} a data rank, {run['global_rows']} in all; "
        f"{count_text(facts['memory']['parameters'])} parameters",
    ]
    return Text("\n".join(lines) + "\n")


def _short(value: Any) -> str:
    return f"{len(value)} patterns" if isinstance(value, Mapping) else str(value)


def _memory(facts: Facts) -> Table:
    memory = facts["memory"]
    where = memory["module"] or "the step"
    table = _table(
        f"Memory of a rank: highest in {memory['phase']}, {memory['section']} of {where}", "what", "bytes", "share", ""
    )
    for kind in KINDS:
        size = memory["at_peak"][kind]
        if size:
            share = size / memory["peak"]
            table.add_row(kind, bytes_text(size), f"{share:.0%}", "█" * max(1, round(_BAR * share)))
    table.add_row("all tensors", bytes_text(memory["peak"]), "100%", _sparkline(facts), style="bold")
    needed = memory["peak"] + memory["reserved"]
    verdict = "fits" if memory["fits"] else "DOES NOT FIT"
    table.add_row("with what the device reserves", bytes_text(needed), "", "")
    table.add_row(
        "the device has", bytes_text(memory["available"]), f"{needed / memory['available']:.0%} full", verdict
    )
    return table


def _sparkline(facts: Facts) -> str:
    """The memory of the steady iteration over its nodes."""
    totals = [p["total"] for phase in facts["phases"] if phase["times"] for p in phase["curve"]]
    highest = max(totals, default=0) or 1
    width = max(1, -(-len(totals) // _BAR))
    tops = [max(totals[i : i + width]) for i in range(0, len(totals), width)]
    return "".join(_STEPS[round((len(_STEPS) - 1) * top / highest)] for top in tops)


def _holders(facts: Facts) -> Table:
    table = _table("What comes and goes and is there at that point, by module", "module", "what", "tensors", "bytes")
    modules: Sequence[Any] = facts["memory"]["modules"]
    for entry in modules[:ROWS]:
        table.add_row(entry["module"] or "(the step)", entry["kind"], str(entry["count"]), bytes_text(entry["bytes"]))
    rest = modules[ROWS:]
    if rest:
        table.add_row("all others", "", str(sum(e["count"] for e in rest)), bytes_text(sum(e["bytes"] for e in rest)))
    return table


def _time(facts: Facts) -> Table:
    time = facts["time"]
    step = time["step"] or 1.0
    table = _table("Time of an iteration (predicted, not measured)", "what", "time", "share")
    table.add_row("computing", seconds_text(time["computing"]), f"{time['computing'] / step:.0%}")
    table.add_row("waiting for communication", seconds_text(time["exposed"]), f"{time['exposed'] / step:.0%}")
    table.add_row("waiting for the host", seconds_text(time["host_bound"]), f"{time['host_bound'] / step:.0%}")
    table.add_row("step", seconds_text(time["step"]), "100%", style="bold")
    table.add_row("communication, hidden or not", seconds_text(time["communicating"]), "")
    table.add_row("samples a second, all ranks", count_text(time["rows_per_second"]), "")
    table.add_row("MFU", f"{time['mfu']:.1%}", f"{count_text(time['flops'])}FLOP a step")
    return table


def _messages(facts: Facts) -> Table:
    columns = ("collective", "group", "ranks", "link", "count", "bytes", "time", "waited for")
    table = _table("Collectives of an iteration", *columns)
    for m in facts["messages"]:
        table.add_row(
            m["kind"], m["group"], str(m["ranks"]), m["link"], str(m["count"]), bytes_text(m["bytes"]),
            seconds_text(m["seconds"]), seconds_text(m["exposed"]),
        )  # fmt: skip
    if not facts["messages"]:
        table.add_row("none", *[""] * (len(columns) - 1))
    return table


def _modules(facts: Facts) -> Table:
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for entry in facts["modules"]:
        line = found[pattern(entry["module"])]
        section = entry["section"] if entry["section"] in ("forward", "backward") else "update"
        line[section] += entry["seconds"]
        line["flops"] += entry["flops"]
        line["all"] += entry["seconds"]
    table = _table("Where the device computes, by module", "module", "forward", "backward", "update", "FLOP", "share")
    total = facts["time"]["computing"] or 1.0
    ordered = sorted(found.items(), key=lambda item: -item[1]["all"])
    for name, line in ordered[:ROWS]:
        times = [seconds_text(line[section]) for section in ("forward", "backward", "update")]
        table.add_row(name or "(the step)", *times, count_text(line["flops"]), f"{line['all'] / total:.0%}")
    return table
