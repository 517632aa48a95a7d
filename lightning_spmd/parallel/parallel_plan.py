"""Which placement each graph input has on each mesh axis, and which placement each output must get.

A plan is asked by role, never by position. :class:`ReplicatedPlan` is plain data parallelism; sharded states and tensor
parallelism are other implementations of the same two methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lightning_spmd.errors import BatchError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Shard, ShardAxis
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole


class ParallelPlan(Protocol):
    """What expansion asks of a plan."""

    def input_placement(self, axis: ShardAxis, entry: GraphInput) -> Placement:
        """How this input lies on ``axis``."""
        ...

    def output_placement(self, axis: ShardAxis, entry: GraphOutput, current: Placement) -> Placement:
        """How this output must lie on ``axis``, given how it was computed."""
        ...


@dataclass(frozen=True)
class ReplicatedPlan:
    """Data parallelism: the batch is split, everything else is on every rank.

    Args:
        reduce_gradients: gradients cross the graph's border as their sum over the ranks (hooks look at them). Otherwise
            they stay partial sums, and only the graph that applies them reduces them: once for all micro-batches.
    """

    reduce_gradients: bool = False

    def input_placement(self, axis: ShardAxis, entry: GraphInput) -> Placement:
        """Batch leaves are split along their first dimension, accumulated gradients are partial sums."""
        if entry.role is InputRole.GRADIENT and not self.reduce_gradients:
            return PARTIAL
        if entry.role is not InputRole.BATCH or not isinstance(entry.value, TensorSpec) or not entry.value.shape:
            return REPLICATE
        rows = entry.value.shape[0]
        if not axis.divides(rows):
            raise BatchError(
                f"batch leaf {entry.name} has {rows} rows, which cannot be split over {axis.size} ranks like the "
                f"global batch of {axis.total} rows; its first dimension must be the batch dimension"
            )
        return Shard(0)

    def output_placement(self, axis: ShardAxis, entry: GraphOutput, current: Placement) -> Placement:
        """Values that Python reads are global; outputs of single rows stay with their rank."""
        if entry.role is OutputRole.GRADIENT:
            return REPLICATE if self.reduce_gradients else PARTIAL
        if entry.role in (OutputRole.STEP_OUTPUT, OutputRole.METRIC_INPUT) and not isinstance(current, Partial):
            return current
        return REPLICATE
