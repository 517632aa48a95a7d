"""Batches that are objects with a ``to`` of their own, as torch_geometric's ``Data``: one graph for all their sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.strategy.small import Net, Quiet, assert_as_eager


class Graphs:
    """Some graphs as one: nodes, edges, and the graph of each node, in a store as torch_geometric has it."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        nodes = int(torch.randint(8, 30, (), generator=generator))
        edges = torch.randint(0, nodes, (2, 2 * nodes), generator=generator)
        self._store: dict[str, Any] = {"x": torch.randn(nodes, 6, generator=generator), "edges": edges}
        self._store["of"] = torch.arange(nodes) % 4
        self.labels = [torch.randint(0, 3, (4,), generator=generator), {"weight": torch.rand((), generator=generator)}]
        self.seen: list[float] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._store[name]

    def to(self, *_: Any, **__: Any) -> Graphs:
        return self


def loader() -> Any:
    return DataLoader([Graphs(seed) for seed in range(9)], batch_size=None)  # type: ignore[arg-type]


class OnGraphs(Quiet):
    """One layer of messages; the mean of each graph is classified."""

    def scores(self, graphs: Any, x: Tensor) -> Tensor:
        source, target = graphs.edges
        h = torch.tanh(self.first(x))
        h = h.index_add(0, target, h[source])
        return self.last(h.new_zeros(4, 10).index_add(0, graphs.of, h))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels, more = batch.labels
        loss = F.cross_entropy(self.scores(batch, batch.x), labels) * more["weight"]
        self.log("loss", loss, batch_size=4)
        return loss


class Changes(OnGraphs):
    """The step writes into the object's tensors, puts others there and keeps what it sees on it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch.x.mul_(0.5)
        batch._store["extra"] = batch.x + 1
        loss = super().training_step(batch, batch_idx)
        batch.seen.append(float(batch.x.sum()))
        return loss + torch.tanh(self.scores(batch, batch.extra)).mean() / 10

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("kept", float(batch.extra.sum()) + float(batch.x.sum()) + sum(batch.seen), batch_size=4)


class HoldsMore(OnGraphs):
    """Parameters, modules, buffers and what it refers back to are in the object, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))
        self.own = nn.Parameter(torch.ones(6))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch.module, batch.own, batch.scale, batch.back = self, self.own, self.scale, batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch.scale.mul_(0.99)
        return F.cross_entropy(self.scores(batch, batch.x * batch.own * batch.scale), batch.labels[0])


@pytest.mark.parametrize(("make", "most"), [(OnGraphs, 3), (Changes, 6)])  # what is added is there in later epochs
def test_one_graph_is_for_all_sizes(make: type[Net], most: int) -> None:
    assert assert_as_eager(make, data=loader).captures <= most


def test_what_is_the_modules_stays_the_modules() -> None:
    assert_as_eager(HoldsMore, data=loader)
