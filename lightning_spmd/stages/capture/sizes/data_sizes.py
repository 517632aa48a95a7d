"""Operators whose results have data-dependent sizes: ``nonzero``, ``x[mask]``, ``unique``, ``bincount``, CTC.

The size is read from a tensor (``reads``), and the graph then holds for it. The operator is recorded in a form that has
this size as an argument. Eager goes the same way: it counts, allocates, and ``x[mask]`` is ``x[positions]``; so values
are equal bit for bit. The gradient uses the same positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.ir.operators.ctc import CTC_LOSS, CTC_LOSS_BACKWARD, PAD_TARGETS
from lightning_spmd.ir.operators.positions import BY_DIMENSION
from lightning_spmd.ir.operators.unique import UNIQUE, UNIQUE_COUNT

aten = torch.ops.aten
_FLAT = aten._unique2.default  # noqa: SLF001 - an operator's public name
_UNIQUE = (_FLAT, aten.unique_dim.default, aten.unique_consecutive.default)
_CTC_OF_TENSORS = aten._ctc_loss.Tensor  # noqa: SLF001 - an operator's public name
_CTC_BACKWARD = aten._ctc_loss_backward  # noqa: SLF001 - an operator's public name
_ASKS_FOR_LIBRARY = frozenset(
    getattr(packet, overload)
    for packet in (getattr(aten, f"_use_{library}_ctc_loss", None) for library in ("cudnn", "miopen"))
    if packet is not None
    for overload in packet.overloads()
)
_MASKS = (torch.bool, torch.uint8)
_SCATTERS = frozenset({aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default})


class DataSizes:
    """Gives such operators sizes.

    Args:
        call: makes or records an operator.
        numbers: gives the whole numbers in some tensors, all of which are asked for at once.
        knows_again: whether a tensor that is met again is known to be the same.

    Attributes:
        slot: how often the operators so far had to know a size, or would have had they been the first to ask.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        numbers: Callable[..., list[int]],
        *,
        knows_again: bool = True,
    ) -> None:
        self._call, self.numbers, self._knows_again = call, numbers, knows_again
        self.slot = 0
        self._met: dict[int, Tensor] = {}
        self._found: dict[Any, Tensor] = {}
        self._same: dict[Any, tuple[Any, int]] = {}
        self._padded: dict[Any, Tensor] = {}
        self._forms: dict[Any, Callable[..., Any]] = {
            aten.nonzero.default: self._positions,
            aten.masked_select.default: self._masked_select,
            aten.index.Tensor: self._index,
            aten.repeat_interleave.Tensor: self._repeat_interleave,
            aten.bincount.default: self._bincount,
            _CTC_OF_TENSORS: self._ctc_loss,
            _CTC_BACKWARD.Tensor: self._ctc_loss_backward,
            **dict.fromkeys(_ASKS_FOR_LIBRARY, _not_a_library),
            **{func: functools.partial(self._unique, func) for func in _UNIQUE},
            **{func: self._scatter_of(func) for func in _SCATTERS},
        }

    def form_of(self, func: Any, args: Sequence[Any], kwargs: Any) -> Callable[[], Any] | None:
        """A function that records a call in a form with sizes; None if the call is recorded as it is."""
        form = self._forms.get(func)
        if form is None or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None):
            return None
        if func is aten.index.Tensor or func in _SCATTERS:
            _check_masks(*args[:2])
        if func is aten.index.Tensor and not any(map(_is_mask, args[1])):
            return None
        if func in (_CTC_OF_TENSORS, _CTC_BACKWARD.Tensor) and args[1 + (func is _CTC_BACKWARD.Tensor)].dim() == 2:
            whole = CTC_LOSS if func is _CTC_OF_TENSORS else CTC_LOSS_BACKWARD
            given = _in_order(func, args, kwargs)
            return lambda: self._call(whole, *given)
        if func is _CTC_BACKWARD.Tensor and self._keys(args[2:5]) not in self._padded:
            return None
        if func in _SCATTERS:
            # a gradient is as large as the data say; true tensors, which are counted alone, show none
            asks = args[2].requires_grad and torch.is_grad_enabled() or not self._knows_again
            if not (asks and any(map(_is_mask, args[1]))) and not any(map(self._is_known, args[1])):
                return None  # its result is as large as what it writes into
        return lambda: form(*args, **kwargs)

    def _number(self, tensor: Tensor) -> int:
        return self.numbers(tensor)[0]

    def _key(self, mask: Tensor) -> tuple[Any, int] | None:
        if not self._knows_again or mask.is_inference():
            return None
        self._met[id(mask)] = mask  # which keeps its id its own
        key = id(mask), mask._version  # noqa: SLF001 - documented in torch's notes
        return self._same.get(key, key)

    def same(self, mask: Tensor, before: Tensor) -> None:
        """Two masks have the same values; they may be written into later."""
        key, known = self._key(mask), self._key(before)
        if key is not None and known is not None:
            self._same[key] = known

    def _is_known(self, mask: Tensor | None) -> bool:
        return mask is not None and _is_mask(mask) and self._key(mask) in self._found

    def _positions(self, mask: Tensor) -> Tensor:
        self.slot += 1
        key = self._key(mask)
        if key is not None and key in self._found:
            return self._call(BY_DIMENSION, self._found[key])  # eager's results share no memory
        count = self._number(self._call(aten.count_nonzero.default, mask))
        found = self._call(aten.nonzero_static.default, mask, size=count)
        if key is not None:
            self._found[key] = found
        return self._call(BY_DIMENSION, found)

    def _columns(self, mask: Tensor) -> Iterator[Tensor]:
        key = self._key(mask)
        found = self._found.get(key) if key is not None else None
        if found is None:
            made = self._positions(mask)
            found = self._found[key] if key is not None else made
        else:
            self.slot += 1
        for dim in range(mask.dim()):
            yield self._call(aten.select.int, found, 1, dim)

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        plain: list[Tensor | None] = []
        for one in indices:
            plain += self._columns(one) if one is not None and _is_mask(one) else [one]
        return plain

    def _index(self, source: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        return self._call(aten.index.Tensor, source, self._without_masks(indices))

    def _scatter_of(self, func: Any) -> Callable[..., Any]:
        def record(target: Tensor, indices: Sequence[Tensor | None], *rest: Any, **more: Any) -> Any:
            return self._call(func, target, self._without_masks(indices), *rest, **more)

        return record

    def _masked_select(self, source: Tensor, mask: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(source.shape, mask.shape)
        call = self._call
        source = source if source.shape == shape else call(aten.expand.default, source, list(shape))
        mask = mask if mask.shape == shape else call(aten.expand.default, mask, list(shape))
        if not shape:
            source, mask = (call(aten.view.default, each, [1]) for each in (source, mask))
        return self._index(source, [mask])

    def _repeat_interleave(self, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
        self.slot += 1
        key = "repeated", self._key(repeats)
        if key in self._found:
            return self._call(aten.clone.default, self._found[key])
        size = self._number(self._call(aten.sum.default, repeats)) if output_size is None else output_size
        found = self._call(aten.repeat_interleave.Tensor, repeats, output_size=size)
        if key[1] is None:
            return found
        self._found[key] = found
        return self._call(aten.clone.default, found)

    def _bincount(self, source: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        self.slot += 1
        call, device = self._call, source.device
        summed: Any = weights
        if weights is None:
            summed = call(aten.ones.default, list(source.shape), dtype=torch.int64, device=device)
        elif weights.dtype != torch.float32:
            summed = call(aten._to_copy.default, weights, dtype=torch.float64)  # noqa: SLF001 - as below
        places = call(aten._to_copy.default, source, dtype=torch.int64)  # noqa: SLF001 - an operator's public name
        size = minlength
        if source.shape[0]:
            end = call(aten.add.Tensor, call(aten.max.default, places), 1)
            size = self._number(call(aten.clamp_min.default, end, minlength))
        bins = call(aten.zeros.default, [size], dtype=summed.dtype, device=device)
        return call(aten.index_add.default, bins, 0, places, summed)

    def _unique(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        given = {"dim": None, "sorted": True, **_by_name(func, args, kwargs)}
        source, consecutive = given["self"], func is aten.unique_consecutive.default
        self.slot += 1
        size = self._number(self._call(UNIQUE_COUNT, source, given["dim"], consecutive))
        flags = given["sorted"], given["return_inverse"], given["return_counts"]
        return self._call(UNIQUE, source, given["dim"], consecutive, *flags, size)

    def _ctc_loss(self, scores: Tensor, targets: Tensor, *lengths_and_rest: Any, **more: Any) -> Any:
        call, (lengths, target_lengths, *_) = self._call, lengths_and_rest
        self.slot += 1
        width = self._number(call(aten.clamp_min.default, call(aten.max.default, target_lengths), 1))
        padded = call(PAD_TARGETS, targets, target_lengths, width)
        self._padded[self._keys((targets, lengths, target_lengths))] = padded
        given = _in_order(_CTC_OF_TENSORS, (scores, padded, *lengths_and_rest), more)
        return call(CTC_LOSS, *given)

    def _ctc_loss_backward(self, gradient: Tensor, scores: Tensor, targets: Tensor, *rest: Any, **more: Any) -> Tensor:
        padded = self._padded[self._keys((targets, *rest[:2]))]  # nothing is read any more in the backward pass
        return self._call(CTC_LOSS_BACKWARD, *_in_order(_CTC_BACKWARD.Tensor, (gradient, scores, padded, *rest), more))

    def _keys(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, int] | None, ...]:
        return tuple(map(self._key, tensors))


def _check_masks(source: Tensor, indices: Sequence[Tensor | None]) -> None:
    """Masks are as large as what they choose from; their positions do not show it, and fake tensors do not ask.

    Raises:
        IndexError: one is not.
    """
    begin = 0
    for one in indices:
        dims = one.dim() if one is not None and _is_mask(one) else 1
        if one is not None and _is_mask(one) and tuple(source.shape[begin : begin + dims]) != tuple(one.shape):
            raise IndexError(
                f"the shape of the mask {list(one.shape)} does not match the shape of the indexed tensor "
                f"{list(source.shape)} from dimension {begin} on"
            )
        begin += dims


def _by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - an operator's description
    return dict(zip(names, _in_order(func, args, kwargs), strict=True))


def _in_order(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call, in the order of the operator's description."""
    missing = func._schema.arguments[len(args) :]  # noqa: SLF001 - an operator's description
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in missing)]


def _not_a_library(*_: Any, **__: Any) -> bool:
    """Say that cuDNN is not to compute CTC: torch's own kernel takes lengths that the graph knows."""
    return False


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in _MASKS
