"""Context parallelism: every rank works on its part of each sequence; only attention needs the others' parts.

All ranks of the axis get the same whole batch (token numbers are small). Activations are split at the first operator
that combines data of the batch with parameters, and stay split. The parameters are whole on every rank, so their
gradients are partial sums, as on a data-parallel axis. Returned values, logged values and inputs of metrics are whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Placement, ShardAxis
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole

CONTEXT_PARALLEL = "context_parallel"


@dataclass(frozen=True)
class ContextParallelPlan:
    """Placements on the context axis; a ``parallel_plan.ParallelPlan`` that also splits sequences.

    Args:
        reduce_gradients: whether gradients leave the graph as their sum over the ranks, because hooks read them.
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
        """Outputs are whole; gradients keep their placement."""
        return self._gradient() if entry.role is OutputRole.GRADIENT else REPLICATE

    def shards_state(self, axis: ShardAxis) -> bool:
        """Every rank makes the whole update."""
        return False

    def splits_sequence(self, axis: ShardAxis) -> int | None:
        """The dimension of a leaf of the batch that is its sequence."""
        return self.sequence_dim

    def _gradient(self) -> Placement:
        return REPLICATE if self.reduce_gradients else PARTIAL
