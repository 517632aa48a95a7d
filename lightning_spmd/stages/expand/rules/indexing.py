"""Gather, scatter and advanced indexing.

* along unsplit dimensions, everything else row-wise;
* a replicated table read with split indices, and its gradient: a partial sum;
* ``x[arange(batch), position]``: row i reads its own row, recognised by the ``arange`` in the graph; each rank numbers
  its own;
* ``x[mask] = number``: element by element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.operators.positions import BY_DIMENSION
from lightning_spmd.ir.placement import PARTIAL
from lightning_spmd.stages.expand.call import (
    Layout,
    LocalCall,
    OpCall,
    Rule,
    Where,
    along,
    in_one_range,
    is_tensor,
    linear,
)

aten = torch.ops.aten


# ---------------------------------------------------------------- gather, scatter, index_select
def _along_dim(call: OpCall) -> list[Layout]:
    """Every other dimension has one size in all operands, so it may be split."""
    ndim = len(call.shape)
    worked = call["dim"] % ndim if ndim else 0
    found: list[Layout] = []
    for dim in range(ndim):
        same = len({s.shape[dim] for s in call.specs if len(s.shape) == ndim}) == 1
        if dim != worked and same:
            found += along(call, [dim if len(s.shape) == ndim else None for s in call.specs], [dim])
    return found


def _scatter_add(call: OpCall) -> list[Layout]:
    """A split index along the worked dimension adds a part of everything to each rank's copy."""
    index, source, worked = call["index"].meta["val"].shape, call["src"].meta["val"].shape, call["dim"]
    found = _along_dim(call)
    if index and index[worked] == source[worked]:
        found += along(call, [PARTIAL, worked % len(index), worked % len(index)], [PARTIAL])
    return found


def _gather(call: OpCall) -> list[Layout]:
    """As scatter; a replicated table may also be read with an index split along the worked dimension."""
    worked = call["dim"] % max(len(call.shape), 1)
    return _along_dim(call) + (along(call, [None, worked], [worked]) if call.shape else [])


def _index_select(call: OpCall) -> list[Layout]:
    ndim = len(call.shape)
    if not ndim:
        return []
    worked = call["dim"] % ndim
    found = along(call, [None, 0], [worked]) if len(call.specs[1].shape) == 1 else []
    for dim in range(ndim):
        if dim != worked:
            found += along(call, [dim, None], [dim])
    return found


def _index_add(call: OpCall) -> list[Layout]:
    ndim = len(call.shape)
    if not ndim:
        return []
    worked = call["dim"] % ndim
    found = along(call, [PARTIAL, 0, worked], [PARTIAL]) if len(call.specs[1].shape) == 1 else []
    for dim in range(ndim):
        if dim != worked:
            found += along(call, [dim, None, dim], [dim])
    return found + linear(call, (0, 2))


# ---------------------------------------------------------------- x[indices]
def is_row_numbers(node: fx.Node, rows: int) -> bool:
    """Whether the index is ``arange(rows)`` (perhaps as a column)."""
    views = (
        aten.view.default,
        aten.unsqueeze.default,
        aten.expand.default,
        aten._unsafe_view.default,
        aten._to_copy.default,
    )
    while node.target in views and isinstance(node.args[0], fx.Node):
        if [s for s in node.meta["val"].shape if s != 1][:1] != [rows] or node.meta["val"].shape[0] != rows:
            return False
        node = node.args[0]
    if node.target is aten.arange.default:
        return list(node.args) == [rows]
    if node.target is aten.arange.start:
        return list(node.args[:2]) == [0, rows]
    return node.target is aten.arange.start_step and list(node.args[:3]) in ([0, rows], [0, rows, 1])


class _Indexing:
    """Shape bookkeeping of ``x[indices]``: which result dimensions come from where."""

    def __init__(self, call: OpCall) -> None:
        self.call = call
        self.source = call["self"].meta["val"].shape
        indices = list(call["indices"])
        self.indices: list[fx.Node | None] = indices + [None] * (len(self.source) - len(indices))
        tensors = [i for i in self.indices if i is not None]
        self.plain = all(i.meta["val"].dtype in (torch.int64, torch.int32) for i in tensors)
        self.broadcast = torch.broadcast_shapes(*[i.meta["val"].shape for i in tensors]) if tensors else ()
        used = [d for d, i in enumerate(self.indices) if i is not None]
        adjacent = bool(used) and used == list(range(used[0], used[-1] + 1))
        self.start = used[0] if adjacent else 0
        self.used = used

    def result_dim(self, source_dim: int) -> int:
        """Result dimension of an unindexed source dimension."""
        before = sum(1 for d in range(source_dim) if self.indices[d] is None)
        after_block = source_dim > self.start if self.used and self.start in self.used else True
        return before + (len(self.broadcast) if after_block and (source_dim > self.start or self.start == 0) else 0)

    def index_dims(self, dim: int) -> list[Where]:
        """Per index operand, its own dimension for dimension ``dim`` of the broadcast shape."""
        found: list[Where] = []
        for index in self.indices:
            if index is not None:
                shape = index.meta["val"].shape
                own = dim - (len(self.broadcast) - len(shape))
                found.append(own if own >= 0 and shape[own] == self.broadcast[dim] else None)
        return found


