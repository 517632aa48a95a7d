"""How each parameter lies: the whole of it as a rectangle, and in it what rank 0 holds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lightning_spmd.planning.page.marks import tag
from lightning_spmd.planning.units import bytes_text

Facts = Mapping[str, Any]
Stretch = tuple[float, float]
"""Begin and length, as shares of a dimension."""
_PLACE = re.compile(r"([SC])\((\d+)(?:,outer=(\d+))?\)")
_LONGEST, _SHORTEST = 120.0, 14.0
_MOST = 80
_NAME = 26


def sharding(facts: Facts) -> str:
    """A picture for each kind of parameter."""
    run = facts["run"]
    cards = [_card(entry, run) for entry in facts["parameters"][:_MOST]]
    left = len(facts["parameters"]) - len(cards)
    more = tag("p", f"and {left} other kinds of parameters, which --json lists") if left > 0 else ""
    return _mesh(run) + tag("div", "".join(cards), class_="cards", id="sharding") + more


def _mesh(run: Facts) -> str:
    """The first node's devices, with their places on the axes."""
    sizes = [(name, size) for name, size in run["mesh"].items() if size > 1]
    if not sizes:
        return tag("p", "One device holds everything.")
    shown = min(run["devices"], 16)
    boxes: list[str] = []
    for rank in range(shown):
        rest, places = rank, list[str]()
        for name, size in reversed(sizes):
            rest, at = divmod(rest, size)
            places.insert(0, f"{name.replace('_parallel', '')} {at}")
        boxes.append(
            tag(
                "div",
                tag("b", f"rank {rank}") + "<br>" + tag("small", "<br>".join(map(escape, places))),
                class_="rank",
            )
        )
    more = run["ranks"] - shown
    text = f"and {more} others like them" if more else ""
    axes = " × ".join(f"{name} {size}" for name, size in sizes)
    return tag("p", f"{escape(axes)}; the first node:") + tag("div", "".join(boxes) + tag("span", text), class_="ranks")


def _card(entry: Facts, run: Facts) -> str:
    shape, local = entry["shape"], entry["local"]
    count = f" × {entry['count']}" if entry["count"] > 1 else ""
    places = ", ".join(f"{name.replace('_parallel', '')}: {_words(p)}" for name, p in entry["placements"].items())
    share = math.prod(local) / max(1, math.prod(shape))
    text = f"{_shape(shape)} → {_shape(local)}" if shape != local else f"{_shape(shape)}, whole"
    lines = [
        tag("div", escape(_short(entry["name"]) + count), class_="name", title=entry["name"]),
        tag("div", _picture(entry, run), class_="picture"),
        tag("div", escape(text)),
        tag("div", escape(places or "one device"), class_="faint"),
        tag("div", f"{bytes_text(entry['bytes'])} a rank, {share:.1%} of it", class_="faint"),
    ]
    return tag("div", "".join(lines), class_="card")


def _short(name: str) -> str:
    """The end of a long path."""
    return name if len(name) <= _NAME else "…" + name[-_NAME:].partition(".")[2]


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "one number"


def _words(place: str) -> str:
    found = _PLACE.fullmatch(place)
    if found is None:
        return "whole" if place == "R" else place
    kind, dim, outer = found.groups()
    parts = f" in each of {outer} blocks" if outer else ""
    return f"{'chunk of' if kind == 'C' else 'split along'} dimension {dim}{parts}"


def _picture(entry: Facts, run: Facts) -> str:
    shape = [*entry["shape"], 1, 1][:2] if entry["shape"] else [1, 1]
    rows, columns = shape
    longest = max(rows, columns)
    height, width = (max(_SHORTEST, _LONGEST * math.sqrt(n / longest)) for n in (rows, columns))
    held = [stretches(entry["placements"], dim, run["mesh"], entry) for dim in (0, 1)]
    parts = [tag("rect", "", x=0.5, y=0.5, width=width - 1, height=height - 1, fill="#e7f5ff", stroke="#74c0fc")]
    for top, tall in held[0]:
        for left, wide in held[1]:
            box = {
                "x": left * width,
                "y": top * height,
                "width": max(1.5, wide * width),
                "height": max(1.5, tall * height),
            }
            parts.append(tag("rect", "", fill="#1971c2", **box))
    return tag("svg", "".join(parts), width=width, height=height)


def stretches(placements: Mapping[str, str], dim: int, mesh: Mapping[str, int], entry: Facts) -> list[Stretch]:
    """What rank 0 holds of a dimension.

    Args:
        placements: of a parameter, by axis, the outermost cut first.
        dim: which dimension.
        mesh: ranks by axis.
        entry: the parameter, whose local size says how many ranks a chunk is one of.
    """
    held: list[Stretch] = [(0.0, 1.0)]
    for axis, place in placements.items():
        found = _PLACE.fullmatch(place)
        if found is None or int(found[2]) != dim:
            continue
        blocks = int(found[3] or 1)
        if found[1] == "C":  # hybrid sharding has smaller groups than the axis: the local size knows
            whole, local = entry["shape"][dim], entry["local"][dim]
            held = _first(held, local / max(1, whole))
        else:
            pieces = [(b + i * n / blocks, n / blocks) for b, n in held for i in range(blocks)]
            held = [(b, n / mesh[axis]) for b, n in pieces]
    return held


def _first(held: Sequence[Stretch], share: float) -> list[Stretch]:
    """The beginning of these stretches, so long that it is a share of the dimension."""
    found: list[Stretch] = []
    for begin, length in held:
        taken = min(length, share)
        if taken > 0:
            found.append((begin, taken))
        share -= taken
    return found
