"""Which calls of a graph go through torch's bindings, and that these are the operators' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_spmd.ir.bindings import METHOD, binding_of
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.source import function_of

aten = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A graph of one call, whose tensors are inputs."""
    graph, inputs = fx.Graph(), dict[int, fx.Node]()

    def placeholder(value: Any) -> Any:
        if isinstance(value, list):
            return [placeholder(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        if id(value) not in inputs:
            inputs[id(value)] = graph.placeholder(f"x{len(inputs)}")
            inputs[id(value)].meta["val"] = TensorSpec.of(value)
        return inputs[id(value)]

    given = [placeholder(a) for a in args]
    node = graph.call_function(target, tuple(given), {k: placeholder(v) for k, v in kwargs.items()})
    node.meta["val"] = None
    graph.output(node)
    return node


X, SCALAR = torch.arange(6.0).reshape(2, 3), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "found"),
    [
        (aten.view.default, (X, [6]), {}, METHOD),
        (aten.add.Tensor, (X, 1), {"alpha": 2}, METHOD),
        (aten.mul.Tensor, (X, SCALAR), {}, METHOD),
        (aten.mul.Scalar, (X, 2.0), {}, None),  # the parser takes mul.Tensor
        (aten.pow.Tensor_Scalar, (X, 2), {}, METHOD),
        (aten.pow.Tensor_Tensor, (X, X), {}, METHOD),
        (aten.sum.dim_IntList, (X, [0]), {"dtype": torch.float64}, METHOD),
        (aten.gelu.default, (X,), {"approximate": "tanh"}, torch._C._nn.gelu),
        (aten.stack.default, ([X, X], 1), {}, torch.stack),
        (aten.linear.default, (X, X), {}, None),  # arrives as the operators that it consists of
        (aten.slice_backward.default, (X, [2, 3], 0, 0, 2, 1), {}, None),
        (torch.ops.prim.device.default, (X,), {}, None),
    ],
)
def test_a_binding_calls_this_operator_with_these_arguments(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any
) -> None:
    node = call(target, *args, **kwargs)
    assert binding_of(node.target, node.args, node.kwargs) is found
    if target is torch.ops.prim.device.default:
        return
    tensors = list({id(t): t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)}.values())
    ran = function_of(fx.GraphModule({}, node.graph))(*tensors)
    assert torch.equal(ran, target(*args, **kwargs))


def test_numbers_of_the_graph_are_numbers() -> None:
    node = call(aten.lerp_.Scalar, X.clone(), X + 1, 0.5)
    with node.graph.inserting_before(node):
        weight = node.graph.placeholder("weight")
    weight.meta["val"] = 0.25
    node.args = (*node.args[:2], weight)
    assert binding_of(node.target, node.args, node.kwargs) == METHOD
    node.meta["val"] = None
    found = function_of(fx.GraphModule({}, node.graph))(X.clone(), X + 1, 0.5)
    assert torch.equal(found, torch.lerp(X, X + 1, 0.5))