def _emit_own_rows(call: LocalCall) -> list[fx.Node | None]:
    """The rank's i-th row reads its own i-th row, however the rows are dealt out."""
    indices = list(call["indices"])
    shape, value = call.program.shape(indices[0]), indices[0].meta["val"]
    rows = call.call(aten.arange.default, shape[0], dtype=value.dtype, device=value.device)
    column = call.call(aten.view.default, rows, [shape[0], *[1] * (len(shape) - 1)])
    indices[0] = column if shape[1:].count(1) == len(shape) - 1 else call.call(aten.expand.default, column, list(shape))
    if any(not axis.is_even for axis in call.program.axes):
        for node in (rows, column, indices[0]):
            node.meta["rank_dependent"] = True
    return [call.default(indices=indices)]


def _value_dim(info: _Indexing, result_dim: int, call: OpCall) -> Where:
    """Dimension of ``values`` for one dimension of the region that is written."""
    values = call["values"].meta["val"].shape
    region = list(info.broadcast)
    for d, index in enumerate(info.indices):
        if index is None:
            region.insert(info.result_dim(d), info.source[d])
    own = result_dim - (len(region) - len(values))
    return own if own >= 0 and values[own] == region[result_dim] else None


def indexed_dimensions(call: OpCall, number: int) -> tuple[int, int]:
    """(the dimension of the source that an index is for, the first one of the result that indices make).

    Args:
        call: ``x[indices]``, or a write there.
        number: which of the indices that are tensors.
    """
    info = _Indexing(call)
    return info.used[number], info.start


def value_dimension(call: OpCall, result_dim: int) -> int | None:
    """Dimension of the ``values`` of a write for one of the written region; None: they are the same along it."""
    found = _value_dim(_Indexing(call), result_dim, call)
    return found if isinstance(found, int) else None


def index(call: OpCall) -> list[Layout]:
    """``x[indices]`` with integer tensors."""
    info = _Indexing(call)
    if not info.plain or not info.used:
        return []
    count = len(info.used)
    found: list[Layout] = []
    for dim, at in enumerate(info.indices):
        if at is None:
            found += along(call, [dim, *[None] * count], [info.result_dim(dim)])
    for dim in range(len(info.broadcast)):
        found += along(call, [None, *info.index_dims(dim)], [info.start + dim])
    first = info.indices[0]
    if first is not None and info.broadcast[:1] == info.source[:1] and is_row_numbers(first, info.source[0]):
        found += in_one_range(along(call, [0, *info.index_dims(0)], [info.start], _emit_own_rows))
    return found + linear(call, (0,))


def _masked(call: OpCall, info: _Indexing) -> list[Layout]:
    """``x[mask] = number``: where to write is asked element by element, and the same is written everywhere."""
    if len(info.used) != 1 or not is_tensor(call["values"]) or call["values"].meta["val"].numel != 1:
        return []
    begins, mask = info.used[0], info.indices[info.used[0]]
    if mask is None or mask.meta["val"].dtype != torch.bool:
        return []
    ends = begins + len(mask.meta["val"].shape)
    found: list[Layout] = []
    for dim in range(len(info.source)):
        found += along(call, [dim, dim - begins if begins <= dim < ends else None, None], [dim])
    return found


def index_put(call: OpCall) -> list[Layout]:
    """``x[indices] = values`` (or ``+=``)."""
    info = _Indexing(call)
    if masked := _masked(call, info):
        return masked
    if not info.plain or not info.used or not is_tensor(call["values"]):
        return []
    count = len(info.used)
    found: list[Layout] = []
    for dim, at in enumerate(info.indices):
        if at is None:
            found += along(call, [dim, *[None] * count, _value_dim(info, info.result_dim(dim), call)], [dim])
    first = info.indices[0]
    if first is not None and info.broadcast[:1] == info.source[:1] and is_row_numbers(first, info.source[0]):
        inputs = [0, *info.index_dims(0), _value_dim(info, info.start, call)]
        found += in_one_range(along(call, inputs, [0], _emit_own_rows))
    if call["accumulate"]:
        for dim in range(len(info.broadcast)):
            value = _value_dim(info, info.start + dim, call)
            if value is not None:
                found += along(call, [PARTIAL, *info.index_dims(dim), value], [PARTIAL])
        found += linear(call, (0, len(call.operands) - 1))
    return found


def _search(call: OpCall) -> list[Layout]:
    """``bucketize``/``searchsorted`` with one-dimensional boundaries: element-wise in the values."""
    values = call.index("self")
    found: list[Layout] = []
    if values is None or len(call["self"].meta["val"].shape) != len(call.shape):
        return found
    boundaries = call.index("boundaries") if "boundaries" in call.arguments else call.index("sorted_sequence")
    if boundaries is None or len(call.specs[boundaries].shape) != 1:
        return found
    for dim in range(len(call.shape)):
        inputs: list[Where] = [dim if i == values else None for i in range(len(call.operands))]
        found += along(call, inputs, [dim])
    return found


def _by_dimension(call: OpCall) -> list[Layout]:
    return along(call, [0], [0])


RULES: dict[Any, Rule] = {
    BY_DIMENSION: _by_dimension,
    **dict.fromkeys([aten.scatter, aten.scatter_reduce], _along_dim),
    aten.gather: _gather,
    aten.scatter_add: _scatter_add,
    aten.index_select: _index_select,
    aten.index_add: _index_add,
    **dict.fromkeys([aten.index.Tensor, aten._unsafe_index.Tensor], index),
    **dict.fromkeys([aten.index_put, aten.index_put_, aten._unsafe_index_put, aten._index_put_impl_], index_put),
    **dict.fromkeys([aten.bucketize.Tensor, aten.searchsorted.Tensor], _search),
}
