"""Views, their backward twins, joining and splitting.

A view in row-major order turns ``(before, split, after)`` into other dimensions. The split stays one dimension's if the
elements before it are a multiple of that dimension's prefix; the quotient is the number of blocks (``Shard.outer``).
All of these are linear, so partial sums pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.placement import PARTIAL, Brought, Chosen, Placement, Shard, ShardAxis
from lightning_spmd.stages.expand.call import Layout, LocalCall, Localizer, OpCall, Rule, along, linear
from lightning_spmd.stages.expand.collectives.exchange import own_index, positions
from lightning_spmd.stages.expand.collectives.redistribute import zero_unless
from lightning_spmd.stages.expand.rules.pointwise import elementwise

aten = torch.ops.aten


def map_view(source: Sequence[int], target: Sequence[int], placement: Shard, axis: ShardAxis) -> Shard | None:
    """Where a split dimension of shape ``source`` is in shape ``target``, or None if it is not one dimension there."""
    before = math.prod(source[: placement.dim])
    if isinstance(placement.outer, Chosen):  # rows stay whole; what is within one may be of its dimension
        rows = placement.outer.rows
        whole = [d for d, n in enumerate(target) if n and n % rows == 0 and math.prod(target[:d]) == before]
        return Shard(whole[0], placement.outer) if whole else None
    if isinstance(placement.outer, (tuple, Brought)):  # stays where the dimension stays what it is
        same = [d for d, n in enumerate(target) if n == source[placement.dim] and math.prod(target[:d]) == before]
        return Shard(same[0], placement.outer) if same else None
    blocks = before * placement.outer
    best: Shard | None = None
    fewest = math.inf
    before = 1
    for dim, size in enumerate(target):
        if before > 0 and blocks % before == 0:
            outer = blocks // before
            if outer > 0 and size % outer == 0 and axis.divides(size // outer) and outer < fewest:
                best, fewest = Shard(dim, outer), outer
        before *= size
    return best


def _through(call: OpCall, placements: Sequence[Placement]) -> list[Layout]:
    source, target = call.specs[0].shape, call.shape
    found: list[Layout] = []
    for placement in placements:
        if isinstance(placement, Shard) and (mapped := map_view(source, target, placement, call.axis)) is not None:
            found.append(Layout((placement,), (mapped,)))
    return found


def view(call: OpCall) -> list[Layout]:
    """``view`` and ``reshape``."""
    candidates: list[Placement] = [call.current[0]]
    if isinstance(call.forced, Shard):
        candidates += [Shard(d) for d in range(len(call.specs[0].shape)) if call.axis.divides(call.specs[0].shape[d])]
    return _through(call, candidates) + linear(call, (0,))


def _dims(call: OpCall, mapping: dict[int, int]) -> list[Layout]:
    found: list[Layout] = []
    for source, target in mapping.items():
        found += along(call, [source], [target])
    return found + linear(call, (0,))


def _permute(call: OpCall) -> list[Layout]:
    ndim = len(call.shape)
    return _dims(call, {d % ndim: i for i, d in enumerate(call["dims"])})


def _transpose(call: OpCall) -> list[Layout]:
    ndim = len(call.shape)
    if ndim < 2:
        return _dims(call, {d: d for d in range(ndim)})
    a, b = (call["dim0"] % ndim, call["dim1"] % ndim) if "dim0" in call.arguments else (0, 1)
    return _dims(call, {d: b if d == a else a if d == b else d for d in range(ndim)})


def _unsqueeze(call: OpCall) -> list[Layout]:
    at = call["dim"] % len(call.shape)
    return _dims(call, {d: d + (d >= at) for d in range(len(call.shape) - 1)})


def _squeezed(arguments: Any, shape: Sequence[int]) -> list[int]:
    dims = arguments.get("dim", list(range(len(shape))))
    dims = [dims] if isinstance(dims, int) else dims
    return sorted({d % len(shape) for d in dims if shape[d] == 1}) if shape else []


def _squeeze(call: OpCall) -> list[Layout]:
    shape = call.specs[0].shape
    gone = _squeezed(call.arguments, shape)
    found: list[Layout] = []
    for at, dim in enumerate(d for d in range(len(shape)) if d not in gone):
        found += along(call, [dim], [at], _emit_squeeze)
    return found + linear(call, (0,))


def _emit_squeeze(call: LocalCall) -> list[fx.Node | None]:
    """A dimension of which this rank has one entry stays."""
    gone = _squeezed(call.globals, call.spec("self").shape)
    in_place = call.op._schema.is_mutable
    return [call.call(aten.squeeze_.dims if in_place else aten.squeeze.dims, call["self"], gone)]


def _expand(call: OpCall) -> list[Layout]:
    source, new = call.specs[0].shape, len(call.shape) - len(call.specs[0].shape)
    found = _dims(call, {d: d + new for d in range(len(source)) if source[d] == call.shape[d + new]})
    if call.outputs[0].numel != call.specs[0].numel:
        # A partial sum is reduced before it is spread over the batch, not after.
        found = [c for c in found if c.outputs != (PARTIAL,)]
    for dim, size in enumerate(call.shape):
        if dim < new or source[dim - new] != size:
            found += along(call, [None], [dim])
    return found


def _unfold(call: OpCall) -> list[Layout]:
    ndim = len(call.specs[0].shape)
    return _dims(call, {d: d for d in range(ndim) if d != call["dimension"] % max(ndim, 1)})


def _select(call: OpCall) -> list[Layout]:
    ndim = len(call.specs[0].shape)
    at = call["dim"] % ndim
    return _dims(call, {d: d - (d > at) for d in range(ndim) if d != at}) + along(call, [at], [PARTIAL], _emit_one_row)


def _emit_one_row(call: LocalCall) -> list[fx.Node | None]:
    """One row of a split dimension: its owner's, as a partial sum."""
    shape = call.spec("self").shape
    at = call["dim"] % len(shape)
    places = [layout.inputs[0] for layout in call.layouts]
    row = own_index(shape[at], call["index"] % shape[at], at, places, call.program.axes)
    axes = call.emitting_axes(_emit_one_row)
    if any(0 in axis.split for axis in axes):  # where there is no row, there must be one to take
        end = [0, 0] * (len(shape) - 1 - at) + [0, 1]
        call.replace("self", call.call(aten.constant_pad_nd.default, call["self"], end))
    piece = call.default(index=row or 0)
    piece.meta["rank_dependent"] = True
    return [zero_unless(call.program, piece, row is not None)]


