"""On a batch of each rank's own the user's Python runs in every step, once, on that batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.molecules import MoleculeNet
from tests.helpers.ranks import RankError, RankPool
from tests.strategy.local_cases import Chemist, by_hand, fit, weights


class Counting(Chemist):
    """Reads values of its own batch, keeps Python's state, and logs numbers."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__(MoleculeNet, steps)
        self.runs = 0
        self.kept: list[Any] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.runs += 1
        self.log("runs", self.runs, batch_size=batch["y"].shape[0])
        loss = super().training_step(batch, batch_idx)
        return self.more(loss, batch)

    def more(self, loss: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return loss


class Reading(Counting):
    def more(self, loss: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.kept.append(loss.item())
        scale = 2.0 if batch["y"].max().item() > 1e6 else 1.0
        self.kept.append(loss * 1.0)
        return loss * scale


class EagerInTurn(Counting):
    """Each rank has a step that can be no graph, at another time; all ranks run it eagerly."""

    def more(self, loss: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self.runs in (3, 5) and self.trainer.global_rank == self.runs // 4:
            loss.detach().untyped_storage()
        return loss


def _fit(make: type[Counting], steps: int, **options: Any) -> Any:
    module = make(steps)
    trainer, said = fit(module, {"batch": "local", **options})
    kept = [float(k) for k in module.kept]
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return module.losses, weights(module), module.runs, kept, metrics, said


@pytest.mark.parametrize(("make", "plan"), [(Reading, "replicate"), (EagerInTurn, "zero2"), (Counting, "zero3")])
def test_python_runs_in_every_step(make: type[Counting], plan: str, two_ranks: RankPool) -> None:
    losses, wanted = by_hand(steps=8)
    for ours, trained, runs, kept, metrics, said in two_ranks.run(_fit, make, 8, data_parallel=plan):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(trained, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert runs == 8
        assert kept[::2] == pytest.approx(kept[1::2], rel=1e-6)
        assert metrics["runs"] == 8
        assert not [text for text in said if "trains eagerly" in text]


def test_a_read_where_parameters_are_in_parts_is_named(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"each rank's own batch.*test_followed_local_batches.py:\d+"):
        two_ranks.run(_fit, Reading, 2, data_parallel="zero3")
