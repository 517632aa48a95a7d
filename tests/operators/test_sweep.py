"""Operators of torch's database: every fourth quickly; all of ``python -m tests.operators`` in the long tests."""

from __future__ import annotations

import pytest

from tests.operators.cases import operators, samples, splits_of_rows
from tests.operators.check import CRASHED, FORMULA, SLOW, WRONG, Checker
from tests.operators.sweep import SIDES, Side, run_task, tasks

PARTS = 12
QUICK = 3
BAD = (WRONG, CRASHED, SLOW)
# Where a factor may be zero autograd divides or does not, by looking at it; it cannot look at traced tensors.
OTHER_FORMULAS = {"prod", "masked.prod", "cumprod", "masked.cumprod"}


@pytest.mark.parametrize("part", range(QUICK))
def test_operators_on_two_ranks_are_those_of_one_device(part: int) -> None:
    """The first sample that has rows, all of them but one on one rank."""
    problems: list[str] = []
    for name, op in sorted(operators().items())[part::PARTS]:
        for sample in samples(op, 1):
            for split in splits_of_rows(sample, 0)[:1]:
                outcome = Checker(sample, split.batch, quick=True).check(split)
                if outcome.kind in BAD:
                    problems.append(f"{name}: {outcome.kind}: {outcome.reason}: {sample}")
    assert not problems, "\n".join(problems)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("side", SIDES)
def test_samples_of_all_operators(side: Side, part: int) -> None:
    results = [r for task in tasks(sides=[side])[part::PARTS] for r in run_task(task)]
    assert results
    assert not [str(r) for r in results if r.outcome.kind in BAD]
    assert {r.operator for r in results if r.outcome.kind == FORMULA} <= OTHER_FORMULAS
