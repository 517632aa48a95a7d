# pyright: basic
# (this module walks arguments of any type; every access follows a check that pyright cannot see)
"""Slices that take all: torch's indexing leaves these out, so their gradients keep the strides that they came with.

The values are the same, but a sum or a product that goes through memory in another order has other last bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_spmd.ir.sizes import Condition, Formula
from lightning_spmd.stages.capture.follow.notes import leaves_by_place, tensors_in, with_numbers

Operators = Sequence[tuple[Any, Any, Any, Any]]
"""Operators with their arguments and results."""

_OF_SLICE = torch.ops.aten.slice_backward.default
_COPIED = {_OF_SLICE, torch.ops.aten.select_backward.default}  # into new memory, in its order


class SliceNumbers(NamedTuple):
    """What says whether a slice takes all.

    Args:
        start: the first row.
        end: the one behind the last; may be beyond the size.
        size: of the dimension.

    Each is a number, a formula, or None if it is neither.
    """

    start: Any
    end: Any
    size: Any

    def condition(self) -> Condition | None:
        """That it does not; None if no count decides that."""
        begins = f"({self.start}) != 0" if isinstance(self.start, Formula) else ""
        ends = f"({self.end}) < ({self.size})" if Formula in map(type, self[1:]) and None not in self[1:] else ""
        code = " or ".join(filter(None, [begins, ends]))
        return Condition(Formula(code)) if code and (begins or self.start == 0) else None


def slice_numbers(operators: Operators, index: int) -> SliceNumbers:
    """Those of a gradient of a slice, by its number among operators."""
    _, sizes, dim, start, end, _ = operators[index][1]
    return SliceNumbers(start, end, sizes[dim])


def slices_that_matter(operators: Operators, results: Iterable[Tensor] = ()) -> list[int]:
    """The gradients of slices without which an operator behind them would get other strides, by number.

    Args:
        operators: of a backward pass, on fake tensors.
        results: of it, that others get.
    """
    slices = [
        (index, args)
        for index, (func, args, *_) in enumerate(operators)
        if func is _OF_SLICE and args[5] == 1 and not args[0].is_contiguous()
    ]
    if not slices:
        return []
    given = [{id(tensor) for tensor in tensors_in((args, kwargs))} for _, args, kwargs, _ in operators]
    ids = set(map(id, results))
    found = []
    for index, args in slices:
        made = operators[index][3]
        others = {id(made): _with_layout(args[0], made)}
        if _is_met(operators, given, index + 1, others) or ids & others.keys():
            found.append(index)
    return found


def _with_layout(like: Tensor, tensor: Tensor) -> Tensor:
    """A tensor of the same shape as one, its memory in the order of another one."""
    strides, step = [0] * tensor.ndim, 1
    for dim in sorted(range(tensor.ndim), key=lambda dim: (like.stride(dim), -dim)):
        if like.stride(dim):
            strides[dim], step = step, step * tensor.shape[dim]
    return tensor.new_empty_strided(tensor.shape, strides)


def _is_met(operators: Operators, given: Sequence[set[int]], begin: int, others: dict[int, Tensor]) -> bool:
    """Whether an operator whose result may depend on strides gets one of these tensors.

    Args:
        operators: all of them.
        given: the tensors that each gets.
        begin: the first to look at.
        others: the same tensors with other strides, by those that operators get; those that are made of them come in.
    """
    for (func, args, kwargs, out), ids in zip(operators[begin:], given[begin:], strict=True):
        if others.keys().isdisjoint(ids) or func in _COPIED:
            continue
        if not func.is_view and torch.Tag.pointwise not in func.tags:
            return True
        every = (args, kwargs)
        places = {place: others[id(leaf)] for place, leaf in leaves_by_place(every) if id(leaf) in others}
        other_args, other_kwargs = with_numbers(every, places)
        try:
            made = func(*other_args, **other_kwargs)
        except Exception:  # a view that those strides do not have
            return True
        for tensor, other in zip(tensors_in(out), tensors_in(made), strict=True):
            if tensor.stride() != other.stride():
                others[id(tensor)] = other
    return False
