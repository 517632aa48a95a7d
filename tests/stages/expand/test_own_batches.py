"""Graphs of ranks' own batches: gradients, loss and clipping are those of the mean over all rows, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.placement import OWN
from lightning_spmd.ir.signature import InputRole
from tests.helpers.molecules import FEATURES, MoleculeNet, batches
from tests.helpers.simulated_local import LocalRanks, weighted_by_hand


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _clip(optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)


@pytest.mark.parametrize("plan", ["replicate", "zero2", "zero3"])
@pytest.mark.parametrize("clip", [None, _clip])
def test_molecules_equal_the_weighted_mean_of_the_ranks(plan: str, clip: Any) -> None:
    torch.manual_seed(0)
    reference = MoleculeNet()
    ranks = LocalRanks(reference, _adamw, plan=plan, clip=clip)
    reference = copy.deepcopy(reference)
    optimizer = _adamw(reference.parameters())
    for own in zip(batches([3, 1], 1), batches([5, 2], 2), strict=True):
        loss = ranks.train(own)
        wanted = weighted_by_hand(reference, optimizer, own, [len(b["x"]) for b in own], clip)
        assert loss == pytest.approx(wanted, rel=1e-6)
        for rank in ranks.modules:
            for ours, theirs in zip(rank.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if clip is None else 1e-6)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(FEATURES, 1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.drop(self.norm(batch["x"]))).square().mean()


def test_buffers_and_random_numbers_are_each_ranks_own() -> None:
    ranks = LocalRanks(Normalized(), _adamw)
    own = [next(batches([3], seed)) for seed in (1, 2)]
    ranks.train(own)
    for module, batch in zip(ranks.modules, own, strict=True):
        norm = module.inner.norm
        torch.testing.assert_close(norm.running_mean, 0.1 * batch["x"].mean(0))  # pyright: ignore
    buffers = [e for e in ranks.steps[0].signature.inputs if e.role is InputRole.BUFFER]
    assert all(e.placements == (OWN,) for e in buffers)
    draws = [n.meta["random"] for n in ranks.steps[0].graph_module.graph.nodes if n.meta.get("random") is not None]
    assert draws == [("data_parallel",)]


class Writes(nn.Module):
    """Writes into what all ranks have in common."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, 1)
        self.frozen = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)
        self.where = where

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        kept = self.frozen if self.where == "parameter" else self.head.weight.detach().clone()
        with torch.no_grad():
            kept.add_(batch["x"].mean(0))
        return (self.head(batch["x"]) + (kept * batch["x"]).sum(1, keepdim=True)).square().mean()


def test_a_copy_of_a_parameter_that_the_batch_is_written_into_is_the_ranks_own() -> None:
    module = Writes("copy")
    ranks = LocalRanks(module, _adamw)
    reference, own = copy.deepcopy(module), [next(batches([3], seed)) for seed in (1, 2)]
    loss = ranks.train(own)
    wanted = weighted_by_hand(reference, _adamw(reference.parameters()), own, [len(b["x"]) for b in own])
    assert loss == pytest.approx(wanted, rel=1e-6)


def test_a_parameter_that_the_batch_is_written_into_is_refused() -> None:
    ranks = LocalRanks(Writes("parameter"), _adamw)
    with pytest.raises(ExpansionError, match="writes a value .*local batch into .*frozen.*buffer"):
        ranks.train([next(batches([3], seed)) for seed in (1, 2)])
