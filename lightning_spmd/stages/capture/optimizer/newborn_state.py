"""State that an optimizer creates in its first step, made before that step: then it is a step like all others.

torch's optimizers begin with zeros and counters, so their first step is what every step is, with these in place of the
state: one graph does for both, where two would have to be captured, expanded and compiled. That is looked up in the
graphs, not assumed: :func:`newborn_state` finds state that depends on no value, and :func:`is_same_step` compares the
graph that creates it with the one that finds it. Momentum of ``SGD`` begins as the gradient, and keeps its two graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd.ir.aliasing import storage_roots
from lightning_spmd.ir.first import last
from lightning_spmd.ir.node_info import spec_of
from lightning_spmd.ir.same_step import first_difference
from lightning_spmd.ir.signature import InputRole, OutputRole
from lightning_spmd.ir.steps import CapturedStep

aten = torch.ops.aten
StateKey = tuple[str, str]
"""Name of the parameter, name of the entry."""

_FROM_SHAPE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
_FROM_NUMBERS = {aten.zeros.default, aten.ones.default, aten.full.default}


def newborn_state(step: CapturedStep) -> dict[StateKey, fx.Node]:
    """The nodes that make the optimizer state of a first step, by entry, in the order in which the optimizer has them.

    Empty where there is none, or where an entry is a number or depends on a value that training computes.
    """
    graph = step.graph_module.graph
    entries = list(step.signature.outputs_of(OutputRole.OPTIMIZER_STATE))
    values = _results(graph)
    if not entries:
        return {}
    roots, constants = storage_roots(graph), _constants(step)
    found: dict[StateKey, fx.Node] = {}
    for position, entry in entries:
        value = values[position]
        root = roots[value] if isinstance(value, fx.Node) else None
        if root is None or not _is_constant(root, constants):
            return {}
        owner, key = entry.key
        found[owner, key] = root
    return found if len(set(found.values())) == len(found) else {}


def make_state(step: CapturedStep, births: dict[StateKey, fx.Node]) -> dict[StateKey, Tensor]:
    """What the nodes of :func:`newborn_state` make, whole, by entry."""
    constants = {node: step.constants[index] for node, index in _constants(step).items()}
    return {key: _made(node, constants) for key, node in births.items()}


def is_same_step(first: CapturedStep, births: dict[StateKey, fx.Node], steady: CapturedStep) -> bool:
    """Whether ``steady`` does with the state it is given what ``first`` does with the state that it makes."""
    return first_difference(first, steady, births) is None


# ---------------------------------------------------------------------- pieces
def _results(graph: fx.Graph) -> tuple[Any, ...]:
    values: Any = last(graph.nodes, "output").args[0]
    return tuple(values)


def _is_constant(node: fx.Node, constants: dict[fx.Node, int]) -> bool:
    operands = node.all_input_nodes
    if node.target in _FROM_NUMBERS:
        return not operands
    if node.target in _FROM_SHAPE:
        return operands == [node.args[0]]
    return node.target is aten.clone.default and operands[0] in constants


def _constants(step: CapturedStep) -> dict[fx.Node, int]:
    """Which constant of the step a placeholder is, of those that are one."""
    placeholders = (n for n in step.graph_module.graph.nodes if n.op == "placeholder")
    pairs = zip(placeholders, step.signature.inputs, strict=True)
    return {node: entry.key[0] for node, entry in pairs if entry.role is InputRole.CONSTANT}


def _made(node: fx.Node, constants: dict[fx.Node, Callable[[], Tensor]]) -> Tensor:
    target: Callable[..., Tensor] = node.target  # pyright: ignore[reportAssignmentType]
    constant = constants.get(node.all_input_nodes[0]) if node.all_input_nodes else None
    if constant is not None:
        return constant().detach().clone()

    def blank(operand: fx.Node) -> Any:
        spec = spec_of(operand)
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)

    return target(*fx.map_arg(node.args, blank), **fx.map_arg(node.kwargs, blank))
