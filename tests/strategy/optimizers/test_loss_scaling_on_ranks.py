"""precision="16-mixed" on several ranks: what one of them finds in its part of the gradients holds for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.helpers.ranks import RankPool
from tests.helpers.training import Result
from tests.strategy.optimizers.test_loss_scaling import scaled

ZERO2, ZERO3 = {"data_parallel": "zero2"}, {"data_parallel": "zero3"}
TENSOR = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise", "last": "rowwise"}}


class Looks(L.Callback):
    """At gradients, so that the iteration is split."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert all(p.grad is not None for p in pl_module.parameters())


def assert_as_one_device(pool: RankPool, strategy: Any, **settings: Any) -> list[Result]:
    theirs, scales = scaled("auto", **settings)
    results = pool.run(scaled, strategy, pool.size, **settings)
    assert all(seen == scales for _, seen in results)
    found = [result for result, _ in results]
    assert {result.mode for result in found} == {"split" if settings.get("callbacks") else "compiled"}
    for result in found:
        assert max(float((result.weights[k] - v).abs().max()) for k, v in theirs.weights.items()) < 2e-4
    return found


@pytest.mark.parametrize("strategy", ["spmd", ZERO2, ZERO3, TENSOR], ids=["replicate", "zero2", "zero3", "tp2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw", "gradient_clip_val": 1.0},
        {"optimizer": "adamw_fused", "callbacks": (Looks(),), "accumulate_grad_batches": 2},
        {"optimizer": "sgd", "callbacks": (Looks(),)},
        {"optimizer": "adamw_fused", "accumulate_grad_batches": 3},
    ],
    ids=["clipped", "split, accumulated, fused", "split", "accumulated, fused"],
)
def test_ranks_find_the_same_steps_to_skip(two_ranks: RankPool, strategy: Any, settings: dict[str, Any]) -> None:
    assert_as_one_device(two_ranks, strategy, **settings)


@pytest.mark.parametrize("shard", ["auto", 2], ids=["beside tensor parallelism", "hybrid"])
def test_parts_on_two_axes(four_ranks: RankPool, shard: Any) -> None:
    options = {**ZERO3, **(TENSOR if shard == "auto" else {"data_parallel_shard_size": shard})}
    assert_as_one_device(four_ranks, options, optimizer="sgd")


def saved(strategy: Any, devices: int, path: Path, ckpt_path: Any = None, epochs: int = 1) -> Any:
    saver = L.pytorch.callbacks.ModelCheckpoint(path, save_last=True)
    flags = {"max_epochs": epochs, "enable_checkpointing": True, "ckpt_path": ckpt_path}
    return scaled(strategy, devices, optimizer="adamw", callbacks=(saver,), **flags)


@pytest.mark.parametrize("folder", [False, True])
def test_the_scale_goes_through_checkpoints_of_parts(two_ranks: RankPool, tmp_path: Path, folder: bool) -> None:
    options = {**ZERO3, "save_distributed_checkpoint": folder}
    whole = two_ranks.run(scaled, ZERO3, 2, "adamw", max_epochs=3)
    begun = two_ranks.run(saved, options, 2, tmp_path)
    (last,) = (path for path in tmp_path.iterdir() if path.name.startswith("last"))
    resumed = two_ranks.run(saved, options, 2, tmp_path / "resumed", last, 3)
    for (weights, scales), (_, before), (after, rest) in zip(whole, begun, resumed, strict=True):
        assert before + rest == scales
        assert all(torch.equal(after.weights[k], v) for k, v in weights.weights.items())
    if not folder:
        assert saved("auto", 1, tmp_path / "eager", last, 3)[1] == whole[0][1][12:]
