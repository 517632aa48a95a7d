"""Batches that are no parts of one: each rank's is a graph of its own, and the ranks take the weighted mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_spmd import SPMDStrategy
from lightning_spmd.errors import ConfigurationError
from tests.helpers.molecules import MoleculeNet, collate
from tests.helpers.ranks import RankPool
from tests.strategy.local_cases import (
    DATA,
    Chemist,
    Normalized,
    Sometimes,
    Turned,
    by_hand,
    fit,
    indices,
    sampler,
    weights,
)


def _fit(net: Callable[[], nn.Module], steps: int, options: dict[str, Any], **flags: Any) -> Any:
    module = Chemist(net, steps)
    trainer, said = fit(module, options, **flags)
    mode = str(trainer.strategy.mode)  # type: ignore[attr-defined]
    return module.losses, weights(module), dict(trainer.callback_metrics), mode, said


def _assert_as_by_hand(everyone: list[Any], losses: list[float], wanted: list[Tensor]) -> None:
    for ours, trained, _, mode, _ in everyone:
        assert mode == "compiled"
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(trained, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", ["replicate", "zero2", "zero3"])
def test_molecules_train_as_by_the_weighted_mean(two_ranks: RankPool, plan: str) -> None:
    steps = 50 if plan == "replicate" else 9
    losses, wanted = by_hand(steps=steps)
    everyone = two_ranks.run(_fit, MoleculeNet, steps, {"data_parallel": plan})
    _assert_as_by_hand(everyone, losses, wanted)
    sizes = [sum(len(indices(rank, step)) for rank in range(2)) for step in range(steps)]
    epoch = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    for _, _, metrics, _, _ in everyone:
        assert float(metrics["loss_epoch"]) == pytest.approx(epoch, rel=1e-5)
    (told,) = [text for text in everyone[0][-1] if "local batches" in text]
    for part in ("weighed by batch_size= of self.log", "local_cases.py", "no common first dimension: batch['x']: ("):
        assert part in told


@pytest.mark.parametrize("net", [Sometimes, Turned])
def test_batches_may_reach_other_layers_or_in_another_order(two_ranks: RankPool, net: Callable[[], nn.Module]) -> None:
    losses, wanted = by_hand(net, 9)
    _assert_as_by_hand(two_ranks.run(_fit, net, 9, {"batch": "local"}), losses, wanted)


def test_accumulated_and_clipped_gradients(two_ranks: RankPool) -> None:
    losses, wanted = by_hand(Sometimes, 8, accumulate=2, clip=0.1)
    flags = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    shown = [loss / 2 for loss in losses]  # Lightning's outputs["loss"] is divided
    _assert_as_by_hand(two_ranks.run(_fit, Sometimes, 8, {}, **flags), shown, wanted)


def test_buffers_are_each_ranks_own_and_that_is_said(two_ranks: RankPool) -> None:
    losses, wanted = by_hand(Normalized, 3)
    everyone = two_ranks.run(_fit, Normalized, 3, {})
    _assert_as_by_hand(everyone, losses, wanted)
    assert any("net.norm.running_mean" in text and "each rank's own" in text for text in everyone[0][-1])


def test_a_layer_that_one_rank_does_not_reach_is_an_error_where_it_lies_in_parts(two_ranks: RankPool) -> None:
    wanted = r"(?s)state sharded over the ranks.*different exchanges.*rank 1: all_gather\S* of parameter_net_rare_"
    with pytest.raises(AssertionError, match=wanted):
        two_ranks.run(_fit, Sometimes, 9, {"data_parallel": "zero3"})


class Logs(Chemist):
    """Logs in all ways."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, count = self.net.loss(batch), batch["y"].shape[0]  # type: ignore[operator]
        self.log("rows", float(count), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", batch["y"].max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("count", count, batch_size=count)
        self.log("total", batch["y"].sum(), reduce_fx=torch.sum, on_step=False, on_epoch=True)
        self.log_dict({"twice": loss * 2, "half": 0.5}, on_step=False, on_epoch=True)
        return {"loss": loss, "own": batch["y"]}


def _logs() -> dict[str, float]:
    module = Logs(steps=3)
    trainer, _ = fit(module)
    assert {value.dtype for value in trainer.callback_metrics.values()} == {torch.float32}  # the shares are float64
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def test_logged_values_are_those_of_all_ranks(two_ranks: RankPool) -> None:
    losses, _ = by_hand(steps=3)
    sizes = [[len(indices(rank, step)) for rank in range(2)] for step in range(3)]
    y = [DATA[i]["y"] for step in range(3) for rank in range(2) for i in indices(rank, step)]
    rows = [sum(pair) for pair in sizes]
    wanted = {
        "rows": sum(rows),
        "largest": float(torch.cat(y).max()),
        "count": sum(n * n for n in sizes[-1]) / rows[-1],
        "total": float(torch.cat(y).sum()),
        "twice": sum(2 * loss * n for loss, n in zip(losses, rows, strict=True)) / sum(rows),
        "half": 0.5,
    }
    for logged in two_ranks.run(_logs):
        assert logged == pytest.approx(wanted, rel=1e-5)


class SameOnAll(Chemist):
    """All ranks have the batches of rank 0."""

    def train_dataloader(self) -> Any:
        batches: Any = sampler(0, self.steps)
        return DataLoader(DATA, batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]


def _shares_layers() -> tuple[list[float], list[Tensor]]:
    plan = {"net.messages.0": "colwise", "net.head": "replicate"}
    module = SameOnAll(steps=3)
    fit(module, {"tensor_parallel_size": 2, "tensor_parallel_plan": plan})
    return module.losses, weights(module)


def test_ranks_that_share_layers_have_the_same_local_batch(two_ranks: RankPool) -> None:
    reference: Any = Chemist().net
    optimizer, losses = torch.optim.AdamW(reference.parameters(), lr=1e-2), []
    for step in range(3):
        optimizer.zero_grad()
        loss = reference.loss(collate([DATA[i] for i in indices(0, step)]))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for ours, trained in two_ranks.run(_shares_layers):
        assert ours == pytest.approx(losses, rel=1e-5)
        for mine, theirs in zip(trained, reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-5)


def test_the_option_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="batch='lokal': give one of 'auto', 'global', 'local'"):
        SPMDStrategy(batch="lokal")  # type: ignore[arg-type]
