"""The context axis: the ranks have the same batch, and each works on its part of every sequence in it."""

from lightning_spmd.parallel.axes.kind import AxisKind
from lightning_spmd.parallel.context_parallel import CONTEXT_PARALLEL, ContextParallelPlan

CONTEXT = AxisKind(
    name=CONTEXT_PARALLEL,
    batch_dim=1,
    holds_chunks=False,
    splits_layers=False,
    size=lambda options: options.context_parallel_size,
    plan=lambda _options, exposed: ContextParallelPlan(reduce_gradients=exposed),
)
