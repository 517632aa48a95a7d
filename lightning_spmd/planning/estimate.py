"""A rough cost of a layout from the captured graph alone, to order the layouts before they are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_spmd.cost.hardware import Machines
from lightning_spmd.cost.memory import peak_bytes
from lightning_spmd.cost.operators import specs_in, work_of
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of
from lightning_spmd.ir.signature import InputRole, Signature
from lightning_spmd.planning.capturing import Capture
from lightning_spmd.planning.layout import Layout

_SPLIT_BY_TENSOR = 0.7
"""Of the activations of a block, about what is split over the ranks that share layers."""


@dataclass(frozen=True)
class Estimate:
    """The estimate for one rank.

    Args:
        seconds: of a step.
        fixed: bytes that are always there, and of gradients.
        activations: bytes at the peak.
        fits: whether all of it fits on the device.
    """

    seconds: float
    fixed: float
    activations: float
    fits: bool


@dataclass(frozen=True)
class Totals:
    """Totals of the whole iteration on one device.

    Args:
        seconds: of computation.
        parameters: bytes.
        state: bytes of optimizer state.
        activations: bytes at the peak.
        between: bytes of the results of products with weights in the forward pass.
    """

    seconds: float
    parameters: int
    state: int
    activations: int
    between: int


def estimated(totals: Totals, layout: Layout, machines: Machines) -> Estimate:
    """A rough estimate of a layout's cost."""
    options: Mapping[str, Any] = layout.options
    sizes = layout.sizes
    data, context, tensor = (sizes.get(f"{n}_parallel", 1) for n in ("data", "context", "tensor"))
    plan = options.get("data_parallel", "replicate")
    parameters, state = totals.parameters / tensor, totals.state / tensor
    held = parameters / (data if plan == "zero3" else 1) + state / (data if plan != "replicate" else 1)
    fixed = held + parameters / (data if plan != "replicate" else 1) + machines.device.reserved
    shared = _SPLIT_BY_TENSOR / tensor + 1 - _SPLIT_BY_TENSOR
    activations = totals.activations / (data * context) * shared
    moved = 0.0
    whole, stride = int(parameters), tensor * context
    if plan == "replicate":
        moved += machines.seconds("all_reduce", whole, data, stride)
    else:
        gathers = 2 if plan == "zero3" else 1
        moved += machines.seconds("reduce_scatter", whole, data, stride)
        moved += gathers * machines.seconds("all_gather", whole // max(1, data), data, stride)
    # forward and backward, every second product ends in a sum over the ranks that share layers; nothing hides it
    own = totals.between // (data * context)
    blocking = machines.seconds("all_reduce", own, tensor, 1)
    blocking += 3 * machines.seconds("all_gather", own // max(1, 2 * context), context, tensor)
    seconds = max(totals.seconds / layout.ranks, moved) + blocking
    return Estimate(seconds, fixed, activations, fixed + activations <= machines.device.memory)


def totals_of(capture: Capture, machines: Machines) -> Totals:
    """The totals of the iteration on one device, which all layouts share."""
    seconds, between = 0.0, 0
    for part in capture.parts:
        for node in part.captured.graph_module.graph.nodes:
            work = work_of(node)
            seconds += part.times * machines.device.seconds(work)
            if work.flops and info_of(node).section is Section.FORWARD and _reads_weight(node):
                between += part.times * sum(s.bytes for s in specs_in(node.meta.get("val")))
    first, last = capture.parts[0].captured, capture.parts[-1].captured
    return Totals(
        seconds,
        _bytes(first.signature, InputRole.PARAMETER),
        _bytes(last.signature, InputRole.OPTIMIZER_STATE),
        peak_bytes(first.graph_module.graph),
        between,
    )


def _reads_weight(node: fx.Node) -> bool:
    """Whether an operand is a parameter, or a view or cast of one."""
    return any(_is_weight(n) for n in node.all_input_nodes)


def _is_weight(node: fx.Node) -> bool:
    while node.op == "call_function" and len(node.all_input_nodes) == 1 and not work_of(node).flops:
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and isinstance(node.meta.get("val"), TensorSpec)


def _bytes(signature: Signature, role: InputRole) -> int:
    return sum(e.value.bytes for _, e in signature.inputs_of(role) if isinstance(e.value, TensorSpec))
