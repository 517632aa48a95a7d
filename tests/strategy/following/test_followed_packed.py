"""Packed sequences in steps that are followed: Python runs in every step, graphs have eager's bits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.ranks import RankPool
from tests.helpers.training import assert_compiled, assert_equals_one_device
from tests.strategy.batches.test_packed_sequences import (
    Drops,
    Listed,
    LooksInside,
    Reads,
    Replaces,
    Sorted,
    Stacked,
    Twice,
    Writes,
    WritesData,
    WritesLengths,
    WritesOutputs,
    of_one_length,
    on_two,
)
from tests.strategy.batches.test_packed_weights_used_twice import ByHand, Cached, Penalised, Siamese
from tests.strategy.small import Net, assert_as_eager


class Looks:
    """Counts how often Python ran."""

    runs = 0


def counted(make: type[Net]) -> type[Net]:
    """The module, whose steps are counted."""

    class Counted(make):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            Looks.runs += 1
            return super().training_step(batch, batch_idx)

    return Counted


def assert_followed(make: type[Net], graphs: int | None, mode: str = "compiled", **settings: Any) -> Any:
    """Bitwise eager's; Python ran once a step; so many graphs were built."""
    Looks.runs = 0
    ours = assert_as_eager(counted(make), mode, data=of_one_length, max_epochs=2, **settings)
    assert Looks.runs == 16  # four steps an epoch, without the strategy and with it
    assert graphs in (None, ours.captures)
    return ours


@pytest.mark.parametrize(
    "make", [Reads, Sorted, Stacked, Listed, Drops, Siamese, Penalised, ByHand, Writes, WritesOutputs]
)
def test_steps_are_graphs(make: type[Net]) -> None:
    assert_followed(make, 2)


@pytest.mark.parametrize("make", [WritesData, WritesLengths])
def test_packed_is_what_was_there_then(make: type[Net]) -> None:
    assert_followed(make, 2)


@pytest.mark.parametrize("make", [Twice, Cached])
def test_what_the_operator_cannot_is_eager_s(make: type[Net]) -> None:
    found = assert_followed(make, 0, "eager")
    assert any("create_graph" in text or "autocast" in text for text in found.warnings)


@pytest.mark.parametrize("make", [Replaces, LooksInside])
def test_entries_are_as_many_as_the_lengths_say(make: type[Net]) -> None:
    assert_followed(make, None)


class OnRanks(Stacked):
    """Counted in each process."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Looks.runs += 1
        return super().training_step(batch, batch_idx)


def run_counted(devices: int) -> tuple[Any, int]:
    """A fit, and how often Python ran."""
    Looks.runs = 0
    return on_two(OnRanks, devices, data=of_one_length, max_epochs=1), Looks.runs


def test_ranks_give_one_device_s_numbers(two_ranks: RankPool) -> None:
    (*ours,) = two_ranks.run(run_counted, 2)
    (theirs, runs) = run_counted(1)
    results = [result for result, _ in ours]
    assert [count for _, count in ours] == [runs, runs]
    assert_compiled(*results)
    assert not any("eagerly" in text for text in results[0].warnings)
    assert_equals_one_device(results, theirs)
