"""Makes one graph for batches of many sizes, in place of the graph for one size.

The step is traced once more with symbols for the sizes that vary (``sizes/symbolic_batch.py`` of capture). That gives
formulas and the condition under which they hold. Final graphs are then made for a few sizes that equal no other number
in the graph, and unified (``ir/unify.py``). For each of these sizes the formulas are compared with a capture of the
noted calls at that size.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from lightning_spmd.errors import SPMDError
from lightning_spmd.ir.family import Family
from lightning_spmd.ir.same_step import first_difference
from lightning_spmd.ir.sizes import Dimension, Formula
from lightning_spmd.ir.steps import CapturedStep, IterationGraphs
from lightning_spmd.ir.unify import Apart, Fits, joined
from lightning_spmd.stages.capture.followed_trace import capture_followed
from lightning_spmd.stages.capture.request import CaptureRequest
from lightning_spmd.stages.capture.sizes.symbolic_batch import OtherSizes, SymbolicBatch
from lightning_spmd.stages.capture.sizes.symbolic_family import NotGeneral, family_of
from lightning_spmd.stages.runtime.agreement.control import ControlPlane
from lightning_spmd.stages.runtime.executor import Executable

aten = torch.ops.aten

_SAMPLES = 3
"""Graphs that are unified where one size varies; one more for each further size."""
_OTHERS = 8
"""Further sizes at which formulas are told from each other."""
_MOST_TRIES = 400
_FACTORS = (2, 3, 1, 5, 1, 1, 1, 1, 2, 3, 1, 1, 4, 0.5, 1, 1, 7, 1, 1)
_MORE = (1, 2, 1, 3, 3, -1, 2, -3, 0, 0, 8, 64, 0, 0, -2, 16, 5, 5, 7)
"""Sizes that are tried in place of one: so many times as large, and so much more."""
_FAR = 512
"""Up to where formulas are checked; for long sequences up to eight times as far. Beyond, a graph is built anew."""


def generalized(
    captured: CapturedStep,
    request: CaptureRequest,
    open_sizes: Mapping[Dimension, int],
    make: Callable[[CapturedStep], IterationGraphs],
) -> tuple[IterationGraphs, Family]:
    """The graphs of a step for batches of all sizes that are treated alike.

    Args:
        captured: the step of this batch.
        request: the request that the step was captured for.
        open_sizes: the sizes of the batch that vary, with their values.
        make: builds the graphs of a captured step.

    Raises:
        NotGeneral: with the reason.
    """
    family = _family(captured, request, open_sizes)
    formulas = family.formulas()
    chosen = _chosen(family, formulas)
    count = _SAMPLES - 1 + len(_free(family))
    samples, others = chosen[:count], chosen
    if len(samples) < count:
        raise NotGeneral("hardly any other size is treated alike")
    extremes = _extremes(family)
    for sample in (samples[0], *extremes):
        _check(family, sample, request)
    family.sizes.restrict([samples[0], *extremes, family.seen])
    graphs = [make(family.at(sample, marked=True)) for sample in samples]
    try:
        main = joined([g.main for g in graphs], Fits(family.sizes, samples, formulas, others))
    except Apart as error:
        raise NotGeneral(str(error)) from error
    return dataclasses.replace(graphs[0], main=main), family


def as_all_ranks(
    executable: Executable | None,
    problem: SPMDError | None,
    closed: Callable[[], Executable],
    control: ControlPlane | None,
) -> tuple[Executable | None, SPMDError | None]:
    """A graph with open sizes on all ranks or on none; called by all ranks together.

    Args:
        executable: this rank's graph.
        problem: why this rank has no such graph.
        closed: builds a graph with fixed sizes.
        control: messages among the ranks; None on one device.
    """
    mine = None if executable is None else executable.not_general
    reasons = [mine] if control is None else control.gather(mine)
    reason = next((reason for reason in reasons if reason is not None), None)
    if executable is None or reason is None:
        return executable, problem
    if executable.sizes is not None:
        try:
            executable = closed()
        except SPMDError as error:
            return None, error
    executable.not_general = reason
    return executable, problem


def _family(captured: CapturedStep, request: CaptureRequest, open_sizes: Mapping[Dimension, int]) -> Family:
    """The formulas of the step, which give the step itself for the sizes of this batch.

    Raises:
        NotGeneral: there are none.
    """
    try:
        return _traced(captured, request, SymbolicBatch(open_sizes))
    except NotGeneral as error:
        try:
            return _traced(captured, request, SymbolicBatch(open_sizes, by_python=True))
        except NotGeneral:
            raise error from None


def _traced(captured: CapturedStep, request: CaptureRequest, batch: SymbolicBatch) -> Family:
    try:
        family = family_of(capture_followed(dataclasses.replace(request, sizes=batch)), batch)
    except NotGeneral:
        raise
    except Exception as error:  # whatever code, the user's or torch's, does with what is no plain integer
        raise NotGeneral(f"the step does not run on symbols: {str(error).splitlines()[0]}") from error
    if not any(isinstance(place, Formula) for place in family.places):
        lines = sorted({line for line in family.fixed.values() if line})
        raise NotGeneral("its very size is wanted" + (f" at {', '.join(lines)}" if lines else ""))
    _take_views_of(captured, family.step)
    _compare(captured, family.at(family.seen))
    if not family.sizes.hold(family.seen):
        raise NotGeneral("the condition on sizes does not hold for those that gave it")
    return family


def _take_views_of(one: CapturedStep, other: CapturedStep) -> None:
    """Products written in Python end with a plain view where those in C++ have one that autograd does not follow."""
    for mine, its in zip(one.graph_module.graph.nodes, other.graph_module.graph.nodes, strict=False):
        if mine.target is aten._unsafe_view.default and its.target is aten.view.default:  # noqa: SLF001 - its name
            its.target = mine.target


def _compare(one: CapturedStep, other: CapturedStep) -> None:
    """Two steps for the same sizes must be one.

    Raises:
        NotGeneral: they are not.
    """
    if [(e.role, e.key) for e in one.signature.inputs] != [(e.role, e.key) for e in other.signature.inputs]:
        raise NotGeneral("the step reads other tensors when sizes are symbols")
    if (difference := first_difference(one, other)) is not None:
        raise NotGeneral(f"the step does something else when sizes are symbols\n{difference}")


def _check(family: Family, sample: tuple[int, ...], request: CaptureRequest) -> None:
    """What the formulas give must be what the user's code does.

    Raises:
        NotGeneral: it is not.
    """
    sizes = dict(zip(family.sizes.places, sample, strict=True))
    try:
        traced = capture_followed(dataclasses.replace(request, sizes=OtherSizes(sizes)))
    except Exception as error:
        raise NotGeneral(f"the step does not run with sizes {sample}: {str(error).splitlines()[0]}") from error
    _compare(traced, family.at(sample))


def _extremes(family: Family) -> list[tuple[int, ...]]:
    """The least and the greatest of each size for which the formulas hold, the greatest within reason.

    What code does with a number and not with a symbol (``isinstance(length, int) and length > 64``) shows at one.
    """
    found: list[tuple[int, ...]] = []
    for place in _free(family):
        size = family.seen[place]

        def at(number: int, place: int = place) -> tuple[int, ...]:
            return _with(family, {place: number})

        for end in (2, max(_FAR, 8 * size)):
            inside, outside = size, end
            if family.sizes.hold(at(end)):
                inside = end
            while abs(outside - inside) > 1:
                middle = (inside + outside) // 2
                inside, outside = (middle, outside) if family.sizes.hold(at(middle)) else (inside, middle)
            found.append(at(inside))
    return [sample for sample in dict.fromkeys(found) if sample != family.seen]


def _free(family: Family) -> list[int]:
    """The sizes that are not those of others, and no constants."""
    return [i for i, p in enumerate(family.places) if isinstance(p, Formula) and p.code == f"s{i}"]


def _with(family: Family, numbers: Mapping[int, int]) -> tuple[int, ...]:
    """Sizes of a batch with other numbers for some of the free ones."""
    values = [numbers.get(i, size) for i, size in enumerate(family.seen)]
    for i, formula in enumerate(family.places):
        values[i] = formula if isinstance(formula, int) else family.sizes.evaluate(formula, values)
    return tuple(values)


def _chosen(family: Family, formulas: Collection[Formula]) -> list[tuple[int, ...]]:
    """Sizes for which the formulas hold, the first of which tell formulas from constants."""
    found: list[tuple[int, ...]] = []
    for sample in itertools.islice(_candidates(family), _MOST_TRIES):
        if sample not in found and min(sample) > 1 and family.sizes.hold(sample):
            found.append(sample)
    varied = [s for s in found if all(_differ(family, f, [s, family.seen]) for f in formulas)]
    return [*varied, *(s for s in found if s not in varied)][: _SAMPLES + len(family.seen) + _OTHERS]


def _differ(family: Family, formula: Formula, samples: Sequence[tuple[int, ...]]) -> bool:
    return len({family.sizes.evaluate(formula, sample) for sample in samples}) == len(samples)


def _candidates(family: Family) -> Iterator[tuple[int, ...]]:
    """Sizes to try: each independent one is moved on its own, most of them far, to numbers that are no round ones."""
    free = _free(family)
    for step in range(_MOST_TRIES):
        numbers: dict[int, int] = {}
        for rank, place in enumerate(free):
            move = (step + rank * (1 + step // len(_MORE))) % len(_MORE)
            size = int(_FACTORS[move] * family.seen[place]) + _MORE[move]
            numbers[place] = size + step // len(_MORE) * (rank == len(free) - 1)
        yield _with(family, numbers)
