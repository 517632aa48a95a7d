"""CapturedStep → ShardedStep: this rank's graph, local shapes, explicit collectives.

::

    captured graph ──propagate (one axis at a time)──► placements ──emit──► local graph
      └ shared_casts,   │
        associate,      │
        expert_regions  │
                        │ rules/         one operator family a file
                        │ registered     DTensor's strategies, where we have no rule
                        │ routing        rows sorted, worked on and put back (mixture of experts)
                        │ chosen         rows that values choose (``x[mask]``), by each rank from its own
                        │ experts        stacks of experts, split over a tensor axis
                        │ activations    partial sums and sequence shards between tensor-parallel layers
                        └ replicate      the last resort, reported

Import order: ``call < program < redistribute < rules < activations, registered, routing, expert_regions < chosen,
experts < propagate < associate, shared_casts, emit < expand``; ``emit < row_chains < row_chunks``, which splits a
rank's rows once more, over time.
"""

from lightning_spmd.stages.expand.expand import announce, expand
from lightning_spmd.stages.expand.row_chains import mark_counted
from lightning_spmd.stages.expand.row_chunks import NAME as LOSS_CHUNKS
from lightning_spmd.stages.expand.row_chunks import chunk_losses, what_chunks_would_save

__all__ = ["LOSS_CHUNKS", "announce", "chunk_losses", "expand", "mark_counted", "what_chunks_would_save"]
