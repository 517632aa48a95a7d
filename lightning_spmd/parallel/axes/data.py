"""The data axis: each rank has its own batch, and state may be in chunks over it (ZeRO)."""

from lightning_spmd.parallel.axes.kind import AxisKind
from lightning_spmd.parallel.parallel_plan import data_parallel_plan

DATA = AxisKind(
    name="data_parallel",
    batch_dim=0,
    holds_chunks=True,
    splits_layers=False,
    size=lambda options: options.data_parallel_size,
    plan=lambda options, exposed: data_parallel_plan(options.data_parallel, reduce_gradients=exposed),
)
