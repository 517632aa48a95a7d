"""A batch seen with other sizes than it has: a graph for all sizes is made of the graphs for a few."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_spmd.ir.layout import layout_of, strides_as
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.sizes import Dimension


class OtherSizes:
    """Sizes of a batch in the place of its own.

    Args:
        sizes: them, by place; other dimensions are as they are.
    """

    def __init__(self, sizes: Mapping[Dimension, int]) -> None:
        self.sizes = dict(sizes)

    def spec(self, position: int, spec: TensorSpec) -> TensorSpec:
        """The spec of a tensor leaf, which lies in memory as it does with its own sizes."""
        if not any(place[0] == position for place in self.sizes):
            return spec
        shape = tuple(self.sizes.get((position, dim), size) for dim, size in enumerate(spec.shape))
        strides = strides_as(layout_of(spec.shape, spec.stride), shape)
        return TensorSpec(shape, strides, spec.dtype, spec.device)
