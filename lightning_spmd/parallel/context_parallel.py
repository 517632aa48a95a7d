"""Context parallelism: every rank works on its part of each sequence; only attention needs the others' parts.

All ranks of the axis get the same whole batch (token numbers are small). Activations are cut where data of the batch
first meets parameters, and stay cut; the parameters are whole on every rank, so their gradients are partial sums, as on
a data-parallel axis. What is returned, logged or given to a metric is whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Placement, ShardAxis
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole

CONTEXT_PARALLEL = "context_parallel"


@dataclass(frozen=True)
class ContextParallelPlan:
    """What lies where on the context axis; a ``parallel_plan.ParallelPlan`` that splits sequences, too.

    Args:
        reduce_gradients: gradients cross the graph's border as their sum over the ranks (hooks look at them).
        sequence_dim: the dimension of a leaf of the batch that is its sequence.
    """

    reduce_gradients: bool = False
    sequence_dim: int = 1
    needs_graphs: bool = False
    shards_parameters: bool = False

    def input_placement(self, axis: ShardAxis, entry: GraphInput) -> Placement:
        """Everything is on every rank; accumulated gradients are partial sums."""
        return self._gradient() if entry.role is InputRole.GRADIENT else REPLICATE

    def output_placement(self, axis: ShardAxis, entry: GraphOutput, current: Placement) -> Placement:
        """What leaves the graph is whole; gradients as they came in."""
        return self._gradient() if entry.role is OutputRole.GRADIENT else REPLICATE

    def shards_state(self, axis: ShardAxis) -> bool:
        """Every rank makes the whole update."""
        return False

    def splits_sequence(self, axis: ShardAxis) -> int | None:
        """The dimension of a leaf of the batch that is its sequence."""
        return self.sequence_dim

    def _gradient(self) -> Placement:
        return REPLICATE if self.reduce_gradients else PARTIAL
