"""Which nodes of a graph a CUDA graph can hold, and where the graph is cut.

A recording repeats kernels on the same memory with the same arguments. It cannot hold nodes that depend on a number of
the step (a learning rate), nodes in which the host takes part (step counters, copies from and to the host, operators
that wait for the device to know a shape), and nodes with effects elsewhere (collectives, operators of libraries, the
selection of a random stream). These run between two recordings::

    forward + backward │ all_reduce │ backward │ wait, fused_adamw(lr) │ ...
    recorded           │ Python     │ recorded │ Python                │

Nothing is in flight when a recording ends: collectives start and end outside of recordings.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import fx

from lightning_spmd._private_api import OpOverload, pytree
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.effects import outputs_of
from lightning_spmd.ir.geometry import is_view
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.signature import MOVES, InputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import is_wait, starts_collective

_aten = torch.ops.aten
OnDevice = Callable[[TensorSpec], bool]
FEWEST = 4
"""Kernels below which a recording saves nothing."""

_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index}  # noqa: SLF001
_ATTENTION = {
    getattr(_aten, name)
    for kind in ("flash", "efficient", "cudnn")
    for name in (f"_scaled_dot_product_{kind}_attention", f"_scaled_dot_product_{kind}_attention_backward")
}
"""Their seed and offset are on the host, on the device while they are recorded; nobody reads them without dropout."""


@dataclass
class Piece:
    """Consecutive nodes that are recorded, or not.

    Args:
        nodes: in order.
        recorded: whether they are recorded.
        copied: storage roots without a lasting address that its kernels use: their values are copied in.
        written: the roots among them that it writes: their values are copied back.
        kept: its values that Python reads or that leave the graph.
        passed: its other values that only other recordings read.
    """

    nodes: list[fx.Node]
    recorded: bool
    copied: tuple[fx.Node, ...] = ()
    written: frozenset[fx.Node] = frozenset()
    kept: tuple[fx.Node, ...] = ()
    passed: tuple[fx.Node, ...] = ()


@dataclass
class Plan:
    """A graph cut into pieces.

    Args:
        pieces: in order.
        placeholders: inputs, in order.
        constants: values of the graph module, by node.
        outputs: of the graph, numbers as they are.
        roots: for each node the node whose storage its value shares.
        live: inputs whose address stays the same between steps; recordings use them directly.
        recorded: nodes in recordings; storage whose root is one of them belongs to a recording.
        going: collectives that the next iteration waits for.
        left_out: why nodes are not recorded, by node.
        dies: for each piece, by index, the values that it reads last.
    """

    pieces: list[Piece]
    placeholders: list[fx.Node]
    constants: dict[fx.Node, Any]
    outputs: tuple[Any, ...]
    roots: dict[fx.Node, fx.Node]
    live: set[fx.Node]
    recorded: set[fx.Node]
    going: set[fx.Node]
    left_out: dict[fx.Node, str]
    dies: dict[int, list[fx.Node]] = field(default_factory=dict[int, list[fx.Node]])

    @property
    def kernels(self) -> int:
        """How many nodes are recorded."""
        return sum(not _is_free(n) for piece in self.pieces if piece.recorded for n in piece.nodes)

    @property
    def recordings(self) -> int:
        """How many pieces are recorded."""
        return sum(piece.recorded for piece in self.pieces)


def why_not(node: fx.Node, on_device: OnDevice) -> str | None:
    """Why a node cannot be recorded, or None."""
    target: Any = node.target
    if target is operator.getitem:
        return None if _specs(node) else "works on the host"
    specs = [spec for value in (node, *node.all_input_nodes) for spec in _specs(value)]
    region = getattr(target, "launches_only", False)
    if not specs or not (region or isinstance(target, OpOverload)):
        return "works on the host"
    if region:
        return None if all(map(on_device, specs)) else "takes part in a tensor of the host"
    if starts_collective(node) or is_wait(node):
        return "is a collective"
    if target.namespace not in ("aten", "prims"):
        return "is no operator of torch's own"
    if target.overloadpacket in _INDEXING:
        if _by_mask(node):
            return "waits for the device to count a mask"
    elif {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(target.tags):
        return "waits for the device"
    if "assert" in str(target):
        return "tells the host"
    if target.overloadpacket in _ATTENTION:
        return "draws on the host for its dropout" if _drops(node) else None
    if any(not _specs(operand) for operand in node.all_input_nodes):
        return "takes a number of this step"
    return None if all(map(on_device, specs)) else "takes part in a tensor of the host"


def cut(step: ShardedStep, on_device: OnDevice, refused: Iterable[fx.Node] = ()) -> Plan:
    """Cut a graph into pieces.

    Args:
        step: the graph.
        on_device: whether a tensor is on the device of the recordings.
        refused: nodes whose recording failed.
    """
    graph = step.graph_module.graph
    roots, live = storage_roots(graph), _live(step)
    calls = [n for n in graph.nodes if n.op == "call_function"]
    left_out = dict.fromkeys(refused, "could not be recorded")
    count = -1
    while len(left_out) != count:  # what is left out may leave its neighbours too few
        count = len(left_out)
        for node in calls:
            reason = left_out.get(node) or why_not(node, on_device) or _depends(node, roots, live, left_out)
            if reason is not None:
                left_out[node] = reason
        for recorded, run in groupby(calls, lambda n: n not in left_out):
            nodes = list(run)
            if recorded and sum(not _is_free(n) for n in nodes) < FEWEST:
                left_out.update(dict.fromkeys(nodes, "has too few neighbours"))
    pieces = [Piece(list(run), recorded) for recorded, run in groupby(calls, lambda n: n not in left_out)]
    inside = {n for piece in pieces if piece.recorded for n in piece.nodes}
    constants = {n: _attribute(step, n) for n in graph.nodes if n.op == "get_attr"}
    output: Any = graph.output_node().args[0]
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    plan = Plan(pieces, placeholders, constants, tuple(output), roots, live, inside, _handed_on(step), left_out)
    _fill_in(plan, live | set(constants) | {n for n in inside if roots[n] is n})
    return plan


def _fill_in(plan: Plan, lasting: set[fx.Node]) -> None:
    """What pieces copy and keep, and when values are read last."""
    home = {node: index for index, piece in enumerate(plan.pieces) for node in piece.nodes}
    leaving = {value for value in plan.outputs if isinstance(value, fx.Node)}
    read_last: dict[fx.Node, int] = {}
    for index, piece in enumerate(plan.pieces):
        for node in piece.nodes:
            for operand in (*node.all_input_nodes, *(plan.roots[o] for o in node.all_input_nodes)):
                read_last[operand] = index
        if not piece.recorded:
            continue
        working = [n for n in piece.nodes if not _is_free(n)]
        inside = set(piece.nodes)
        used = dict.fromkeys(plan.roots[o] for n in working for o in n.all_input_nodes)
        piece.copied = tuple(r for r in used if r not in lasting and r not in inside)
        written = {plan.roots[o] for n in working for o in written_arguments(n)}
        piece.written = frozenset(written & set(piece.copied))
        read = {n: {home[u] for u in n.users if u in home} - {index} for n in piece.nodes}
        in_python = {n for n in piece.nodes if any(not plan.pieces[i].recorded for i in read[n])} | (leaving & inside)
        piece.kept = tuple(n for n in piece.nodes if n in in_python)
        piece.passed = tuple(n for n in piece.nodes if read[n] and n not in in_python)
    for node, index in read_last.items():
        if node not in leaving and plan.roots[node] not in leaving:
            plan.dies.setdefault(index, []).append(node)


def _handed_on(step: ShardedStep) -> set[fx.Node]:
    """Collectives that the next iteration waits for."""
    return {n for n in outputs_of(step.graph_module.graph) if starts_collective(n)}


def _live(step: ShardedStep) -> set[fx.Node]:
    """Inputs that stay where they are: parameters, and what no output takes the place of."""
    roles = (InputRole.PARAMETER, InputRole.BUFFER, InputRole.OPTIMIZER_STATE, InputRole.CONSTANT)
    replaced = {(entry.role.value, entry.key) for entry in step.signature.outputs}
    placeholders = step.graph_module.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, step.signature.inputs, strict=True)
    return {n for n, e in pairs if e.role in roles and MOVES not in e.key and (e.role.value, e.key) not in replaced}


def _depends(
    node: fx.Node, roots: dict[fx.Node, fx.Node], live: set[fx.Node], left_out: dict[fx.Node, str]
) -> str | None:
    """Why a node cannot be recorded where others are not, or None."""
    if node.target is operator.getitem and node.args[0] in left_out:
        return left_out[node.args[0]]  # type: ignore[index]
    for value in (node, *node.all_input_nodes):
        root = roots[value]
        loose = root in left_out or (root.op == "placeholder" and root not in live)
        if loose and len({spec.dtype for n in (value, root) for spec in _specs(n)}) > 1:
            return "reads a value as another type"  # in a copy it could not be found again
    return None


def _is_free(node: fx.Node) -> bool:
    """Whether a node launches nothing."""
    return node.target is operator.getitem or is_view(node)


def _attribute(step: ShardedStep, node: fx.Node) -> Any:
    value: Any = step.graph_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _specs(node: fx.Node) -> list[TensorSpec]:
    values: list[Any] = pytree.tree_leaves(node.meta.get("val"))
    return [value for value in values if isinstance(value, TensorSpec)]


def _by_mask(node: fx.Node) -> bool:
    indices: list[Any] = pytree.tree_leaves(node.args[1])
    masks = (torch.bool, torch.uint8)
    return any(isinstance(n, fx.Node) and any(spec.dtype in masks for spec in _specs(n)) for n in indices)


def _drops(node: fx.Node) -> bool:
    """Whether attention drops weights: its ``dropout_p`` is not 0."""
    schema = node.target._schema  # type: ignore[union-attr]  # noqa: SLF001 - an operator's description
    for index, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            value = node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return not isinstance(value, (int, float)) or value != 0
    return True
