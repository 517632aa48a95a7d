"""Time of every node of a graph: roofline for computation, latency and bandwidth for communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from lightning_spmd.cost.collectives import Kind
from lightning_spmd.cost.hardware import Machines
from lightning_spmd.cost.operators import specs_in, work_of
from lightning_spmd.ir.first import first
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import starts_collective
from lightning_spmd.planning.kernels import Kernels, kernel_of
from lightning_spmd.planning.layout import GroupPlace

_KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Message:
    """A collective's message.

    Args:
        kind: kind of collective.
        size: bytes, as in ``cost.collectives``.
        group: name of the process group.
    """

    kind: Kind
    size: int
    group: str


def message_of(node: fx.Node) -> Message:
    """The message of a collective's start node."""
    name = str(node.target)
    kinds: list[Kind] = [kind for kind in _KINDS if kind in name]
    operands = [s for n in node.all_input_nodes for s in specs_in(n.meta.get("val"))]
    return Message(first(kinds, "kind of collective"), sum(s.bytes for s in operands), str(node.args[-1]))


@dataclass(frozen=True)
class Clock:
    """Returns times of nodes.

    Args:
        machines: the devices and links.
        groups: the ranks of each process group.
        kernels: operators that were measured.
    """

    machines: Machines
    groups: Mapping[str, GroupPlace]
    kernels: Kernels

    def seconds(self, step: ShardedStep) -> dict[str, float]:
        """Of every node that takes time, by name."""
        nodes = step.graph_module.graph.nodes
        times = {node.name: self.of(node) for node in nodes if node.op == "call_function"}
        return {name: seconds for name, seconds in times.items() if seconds}

    def of(self, node: fx.Node) -> float:
        """Of one node."""
        if starts_collective(node):
            message = message_of(node)
            place = self.groups[message.group]
            return self.machines.seconds(message.kind, message.size, place.size, place.stride)
        kernel = kernel_of(node) if self.kernels else None
        known = None if kernel is None else self.kernels.get(kernel)
        return self.machines.device.seconds(work_of(node)) if known is None else known
