"""What the parts found, as tables and as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.gpu.benchmark import OPTIONS
from tests.gpu.running import NOT_RUN, PASSED, Outcome

EAGER, COMPILED, BY_HAND = "lightning", "lightning, compiled", "hand-written, compiled"
OURS = "spmd"


def peak_flops(outcomes: Sequence[Outcome]) -> float | None:
    """What the device reaches in bfloat16, if that was measured."""
    return next((o.data["peak_flops"] for o in outcomes if "peak_flops" in o.data), None)


def with_shares(outcomes: Sequence[Outcome]) -> None:
    """Add the share of the measured peak to the rows of benchmarks."""
    peak = peak_flops(outcomes)
    for outcome in outcomes:
        for row in outcome.data.get("rows", ()):
            if peak and "tokens_per_second" in row:
                row["mfu"] = row["tokens_per_second"] * outcome.data["case"]["flops_per_token"] / peak


def targets(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """What is wanted of this strategy on a GPU, with the best of its sides: (text, value, wanted, met)."""
    found: list[dict[str, Any]] = []
    for outcome in outcomes:
        rows = {r["side"]: r for r in outcome.data.get("rows", ()) if "tokens_per_second" in r}
        ours = [r for name, r in rows.items() if name.startswith(OURS)]
        if not ours:
            continue
        best = max(ours, key=lambda r: r["tokens_per_second"])
        counted = [r for r in ours if not OPTIONS.get(r["side"], {}).get("cuda_graphs")]  # pools count as nothing
        fastest_counted = max(counted, key=lambda r: r["tokens_per_second"], default=None)

        def ratio(
            to: str,
            wanted: float,
            key: str = "tokens_per_second",
            *,
            at_most: bool = False,
            part: str = outcome.part.name,
            best: dict[str, Any] = best,
            rows: dict[str, Any] = rows,
            counted: dict[str, Any] | None = fastest_counted,
        ) -> None:
            side = counted if key == "peak_bytes" else best
            if side is None or not rows.get(to, {}).get(key) or not side.get(key):
                return
            value = side[key] / rows[to][key]
            met = value <= wanted if at_most else value >= wanted
            text = f"{part}: {key} of {side['side']} over that of {to}"
            found.append({"what": text, "value": value, "wanted": wanted, "at_most": at_most, "met": met})

        if outcome.part.name == "small":
            ratio(EAGER, 1.5)
            continue
        ratio(COMPILED, 1.10)
        ratio(BY_HAND, 1.00)
        ratio(COMPILED, 1.00, "peak_bytes", at_most=True)
        ratio(BY_HAND, 1.00, "peak_bytes", at_most=True)
        if outcome.part.name == "gpt2_350m" and "mfu" in best:
            text = f"gpt2_350m: share of the measured peak, {best['side']}"
            met = best["mfu"] >= 0.5
            found.append({"what": text, "value": best["mfu"], "wanted": 0.5, "at_most": False, "met": met})
    return found


def document(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything, for machines."""
    parts = [
        {
            "part": o.part.name,
            "kind": o.part.kind,
            "status": o.status,
            "reason": o.reason,
            "exit_code": o.exit_code,
            "seconds": round(o.seconds, 1),
            "found": o.data,
        }
        for o in outcomes
    ]
    return {**facts, "peak_flops": peak_flops(outcomes), "parts": parts, "targets": targets(outcomes)}


def write(path: Path, found: dict[str, Any]) -> None:
    """Keep the document."""
    path.write_text(json.dumps(found, indent=1))


# ---------------------------------------------------------------------- for people
def print_all(outcomes: Sequence[Outcome], console: Console) -> None:
    """Every table that has a row."""
    tables = [_parts(outcomes), _equality(outcomes), *map(_benchmark, outcomes), _targets(outcomes)]
    for table in tables:
        if table.row_count:
            console.print(table)
    peak = peak_flops(outcomes)
    if peak:
        console.print(f"measured bfloat16 peak: {peak / 1e12:.4g} TFLOP/s", highlight=False)


def _parts(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="parts", title_justify="left")
    for name in ("part", "status", "seconds", "exit code", "reason"):
        table.add_column(name, overflow="fold")
    for o in outcomes:
        style = {PASSED: "green", NOT_RUN: "yellow"}.get(o.status, "red")
        code = "-" if o.exit_code is None else str(o.exit_code)
        reason = escape(o.reason or str(o.data.get("note", "")))
        table.add_row(o.part.name, f"[{style}]{o.status}[/]", f"{o.seconds:.0f}", code, reason)
    return table


def _equality(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="against eager training (relative; two eager runs in brackets)", title_justify="left")
    for name in ("model", "ranks", "precision", "losses", "weights", "graphs", "equal"):
        table.add_column(name)
    for row in (row for o in outcomes if o.data.get("kind") == "equality" for row in o.data["rows"]):
        table.add_row(
            row["model"],
            str(row["ranks"]),
            row["precision"],
            f"{row['difference']:.1e} ({row['band']:.1e})",
            f"{row['weights_difference']:.1e} ({row['weights_band']:.1e})",
            str(row["captures"]),
            "[green]yes[/]" if row["passed"] else "[red]NO[/]",
        )
    return table


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
    "step": lambda r: f"{1e3 * r['median_step_seconds']:.2f} ms",
    "of peak": lambda r: f"{100 * r['mfu']:.1f} %",
    "allocated": lambda r: f"{r['peak_bytes'] / 2**20:,.0f} MiB",
    "reserved": lambda r: f"{r['reserved_bytes'] / 2**20:,.0f} MiB",
    "first step": lambda r: f"{r['first_step_seconds']:.1f} s",
    "last loss": lambda r: f"{r['loss']:.4f}",
    "trace": lambda r: str(r["trace"] or "-"),
}


def _benchmark(outcome: Outcome) -> Table:
    case = outcome.data.get("case", {})
    size = "{layers} layers of {width}, {rows} × {length} tokens".format_map(case) if case else ""
    kernel = f"attention: {outcome.data.get('attention')}"
    table = Table(title=f"{outcome.part.name}: {size}, bf16-mixed, {kernel}", title_justify="left")
    table.add_column("side")
    for name in _COLUMNS:
        table.add_column(name, justify="right", overflow="fold")
    if outcome.data.get("kind") != "benchmark":
        return table
    for row in outcome.data["rows"]:
        table.add_row(row["side"], *[_cell(make, row) for make in _COLUMNS.values()])
        if "error" in row:
            table.add_row(f"[red]{escape(row['error'])}[/]")
    return table


def _cell(make: Callable[[dict[str, Any]], str], row: dict[str, Any]) -> str:
    try:
        return make(row)
    except (KeyError, TypeError):
        return "-"


def _targets(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="what is wanted on a GPU", title_justify="left")
    for name in ("what", "is", "wanted", "met"):
        table.add_column(name, overflow="fold")
    for t in targets(outcomes):
        wanted = f"{'at most' if t['at_most'] else 'at least'} {t['wanted']:.2f}"
        table.add_row(t["what"], f"{t['value']:.3f}", wanted, "[green]yes[/]" if t["met"] else "[red]no[/]")
    return table
