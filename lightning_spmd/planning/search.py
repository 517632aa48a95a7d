"""Layouts of a training, ranked: which of those that fit takes the least time for the same global batch.

Every way to fill the ranks (data, context and tensor axis, ``replicate``, ``zero2``, ``zero3``) gets an estimate from
the captured graph alone (``estimate.py``). Then the graphs of the most promising ones are built and played, as for a
plan, as many as the time allows; where one does not fit, activations are made again; of the best one other buckets are
tried.
One capture serves them all: the captured graph is that of one device on the global batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_spmd.cost.hardware import Machines
from lightning_spmd.errors import SPMDError
from lightning_spmd.planning.capturing import Capture
from lightning_spmd.planning.estimate import Estimate, estimated, totals_of
from lightning_spmd.planning.layout import Layout
from lightning_spmd.planning.outlook import Outlook, outlook_of

PLANS = ("replicate", "zero2", "zero3")
SHARES = (0.5, 1.0)
"""Of the activations' bytes to give back, where a layout does not fit without."""
BUCKETS = (5, 100)
"""MiB that are tried beside the automatic size, for the best layout."""
_MOST_CONTEXT = 8
_FOR_LAYOUTS = 0.8
"""Of the time; the rest is for buckets."""
_USUAL = {"data_parallel": "replicate", "context_parallel_size": 1, "tensor_parallel_size": 1}
_TOLD = (*_USUAL, "rematerialize", "bucket_size_mb")


@dataclass(frozen=True)
class Candidate:
    """A layout.

    Args:
        layout: where it runs.
        estimate: what the captured graph alone says of it.
        outlook: what its graphs say; None if there was no time for them, or it cannot be.
        reason: why it cannot be.
    """

    layout: Layout
    estimate: Estimate
    outlook: Outlook | None = None
    reason: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """What a recipe has to say to get it."""
        wanted = self.layout.options
        return {k: wanted[k] for k in _TOLD if k in wanted and wanted[k] not in (_USUAL.get(k), None, "auto")}

    @property
    def fits(self) -> bool:
        """Whether its graphs fit."""
        return self.outlook is not None and self.outlook.fits


@dataclass
class Search:
    """What was found.

    Args:
        built: layouts whose graphs were built or cannot be, the best first.
        others: those for which there was no time, the most promising first.
        seconds: how long it took.
    """

    built: list[Candidate] = field(default_factory=list[Candidate])
    others: list[Candidate] = field(default_factory=list[Candidate])
    seconds: float = 0.0

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits; else the smallest."""
        return next((c for c in self.built if c.outlook is not None), None)


def search(
    capture: Capture, own: Layout, machines: Machines, budget: float, say: Callable[[str], None] = lambda _line: None
) -> Search:
    """Rank layouts.

    Args:
        capture: the iteration.
        own: the recipe's layout, which is among them; others keep its options but for those of the axes.
        machines: the devices and links.
        budget: seconds after which no further layout is begun.
        say: told what is going on.
    """
    begun = time.monotonic()
    totals = totals_of(capture, machines)
    queue = _ordered([Candidate(layout, estimated(totals, layout, machines)) for layout in layouts(capture, own)], own)
    found = Search()

    longest = 0.0

    def is_time(share: float = 1.0) -> bool:
        """Whether a layout that takes as long as the longest one so far will be ready."""
        return time.monotonic() - begun + longest < share * budget

    def build(candidate: Candidate) -> Candidate:
        nonlocal longest
        started = time.monotonic()
        made = _built(capture, candidate, machines)
        now = time.monotonic()
        longest = max(longest, now - started)
        say(f"{now - begun:4.0f} s  {_in_words(made)}")
        found.built.append(made)
        return made

    while queue and is_time(_FOR_LAYOUTS):
        candidate = build(queue.pop(0))
        again = iter(SHARES)
        while candidate.outlook is not None and not candidate.fits and is_time():
            share = next(again, None)
            if share is None or candidate.estimate.fixed > machines.device.memory:
                break
            candidate = build(_changed(candidate, rematerialize=share))
    found.built.sort(key=_merit)
    for size in BUCKETS:
        if found.built and found.built[0].fits and is_time():
            build(_changed(found.built[0], bucket_size_mb=size))
    found.built.sort(key=_merit)
    found.others = queue
    found.seconds = time.monotonic() - begun
    return found


def layouts(capture: Capture, own: Layout) -> Iterator[Layout]:
    """All ways to fill the ranks, the recipe's own one first."""
    yield own
    ranks, rows = own.ranks, capture.global_rows
    tensors = [n for n in range(1, own.devices + 1) if own.devices % n == 0 and n & (n - 1) == 0]
    contexts = [n for n in (1, 2, 4, _MOST_CONTEXT) if ranks % n == 0]
    for tensor, context, plan in itertools.product(tensors, contexts, PLANS):
        data = ranks // (tensor * context) if ranks % (tensor * context) == 0 else 0
        if not data or rows % data or (data == 1 and plan != "replicate"):
            continue
        options: dict[str, Any] = {
            **own.options,
            "data_parallel": plan,
            "data_parallel_size": "auto",
            "context_parallel_size": context,
            "tensor_parallel_size": tensor,
            "rematerialize": None,
        }
        if tensor > 1:
            options["tensor_parallel_plan"] = own.options.get("tensor_parallel_plan") or "auto"
        else:
            options.update(tensor_parallel_plan=None, sequence_parallel=False)
        layout = Layout(options, own.devices, own.nodes)
        if _axes(layout) != _axes(own):
            yield layout


