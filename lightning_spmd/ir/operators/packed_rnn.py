"""A recurrent layer as one operator, over rows of one length or over padded rows and their lengths.

    packed = pack_padded_sequence(x, lengths)      │
    out, hidden = lstm(packed)                     │      out, hidden = packed_rnn(x, lengths, ...)
    out, _ = pad_packed_sequence(out)              │

A packed sequence is as large as the lengths say, which no graph of one shape can hold; padded rows have one shape, and
ranks can split them. The kernel packs, calls torch's own layer and pads again, with the operators that eager calls and
in their order, so values and gradients are eager's bits. Without lengths it is that layer alone, which torch unrolls
over time (or which has a kernel that asks for plain sizes): of that there is a graph for each length, and of the
operator one for all. Its backward runs autograd over just that. What autograd has kept of the forward pass hangs on a
small tensor, the last result; where that is lost (a copy, other memory of the weights), the forward pass is computed
again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.operators.library import define_operator

aten = torch.ops.aten
_SETTINGS = (
    "str mode, bool bias, int layers, bool bidirectional, bool train, bool sort, bool rows_first, "
    "ScalarType? autocast, bool cached, bool even, bool[] asks"
)
_pack, _pad = aten._pack_padded_sequence.default, aten._pad_packed_sequence  # noqa: SLF001 - operators' public names
_LAYERS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


@dataclass(frozen=True)
class Settings:
    """A layer's configuration without its weights.

    Args:
        mode: ``LSTM``, ``GRU``, ``RNN_TANH`` or ``RNN_RELU``.
        bias: whether weights have biases among them.
        layers: number of layers.
        bidirectional: whether it also goes backwards.
        train: whether a backward pass may follow.
        sort: rows are sorted by length first; otherwise they must be sorted already.
        rows_first: padded rows are (rows, time, units), otherwise (time, rows, units).
        autocast: dtype of products; None: that of the input.
        cached: whether autocast casts a weight only once, so that gradients of its time steps are added in that dtype.
        even: whether all rows have the same length. Under autocast an LSTM on the CPU then returns another dtype.
        asks: which of input, states and weights ask for gradients: products of those that do not are made otherwise.
    """

    mode: str
    bias: bool
    layers: int
    bidirectional: bool
    train: bool
    sort: bool
    rows_first: bool
    autocast: torch.dtype | None
    cached: bool
    even: bool
    asks: tuple[bool, ...] = ()

    def arguments(self) -> tuple[Any, ...]:
        """As the operators take them."""
        return (
            self.mode, self.bias, self.layers, self.bidirectional, self.train, self.sort, self.rows_first,
            self.autocast, self.cached, self.even, self.asks,
        )  # fmt: skip


@dataclass(frozen=True)
class _Kept:
    """What autograd knows of a forward pass.

    Args:
        leaves: input, states and weights as it took them.
        results: what it gave.
        lengths: as it took them.
        places: where in memory all of these were, with which shapes.
    """

    leaves: list[Tensor]
    results: list[Tensor]
    lengths: Tensor | None
    places: list[tuple[Any, ...]]


def _forward(
    input: Tensor, lengths: Tensor | None, hx: Sequence[Tensor], weights: Sequence[Tensor], *settings: Any
) -> list[Tensor]:
    how = _settings(settings)
    if not hx[0].shape[1]:  # a rank without rows
        return _forward_shapes(input, lengths, hx, weights, *settings)
    reserve = input.new_empty(1)
    leaves = _leaves([input, *hx, *weights], how.asks)
    results = computed_eagerly(how, leaves, lengths, len(hx))
    if how.train:
        reserve.kept = _Kept(leaves, results, lengths, _places(leaves, lengths))  # type: ignore[attr-defined]
    return [*(r.detach().contiguous() for r in results), reserve]


def _backward(
    grads: Sequence[Tensor | None],
    input: Tensor,
    lengths: Tensor | None,
    hx: Sequence[Tensor],
    weights: Sequence[Tensor],
    reserve: Tensor,
    wanted: Sequence[bool],
    *settings: Any,
) -> list[Tensor]:
    tensors, how, sums = [input, *hx, *weights], _settings(settings[:-1]), settings[-1] or [None] * sum(wanted)
    if not hx[0].shape[1]:
        none = [t.new_zeros(t.shape) for t, wants in zip(tensors, wanted, strict=True) if wants]
        return [zeros if total is None else total.clone() for zeros, total in zip(none, sums, strict=True)]
    kept = cast("dict[str, _Kept]", reserve.__dict__).pop("kept", None)
    if kept is not None and kept.places == _places(tensors, lengths):
        leaves, results = kept.leaves, kept.results
    else:  # a rank may have parts now of what it had whole
        leaves = _leaves(tensors, how.asks)
        results = computed_eagerly(how, leaves, lengths, len(hx))
    asked = [leaf for leaf, wants in zip(leaves, wanted, strict=True) if wants]
    given = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None]
    with torch.enable_grad():  # made last, they come first in the backward pass
        before = cast("Callable[..., Tensor]", _Before.apply)  # pyright: ignore[reportUnknownMemberType]
        first = [before(a, total) for a, total in zip(asked, sums, strict=True) if total is not None]
    given += [(one, one.detach()) for one in first]
    made = torch.autograd.grad([r for r, _ in given], asked, [g for _, g in given], allow_unused=True)
    found = cast("tuple[Tensor | None, ...]", made)
    return [
        leaf.new_zeros(leaf.shape) if gradient is None else gradient.contiguous()
        for leaf, gradient in zip(asked, found, strict=True)
    ]


class _Before(torch.autograd.Function):
    """Gives a tensor a gradient to which what comes later in the backward pass is added."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: Tensor) -> Tensor:  # type: ignore[override]
        ctx.total = total
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.total.clone(), None


