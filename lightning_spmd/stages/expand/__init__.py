"""CapturedStep → ShardedStep: this rank's graph, local shapes, explicit collectives.

::

    captured graph ──propagate (one axis at a time)──► placements ──emit──► local graph
                        │ rules/         one operator family a file
                        │ registered     DTensor's strategies, where we have no rule
                        │ routing        rows sorted, worked on and put back (mixture of experts)
                        └ replicate      the last resort, reported

Import order: ``call < program < redistribute < rules < registered, routing < propagate < emit < expand``.
"""

from lightning_spmd.stages.expand.expand import expand

__all__ = ["expand"]
