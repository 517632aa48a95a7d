"""``training_step`` returns None and Lightning skips the batch: a graph of its own, with eager's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from tests.helpers.training import assert_bitwise
from tests.strategy.small import Net, run


class Skips(Net):
    """Every third batch, from the first one on; what the step leaves otherwise stays."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen = nn.BatchNorm1d(10), list[float]()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.seen.append(loss.item())
        return None if self.skipped(loss, batch, batch_idx) else loss

    def skipped(self, loss: Tensor, batch: Any, batch_idx: int) -> bool:
        return batch_idx % 3 == 0

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


class ByLoss(Skips):
    def skipped(self, loss: Tensor, batch: Any, batch_idx: int) -> bool:
        return bool(loss < 1.1) or not torch.isfinite(loss)


class ByData(Skips):
    """Labels decide; the update is momentum's, fused or not."""

    def skipped(self, loss: Tensor, batch: Any, batch_idx: int) -> bool:
        return int((batch[1] == 2).sum()) > 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, fused=True)


class Always(Skips):
    def skipped(self, loss: Tensor, batch: Any, batch_idx: int) -> bool:
        return True


@pytest.mark.parametrize(
    ("make", "flags", "captures"),
    [
        (Skips, {"gradient_clip_val": 0.3}, 4),
        pytest.param(ByLoss, {"precision": "bf16-mixed"}, 5, marks=pytest.mark.long),
        pytest.param(ByData, {}, 5, marks=pytest.mark.long),
        pytest.param(Always, {}, 2, marks=pytest.mark.long),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_skipped_batches_are_graphs(make: type[Net], flags: dict[str, Any], captures: int) -> None:
    """Was eager: 'returned NoneType without a loss tensor'."""
    modules: list[Any] = []

    def made() -> Net:
        modules.append(make())
        return modules[-1]

    theirs, ours = run(made, "auto", max_epochs=2, **flags), run(made, max_epochs=2, **flags)
    assert ours.mode == "compiled", ours.warnings
    assert ours.captures <= captures
    assert_bitwise(ours, theirs)
    assert modules[0].seen == modules[1].seen


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_beside_accumulation_and_loss_scaling(is_scaled: bool, parts: int) -> None:
    """Under loss scaling Lightning neither steps nor moves the scale for such a batch."""

    def plugins() -> list[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        return [MixedPrecision("16-mixed", "cpu", scaler)] if is_scaled else []

    theirs, ours = (
        run(Skips, s, plugins=plugins(), accumulate_grad_batches=parts, max_epochs=2) for s in ("auto", "spmd")
    )
    assert ours.mode == "compiled"
    assert_bitwise(ours, theirs)
