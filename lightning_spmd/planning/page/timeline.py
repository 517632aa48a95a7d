"""Streams and memory over time: all phases side by side on one axis, which can be stretched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from lightning_spmd.planning.contents import KINDS
from lightning_spmd.planning.page.marks import OF_KIND, OF_SECTION, OTHER, WAITING, legend, percent, tag
from lightning_spmd.planning.streams import BETWEEN, COMPUTE
from lightning_spmd.planning.units import bytes_text, seconds_text

Facts = Mapping[str, Any]
ROW, TOP, MEMORY = 34, 22, 190
"""Pixels: of a stream, of the names of the phases, of the memory curve."""
_FULL = 0.9
"""Of its height, what the memory curve takes; above it is written how high it is."""
_THIN = 0.0002
"""Of the whole width: what is narrower is drawn together with what follows."""


def timeline(facts: Facts, name: str = "timeline") -> str:
    """The streams of every phase.

    Args:
        facts: with ``phases``, predicted or measured.
        name: of the picture in the page.
    """
    phases = _placed(facts["phases"])
    streams = list(dict.fromkeys([COMPUTE, *(s["stream"] for p, _, _ in phases for s in p["spans"])]))
    parts: list[str] = []
    for row, _ in enumerate(streams):
        y = TOP + row * ROW
        parts.append(tag("rect", "", x=0, y=y, width="100%", height=ROW - 4, fill="#f1f3f5"))
    for phase, left, width in phases:
        parts += _names(phase, left, width, TOP + ROW * len(streams))
        for row, stream in enumerate(streams):
            spans = [s for s in phase["spans"] if s["stream"] == stream]
            stalls = phase["stalls"] if stream == COMPUTE else []
            parts += _stalls(stalls, phase, left, width, TOP + row * ROW)
            parts += _bars(spans, phase, left, width, TOP + row * ROW)
    svg = tag("svg", "".join(parts), id=name, width="100%", height=TOP + ROW * len(streams), role="img")
    names = [tag("div", escape(_stream_name(s)), style=f"height:{ROW}px") for s in streams]
    sections = {span["section"] for phase, _, _ in phases for span in phase["spans"]}
    colours = {**OF_SECTION, "waiting for communication": WAITING, **({BETWEEN: OTHER} if BETWEEN in sections else {})}
    return _frame("".join(names), TOP, svg) + legend(colours)


def memory_curve(facts: Facts) -> str:
    """What lies in memory, on the same axis."""
    phases = _placed(facts["phases"])
    highest = max(max((p["total"] for p in phase["curve"]), default=0) for phase, _, _ in phases) or 1
    parts: list[str] = []
    for phase, left, width in phases:
        areas = "".join(_areas(phase, highest))
        inner = {"viewBox": "0 0 1000 1000", "preserveAspectRatio": "none"}
        parts.append(tag("svg", areas, x=percent(left), y=0, width=percent(width), height=MEMORY, **inner))
        parts.append(tag("line", "", x1=percent(left), x2=percent(left), y1=0, y2=MEMORY, stroke="#868e96"))
        parts += _highest(phase, left, width, highest)
    svg = tag("svg", "".join(parts), id="memory-curve", width="100%", height=MEMORY, role="img")
    scale = [
        tag("div", bytes_text(highest * share), class_="tick", style=f"top:{MEMORY * (1 - _FULL * share):.0f}px")
        for share in (1.0, 0.5, 0.0)
    ]
    names = tag("div", "".join(scale), style=f"height:{MEMORY}px;position:relative")
    used = {k: c for k, c in OF_KIND.items() if any(p["bytes"][k] for ph, _, _ in phases for p in ph["curve"])}
    return _frame(names, 0, svg) + legend(used)


# ---------------------------------------------------------------- pieces
def _placed(phases: Sequence[Facts]) -> list[tuple[Facts, float, float]]:
    """Each phase with its place and width as shares of the axis."""
    total = sum(p["seconds"] for p in phases) or 1.0
    found: list[tuple[Facts, float, float]] = []
    left = 0.0
    for phase in phases:
        width = phase["seconds"] / total
        found.append((phase, left, width))
        left += width
    return found


def _frame(names: str, top: int, picture: str) -> str:
    """Names that stay at the left, and a picture that can be stretched and moved beside them."""
    side = tag("div", names, class_="names", style=f"padding-top:{top}px")
    return tag("div", side + tag("div", tag("div", picture, class_="stretch"), class_="window"), class_="frame")


def _stream_name(stream: str) -> str:
    return stream if stream == COMPUTE else stream.replace("_parallel", "") + " messages"


def _names(phase: Facts, left: float, width: float, height: int) -> Iterator[str]:
    times = f" × {phase['times']}" if phase["times"] > 1 else ""
    name = f"{phase['name']}{times}, {seconds_text(phase['seconds'])}"
    yield tag("line", "", x1=percent(left), x2=percent(left), y1=0, y2=height, stroke="#868e96")
    if width > 0.04:
        yield tag("svg", tag("text", escape(name), x=4, y=15), x=percent(left), y=0, width=percent(width), height=TOP)


def _bars(spans: Sequence[Facts], phase: Facts, left: float, width: float, y: int) -> Iterator[str]:
    seconds = phase["seconds"] or 1.0
    for bar in _merged(spans, _THIN * seconds / max(width, 1e-9)):
        begin = max(0.0, bar["begin"])
        share = (bar["end"] - begin) / seconds
        if share <= 0:
            continue
        where = bar["module"] or "the step"
        count = f" ({bar['count']} operators)" if bar["count"] > 1 else ""
        title = f"{bar['name']}{count}\n{bar['section']} of {where}\n{seconds_text(bar['end'] - bar['begin'])}"
        if bar["waited"]:
            title += f", of which the device waits {seconds_text(bar['waited'])}"
        yield tag(
            "rect", tag("title", escape(title)), x=percent(left + width * begin / seconds), y=y + 3,
            width=percent(width * share), height=ROW - 10, fill=OF_SECTION.get(bar["section"], OTHER),
        )  # fmt: skip


def _stalls(stalls: Sequence[Facts], phase: Facts, left: float, width: float, y: int) -> Iterator[str]:
    seconds = phase["seconds"] or 1.0
    for stall in stalls:
        lasts = stall["end"] - stall["begin"]
        title = f"waits {seconds_text(lasts)} for messages of {stall['for'] or 'the step'}"
        yield tag(
            "rect", tag("title", escape(title)), x=percent(left + width * stall["begin"] / seconds), y=y,
            width=percent(width * lasts / seconds), height=ROW - 4, fill=WAITING,
        )  # fmt: skip


def _merged(spans: Sequence[Facts], gap: float) -> Iterator[dict[str, Any]]:
    """Neighbours of one module and section as one bar."""
    bar: dict[str, Any] | None = None
    for span in sorted(spans, key=lambda s: s["begin"]):
        together = (
            bar is not None
            and span["stream"] == COMPUTE
            and (bar["module"], bar["section"]) == (span["module"], span["section"])
            and span["begin"] - bar["end"] <= gap
        )
        if together and bar is not None:
            bar.update(end=span["end"], count=bar["count"] + 1, waited=bar["waited"] + span["waited"])
            continue
        if bar is not None:
            yield bar
        bar = {**span, "count": 1}
    if bar is not None:
        yield bar


def _areas(phase: Facts, highest: float) -> Iterator[str]:
    """A polygon for each kind, on top of those before it; the curve has steps, not slopes."""
    seconds = phase["seconds"] or 1.0
    points = phase["curve"]
    base = [0.0] * len(points)
    for kind in KINDS:
        top = [b + p["bytes"][kind] for b, p in zip(base, points, strict=True)]
        if any(p["bytes"][kind] for p in points):
            upper, lower = _steps(points, top, seconds, highest), _steps(points, base, seconds, highest)
            corners = " ".join(f"{x:.2f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
            yield tag("polygon", tag("title", escape(kind)), points=corners, fill=OF_KIND[kind])
        base = top


def _steps(
    points: Sequence[Facts], heights: Sequence[float], seconds: float, highest: float
) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    last = 0.0
    for point, height in zip(points, heights, strict=True):
        x, y = 1000 * min(1.0, point["at"] / seconds), 1000 * (1 - _FULL * height / highest)
        found += [(last, y), (x, y)]
        last = x
    return [*found, (1000.0, found[-1][1])] if found else []


def _highest(phase: Facts, left: float, width: float, highest: float) -> Iterator[str]:
    if phase["peak"] < highest or not phase["curve"]:
        return
    at = max(phase["curve"], key=lambda p: p["total"])["at"] / (phase["seconds"] or 1.0)
    x = percent(left + width * min(at, 1.0))
    yield tag("line", "", x1=x, x2=x, y1=0, y2=MEMORY, stroke="#212529", stroke_dasharray="3 3")
    anchor = "end" if left + width * at > 0.5 else "start"
    yield tag(
        "svg",
        tag(
            "text",
            f"highest: {bytes_text(highest)}",
            x=-6 if anchor == "end" else 6,
            y=14,
            text_anchor=anchor,
            font_weight="bold",
        ),
        x=x,
        y=0,
        overflow="visible",
    )
