"""The data axis: each rank has its own batch, and state may be in chunks over it (ZeRO, experts)."""

from lightning_spmd.parallel.axes.kind import AxisKind, ParallelOptions
from lightning_spmd.parallel.parallel_plan import ExpertParallelPlan, ParallelPlan, data_parallel_plan


def _plan(options: ParallelOptions, exposed: bool) -> ParallelPlan:
    plan = data_parallel_plan(options.data_parallel, reduce_gradients=exposed)
    return plan if options.expert_parallel_size == 1 else ExpertParallelPlan(plan, options.experts())


DATA = AxisKind(
    name="data_parallel",
    batch_dim=0,
    holds_chunks=True,
    splits_layers=False,
    size=lambda options: options.data_parallel_size,
    plan=_plan,
)
