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
    twins = _twin_inputs(first, births, steady)
    if twins is None:
        return False
    born = set(births.values())
    ours = [n for n in first.graph_module.graph.nodes if n.op == "call_function" and n not in born]
    theirs = [n for n in steady.graph_module.graph.nodes if n.op == "call_function"]
    if len(ours) != len(theirs):
        return False
    for one, other in zip(ours, theirs, strict=True):
        twin = _with_twins((one.args, one.kwargs), twins)
        if one.target is not other.target or twin is None or not _equal(twin, (other.args, other.kwargs)):
            return False
        twins[one] = other
    return _same_results(first, steady, twins)


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


def _twin_inputs(
    first: CapturedStep, births: dict[StateKey, fx.Node], steady: CapturedStep
) -> dict[fx.Node, fx.Node] | None:
    """From inputs and births of the first step to the other's inputs; None where they do not fit."""
    ours, theirs = _inputs(first, set(births.values())), _inputs(steady, set())
    given = {key: theirs.pop((InputRole.OPTIMIZER_STATE, *key), None) for key in births}
    if None in given.values() or ours.keys() != theirs.keys():
        return None
    twins = {node: theirs[key] for key, node in ours.items()}
    return {**twins, **{node: given[key] for key, node in births.items()}}  # type: ignore[dict-item]


def _inputs(step: CapturedStep, without: set[fx.Node]) -> dict[tuple[Any, ...], fx.Node]:
    """Inputs that somebody but ``without`` reads, by role and key; constants by their order, for they have no name."""
    placeholders = [n for n in step.graph_module.graph.nodes if n.op == "placeholder"]
    found: dict[tuple[Any, ...], fx.Node] = {}
    constants = 0
    for node, entry in zip(placeholders, step.signature.inputs, strict=True):
        if entry.role is not InputRole.CONSTANT:
            found[entry.role, *entry.key] = node
        elif not set(node.users) <= without:
            found[entry.role, constants] = node
            constants += 1
    return found


def _with_twins(value: Any, twins: dict[fx.Node, fx.Node]) -> Any:
    """Arguments with every node replaced by its twin; None if one has none."""
    nodes: list[fx.Node] = []
    fx.map_arg(value, lambda n: nodes.append(n) or n)
    return fx.map_arg(value, twins.__getitem__) if all(n in twins for n in nodes) else None


def _equal(one: Any, other: Any) -> bool:
    """Equality of arguments that tells 1 from 1.0 and True, and knows NaN."""
    if isinstance(one, (tuple, list)):
        return isinstance(other, (tuple, list)) and len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    return one is other or (type(one) is type(other) and (one == other or (one != one and other != other)))


def _same_results(first: CapturedStep, steady: CapturedStep, twins: dict[fx.Node, fx.Node]) -> bool:
    """The same outputs, but for the state: what the first step gives out, the other writes into."""
    ours, theirs = (
        [
            (entry.role, entry.key, value)
            for entry, value in zip(s.signature.outputs, _results(s.graph_module.graph), strict=True)
            if entry.role is not OutputRole.OPTIMIZER_STATE
        ]
        for s in (first, steady)
    )
    none_born = not any(True for _ in steady.signature.outputs_of(OutputRole.OPTIMIZER_STATE))
    twin = _with_twins(ours, twins)
    return none_born and twin is not None and _equal(twin, theirs)
