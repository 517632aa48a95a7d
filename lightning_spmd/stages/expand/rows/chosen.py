"""Rows that values choose, by every rank from its own rows: no rank gets what others choose from.

::

    mask = y > 0                                each rank's own rows
    count = count_nonzero(mask)                 a partial sum: a rank's own part of it is what it will hold
    hand_over(count)                            the sum is what Python gets; the part says how large things are here
    found = nonzero_static(mask, size=count)    "found": each rank finds its own, by the numbers that its own rows have
    rows = found[:, 0]                          positions: numbers of own rows
    h = x[rows]                                 a bag: this rank's rows of those that are chosen
    loss = f(h).sum() / count                   a partial sum by the number on all ranks
    out.index_add_(0, rows, h)                  rows in their own places: an ordinary split tensor

Rows that are written down several times, ``x.repeat_interleave(times, 0)``, are chosen in the same way: the count is
``times.sum()``, and ``repeat_interleave(times)`` gives positions.

The order of a bag is not that of the one-device program (``torch.where(mask.T)`` goes through the rows of all ranks
once for each column), and no rank knows the number of a row among all rows. Nothing can see either as long as bags meet
only bags of the same count, values that are the same for all rows, and the operations above. Propagation follows every
value that depends on it; one use outside of this list, and the rows are chosen from gathered ones, as without this
module.

A value that is the same for all rows (``ones(count)``, the gradient of a sum) is made for the rank's rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.effects import draws_random
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.operators.positions import BY_DIMENSION
from lightning_spmd.ir.placement import Chosen, Partial, Placement, Replicate, Shard
from lightning_spmd.ir.reads import hands_over
from lightning_spmd.stages.expand.call import Layout, LocalCall, OpCall, bind_arguments, flatten_values, is_tensor
from lightning_spmd.stages.expand.rows.routing import Order, Route, Routed
from lightning_spmd.stages.expand.rules import layouts_of
from lightning_spmd.stages.expand.rules.indexing import indexed_dimensions, value_dimension
from lightning_spmd.stages.expand.rules.pointwise import is_pointwise

aten = torch.ops.aten

COUNTED_BY: Mapping[Any, Any] = {
    aten.nonzero_static.default: aten.count_nonzero.default,
    aten.repeat_interleave.Tensor: aten.sum.default,
}
"""Operators that choose rows by the values of their operand, and what counts the rows."""
_COPIES = (aten.clone, aten.detach, aten.alias, aten._to_copy, aten.lift_fresh, BY_DIMENSION.overloadpacket)
_VIEWS = (aten.view, aten._unsafe_view, aten.reshape, aten.squeeze)
_MADE = (
    aten.zeros, aten.ones, aten.full, aten.new_zeros, aten.new_ones, aten.new_full,
    aten.zeros_like, aten.ones_like, aten.full_like,
)  # fmt: skip
_BY_ELEMENT = (*_COPIES, aten.neg, aten.mul, aten.div, aten.add, aten.sub, aten.where)
_SUMMED = (
    aten.mean, aten.var, aten.std, aten.var_mean, aten.std_mean, aten.linalg_vector_norm, aten.norm,
    aten.nll_loss_forward, aten.nll_loss2d_forward, aten.squeeze, aten.squeeze_copy,
)  # fmt: skip
"""Local programs of their own that add up over rows, by the numbers of rows of all ranks."""
_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
"""Beginnings of the names of operators of which the same is true."""


def is_chosen(placement: Placement) -> bool:
    """Whether a rank holds what its own rows give of what values choose."""
    return isinstance(placement, Shard) and isinstance(placement.outer, Chosen)


# ---------------------------------------------------------------------- where it begins
def count_of(node: fx.Node, position: Mapping[fx.Node, int]) -> tuple[fx.Node, int] | None:
    """(the hand-over, the position among its values) of the number of rows that an operator chooses.

    Args:
        node: the operator.
        position: of each node in the graph.
    """
    if (counts := COUNTED_BY.get(node.target)) is None or not isinstance(mask := node.args[0], fx.Node):
        return None
    found: tuple[fx.Node, int] | None = None
    for count in mask.users:
        if count.target is not counts or len(count.args) != 1:
            continue
        for user in count.users:
            before = position[user] < position[node] and (found is None or position[user] > position[found[0]])
            if hands_over(user) and before:
                found = user, list(user.args).index(count)
    return found


def begin(call: OpCall, count: int) -> Route | None:
    """Choose from the rank's own rows.

    Args:
        call: of an operator of ``COUNTED_BY``.
        count: which of the graph's counts says how many there are.
    """
    where, rows, finds = call.current[0], call.outputs[0].shape[0], call.op is aten.nonzero_static.default
    if not isinstance(where, Shard) or rows < 1:
        return None
    chosen = Shard(0, Chosen(count, rows))
    into = Shard(0, where.outer)
    size = call.specs[0].shape[where.dim]
    value = Routed(Order.FOUND if finds else Order.POSITIONS, call.node, size, chosen, into, where.dim)
    return Route(Layout((where,), (chosen,), _emit_own), (value,))


def _emit_own(call: LocalCall) -> list[fx.Node | None]:
    rows = call.output_shape()[0]
    return [call.default(size=rows) if call.op is aten.nonzero_static.default else call.default(output_size=rows)]


# ---------------------------------------------------------------------- what follows
def route(
    call: OpCall,
    known: Mapping[int, Routed],
    cost: Callable[[Layout], float],
    is_same: Callable[[fx.Node, int], bool],
) -> Route | None:
    """How an operator on chosen rows runs on the rank's own ones, or None if their order or number could be seen.

    Args:
        call: the call.
        known: its operands that depend on what is chosen, by position.
        cost: of a layout.
        is_same: whether a value is the same all along a dimension.
    """
    if any(not is_chosen(value.where) for value in known.values()):
        return None
    packet = call.op.overloadpacket
    index = call.index("indices") if packet in (aten.index, aten.index_put, aten.index_put_) else call.index("index")
    first = known.get(0)
    if first is not None and first.order is Order.FOUND:
        return _columns(call, first)
    positions = [i for i, value in known.items() if value.order is Order.POSITIONS]
    if not positions:
        return _inside(call, known, cost, is_same)
    if index is None or any(i < index for i in positions):
        return _copied(call, known[0]) if list(known) == [0] else None
    if packet is aten.index and len(positions) == 1:
        return _read(call, known, positions[0])
    if packet in (aten.index_put, aten.index_put_) and len(positions) == 1:
        return _write(call, known, positions[0], is_same)
    if packet is aten.index_select:
        return _select(call, known[index])
    if packet in (aten.index_add, aten.index_add_):
        return _add(call, known[index], is_same)
    return None


def _columns(call: OpCall, found: Routed) -> Route | None:
    """``found[:, i]`` and ``found.unbind(1)``: positions of own rows, and columns of other dimensions."""
    packet, ndim = call.op.overloadpacket, call.specs[0].shape[1]

    def column(i: int) -> Routed:
        return replace(found, order=Order.POSITIONS if i == found.column else Order.BAG)

    one = Layout((found.where,), (found.where,))
    if packet in _COPIES and len(call.operands) == 1 and not call.outputs[0].dtype.is_floating_point:
        return Route(one, (found,))
    if packet is aten.select and call["dim"] in (1, -1):
        return Route(one, (column(call["index"] % ndim),))
    if packet is aten.unbind and call["dim"] in (1, -1):
        return Route(Layout(one.inputs, one.outputs * ndim), tuple(map(column, range(ndim))))
    if packet in _VIEWS and ndim == 1 and len(call.outputs[0].shape) == 1:
        return Route(one, (column(0),))
    return None


def _copied(call: OpCall, positions: Routed) -> Route | None:
    packet = call.op.overloadpacket
    if packet in _COPIES and len(call.operands) == 1 and call.outputs[0].dtype == torch.int64:
        return Route(Layout((positions.where,), (positions.where,)), (positions,))
    return None


def _holds_rows(call: OpCall, operand: int, positions: Routed, dim: int) -> Shard | None:
    """How an operand must lie whose rows positions number along a dimension; None if that costs communication."""
    wanted = Shard(dim, positions.into.outer) if positions.into is not None else None
    own = call.specs[operand].shape[dim] == positions.rows
    lies = call.current[operand] == wanted or (isinstance(call.current[operand], Replicate) and not _is_bag(wanted))
    return wanted if own and lies else None


def _is_bag(placement: Placement | None) -> bool:
    return placement is not None and is_chosen(placement)


def _indices(call: OpCall, known: Mapping[int, Routed], at: int) -> tuple[int, int] | None:
    """(the dimension that positions index, that of the result along which they lie); None if not all are chosen."""
    where = known[at].where
    first = call.index("indices")
    count = sum(1 for leaf in call["indices"] if is_tensor(leaf))
    if first is None or any(
        i not in known or known[i].where != where or call.current[i] != where or len(call.specs[i].shape) != 1
        for i in range(first, first + count)
    ):
        return None
    return indexed_dimensions(call, at - first)


def _bag(positions: Routed, placement: Placement) -> Routed | None:
    return replace(positions, order=Order.BAG) if is_chosen(placement) else None


def _read(call: OpCall, known: Mapping[int, Routed], at: int) -> Route | None:
    """``x[rows]``, ``x[rows, columns]``: a bag."""
    dims = _indices(call, known, at)
    source = None if dims is None else _holds_rows(call, 0, known[at], dims[0])
    if dims is None or source is None:
        return None
    result = Shard(dims[1], known[at].where.outer)
    inputs = (source, *call.current[1:])
    return Route(Layout(inputs, (result,)), (_bag(known[at], result),))


def _write(call: OpCall, known: Mapping[int, Routed], at: int, is_same: Callable[[fx.Node, int], bool]) -> Route | None:
    """``x[rows] = bag``, ``x[rows] += bag``: rows in their own places."""
    dims, source = _indices(call, known, at), call.index("values")
    target = None if dims is None else _holds_rows(call, 0, known[at], dims[0])
    if dims is None or source is None or target is None:
        return None
    along = value_dimension(call, dims[1])
    values = _values(call, known, source, along, known[at], is_same)
    if values is None:
        return None
    layout = Layout((target, *call.current[1:source], values, *call.current[source + 1 :]), (target,))
    return Route(layout, (_bag(known[at], target),))


def _values(
    call: OpCall,
    known: Mapping[int, Routed],
    source: int,
    along: int | None,
    positions: Routed,
    is_same: Callable[[fx.Node, int], bool],
) -> Placement | None:
    """How values lie that are written along a dimension of theirs (None: the same for all rows); None: not at all."""
    current = call.current[source]
    if along is None:
        return current if isinstance(current, Replicate) else None
    wanted = Shard(along, positions.where.outer)
    if source in known:
        return wanted if current == wanted and known[source].order is Order.BAG else None
    return wanted if isinstance(current, Replicate) and is_same(call.operands[source], along) else None


def _select(call: OpCall, positions: Routed) -> Route | None:
    dim = call["dim"] % len(call.specs[0].shape)
    source = _holds_rows(call, 0, positions, dim)
    if source is None:
        return None
    result = Shard(dim, positions.where.outer)
    return Route(Layout((source, positions.where), (result,)), (_bag(positions, result),))


def _add(call: OpCall, positions: Routed, is_same: Callable[[fx.Node, int], bool]) -> Route | None:
    dim = call["dim"] % len(call.specs[0].shape)
    target, wanted = _holds_rows(call, 0, positions, dim), Shard(dim, positions.where.outer)
    current = call.current[2]
    lies = current == wanted or (isinstance(current, Replicate) and is_same(call.operands[2], dim))
    if target is None or not lies or call.operands[1] is call.operands[2]:
        return None
    return Route(Layout((target, positions.where, wanted), (target,)), (_bag(positions, target),))


def _inside(
    call: OpCall,
    known: Mapping[int, Routed],
    cost: Callable[[Layout], float],
    is_same: Callable[[fx.Node, int], bool],
) -> Route | None:
    """Any operator whose rule takes bags as they lie and nothing else that is split."""
    if any(value.order is not Order.BAG for value in known.values()):
        return None

    def fits(layout: Layout) -> bool:
        for i, placement in enumerate(layout.inputs):
            current = call.current[i]
            if i in known:
                if placement != current:
                    return False
            elif is_chosen(placement):
                if not isinstance(current, Replicate) or not is_same(call.operands[i], placement.dim):  # type: ignore[union-attr]
                    return False
            elif isinstance(placement, Shard) or not isinstance(current, (Replicate, Partial)):
                return False
        return _counts_all(call, layout)

    options = [layout for layout in layouts_of(call) or [] if fits(layout)]
    wanted = [layout for layout in options if call.forced is not None and layout.outputs[0] == call.forced]
    best = min(wanted or options, key=cost, default=None)
    if best is None:
        return None
    (bag, *_) = known.values()
    return Route(best, tuple(_bag(bag, p) for p in best.outputs))


def _counts_all(call: OpCall, layout: Layout) -> bool:
    """Whether the local program of a layout knows nothing of where rows are in the whole."""
    if layout.emit is None:
        return True
    packet = call.op.overloadpacket
    if packet in (aten.nll_loss_forward, aten.nll_loss2d_forward):
        scores = call.index("self")
        return scores is not None and layout.inputs[scores] != Shard(1) and not _along_classes(layout.inputs[scores])
    return packet in _SUMMED or packet.__name__.startswith(_LOSSES)


def _along_classes(placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.dim == 1


# ---------------------------------------------------------------------- values that are the same for all rows
def is_same_along(node: fx.Node, dim: int, is_written: Callable[[fx.Node], bool]) -> bool:
    """Whether a value does not depend on where along a dimension one looks.

    Args:
        node: it.
        dim: the dimension.
        is_written: whether a value's storage is written later.
    """
    spec = node.meta.get("val")
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None or not isinstance(spec, TensorSpec) or is_written(node) or draws_random(node):
        return False
    if packet in _MADE:
        return True
    tensors = [value for value in _tensors(node) if value.meta["val"].shape]

    def follows(operand: fx.Node, own: int) -> bool:
        shape = operand.meta["val"].shape
        return own < 0 or shape[own] == 1 or is_same_along(operand, own, is_written)

    if packet in (aten.expand, aten.expand_copy) or packet in _BY_ELEMENT or is_pointwise(node.target):
        return all(follows(t, dim - (len(spec.shape) - len(t.meta["val"].shape))) for t in tensors)
    if packet in (aten.unsqueeze, aten.unsqueeze_copy):
        at = bind_arguments(node.target, node.args, node.kwargs)["dim"] % len(spec.shape)
        return at != dim and follows(tensors[0], dim - (dim > at))
    if packet in (aten.view, aten._unsafe_view, aten.reshape):
        return all(follows(t, own) for t in tensors for own in range(len(t.meta["val"].shape)))
    return False


def _tensors(node: fx.Node) -> Sequence[Any]:
    values = bind_arguments(node.target, node.args, node.kwargs).values()
    return [value for value in flatten_values(list(values)) if is_tensor(value)]
