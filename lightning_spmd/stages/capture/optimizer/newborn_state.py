"""State that an optimizer creates in its first step, made before that step: then it is a step like all others.

torch's optimizers begin with zeros and counters, so their first step is what every step is, with these in place of the
state: one graph does for both, where two would have to be captured, expanded and compiled. State that depends on no
value is looked up in the graph, and becomes inputs of it. Only the steps of torch's own optimizers do the same with
state that they find as with state that they have just created; momentum of ``SGD`` begins as the gradient, and keeps
its two graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd.ir.aliasing import storage_roots
from lightning_spmd.ir.node_info import spec_of
from lightning_spmd.ir.signature import GraphInput, InputRole

aten = torch.ops.aten
StateKey = tuple[str, str]
"""Name of the parameter, name of the entry."""
Births = dict[StateKey, fx.Node]
"""The nodes that create entries of state, in the order in which the optimizer has them."""
OnBirths = Callable[[Mapping[StateKey, Tensor]], None]
"""Gives the live optimizer the state that its first step would create."""

_FROM_SHAPE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
_FROM_NUMBERS = {aten.zeros.default, aten.ones.default, aten.full.default}


def newborn_state(graph: fx.Graph, entries: Mapping[Any, Any], constants: Mapping[fx.Node, Any]) -> Births:
    """The nodes that make the optimizer state of a first step.

    Args:
        graph: of the step.
        entries: what entries of state are that the step created.
        constants: inputs of the graph that are constants.

    Returns:
        Nothing where there is no state, or where an entry is a number or depends on a value that training computes.
    """
    if not entries:
        return {}
    roots = storage_roots(graph)
    found: Births = {}
    for (owner, key), value in entries.items():
        root = roots[value] if isinstance(value, fx.Node) else None
        if root is None or not _is_constant(root, constants):
            return {}
        found[owner, key] = root
    return found if len(set(found.values())) == len(found) else {}


def make_state(births: Births, constants: Mapping[fx.Node, Callable[[], Tensor]]) -> dict[StateKey, Tensor]:
    """What the nodes of :func:`newborn_state` make, whole, by entry."""
    return {key: _made(node, constants) for key, node in births.items()}


def constants_among(
    inputs: Mapping[fx.Node, GraphInput], readers: Sequence[Callable[[], Tensor]]
) -> dict[fx.Node, Callable[[], Tensor]]:
    """The inputs that are constants, and how each is read.

    Args:
        inputs: of a graph.
        readers: of its constants, by index.
    """
    return {node: readers[e.key[0]] for node, e in inputs.items() if e.role is InputRole.CONSTANT}


# ---------------------------------------------------------------------- pieces
def _is_constant(node: fx.Node, constants: Mapping[fx.Node, Any]) -> bool:
    operands = node.all_input_nodes
    if node.target in _FROM_NUMBERS:
        return not operands
    if node.target in _FROM_SHAPE:
        return operands == [node.args[0]]
    return node.target is aten.clone.default and operands[0] in constants


def _made(node: fx.Node, constants: Mapping[fx.Node, Callable[[], Tensor]]) -> Tensor:
    target: Callable[..., Tensor] = node.target  # pyright: ignore[reportAssignmentType]
    constant = constants.get(node.all_input_nodes[0]) if node.all_input_nodes else None
    if constant is not None:
        return constant().detach().clone()

    def blank(operand: fx.Node) -> Any:
        spec = spec_of(operand)
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)

    return target(*fx.map_arg(node.args, blank), **fx.map_arg(node.kwargs, blank))
