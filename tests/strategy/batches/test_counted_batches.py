"""Counters of batches: of the loop, over all epochs, and as keys under which a step puts things."""

from __future__ import annotations

from typing import Any

import pytest

from tests.strategy.small import Quiet, assert_as_eager


class Anneals(Quiet):
    """Reads the loop's counter."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + 0.01 * self.trainer.fit_loop.epoch_loop.total_batch_idx)


class Files(Quiet):
    """Puts losses under the number of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[int, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses[batch_idx] = loss.detach()
        self.losses[batch_idx + 100] = float(loss)
        return loss


@pytest.mark.parametrize("kind", [Anneals, Files])
def test_counters_of_batches_are_inputs(kind: type[Quiet]) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(kind())
        return made[-1]

    assert assert_as_eager(make).captures == 2
    theirs, ours = (getattr(module, "losses", {}) for module in made)
    assert {key: float(loss) for key, loss in ours.items()} == {key: float(loss) for key, loss in theirs.items()}
    assert set(map(type, ours)) <= {int}


class Counts(Quiet):
    """Looks at what it puts there."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts[batch_idx] = self.counts.get(batch_idx, 0) + 1
        return self.loss(batch) * self.counts[batch_idx]


def test_a_dictionary_may_be_looked_at() -> None:
    assert_as_eager(Counts)
