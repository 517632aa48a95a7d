"""The backward pass of an operator is named after the module of its forward pass, whatever else runs in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_spmd.ir.node_info import Section, info_of
from tests.planning.common import Tied, captured


class Layers(Tied):
    """Layers of which some do what autograd does not follow."""

    kind = "conv"

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.SGD(p, lr=0.1))
        if self.kind == "conv":
            inner = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
            self.net = nn.Sequential(
                nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 2, 1), inner, nn.Flatten(), nn.Linear(16, 4)
            )
        else:
            self.net = nn.Sequential(nn.Linear(32, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()


@pytest.mark.parametrize(
    ("kind", "operator", "modules"),
    [("conv", "convolution", ["net.1", "net.2.0"]), ("dropout", "mm", ["net.0", "net.2"])],
)
def test_products_are_those_of_their_layers(
    kind: str, operator: str, modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: a convolution's backward pass was named after the batch norm behind it, whose counter came next."""
    monkeypatch.setattr(Layers, "kind", kind)
    (part,) = captured(make=Layers).parts
    found: list[Any] = [
        info_of(node).module
        for node in part.captured.graph_module.graph.nodes
        if node.op == "call_function" and operator in str(node.target) and info_of(node).section is Section.BACKWARD
    ]
    assert sorted(set(found) - {"net.4"}) == modules
