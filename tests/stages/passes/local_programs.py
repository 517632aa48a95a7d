"""Small per-rank programs written by hand, for what expansion makes rarely or not at all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd.ir.node_info import NodeInfo, Section, TensorSpec
from lightning_spmd.ir.placement import REPLICATE, Placement
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole, Signature
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import stamp_writes, verify_sharded
from lightning_spmd.parallel.pieces import local_spec
from lightning_spmd.stages.expand.program.local_program import LocalProgram
from tests.helpers.simulate import axes_for

functional = torch.ops._c10d_functional


class Writer(LocalProgram):
    """A local program with the collectives of redistribution, each waited at once."""

    def __init__(self, axis: Any) -> None:
        super().__init__((axis,))
        self.axis = axis
        self.info = NodeInfo(Section.BACKWARD)

    def reduce(self, value: fx.Node) -> fx.Node:
        return self.all_reduce(value, self.axis)

    def gather(self, value: fx.Node) -> fx.Node:
        rows, *rest = self.shape(value)
        op, ranks = functional.all_gather_into_tensor.default, self.axis.size
        return self.collective(op, value, (rows * ranks, *rest), ranks, self.axis.group)

    def scatter(self, value: fx.Node) -> fx.Node:
        rows, *rest = self.shape(value)
        op, ranks = functional.reduce_scatter_tensor.default, self.axis.size
        return self.collective(op, value, (rows // ranks, *rest), "sum", ranks, self.axis.group)

    def items_of(self, value: fx.Node) -> list[fx.Node]:
        """The outputs of a multi-output call."""
        return [self.call(operator.getitem, value, i) for i in range(len(value.meta["val"]))]

    def update(self, parameter: fx.Node, gradient: fx.Node) -> None:
        """What the optimizer does."""
        self.info = NodeInfo(Section.OPTIMIZER)
        self.call(torch.ops.aten.add_.Tensor, parameter, gradient, alpha=-0.1)
        self.info = NodeInfo(Section.BACKWARD)


Body = Callable[..., Sequence[tuple[fx.Node, Placement]]]


def write(
    body: Body,
    inputs: Sequence[tuple[Tensor, Placement, InputRole]],
    ranks: int = 2,
    role: OutputRole = OutputRole.STEP_OUTPUT,
) -> list[ShardedStep]:
    """Every rank's verified program.

    Args:
        body: ``body(writer, *placeholders)`` appends nodes and returns outputs with their placements.
        inputs: global tensors, how the ranks hold them, and their roles.
        ranks: of the axis.
        role: of all outputs.
    """
    return [_write(body, inputs, axis, role) for axis in axes_for((1,) * ranks)]


def _write(body: Body, inputs: Any, axis: Any, role: OutputRole) -> ShardedStep:
    writer = Writer(axis)
    nodes: list[fx.Node] = []
    entries: list[GraphInput] = []
    for index, (tensor, placement, kind) in enumerate(inputs):
        spec = TensorSpec.of(tensor)
        local = local_spec(spec, (placement,), (axis,))
        model = fx.Graph().placeholder(f"input_{index}")
        nodes.append(writer.add_input(model, local, (placement,)))
        entries.append(GraphInput(kind, (f"input {index}",), f"input {index}", local, placements=(placement,)))
    outputs = body(writer, *nodes)
    module = writer.finish([node for node, _ in outputs])
    leaving = tuple(
        GraphOutput(role, (i,), f"output {i}", node.meta["val"], (placement,))
        for i, (node, placement) in enumerate(outputs)
    )
    step = ShardedStep(module, Signature(tuple(entries), leaving), (axis,))
    verify_sharded(step)
    stamp_writes(module.graph)
    return step


PARAMETER, BATCH = InputRole.PARAMETER, InputRole.BATCH
R = REPLICATE
