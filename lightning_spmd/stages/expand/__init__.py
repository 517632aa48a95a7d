"""CapturedStep → ShardedStep: this rank's graph, local shapes, explicit collectives.

``expand``          the stage's function: placements for one mesh axis after the other, then one local program
``rewrites/``       rewrites of the captured graph, and ``experts/``: where experts work in it
``propagation/``    chooses the placement of every value along one axis; ``axis_plan``: its result
``rules/``          legal layouts of an operator, one operator family a file; ``call``: a rule's input and answer
``rows/``           layouts of rows whose number or order depends on values
``emit``            writes this rank's program from the placements
``program/``        the local graph that is being written
``collectives/``    placement changes and the collectives they are; ``attention/``: attention over a split sequence
``loss_chunks/``    splits a rank's rows once more, over time
``auto_plan``       ``tensor_parallel_plan="auto"``, found in a captured graph

Import order: ``program < collectives, call < attention, axis_plan < rules < rows, experts, auto_plan < propagation <
rewrites, emit < loss_chunks, expand``.
"""

from lightning_spmd.stages.expand.expand import announce, expand
from lightning_spmd.stages.expand.loss_chunks.row_chains import mark_counted
from lightning_spmd.stages.expand.loss_chunks.row_chunks import NAME as LOSS_CHUNKS
from lightning_spmd.stages.expand.loss_chunks.row_chunks import chunk_losses, what_chunks_would_save

__all__ = ["LOSS_CHUNKS", "announce", "chunk_losses", "expand", "mark_counted", "what_chunks_would_save"]