def _slice(call: OpCall) -> list[Layout]:
    """A slice along an unsplit dimension, or of everything."""
    shape = call.specs[0].shape
    at = call["dim"] % len(shape)
    return _dims(call, {d: d for d in range(len(shape)) if d != at or call.shape[d] == shape[d]})


def _slice_sizes(call: LocalCall) -> dict[str, Any]:
    at = call["dim"] % len(call.spec("self").shape)
    whole = call.outputs[0].shape[at] == call.spec("self").shape[at] and call["step"] == 1
    return {"start": None, "end": None} if whole and "start" in call.globals else {}


def _slice_backward(call: OpCall) -> list[Layout]:
    """Along an unsplit dimension, or of everything; of a split one every rank puts its rows among zeros."""
    shape, small = call.shape, call.specs[0].shape
    at = call["dim"] % len(shape)
    found = _dims(call, {d: d for d in range(len(shape)) if d != at or small[d] == shape[d]})
    if call.current[0] == Shard(at) and small[at] != shape[at]:
        found.append(Layout((Shard(at),), (PARTIAL,), _emit_rows_among_zeros, local=True))
    return found


def _emit_rows_among_zeros(call: LocalCall) -> list[fx.Node | None]:
    sizes, small = call.output_shape(), call.spec("grad_output").shape
    at, step = call["dim"] % len(sizes), call["step"]
    begin = (call["start"] or 0) % call.outputs[0].shape[at]
    ranges = positions(small[at], at, [layout.inputs[0] for layout in call.layouts], call.program.axes)
    if ranges is None:
        raise ExpansionError("the rows of a slice lie in blocks")
    total: fx.Node | None = None
    row = 0
    for start, length in ranges:
        piece = call["grad_output"]
        if len(ranges) > 1:
            piece = call.call(aten.slice.Tensor, piece, at, row, row + length)
        first = begin + start * step
        spread = call.call(aten.slice_backward.default, piece, sizes, at, first, first + (length - 1) * step + 1, step)
        spread.meta["rank_dependent"] = True
        total = spread if total is None else call.call(aten.add.Tensor, total, spread)
        row += length
    return [total]


def _slice_backward_sizes(call: LocalCall) -> dict[str, Any]:
    sizes = call.output_shape()
    at = call["dim"] % len(sizes)
    whole = call.outputs[0].shape[at] == call.spec("grad_output").shape[at]
    return {"input_sizes": sizes, **({"start": 0, "end": sizes[at]} if whole else {})}


def _select_backward(call: OpCall) -> list[Layout]:
    """Along an unsplit dimension; or the rank's own rows alone where nothing wants others."""
    at = call["dim"] % len(call.shape)
    found = _dims(call, {d: d + (d >= at) for d in range(len(call.shape) - 1)})
    return found + [replace(c, emit=_emit_own_row, local=True) for c in along(call, [None], [at])]


