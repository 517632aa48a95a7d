"""What a question about a tensor's history hands out, of a step that is followed: nodes of autograd's graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, autograd

from tests.strategy.following.test_followed_backward import Noted, assert_same, note


class NodeHooks(Noted):
    """Hooks on nodes of operators: they look, they change, one is taken away, one is below another node."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h: Any = torch.tanh(self.body(batch[0]))
        node: Any = h.grad_fn
        assert node is h.grad_fn
        note(isinstance(node, autograd.graph.Node))
        note((type(node).__name__, node.name(), [type(n).__name__ for n, _ in node.next_functions]))
        node.metadata["seen"] = node.metadata.get("seen", 0) + 1
        note(h.grad_fn.metadata["seen"])
        handle = node.register_hook(lambda given, came: note("never"))
        node.register_hook(lambda given, came: (given[0] * 2,))
        node.register_prehook(lambda came: (came[0].clamp(-0.01, 0.01),))
        below: Any = node.next_functions[0][0]
        below.register_hook(lambda given, came: note([g is None or round(g.norm().item(), 9) for g in given]))
        handle.remove()
        return self.loss_of(h, batch[1])


class WrittenSince(Noted):
    """A node is asked for before the tensor is written in place: it is the one of then."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h: Any = self.body(batch[0])
        before: Any = h.grad_fn
        out = torch.zeros_like(h)
        note((before.name(), out.requires_grad, out.grad_fn is None, h._version))
        h.mul_(1 + batch_idx)
        out[:, 2:] = h[:, 2:]
        note((h.grad_fn.name(), out.requires_grad, before.name(), h._version))
        before.register_prehook(lambda came: note(came[0].abs().sum().item()))
        h.grad_fn.register_hook(lambda given, came: (given[0] * 0.5, *given[1:]))
        return self.loss_of(out + h.sigmoid(), batch[1])


class Accumulates(Noted):
    """The node that puts gradients into a parameter, of which no graph knows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        view: Any = self.body.bias.view_as(self.body.bias)
        node = view.grad_fn.next_functions[0][0]
        assert node.variable is self.body.bias
        node.register_hook(lambda given, came: note(came[0].sum().item()))
        return self.loss_of(self.hidden(batch[0]), batch[1])


class ManyGradients(Noted):
    """Hooks on several tensors together."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.body(batch[0])
        g = h.sigmoid()
        autograd.graph.register_multi_grad_hook((h, g), lambda found: note([f.sum().item() for f in found]))
        return self.loss_of(g, batch[1])


class SavedByAutograd(Noted):
    """What autograd saved is looked at, and a view's base is written."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h: Any = torch.tanh(self.body(batch[0]))
        note(h.grad_fn._saved_result.sum().item())
        free = torch.ones(4)
        half: Any = (free * 2)[:2]
        half._base.mul_(3)
        return self.loss_of(h * half.sum(), batch[1])


@pytest.mark.parametrize("kind", [NodeHooks, WrittenSince])
def test_nodes_of_operators_take_hooks_in_graphs(kind: type[Noted]) -> None:
    assert_same(kind)


@pytest.mark.parametrize("kind", [Accumulates, ManyGradients, SavedByAutograd])
def test_what_no_graph_knows_of_history_runs_eagerly(kind: type[Noted]) -> None:
    assert_same(kind, None)