def _settings(given: Sequence[Any]) -> Settings:
    """As the operators took them."""
    *rest, asks = given
    return Settings(*rest, asks=tuple(asks))


def _leaves(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    return [t.detach().requires_grad_(wants) for t, wants in zip(tensors, wanted, strict=True)]


def _places(tensors: Sequence[Tensor], lengths: Tensor | None) -> list[tuple[Any, ...]]:
    """Where tensors are, and how often they have been written."""
    each = tensors if lengths is None else [*tensors, lengths]
    return [(t.data_ptr(), t.shape, t.stride(), t._version) for t in each]  # noqa: SLF001 - in torch's notes


def _computed(how: Settings, tensors: Sequence[Tensor], lengths: Tensor | None, states: int) -> list[Tensor]:
    """Output and last states, as eager computes them."""
    input, hx, weights = tensors[0], list(tensors[1 : 1 + states]), list(tensors[1 + states :])
    with torch.set_grad_enabled(how.train), _casts(how, input.device.type):
        if lengths is None:
            return list(called_as_eager(how, input, hx, weights, how.rows_first))
        rows = _Packing(input, lengths, sort=how.sort, rows_first=how.rows_first)
        state = [rows.sorted(h, 1) for h in hx]
        data, sizes = rows.packed(input)
        layer, state = _LAYERS[how.mode], state if how.mode == "LSTM" else state[0]
        out, *hidden = layer(data, sizes, state, weights, how.bias, how.layers, 0.0, how.train, how.bidirectional)
        return [rows.padded(out, sizes), *(rows.unsorted(h, 1) for h in hidden)]


def called_as_eager(
    how: Settings,
    input: Tensor,
    hx: Sequence[Tensor],
    weights: Sequence[Tensor],
    rows_first: bool,
    dropout: float = 0.0,
) -> tuple[Tensor, ...]:
    """Torch's own layer over rows of one length."""
    state = hx if how.mode == "LSTM" else hx[0]
    settings = how.bias, how.layers, dropout, how.train or dropout > 0, how.bidirectional, rows_first
    return _LAYERS[how.mode](input, state, weights, *settings)


class _Packing:
    """Packs and pads as eager does, with its operators.

    Args:
        input: padded rows.
        lengths: of them.
        sort: rows are sorted by their lengths first.
        rows_first: rows are the first dimension, not the second.
    """

    def __init__(self, input: Tensor, lengths: Tensor, *, sort: bool, rows_first: bool) -> None:
        self._rows, self._rows_first, self._longest = 0 if rows_first else 1, rows_first, input.shape[int(rows_first)]
        self._lengths, self._order, self._inverse = lengths, None, None
        if sort:
            self._lengths, order = torch.sort(lengths, descending=True)
            self._order = order = order.to(input.device)
            self._inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))

    def sorted(self, tensor: Tensor, rows: int) -> Tensor:
        """Rows in the order of their lengths."""
        return tensor if self._order is None else tensor.index_select(rows, self._order)

    def unsorted(self, tensor: Tensor, rows: int) -> Tensor:
        """Rows in their own order again."""
        return tensor if self._inverse is None else tensor.index_select(rows, self._inverse)

    def packed(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Entries, and how many rows each step has."""
        return _pack(self.sorted(tensor, self._rows), self._lengths, self._rows_first)

    def padded(self, data: Tensor, sizes: Tensor) -> Tensor:
        """Padded rows of entries."""
        return self.unsorted(_pad(data, sizes, self._rows_first, 0.0, self._longest)[0], self._rows)


def _noise(input: Tensor, lengths: Tensor, p: float, sort: bool, rows_first: bool) -> Tensor:
    """What eager's dropout multiplies entries with, drawn for as many as there are, as padded rows."""
    if not len(lengths):
        return _noise_shape(input, lengths, p, sort, rows_first)
    rows = _Packing(input, lengths, sort=sort, rows_first=rows_first)
    data, sizes = rows.packed(input)
    return rows.padded(torch.empty_like(data).bernoulli_(1 - p).div_(1 - p), sizes).contiguous()


def _noise_shape(input: Tensor, lengths: Tensor, p: float, sort: bool, rows_first: bool) -> Tensor:
    return input.new_empty(input.shape)


def _casts(how: Settings, device: str) -> contextlib.AbstractContextManager[Any]:
    if how.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=how.autocast, cache_enabled=how.cached)