def _emit_own_row(call: LocalCall) -> list[fx.Node | None]:
    shape = call.outputs[0].shape
    at = call["dim"] % len(shape)
    places = [layout.outputs[0] for layout in call.layouts]
    row = own_index(shape[at], call["index"] % shape[at], at, places, call.program.axes)
    gradient = zero_unless(call.program, call["grad_output"], row is not None)
    result = call.default(grad_output=gradient, input_sizes=call.output_shape(), index=row or 0)
    result.meta["rank_dependent"] = True
    return [result]


def _diagonal(call: OpCall) -> list[Layout]:
    ndim = len(call.specs[0].shape)
    pair = {call.get("dim1", 0) % ndim, call.get("dim2", 1) % ndim}
    return _dims(call, {d: i for i, d in enumerate(d for d in range(ndim) if d not in pair)})


def _diagonal_backward(call: OpCall) -> list[Layout]:
    ndim = len(call.shape)
    pair = {call["dim1"] % ndim, call["dim2"] % ndim}
    return _dims(call, dict(enumerate(d for d in range(ndim) if d not in pair)))


def _repeat(call: OpCall) -> list[Layout]:
    source, repeats = call.specs[0].shape, call["repeats"]
    new = len(repeats) - len(source)
    return _dims(call, {d: d + new for d in range(len(source)) if repeats[d + new] == 1})


def _as_strided(call: OpCall) -> list[Layout]:
    """Sound where the split dimension is the outermost in memory and the result takes whole pieces of it."""
    source, current = call.specs[0], call.current[0]
    found = linear(call, (0,)) if source.stride == call.outputs[0].stride and source.shape == call.shape else []
    if not isinstance(current, Shard) or current.outer != 1:
        return found
    row = source.stride[current.dim]
    if any(s > row for d, s in enumerate(source.stride) if source.shape[d] > 1):
        return found
    size, stride = call["size"], call["stride"]
    rows = [d for d in range(len(size)) if stride[d] == row and size[d] == source.shape[current.dim]]
    span = sum((n - 1) * s for d, (n, s) in enumerate(zip(size, stride, strict=True)) if d not in rows[:1])
    if len(rows) == 1 and span + (call["storage_offset"] or 0) < row:
        found.append(Layout((current,), (Shard(rows[0]),)))
    return found


def _flip(call: OpCall) -> list[Layout]:
    ndim = len(call.shape)
    worked = {d % ndim for d in call["dims"]}
    return _dims(call, {d: d for d in range(ndim) if d not in worked}) if call["dims"] else linear(call, (0,))


def _output_shape(name: str) -> Localizer:
    return lambda call: {name: call.output_shape()}


def _triangle(call: OpCall) -> list[Layout]:
    return _dims(call, {d: d for d in range(len(call.shape) - 2)})


def _other_dtype(call: OpCall) -> list[Layout]:
    """The same bits as numbers of another kind."""
    return elementwise(call) if call.specs[0].dtype.itemsize == call.outputs[0].dtype.itemsize else []


RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        [aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.view_copy.default], view
    ),
    **dict.fromkeys([aten.permute, aten.permute_copy], _permute),
    **dict.fromkeys([aten.transpose, aten.t, aten.transpose_copy, aten.t_copy], _transpose),
    **dict.fromkeys([aten.unsqueeze, aten.unsqueeze_copy], _unsqueeze),
    **dict.fromkeys([aten.squeeze, aten.squeeze_copy], _squeeze),
    **dict.fromkeys([aten.expand, aten.expand_copy], _expand),
    aten.unfold: _unfold,
    aten.view.dtype: _other_dtype,
    **dict.fromkeys([aten.select.int, aten.select_copy.int], _select),
    **dict.fromkeys([aten.slice.Tensor, aten.slice_copy.Tensor], _slice),
    aten.slice_backward: _slice_backward,
    aten.select_backward: _select_backward,
    aten.diagonal: _diagonal,
    aten.diagonal_backward: _diagonal_backward,
    aten.repeat: _repeat,
    aten.as_strided: _as_strided,
    **dict.fromkeys([aten.flip, aten.roll], _flip),
    **dict.fromkeys([aten.tril, aten.triu], _triangle),
}


LOCALIZERS: dict[Any, Localizer] = {
    **dict.fromkeys([aten.view.default, aten._unsafe_view, aten.view_copy.default], _output_shape("size")),
    aten.reshape: _output_shape("shape"),
    aten._reshape_alias: _output_shape("size"),
    aten.expand: _output_shape("size"),
    aten.expand_copy: _output_shape("size"),
    aten.slice.Tensor: _slice_sizes,
    aten.slice_backward: _slice_backward_sizes,
    aten.select_backward: _output_shape("input_sizes"),
    aten.diagonal_backward: _output_shape("input_sizes"),
    aten.as_strided: _output_shape("size"),
}
