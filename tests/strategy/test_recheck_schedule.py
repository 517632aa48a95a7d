"""When graphs are compared with the step that they were made of."""

from __future__ import annotations

import itertools

import pytest

from lightning_spmd.strategy import recheck
from lightning_spmd.strategy.recheck import Schedule, Watch
from tests.helpers.training import assert_bitwise
from tests.strategy.small import Net, run


def look(schedule: Schedule, uses: int, cost: float, step: float, epoch_length: int = 10**9) -> list[int]:
    """The uses of one graph at which it was looked at, if each look and each step take so many seconds."""
    watch, found, seconds = Watch(0, 0), [], 0.0
    for use in range(2, uses + 1):
        seconds += step
        epoch = (use - 1) // epoch_length
        due = schedule.is_due(watch, epoch)
        schedule.count_use(watch)
        if due:
            seconds += cost
            schedule.looked(watch, use, epoch, cost, seconds)
            found.append(use)
    return found


def test_looks_double_their_distance() -> None:
    assert look(Schedule(), 5000, cost=1e-6, step=0.1) == [2**i for i in range(1, 13)]


def test_every_epoch_begins_with_a_look() -> None:
    found = look(Schedule(), 300, cost=1e-6, step=0.1, epoch_length=100)
    assert {101, 201} <= set(found)


@pytest.mark.parametrize(("cost", "step"), [(0.165, 0.128), (1.0, 1.5), (0.02, 0.003), (5.0, 0.5)])
def test_looking_costs_less_than_its_share(cost: float, step: float) -> None:
    """With epochs of 20 steps and a run of an hour, far below one percent."""
    schedule, uses = Schedule(), int(3600 / step)
    found = look(schedule, uses, cost, step, epoch_length=20)
    assert schedule.spent == pytest.approx(cost * len(found))
    assert schedule.spent <= recheck.ALLOWANCE_SECONDS + recheck.SHARE * 3700 + cost
    assert found[0] == 2
    assert len(found) >= 2


def test_a_look_that_could_not_be_afforded_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recheck, "ALLOWANCE_SECONDS", 0.0)
    monkeypatch.setattr(recheck, "SHARE", 0.004)
    found = look(Schedule(), 1000, cost=1.0, step=1.0)
    assert found[:2] == [2, 500]  # two seconds are the share of 500


def test_no_epoch_is_so_long_that_nobody_looks() -> None:
    found = look(Schedule(), 20000, cost=0.5, step=2.0)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert max(gaps) == pytest.approx(recheck.LONGEST_GAP_SECONDS / 2.0, rel=0.01)


@pytest.mark.usefixtures("captured_steps")
def test_the_end_of_a_run_tells_what_looking_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(recheck, "tell", told.append)
    assert_bitwise(run(Net), run(Net, "auto"))
    assert len(told) == 1
    assert told[0].startswith("strategy='spmd' traced the step again ")
    assert "of the run)" in told[0]
