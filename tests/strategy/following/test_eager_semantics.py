"""Where training goes on eagerly on several ranks, users are told what is not one device's."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_spmd.strategy.support.eager_semantics import averaged
from tests.helpers.ranks import RankError, RankPool
from tests.strategy.small import Quiet, run


class WithNorm(Quiet):
    """Batch norm, and a step that leaves the graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.measure = nn.CrossEntropyLoss(ignore_index=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.measure(self(self.norm(batch[0])), batch[1])
        loss.untyped_storage()
        return loss


def test_what_differs_is_named(two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, WithNorm, "spmd", 2, max_epochs=1)[0]
    (told,) = [w for w in ours.warnings if "trains eagerly from here on" in w]
    assert "as DDP does, which is not one device's: batch norm sees a rank's rows alone (norm)" in told
    assert "(ignore_index, weight) is each rank's own (measure)" in told


def test_of_a_module_without_any_it_is_said_in_general() -> None:
    assert "means over valid entries, and batches with other numbers of rows" in averaged(nn.Linear(2, 2))
    many = nn.Sequential(*(nn.BatchNorm2d(2) for _ in range(5)))
    assert "(0, 1, 2 and 2 more)" in averaged(many)
    assert "batch norm" not in averaged(many.eval())


class FrozenOnOneRank(Quiet):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 1:
            next(self.parameters()).requires_grad_(False)


def test_a_parameter_that_one_rank_alone_freezes_is_named(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"RankDisagreementError: \S+\.requires_grad is True on rank 0, and not on all"):
        two_ranks.run(run, FrozenOnOneRank, "spmd", 2, max_epochs=1, timeout=20.0)
