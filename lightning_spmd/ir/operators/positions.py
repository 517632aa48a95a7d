"""Positions of chosen elements as ``nonzero`` gives them: dimension by dimension in memory.

``nonzero_static``, which graphs know the size of, gives them element by element. What is done to positions in place
(``edges.t().contiguous()[1] += n``) would be done to a copy, or the other way round.
"""

from __future__ import annotations

from torch import Tensor

from lightning_spmd.ir.operators.library import define_operator


def _copied(positions: Tensor) -> Tensor:
    return _shape(positions).copy_(positions)


def _shape(positions: Tensor) -> Tensor:
    return positions.new_empty_strided(positions.shape, (1, positions.shape[0]))


BY_DIMENSION = define_operator("by_dimension(Tensor positions) -> Tensor", _copied, _shape)
"""A copy of positions ``(elements, dimensions)`` with strides ``(1, elements)``."""