# ---------------------------------------------------------------- pieces
def _axes(layout: Layout) -> tuple[Any, ...]:
    """What tells layouts apart, while nothing is made again."""
    return tuple(layout.options.get(name, value) for name, value in _USUAL.items())


def _ordered(candidates: Sequence[Candidate], own: Layout) -> list[Candidate]:
    """What to build first: the recipe's own, the best of each kind, then whatever promises most."""
    promising = sorted(candidates, key=lambda c: (not c.estimate.fits, c.estimate.seconds))
    first: dict[Any, Candidate] = {}
    for candidate in promising:
        options = candidate.layout.options
        first.setdefault(options.get("data_parallel", "replicate"), candidate)
        for axis in ("context_parallel_size", "tensor_parallel_size"):
            if options.get(axis, 1) > 1:
                first.setdefault(axis, candidate)
    ahead = [c for c in candidates if c.layout is own]
    ahead += [c for c in promising if c in first.values() and c.layout is not own]
    return [*ahead, *(c for c in promising if c not in ahead)]


def _changed(candidate: Candidate, **options: Any) -> Candidate:
    layout = dataclasses.replace(candidate.layout, options={**candidate.layout.options, **options})
    return Candidate(layout, candidate.estimate)


def _built(capture: Capture, candidate: Candidate, machines: Machines) -> Candidate:
    try:
        return dataclasses.replace(candidate, outlook=outlook_of(capture, candidate.layout, machines))
    except SPMDError as error:
        return dataclasses.replace(candidate, reason=" ".join(str(error).split()))


def _merit(candidate: Candidate) -> tuple[int, float]:
    """Those that fit by time, those that do not by memory, then those that cannot be."""
    outlook = candidate.outlook
    if outlook is None:
        return 2, 0.0
    return (0, outlook.step_seconds) if outlook.fits else (1, outlook.needed_bytes)


def described(options: Mapping[str, Any]) -> str:
    """Options of a candidate in short."""
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "replicate"


def _in_words(candidate: Candidate) -> str:
    outlook = candidate.outlook
    if outlook is None:
        return f"{described(candidate.options)}: {candidate.reason[:100]}"
    fits = "fits" if outlook.fits else "does not fit"
    return f"{described(candidate.options)}: {1e3 * outlook.step_seconds:.1f} ms, {fits}"
