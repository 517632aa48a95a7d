"""Mixed precision: a weight is cast once a step, on one device and on several, and the numbers are eager's."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.stages.capture import followed_trace
from tests.helpers.ranks import RankPool
from tests.helpers.simulated_training import SimulatedTraining
from tests.helpers.training import InOrder, Result, assert_bitwise, fit

WIDTH = 8


class Shared(L.LightningModule):
    """One layer used three times, one under activation checkpointing, and a table that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, WIDTH), nn.LayerNorm(WIDTH)
        self.layer, self.kept = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.norm(self.table(tokens))
        for _ in range(3):
            h = torch.tanh(self.layer(h))
        h = h + checkpoint(lambda x: torch.relu(self.kept(x)), h, use_reentrant=False)
        return F.cross_entropy(F.linear(h, self.table.weight) + h @ self.table.weight.t(), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SharedInAutocast(Shared):
    """For captures without a Trainer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return self.loss(*batch)

    def log(self, *_: Any, **__: Any) -> None:
        pass


def casts(step: CapturedStep | ShardedStep) -> dict[str, int]:
    """How often each weight is cast before the update."""
    graph = step.graph_module.graph
    entries = zip(graph.find_nodes(op="placeholder"), step.signature.inputs, strict=True)
    weights = {n: e.name for n, e in entries if e.role is InputRole.PARAMETER}
    found: dict[str, int] = {}
    for node in graph.nodes:
        if node.target is torch.ops.aten._to_copy.default and info_of(node).section is not Section.OPTIMIZER:
            for weight, name in weights.items():
                if _comes_from(node.args[0], weight):
                    found[name] = found.get(name, 0) + 1
    return found


def _comes_from(value: Any, weight: fx.Node) -> bool:
    """Whether a value is the weight, or it in another shape or in pieces put together."""
    while isinstance(value, fx.Node) and value is not weight and len(value.all_input_nodes) == 1:
        value = value.all_input_nodes[0]
    return value is weight


ONCE = dict.fromkeys(("layer.weight", "layer.bias", "kept.weight", "kept.bias"), 1)


def _trained(plan: str, split: tuple[int, ...], accumulate: int = 1) -> SimulatedTraining:
    torch.manual_seed(0)
    module = SharedInAutocast()
    training = SimulatedTraining(module, module.configure_optimizers(), split, plan=plan, accumulate=accumulate)
    for _ in range(2 * accumulate):
        training.train([torch.randint(11, (sum(split),)), torch.randint(11, (sum(split),))])
    return training


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_captured_graph_casts_each_weight_once(accumulate: int) -> None:
    """Each micro-batch is a graph of its own."""
    for _, captured, _ in _trained("replicate", (4, 4), accumulate).graphs:
        # the table's transposed view is cast as it is, which autocast does before it multiplies
        assert casts(captured) == {**ONCE, "table.weight": 2}


@pytest.mark.parametrize("plan", ["replicate", "zero2", "zero3"])
def test_each_rank_casts_each_weight_once(plan: str) -> None:
    """Under ZeRO 3 a rank casts its own chunk again where it gathers again, as it keeps nothing in between."""
    for step in _trained(plan, (4, 4)).graphs[-1][2]:
        found = casts(step)
        most = 2 if plan == "zero3" else 1
        assert all(1 <= found[name] <= most for name in ONCE)
        gathers = [n for n in step.graph_module.graph.nodes if "all_gather" in str(n.target)]
        halves = [n for n in gathers if n.meta["val"].dtype is torch.bfloat16]
        assert bool(halves) == (plan == "zero3")


def trained(strategy: Any, devices: int = 1) -> Result:
    L.seed_everything(2)
    generator = torch.Generator().manual_seed(4)
    rows = [tuple(torch.randint(11, (2,), generator=generator)) for _ in range(48)]
    return fit(
        Shared(), InOrder(rows, 8), strategy, devices, max_epochs=2, precision="bf16-mixed", limit_val_batches=1
    )[0]


def test_one_device_keeps_eagers_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = trained("spmd")
    assert ours.mode == "compiled"
    assert_bitwise(ours, trained("auto"))
    seen: list[dict[str, int]] = []
    share = followed_trace.share_weight_casts

    def counting(graph: fx.Graph, weights: set[fx.Node]) -> None:
        share(graph, weights)
        roots = [n for n in graph.nodes if n.target is torch.ops.aten._to_copy.default and n.args[0] in weights]
        seen.append({str(n.args[0]): sum(m.args[0] is n.args[0] for m in roots) for n in roots})

    monkeypatch.setattr(followed_trace, "share_weight_casts", counting)
    trained("spmd")
    assert seen
    assert all(set(counts.values()) == {1} for counts in seen)


def test_ranks_train_to_the_same_numbers(two_ranks: RankPool) -> None:
    """Evaluation too is a graph there."""
    theirs = trained("auto")
    for result in two_ranks.run(trained, {"data_parallel": "zero3"}, 2):
        assert result.final["val_loss"] == pytest.approx(theirs.final["val_loss"], rel=2e-2)
        assert max(float((result.weights[k] - v).abs().max()) for k, v in theirs.weights.items()) < 2e-2
