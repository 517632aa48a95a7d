"""What ``rematerialize`` frees, counted and measured, on a GPT of eight layers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spmd.cost.memory import liveness
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.stages import BuildOptions, build
from lightning_spmd.stages.passes.remat.choice import choose
from lightning_spmd.stages.passes.remat.plan import Planner
from lightning_spmd.stages.passes.remat.values import Values
from tests.cost.test_memory import Allocations, _update
from tests.helpers.models import GPT
from tests.helpers.tiny_capture import capture_module


@functools.cache
def _gpt(dropout: float) -> tuple[CapturedStep, list[Tensor]]:
    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x).flatten(0, -2), y)

    torch.manual_seed(0)
    batch = torch.randint(256, (16, 64)), torch.randint(256, (16 * 64,))
    return capture_module(GPT(8, 64, dropout=dropout), loss, batch, update=_update)


def _step(dropout: float, wanted: Any) -> ShardedStep:
    return build(_gpt(dropout)[0], (), BuildOptions(rematerialize=wanted)).main


def _measured(step: ShardedStep, live: list[Tensor]) -> int:
    run = Allocations(step.graph_module)
    run.run_on(*(t.clone() for t in live))
    return max(run.found.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_share_of_the_activations_is_given_back_counted_and_measured(dropout: float, share: float) -> None:
    """0.5: 35.8 MiB at the peak of a step become 17.8, of which 34.8 and 16.8 are activations."""
    before, after = _step(dropout, None), _step(dropout, share)
    activations = Planner(Values(before)).plan(()).peak
    peaks = [liveness(s.graph_module.graph, s.signature).peak for s in (before, after)]
    assert activations > 0.9 * peaks[0]
    assert peaks[0] - peaks[1] >= share * activations - 2**19, "what autograd makes beside them takes half a MiB more"
    assert [_measured(s, _gpt(dropout)[1]) for s in (before, after)] == peaks


def test_what_is_counted_while_choosing_is_what_is_alive_in_the_graph() -> None:
    values = Values(_step(0.1, None))
    planner = Planner(values)
    plan = choose(values, planner, planner.plan(()).peak // 2)
    step = _step(0.1, 0.5)
    old = {node.name for node in _gpt(0.1)[0].graph_module.graph.nodes}
    activations = {root.name for root in values.activations}
    found = liveness(step.graph_module.graph, step.signature)
    ours = [s for s in found.storages if s.maker.name not in old or _names(s.maker) & activations]
    alive = (sum(s.bytes for s in ours if s.first <= i <= s.last) for i in range(len(found.order)))
    assert max(alive) == pytest.approx(plan.peak, rel=1e-3)


def _names(maker: Any) -> set[str]:
    return {maker.name, *(user.name for user in maker.users)}
