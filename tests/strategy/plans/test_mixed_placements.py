"""Tensors that are whole beside tensors in parts: biases under tensor parallelism, buffers under ``zero3``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, rows, run

TENSOR = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise", "last": "rowwise"}}


class Clips(Quiet):
    """In every way that is not the Trainer's."""

    def on_after_backward(self) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.log("norm", getattr(norm, "full_tensor", lambda: norm)())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.2)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")


def _clipped(strategy: Any, devices: int) -> Result:
    return run(Clips, strategy, devices, data=lambda: InOrder(rows(), ROWS), max_epochs=1)


def test_hooks_clip_whole_gradients_beside_parts(two_ranks: RankPool) -> None:
    results = two_ranks.run(_clipped, TENSOR, 2)
    assert_equals_one_device(results, _clipped("auto", 1))
    assert results[0].mode == "split"
    assert results[0].logged[1]["norm"] > 0


# ---------------------------------------------------------------------- outside of steps
class Averages(Quiet):
    """A moving average of weights and of batch norm's statistics, as torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.BatchNorm1d(10)
        self.net = nn.Sequential(self.first, self.dropout, nn.Tanh(), self.last)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(self.net)


def _averaged(strategy: Any, devices: int) -> Result:
    return run(Averages, strategy, devices, data=lambda: InOrder(rows(), ROWS), max_epochs=1)


COPY = {
    f"{name}{layer}": style
    for name in ("net.", "average.module.")
    for layer, style in [("0", "colwise"), ("3", "rowwise")]
}


@pytest.mark.parametrize(
    "plan", [{"data_parallel": "zero3"}, {"tensor_parallel_size": 2, "tensor_parallel_plan": COPY}]
)
def test_weights_and_buffers_are_averaged(two_ranks: RankPool, plan: dict[str, Any]) -> None:
    assert_equals_one_device(two_ranks.run(_averaged, plan, 2), _averaged("auto", 1))


class Thawed(Quiet):
    """Its first two layers begin to learn later: ``BaseFinetuning`` compares weights with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(self.first, nn.Tanh(), nn.Linear(10, 10))

    def forward(self, x: Any) -> Any:
        return self.last(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def _thawed(strategy: Any, devices: int) -> Result:
    callback = BackboneFinetuning(1, lambda _: 2.0, verbose=False)
    return run(Thawed, strategy, devices, lambda: [callback], lambda: InOrder(rows(), ROWS), max_epochs=2)


def test_layers_thaw(two_ranks: RankPool) -> None:
    layers = {"backbone.0": "colwise", "backbone.2": "rowwise"}
    plan = {"tensor_parallel_size": 2, "tensor_parallel_plan": layers}
    assert_equals_one_device(two_ranks.run(_thawed, plan, 2), _thawed("auto", 1))


def _operators(devices: int) -> None:
    module = Quiet()
    run(lambda: module, {"data_parallel": "zero3"}, devices, data=lambda: InOrder(rows(), ROWS), max_epochs=1)
    part, plain = module.first.bias, torch.arange(4.0)
    assert isinstance(part, DTensor)
    whole = part.full_tensor()
    scale = torch.ops.aten.sum.default(torch.ones_like(part))  # a number that is a DTensor
    found: Any = torch._foreach_mul([plain, part, plain], [2.0, 3.0, 4.0])  # pyright: ignore[reportPrivateImportUsage]
    assert torch.equal(found[0], 2 * plain)
    assert torch.equal(found[2], 4 * plain)
    assert torch.equal(found[1].full_tensor(), 3 * whole)
    found = torch._foreach_mul([part, plain], scale)  # pyright: ignore[reportPrivateImportUsage]
    assert torch.equal(found[1], 10 * plain)
    assert torch.equal(found[0].full_tensor(), 10 * whole)
    assert torch.equal(part, whole)
    assert torch.equal(whole, part)
    assert not torch.equal(part, whole + 1)
    assert not torch.equal(part, plain)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):  # no position is of one kind
        torch._foreach_add([part], [whole])  # pyright: ignore[reportPrivateImportUsage]


def test_lists_are_taken_position_by_position(two_ranks: RankPool) -> None:
    two_ranks.run(_operators, 2)
