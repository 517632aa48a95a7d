"""ShardedStep → ShardedStep: one pass a file, each a function with a contract; the order is the list below.

To add one: a new file with a function, its docstring (before → after, when it does nothing) and a ``PASS``; one line in
``PASSES``; tests that it does its work, does nothing when its conditions fail, and keeps the losses.
"""

from lightning_spmd.stages.passes import (
    bucket_collectives,
    common_subexpressions,
    dead_code,
    early_operands,
    gather_embedding_rows,
    identity_views,
    offload_activations,
    redundant_copies,
    regather_parameters,
    rematerialize,
)
from lightning_spmd.stages.passes.contract import REDUCE_DTYPES, GraphPass, PassState, check_order, select
from lightning_spmd.stages.passes.optimizer import fuse_optimizer, split_optimizer
from lightning_spmd.stages.passes.runner import run_passes

PASSES: tuple[GraphPass, ...] = (
    identity_views.PASS,
    common_subexpressions.PASS,
    redundant_copies.PASS,
    dead_code.PASS,
    rematerialize.PASS,
    offload_activations.PASS,
    regather_parameters.PASS,
    early_operands.PASS,
    gather_embedding_rows.PASS,
    bucket_collectives.PASS,
    split_optimizer.PASS,
    fuse_optimizer.PASS,
)
"""All passes, in order: the default, and what ``SPMDStrategy(passes=[...])`` knows by name."""
REMATERIALIZE = rematerialize.PASS
"""The pass that ``SPMDStrategy(rematerialize=...)`` asks for; one device runs it too."""
OFFLOAD_ACTIVATIONS = offload_activations.PASS
"""The pass that ``SPMDStrategy(offload_activations=...)`` asks for."""

__all__ = [
    "OFFLOAD_ACTIVATIONS",
    "PASSES",
    "REDUCE_DTYPES",
    "REMATERIALIZE",
    "GraphPass",
    "PassState",
    "check_order",
    "run_passes",
    "select",
]
