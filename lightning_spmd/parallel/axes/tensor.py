"""The tensor axis: the ranks have the same batch and share each layer."""

from lightning_spmd.parallel.axes.kind import AxisKind

TENSOR = AxisKind(
    name="tensor_parallel",
    batch_dim=None,
    holds_chunks=False,
    splits_layers=True,
    size=lambda options: options.tensor_parallel_size,
    plan=lambda options, _exposed: options.layers(),
)