def computed_eagerly(how: Settings, tensors: Sequence[Tensor], lengths: Tensor | None, states: int) -> list[Tensor]:
    """The same in the dtypes that the graph knows: of a rank's rows alone they may be others."""
    results = _computed(how, tensors, lengths, states)
    with torch.set_grad_enabled(how.train):
        return [r.to(dtype) for r, dtype in zip(results, _dtypes_of(how, tensors, lengths, states), strict=True)]


def _forward_shapes(
    input: Tensor, lengths: Tensor | None, hx: Sequence[Tensor], weights: Sequence[Tensor], *settings: Any
) -> list[Tensor]:
    how = _settings(settings)
    if input.shape[int(how.rows_first)] == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    units = hx[0].shape[2] * (2 if how.bidirectional else 1)
    dtypes = _dtypes_of(how, [input, *hx, *weights], lengths, len(hx))
    shapes = [(*input.shape[:2], units), *(state.shape for state in hx)]
    return [*(input.new_empty(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)), input.new_empty(1)]


def _backward_shapes(
    _: Any, input: Tensor, __: Any, hx: Sequence[Tensor], weights: Sequence[Tensor], ___: Any, wanted: Any, *____: Any
) -> list[Tensor]:
    tensors = [input, *hx, *weights]
    return [t.new_empty(t.shape) for t, wants in zip(tensors, wanted, strict=True) if wants]


def _dtypes_of(
    how: Settings, tensors: Sequence[Tensor], lengths: Tensor | None, states: int
) -> tuple[torch.dtype, ...]:
    """What output and states are."""
    given = tensors[0].dtype, tensors[1].dtype, tensors[1 + states].dtype
    if how.autocast is None or tensors[0].device.type != "cpu":
        return (given[0] if how.autocast is None else how.autocast,) * (1 + states)
    projects = states > 1 and tensors[1].shape[2] != tensors[2].shape[2]
    return _dtypes(how, lengths is not None, projects, *given)


@functools.cache
def _dtypes(
    how: Settings, packed: bool, projects: bool, of_input: torch.dtype, of_state: torch.dtype, of_weight: torch.dtype
) -> tuple[torch.dtype, ...]:
    """The same on the CPU under autocast, where eager's layers mix dtypes: a small one is asked."""
    one = dataclasses.replace(how, layers=1, bidirectional=False, train=False, sort=False, rows_first=False, asks=())
    gates, units, projected = {"LSTM": 4, "GRU": 3}.get(how.mode, 1), 2, 1 if projects else 2
    shapes = [(gates * units, 1), (gates * units, projected), *([(gates * units,)] * 2 if how.bias else [])]
    shapes += [(projected, units)] if projects else []
    states = [(1, 2, projected), (1, 2, units)][: 2 if how.mode == "LSTM" else 1]
    with private.disable_dispatch_modes(), private.no_torch_functions():
        tensors = [torch.zeros(2, 2, 1, dtype=of_input)]
        tensors += [torch.zeros(shape, dtype=of_state) for shape in states]
        tensors += [torch.zeros(shape, dtype=of_weight) for shape in shapes]
        lengths = torch.tensor([2, 2 if how.even else 1])
        return tuple(result.dtype for result in _computed(one, tensors, lengths if packed else None, len(states)))


PACKED_RNN = define_operator(
    f"packed_rnn(Tensor input, Tensor? lengths, Tensor[] hx, Tensor[] weights, {_SETTINGS}) -> Tensor[]",
    _forward,
    _forward_shapes,
)
PACKED_RNN_BACKWARD = define_operator(
    "packed_rnn_backward(Tensor?[] grads, Tensor input, Tensor? lengths, Tensor[] hx, Tensor[] weights, "
    f"Tensor reserve, bool[] wanted, {_SETTINGS}, Tensor?[] sums) -> Tensor[]",
    _backward,
    _backward_shapes,
)
PACKED_NOISE = define_operator(
    "packed_noise(Tensor input, Tensor lengths, float p, bool sort, bool rows_first) -> Tensor",
    _noise,
    _noise_shape,
    tags=(torch.Tag.nondeterministic_seeded,),
)
