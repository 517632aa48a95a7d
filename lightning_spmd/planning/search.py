"""Ranks the layouts of a training: which layout that fits is fastest for the same global batch.

All combinations of data, context and tensor axis with ``replicate``, ``zero2`` and ``zero3`` get an estimate from the
captured graph alone (``estimate.py``). Then the graphs of the most promising ones are built and simulated, as for a
plan, as many as the time allows. Layouts that do not fit are tried with recomputed activations, and the best one with
other bucket sizes. One capture serves all of them, because the captured graph is that of one device on the global
batch.
"""

from __future__ import annotations

import contextlib
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
        layout: the layout.
        estimate: from the captured graph alone.
        outlook: from its graphs; None if there was no time, or it is not possible.
        reason: why it is not possible.
    """

    layout: Layout
    estimate: Estimate
    outlook: Outlook | None = None
    reason: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """The options that a recipe needs for this layout."""
        wanted = self.layout.options
        return {k: wanted[k] for k in _TOLD if k in wanted and wanted[k] not in (_USUAL.get(k), None, "auto")}

    @property
    def fits(self) -> bool:
        """Whether its graphs fit."""
        return self.outlook is not None and self.outlook.fits


@dataclass
class Search:
    """The result of a search.

    Args:
        built: layouts whose graphs were built or are not possible, the best first.
        others: layouts for which there was no time, the most promising first.
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
    capture: Capture,
    own: Layout,
    machines: Machines,
    budget: float,
    say: Callable[[str], None] = lambda _line: None,
    begun: float | None = None,
) -> Search:
    """Rank layouts.

    Args:
        capture: the iteration.
        own: the recipe's layout, which is included; the others keep its options except for those of the axes.
        machines: the devices and links.
        budget: seconds after which no further layout is begun, and a half-built one is abandoned once there is a
            result.
        say: called with progress messages.
        begun: start of these seconds, by ``time.monotonic``; None: now.
    """
    totals = totals_of(capture, machines)
    queue = _ordered([Candidate(layout, estimated(totals, layout, machines)) for layout in layouts(capture, own)], own)
    building = _Building(capture, machines, budget, say, time.monotonic() if begun is None else begun)
    with contextlib.suppress(_OutOfTime):
        building.build_all(queue)
        building.try_buckets()
    built = sorted(building.built, key=_merit)
    others = [*([] if building.left is None else [building.left]), *queue]
    return Search(built, others, building.elapsed())


class _OutOfTime(Exception):
    """Control flow: this layout will not be ready."""


@dataclass
class _Building:
    """Layouts whose graphs are built one after the other, while there is time.

    Args:
        capture: the iteration.
        machines: the devices and links.
        budget: seconds that there are.
        say: told what is going on.
        begun: when they began.
        built: what is ready.
        left: what was left half done.
        longest: seconds of the slowest one.
    """

    capture: Capture
    machines: Machines
    budget: float
    say: Callable[[str], None]
    begun: float
    built: list[Candidate] = field(default_factory=list[Candidate])
    left: Candidate | None = None
    longest: float = 0.0

    def elapsed(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self.begun

    def build_all(self, queue: list[Candidate]) -> None:
        """Build layouts in order and take them out of the queue; one there is always time for."""
        while queue and (not self._has_result() or self._is_time(_FOR_LAYOUTS)):
            candidate = self._build(queue.pop(0))
            again = iter(SHARES)
            while candidate.outlook is not None and not candidate.fits and self._is_time():
                share = next(again, None)
                if share is None or candidate.estimate.fixed > self.machines.device.memory:
                    break
                candidate = self._build(_changed(candidate, rematerialize=share))

    def try_buckets(self) -> None:
        """Other sizes of buckets for the best layout."""
        self.built.sort(key=_merit)
        best = self.built[0]
        for size in BUCKETS:
            if best.fits and self._is_time():
                self._build(_changed(best, bucket_size_mb=size))

    # ------------------------------------------------------------------ pieces
    def _has_result(self) -> bool:
        return any(c.outlook is not None for c in self.built)

    def _is_time(self, share: float = 1.0) -> bool:
        """Whether a layout that takes as long as the longest one so far will be ready."""
        return self.elapsed() + self.longest < share * self.budget

    def _check_time(self, _stage: str) -> None:
        """End an unfinished layout when the time is over: on a busy machine its duration is unpredictable."""
        if self.elapsed() > self.budget and self._has_result():
            raise _OutOfTime

    def _build(self, candidate: Candidate) -> Candidate:
        started, self.left = self.elapsed(), candidate
        made = _built(self.capture, candidate, self.machines, self._check_time)
        self.left = None
        self.longest = max(self.longest, self.elapsed() - started)
        self.say(f"{self.elapsed():4.0f} s  {_in_words(made)}")
        self.built.append(made)
        return made


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


def _built(capture: Capture, candidate: Candidate, machines: Machines, on_stage: Callable[[str], None]) -> Candidate:
    try:
        return dataclasses.replace(candidate, outlook=outlook_of(capture, candidate.layout, machines, on_stage))
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
