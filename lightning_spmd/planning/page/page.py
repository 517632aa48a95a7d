"""Puts the page together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lightning_spmd.planning.page.marks import tag
from lightning_spmd.planning.page.modules import flow, tree
from lightning_spmd.planning.page.sharding import sharding
from lightning_spmd.planning.page.style import SCRIPT, STYLE
from lightning_spmd.planning.page.timeline import memory_curve, timeline
from lightning_spmd.planning.tables import measured_rows, wait_rows
from lightning_spmd.planning.units import bytes_text, count_text, nodes_text, seconds_text

Facts = Mapping[str, Any]
_SECTIONS = {"time": "Time", "memory": "Memory", "graph": "Modules", "layers": "Sharding", "messages": "Messages"}
_MEASURED = {"measured": "Measured"}
_ZOOMS = (1, 2, 4, 8, 16, 32)


def page_of(facts: Facts) -> str:
    """The page.

    Args:
        facts: ``facts_of`` an outlook.
    """
    title = f"Plan: {facts['run']['ranks']} × {facts['run']['device']['name']}"
    zoom = "stretch" + "".join(tag("button", f"{z}×", data_zoom=z) for z in _ZOOMS)
    body = [
        _header(facts, title),
        "<main>",
        _numbers(facts),
        _section("time", "Streams of a rank over time" + tag("span", zoom, class_="zoom"), timeline(facts)),
        _section("memory", "Memory of a rank over time", memory_curve(facts)),
        _measured(facts["measured"]) if "measured" in facts else "",
        tag("div", _holders(facts), class_="columns"),
        _section("graph", "Graph by module", flow(facts) + tree(facts)),
        _section("layers", "How parameters lie (dark: rank 0)", sharding(facts)),
        _section("messages", "Collectives of an iteration", _messages(facts)),
        tag("div", "".join(tag("p", escape(r)) for r in facts["remarks"]), class_="faint"),
        "</main>",
        tag("script", SCRIPT),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += tag("title", escape(title)) + tag("style", STYLE)
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _section(name: str, title: str, content: str) -> str:
    return tag("section", tag("h2", title) + content, id=name)


def _header(facts: Facts, title: str) -> str:
    run = facts["run"]
    mesh = " × ".join(f"{name} {size}" for name, size in run["mesh"].items() if size > 1) or "one device"
    network = f", {run['between']['name']} between nodes" if run["nodes"] > 1 else ""
    said = (
        f"{nodes_text(run)}: {mesh}. {run['within']['name']} in a node{network}. Precision "
        f"{run['precision']}, {run['rows']} rows a data rank, {run['global_rows']} in all. Predicted, not measured"
    )
    sections = {**_SECTIONS, **_MEASURED} if "measured" in facts else _SECTIONS
    said += ", but for the section Measured." if "measured" in facts else "."
    links = tag("nav", "".join(tag("a", text, href=f"#{name}") for name, text in sections.items()))
    return tag("header", links + tag("h1", escape(title)) + tag("p", escape(said)))


def _numbers(facts: Facts) -> str:
    time, memory = facts["time"], facts["memory"]
    needed = memory["peak"] + memory["reserved"]
    step = time["step"] or 1.0
    entries = [
        ("step", seconds_text(time["step"]), ""),
        ("MFU", f"{time['mfu']:.1%}", ""),
        ("samples a second", count_text(time["rows_per_second"]), ""),
        ("waiting for messages", f"{seconds_text(time['exposed'])} ({time['exposed'] / step:.0%})", ""),
        ("highest memory", bytes_text(memory["peak"]), ""),
        ("parameters", count_text(memory["parameters"]), ""),
        (
            f"of the {bytes_text(memory['available'])} it has",
            f"{'fits' if memory['fits'] else 'does not fit'}: {needed / memory['available']:.0%}",
            "good" if memory["fits"] else "bad",
        ),
    ]
    boxes = [tag("div", tag("b", escape(value)) + escape(name), class_=kind) for name, value, kind in entries]
    return tag("div", "".join(boxes), class_="numbers")


def _measured(facts: Facts) -> str:
    """The same streams of each rank as its clocks saw them, and the numbers beside the predicted ones."""
    pictures = "".join(timeline(rank, f"measured-{number}") for number, rank in enumerate(facts["ranks"]))
    waits = wait_rows(facts)
    tables = _table(*measured_rows(facts)) + (tag("h2", "Largest waits") + _table(*waits) if waits[1] else "")
    return _section("measured", f"Measured here, a batch: medians of {facts['steps']} steps", pictures + tables)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(tag(kind, escape(c), class_="word" if i < words else "") for i, c in enumerate(row))

    return tag("table", tag("tr", cells("th", head)) + "".join(tag("tr", cells("td", row)) for row in rows))


def _holders(facts: Facts) -> str:
    memory = facts["memory"]
    where = f"{memory['section']} of {memory['module'] or 'the step'} in {memory['phase']}"
    kinds = [
        (kind, bytes_text(size), f"{size / memory['peak']:.1%}") for kind, size in memory["at_peak"].items() if size
    ]
    modules = [
        (m["module"] or "(the step)", m["kind"], str(m["count"]), bytes_text(m["bytes"]))
        for m in memory["modules"][:12]
    ]
    left = tag("h2", f"At the highest point, {escape(where)}") + _table(("what", "bytes", "share"), kinds)
    right = tag("h2", "What comes and goes and is there then, by module")
    right += _table(("module", "what", "tensors", "bytes"), modules, 2)
    return tag("div", left) + tag("div", right)


def _messages(facts: Facts) -> str:
    rows = [
        (
            m["kind"], m["group"], m["link"], str(m["ranks"]), str(m["count"]), bytes_text(m["bytes"]),
            seconds_text(m["seconds"]), seconds_text(m["exposed"]),
        )
        for m in facts["messages"]
    ]  # fmt: skip
    head = ("collective", "group", "link", "ranks", "count", "bytes", "time", "waited for")
    return _table(head, rows, 3) if rows else tag("p", "none")
