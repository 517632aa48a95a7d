"""The kinds of mesh axis, one a file. Everything else asks a mesh, never for a kind by name.

To add one: a file with an :class:`AxisKind`, its place in the two orders below, its size in :class:`ParallelOptions`.
"""

from lightning_spmd.parallel.axes.context import CONTEXT
from lightning_spmd.parallel.axes.data import DATA
from lightning_spmd.parallel.axes.kind import AxisKind, ParallelOptions
from lightning_spmd.parallel.axes.tensor import TENSOR

AXIS_KINDS: tuple[AxisKind, ...] = (DATA, CONTEXT, TENSOR)
"""As ranks are numbered: the last varies fastest, so that those who talk most are neighbours, on one node."""

GRAPH_ORDER: tuple[AxisKind, ...] = (CONTEXT, TENSOR, DATA)
"""As graphs list them: where two axes split one dimension, the first splits it first. A parameter is cut over the
tensor axis, and its pieces into chunks over the data axis; a sequence over the context axis, and its pieces over the
tensor axis (sequence parallelism)."""

__all__ = ["AXIS_KINDS", "CONTEXT", "DATA", "GRAPH_ORDER", "TENSOR", "AxisKind", "ParallelOptions"]
