"""The graph by module: what hands what to whom, and a tree with time, arithmetic and memory of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from lightning_spmd.planning.facts import pattern
from lightning_spmd.planning.page.marks import OF_SECTION, tag
from lightning_spmd.planning.units import bytes_text, count_text, seconds_text

Facts = Mapping[str, Any]
_MOST = 9
"""Boxes of the flow picture."""
_BOX, _GAP, _TALL = 136, 24, 64
_LETTERS = 16
"""Of bold type fit into a box."""
_ARC = 42
"""Above and below the boxes, for what skips some of them."""


@dataclass
class Branch:
    """A module, with everything inside it."""

    name: str
    children: dict[str, Branch] = field(default_factory=dict[str, "Branch"])
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    flops: float = 0.0
    moved: float = 0.0
    kept: int = 0

    @property
    def total(self) -> float:
        """Seconds of all sections."""
        return sum(self.seconds.values())


def flow(facts: Facts) -> str:
    """Modules as boxes in the order in which they run, and what goes from one to the other."""
    depth = _depth(facts)
    order: dict[str, dict[str, float]] = {}
    for entry in facts["modules"]:
        if entry["section"] in ("forward", "backward"):
            line = order.setdefault(_cut(entry["module"], depth), defaultdict(float))
            line[entry["section"]] += entry["seconds"]
    names = list(order)[:_MOST]
    counts = _counts(facts, depth)
    edges: dict[tuple[str, str], int] = defaultdict(int)
    for edge in facts["edges"]:
        ends = _cut(edge["from"], depth), _cut(edge["to"], depth)
        if ends[0] != ends[1] and set(ends) <= set(names):
            edges[ends] += edge["bytes"]
    arc = _ARC if any(names.index(b) != names.index(a) + 1 for a, b in edges) else 4
    parts = [_box(name, i, arc, order[name], counts.get(name, 1)) for i, name in enumerate(names)]
    parts += [_arrow(names.index(a), names.index(b), arc, size) for (a, b), size in edges.items()]
    width = len(names) * (_BOX + _GAP)
    head = tag(
        "marker",
        tag("path", "", d="M0 0L6 3L0 6z", fill="#495057"),
        id="tip",
        markerWidth=6,
        markerHeight=6,
        refX=5,
        refY=3,
        orient="auto",
    )
    return tag(
        "div",
        tag("svg", tag("defs", head) + "".join(parts), id="flow", width=width, height=_TALL + 2 * arc),
        class_="scroll",
    )


def tree(facts: Facts) -> str:
    """All modules, to be opened one by one."""
    root = Branch("the step")
    kept: dict[str, int] = defaultdict(int)
    for held in facts["memory"]["tensors"]:
        kept[held["module"]] += held["bytes"]
    for entry in facts["modules"]:
        for branch in _path(root, entry["module"]):
            section = entry["section"] if entry["section"] in OF_SECTION else "optimizer"
            branch.seconds[section] += entry["seconds"]
            branch.flops += entry["flops"]
            branch.moved += entry["bytes"]
    for module, size in kept.items():
        for branch in _path(root, module):
            branch.kept += size
    head = "".join(tag("span", text) for text in ("", "time", "FLOP", "moved", "at the peak"))
    return tag(
        "div",
        tag("div", tag("span", "module") + head, class_="line head") + _branch(root, root.total or 1.0, 0),
        id="modules",
    )


# ---------------------------------------------------------------- pieces
def _depth(facts: Facts) -> int:
    """So deep that there are several boxes, and not too many."""
    names = {pattern(e["module"]) for e in facts["modules"] if e["section"] == "forward"}
    best = 1
    for depth in range(1, 6):
        boxes = {_cut(name, depth) for name in names}
        if len(boxes) <= _MOST:
            best = depth
    return best


def _cut(module: str, depth: int) -> str:
    return ".".join(pattern(module).split(".")[:depth])


def _counts(facts: Facts, depth: int) -> dict[str, int]:
    """How many modules of a pattern there are."""
    found: dict[str, set[str]] = defaultdict(set)
    for entry in facts["modules"]:
        cut = ".".join(entry["module"].split(".")[:depth])
        found[pattern(cut)].add(cut)
    return {name: len(members) for name, members in found.items()}


def _box(name: str, place: int, y: int, seconds: Mapping[str, float], count: int) -> str:
    x = place * (_BOX + _GAP)
    short = name.rpartition(".")[2] if name else "the step"
    label = ".".join(name.split(".")[-2:]) if short == "*" else short
    times = f" × {count}" if count > 1 else ""
    lines = [
        tag(
            "rect",
            tag("title", escape(name or "the step")),
            x=x,
            y=y,
            width=_BOX,
            height=_TALL,
            rx=5,
            fill="#f8f9fa",
            stroke="#868e96",
        ),
        tag("text", escape((label + times)[:_LETTERS]), x=x + 8, y=y + 18, font_weight="bold"),
        tag("text", f"forward {seconds_text(seconds['forward'])}", x=x + 8, y=y + 37, fill="#2b8a3e"),
        tag("text", f"backward {seconds_text(seconds['backward'])}", x=x + 8, y=y + 54, fill="#d9480f"),
    ]
    return "".join(lines)


def _arrow(start: int, end: int, top: int, size: int) -> str:
    step, y = _BOX + _GAP, top + _TALL // 2
    title = tag("title", bytes_text(size))
    if end == start + 1:
        x = start * step + _BOX
        return tag("path", title, d=f"M{x} {y}L{x + _GAP} {y}", class_="arrow", marker_end="url(#tip)")
    x1, x2 = start * step + _BOX / 2, end * step + _BOX / 2
    forward = end > start
    y1, bend = (top, 4 - top // 2) if forward else (top + _TALL, 2 * top + _TALL + top // 2)
    return tag(
        "path",
        title,
        d=f"M{x1:.0f} {y1}C{x1:.0f} {bend} {x2:.0f} {bend} {x2:.0f} {y1}",
        class_="arrow",
        marker_end="url(#tip)",
    )


def _path(root: Branch, module: str) -> Sequence[Branch]:
    branches = [root]
    for name in module.split(".") if module else ():
        branches.append(branches[-1].children.setdefault(name, Branch(name)))
    return branches


def _branch(branch: Branch, total: float, depth: int) -> str:
    bars = "".join(
        tag(
            "i",
            "",
            style=f"width:{100 * seconds / total:.2f}%;background:{OF_SECTION[section]}",
            title=f"{section} {seconds_text(seconds)}",
        )
        for section, seconds in branch.seconds.items()
        if seconds
    )
    cells = [
        tag("span", escape(branch.name), class_="name", style=f"padding-left:{14 * depth}px"),
        tag("span", bars, class_="bars"),
        *(
            tag("span", text)
            for text in (seconds_text(branch.total), count_text(branch.flops), bytes_text(branch.moved))
        ),
        tag("span", bytes_text(branch.kept) if branch.kept else ""),
    ]
    if not branch.children:
        return tag("div", "".join(cells), class_="line leaf")
    inside = "".join(_branch(child, total, depth + 1) for child in branch.children.values())
    opened = {"open": "open"} if depth < 2 and len(branch.children) < 12 else {}
    return tag("details", tag("summary", "".join(cells), class_="line") + inside, **opened)
