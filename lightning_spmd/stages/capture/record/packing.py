"""Packs a trace: its outputs, names of parameters, gradients in their memory order, a graph without dead nodes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.effects import draws_random
from lightning_spmd.ir.first import first
from lightning_spmd.ir.layout import densely, has_layout, row_major
from lightning_spmd.ir.node_info import TensorSpec, info_of, spec_of
from lightning_spmd.ir.reads import is_check
from lightning_spmd.ir.signature import GraphInput, GraphOutput, OutputRole
from lightning_spmd.stages.capture.numbers.host_scalar import scalar_of
from lightning_spmd.stages.capture.record.recorder import Recorder


@dataclass
class Outputs:
    """Graph outputs in the order in which they were asked for."""

    recorder: Recorder
    nodes: list[Any] = field(default_factory=list)
    entries: list[GraphOutput] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    _told: dict[int, fx.Node | None] = field(default_factory=dict[int, "fx.Node | None"])

    def add(self, value: Any, role: OutputRole, key: tuple[Any, ...], name: str) -> int:
        """Append an output; gives its position."""
        self.nodes.append(self.recorder.argument(value))
        self.values.append(value)
        scalar = scalar_of(value)
        seen = TensorSpec.of(value) if isinstance(value, Tensor) else value if scalar is None else scalar.value
        self.entries.append(GraphOutput(role, key, name, seen))
        return len(self.nodes) - 1

    def add_as_it_is(self, value: Tensor, role: OutputRole, name: str) -> int:
        """Append a value as it is now; later writes into it are not seen."""
        position = self.add(value, role, (), name)
        self._told[position] = next((n for n in reversed(self.recorder.graph.nodes) if n.op != "placeholder"), None)
        return position

    def of(self, role: OutputRole) -> dict[tuple[Any, ...], Any]:
        """The outputs of a role, by key."""
        return {entry.key: node for entry, node in zip(self.entries, self.nodes, strict=True) if entry.role is role}

    def drop(self, role: OutputRole) -> None:
        """Remove the outputs of a role, to which nothing refers by position."""
        kept = [index for index, entry in enumerate(self.entries) if entry.role is not role]
        self.nodes, self.entries, self.values = (
            [part[index] for index in kept] for part in (self.nodes, self.entries, self.values)
        )

    def replace(self, node: fx.Node, other: fx.Node) -> None:
        """Replace a node among the outputs."""
        self.nodes = [other if value is node else value for value in self.nodes]

    def packed(self) -> tuple[Any, ...]:
        """The results of the graph. A value that is written into after its output is copied."""
        if not self._told:
            return tuple(self.nodes)
        graph = self.recorder.graph
        roots, place = storage_roots(graph), {node: i for i, node in enumerate(graph.nodes)}
        writes = dict[fx.Node, list[fx.Node]]()
        for node in list(graph.nodes):
            for written in written_arguments(node):
                writes.setdefault(roots[written], []).append(node)
        for position, told_after in self._told.items():
            node = self.nodes[position]
            begin = -1 if told_after is None else place[told_after]
            later = [w for w in writes.get(roots[node], ()) if place[w] > begin]
            if later:
                self.nodes[position] = self._copied(node, told_after, later[0])
        return tuple(self.nodes)

    def _copied(self, node: fx.Node, told_after: fx.Node | None, write: fx.Node) -> fx.Node:
        graph = self.recorder.graph
        first_call = first((n for n in graph.nodes if n.op != "placeholder"), "call")
        around = graph.inserting_before(first_call) if told_after is None else graph.inserting_after(told_after)
        with around:
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        info = info_of(write) if told_after is None else info_of(told_after)
        copy.meta.update(val=densely(spec_of(node)), info=info)
        return copy


OF_OPTIMIZER_ALONE = "optimizer.param_groups."
"""Where names of parameters begin that the optimizer has and the module has not."""


def parameter_names(module: nn.Module, optimizer: Optimizer | None) -> dict[int, str]:
    """Fully qualified name of every parameter, by ``id``; the first name of a shared one."""
    names = {id(p): name for name, p in module.named_parameters()}
    for index, group in enumerate([] if optimizer is None else optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            names.setdefault(id(parameter), f"{OF_OPTIMIZER_ALONE}{index}.{position}")
    return names


def in_memory_order_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the parameter's memory order, as autograd's accumulation into ``p.grad`` leaves it.

    Of a parameter with gaps, or one that is expanded, it is a plain tensor.
    """
    spec = densely(TensorSpec.of(parameter))
    if has_layout(gradient, spec):
        return gradient
    if spec.stride == row_major(spec.shape):
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient.new_empty_strided(spec.shape, spec.stride).copy_(gradient)


def remove_dead_nodes(graph: fx.Graph) -> None:
    """Erase calls that nothing reads and that change nothing; random draws stay, they advance the generator."""
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.users or written_arguments(node) or is_check(node):
            continue
        if not draws_random(node):
            graph.erase_node(node)


def with_mutations(graph: fx.Graph, inputs: list[tuple[fx.Node, GraphInput]]) -> tuple[GraphInput, ...]:
    """The inputs, each with whether the graph writes into it."""
    roots = storage_roots(graph)
    written = {roots[target] for node in graph.nodes for target in written_arguments(node)}
    return tuple(dataclasses.replace(entry, mutated=node in written) for node, entry in inputs)
