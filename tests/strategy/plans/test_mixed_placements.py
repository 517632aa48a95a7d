"""Under tensor parallelism a bias may be whole beside weights in parts: hooks take all gradients in one list."""

from __future__ import annotations

from typing import Any

import torch

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
