"""Python's state is what it is in each step: every kind of state that a step reads, changed in mid-run by a hook."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_bitwise, deviation
from tests.strategy.kinds import (
    containers_kinds,
    functions_kinds,
    lightning_kinds,
    modules_kinds,
    objects_kinds,
    optimizers_kinds,
    outside_kinds,
    switches_kinds,
    tensors_kinds,
)
from tests.strategy.kinds.base_kinds import Kind
from tests.strategy.small import ROWS, rows, run

OF_PYTHON = (objects_kinds, containers_kinds, functions_kinds, outside_kinds)
SOURCES = (*OF_PYTHON, tensors_kinds, modules_kinds, switches_kinds, optimizers_kinds, lightning_kinds)
KINDS: dict[str, type[Kind]] = {
    name: kind
    for source in SOURCES
    for name, kind in vars(source).items()
    if isinstance(kind, type) and issubclass(kind, Kind) and kind.__module__ == source.__name__
    if kind.read is not Kind.read and kind.write is not Kind.write
}
SOME = (
    "ObjectAttribute", "NestedContainers", "HyperParameters", "GlobalNumber", "Closure", "Environment", "TensorInList",
    "TeacherInList", "ForwardHook", "ParameterGradientHook", "OptimizerAttribute", "OwnStateOfOptimizer",
    "CallbackAttribute", "DatamoduleAttribute", "Metrics", "EachStep", "Count", "PythonRandom", "Attention",
    "WeakMapping", "ReadByOptimizer", "ContextVariable",
)  # fmt: skip
"""Of each sort one: these alone are tried on two ranks, and of what is Python's own on one device by default."""


MOST = 6
"""Graphs of six steps, in nearly all of which another value may decide."""


def in_graphs(result: Result, kind: type[Kind]) -> bool:
    """Whether all steps were graphs."""
    return result.mode == kind.mode and 0 < result.captures <= MOST and not any("eagerly" in w for w in result.warnings)


def _rows() -> Iterator[Any]:
    for name, kind in KINDS.items():
        late = name not in SOME and kind.__module__ in {source.__name__ for source in OF_PYTHON}
        yield pytest.param(name, marks=pytest.mark.long if late else ())


@pytest.mark.parametrize("name", _rows())
def test_what_changes_is_seen(name: str) -> None:
    """One device, bitwise."""
    kind = KINDS[name]
    theirs, ours = run(kind, "auto", max_epochs=1), run(kind, "spmd", max_epochs=1)
    assert_bitwise(ours, theirs)
    assert in_graphs(ours, kind), (ours.mode, ours.captures, ours.warnings)


def run_all(names: Sequence[str]) -> list[Result]:
    """On one rank of two."""
    return [run(KINDS[name], "spmd", 2, max_epochs=1) for name in names]


def assert_as_on_one_device(pool: RankPool, names: Sequence[str]) -> None:
    wrong: list[str] = []
    for name, *results in zip(names, *pool.run(run_all, names), strict=True):
        reference = run(KINDS[name], "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=1)
        mean = [statistics.fmean(of_ranks) for of_ranks in zip(*(r.losses for r in results), strict=True)]
        limit = KINDS[name].tolerance
        losses = all(abs(a - b) <= limit * max(1.0, abs(b)) for a, b in zip(mean, reference.losses, strict=True))
        weights = all(deviation(r, reference).weights <= limit for r in results)
        if not (losses and weights and in_graphs(results[0], KINDS[name])):
            wrong.append(f"{name}: {results[0].mode} {results[0].captures} {mean} {reference.losses}")
    assert not wrong, "\n".join(wrong)


def test_some_kinds_on_two_ranks_equal_one_device(two_ranks: RankPool) -> None:
    assert_as_on_one_device(two_ranks, SOME)


@pytest.mark.long
def test_the_other_kinds_on_two_ranks_equal_one_device(two_ranks: RankPool) -> None:
    assert_as_on_one_device(two_ranks, [name for name in KINDS if name not in SOME])
