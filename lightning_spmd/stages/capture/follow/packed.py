"""Packed sequences in a followed step: padded rows and their lengths, packed only when accessed.

    packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True)     copies of rows and lengths
    out, (h, c) = self.lstm(packed)                                             packed_rnn (ir.operators.packed_rnn)
    out, _ = pad_packed_sequence(out, batch_first=True)                         is the longest row as long as x?

What torch makes is as large as the lengths say, in another order of rows, and ends in C++ that reads lengths. Of all
that a graph sees nothing: one graph holds for all lengths, and ranks have rows of their own. Where the user's code asks
for parts of a packed sequence (``packed.data``), they are made, in eager's order; the number of entries is then read.
A layer over rows of one length is the same operator where sizes vary: torch would unroll it over time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.operators.packed_rnn import (
    PACKED_NOISE,
    PACKED_RNN,
    PACKED_RNN_BACKWARD,
    Settings,
    called_as_eager,
    computed_eagerly,
)
from lightning_spmd.stages.capture.follow.notes import Note

RECURRENT: dict[Any, str] = {
    torch.lstm: "LSTM",
    torch.gru: "GRU",
    torch.rnn_tanh: "RNN_TANH",
    torch.rnn_relu: "RNN_RELU",
}
"""Torch's functions for recurrent layers."""
_HAS_BIAS = 3
"""Of their arguments over rows of one length; over packed sequences there are sizes before the states."""


class _Step(Protocol):
    """The part of a step that is used here."""

    follower: Any
    counts: list[int]
    notes: list[Note]
    is_apart: bool

    @property
    def is_eager(self) -> bool: ...
    def concerns(self, tensor: Tensor) -> bool: ...
    def eagerly(self, why: str) -> None: ...
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any: ...


@dataclass(frozen=True)
class _Rows:
    """Padded rows.

    Args:
        padded: them, (rows, time, ...) or (time, rows, ...).
        lengths: of the rows, on the host.
        rows_first: which of the two it is.
        sort: eager has packed them in the order of their lengths.
        order: eager's order and its inverse, where the rows themselves are in that order; then ``sort`` is not set.
        clean: there are zeros behind the rows' ends.
    """

    padded: Tensor
    lengths: Tensor
    rows_first: bool
    sort: bool
    order: tuple[Tensor, Tensor] | None = None
    clean: bool = False

    @property
    def time_major(self) -> Tensor:
        """(time, rows, ...)."""
        return self.padded.transpose(0, 1) if self.rows_first else self.padded

    def longest(self) -> Any:
        """The length of the longest row, for which the graph then holds."""
        time = self.padded.shape[1 if self.rows_first else 0]
        if bool(self.lengths.max() == time):
            return time  # holds for batches of any size
        return int(self.lengths.max())

    def fits(self) -> bool:
        """Whether torch would pack the rows. The operator of the layers packs them itself, and raises torch's error."""
        good = (self.lengths > 0).all() & (self.lengths.max() <= self.padded.shape[1 if self.rows_first else 0])
        return bool(good if self.sort else good & (self.lengths[1:] <= self.lengths[:-1]).all())


@dataclass(frozen=True)
class _Parts:
    """The fields of a packed sequence, and the place in (time, rows) of each entry."""

    fields: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
    rows: _Rows
    places: tuple[Tensor, Tensor]


class LaterPacked(PackedSequence):
    """A packed sequence whose parts are made on access."""

    rows: _Rows
    parts: _Parts | None
    owner: PackedSequences

    def __new__(cls, *fields: Any, **named: Any) -> PackedSequence:  # type: ignore[misc]
        """Of parts, as ``packed.to(...)`` makes one: a packed sequence like any other."""
        return PackedSequence(*fields, **named)

    @classmethod
    def of(cls, rows: _Rows, owner: PackedSequences) -> LaterPacked:
        """The packed sequence of padded rows."""
        made = cast("LaterPacked", tuple.__new__(cls, (None,) * 4))
        made.rows, made.owner, made.parts = rows, owner, None
        return made

    def made(self) -> tuple[Any, ...]:
        """Its parts."""
        if self.parts is None:
            self.parts = self.owner.parts_of(self.rows)
        return self.parts.fields

    data = property(lambda self: self.made()[0])  # type: ignore[assignment]
    batch_sizes = property(lambda self: self.made()[1])  # type: ignore[assignment]
    sorted_indices = property(lambda self: self.made()[2])  # type: ignore[assignment]
    unsorted_indices = property(lambda self: self.made()[3])  # type: ignore[assignment]

    def __iter__(self) -> Any:
        return iter(self.made())

    def __getitem__(self, index: Any) -> Any:
        return self.made()[index]

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> PackedSequence:  # type: ignore[override]
        return PackedSequence(*iterable)


class PackedSequences:
    """Packs, pads and runs recurrent layers in one step that is followed.

    Args:
        step: the step.
    """

    def __init__(self, step: _Step) -> None:
        self._step = step
        self._parts: dict[int, _Parts] = {}  # by batch_sizes
        self._cast: dict[int, Tensor] = {}  # weights that autocast's cache has

    def in_place_of(self, name: str) -> Callable[..., Any]:
        """The replacement of one of torch's functions, if any."""
        if name in ("pack", "pad"):
            return self._pack if name == "pack" else self._pad
        return self._layer(private.ORIGINAL_PACKING[name])

    def end(self) -> None:
        """The step is over."""
        self._parts.clear()
        self._cast.clear()

    def _is_followed(self, tensor: Any) -> bool:
        step = self._step
        return isinstance(tensor, Tensor) and not (step.is_eager or step.is_apart) and step.concerns(tensor)

    def _pack(self, input: Any, lengths: Any, batch_first: bool, enforce_sorted: bool) -> Any:
        original = private.ORIGINAL_PACKING["pack"]
        if not self._is_followed(input):
            return original(input, lengths, batch_first, enforce_sorted)
        if isinstance(lengths, Tensor):
            lengths = lengths.to(dtype=torch.int64)
        else:
            lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        rows = input.shape[0 if batch_first else 1] if input.dim() >= 2 and 0 not in input.shape else None
        if lengths.device.type != "cpu" or lengths.dim() != 1 or lengths.shape[0] != rows:  # torch says it best
            return original(input, lengths, batch_first, enforce_sorted)
        by_rows = batch_first and not enforce_sorted  # as eager's gradient lies in memory
        padded = input.transpose(0, 1) if batch_first and not by_rows else input
        # what is packed is what is there now, whoever writes into it later
        return LaterPacked.of(_Rows(padded.clone(), lengths.clone(), by_rows, sort=not enforce_sorted), self)

    def _pad(self, sequence: Any, batch_first: bool, padding_value: float, total_length: int | None) -> Any:
        original = private.ORIGINAL_PACKING["pad"]
        rows = self._rows(sequence)
        if rows is None or not (rows.clean or rows.fits()):
            return original(sequence, batch_first, padding_value, total_length)
        if total_length is not None and not bool(rows.lengths.max() <= total_length):
            return original(sequence, batch_first, padding_value, total_length)
        padded, lengths, time = rows.padded, rows.lengths, 1 if rows.rows_first else 0
        if not rows.clean or padding_value != 0:
            inside = torch.arange(padded.shape[time]).unsqueeze(1) < lengths
            inside = (inside.transpose(0, 1) if rows.rows_first else inside).to(padded.device)
            padded = torch.where(inside.view(*inside.shape, *[1] * (padded.dim() - 2)), padded, padding_value)
        padded = padded.narrow(time, 0, rows.longest() if total_length is None else padded.shape[time])
        if total_length is not None:
            padded = _of_length(padded, time, total_length, padding_value)
        if rows.rows_first != batch_first:
            padded = padded.transpose(0, 1)
        if rows.order is not None:
            back = rows.order[1]
            return padded.index_select(0 if batch_first else 1, back), lengths[back.cpu()]
        dense = torch.contiguous_format if rows.sort else torch.preserve_format
        return padded.clone(memory_format=dense), lengths.clone()

    def _layer(self, original: Any) -> Any:
        def forward(layer: nn.RNNBase, input: Any, hx: Any) -> Any:
            rows = self._rows(input) if isinstance(input, PackedSequence) else None
            if rows is not None and not self._is_cast_once(layer, rows):
                self._step.eagerly(
                    "a recurrent layer is called twice on packed sequences under autocast with its cache (enter "
                    "torch.autocast(..., cache_enabled=False), or let the Trainer's precision do it)"
                )
            if rows is None or self._step.is_eager:
                return original(layer, input, hx)
            return self._run(layer, rows, hx)

        return forward

    def _run(self, layer: nn.RNNBase, rows: _Rows, hx: Any) -> Any:
        padded, weights = rows.padded, private.weights_of(layer)
        layer.check_input(padded, None)
        shapes = _shapes_of_states(layer, padded.shape[0 if rows.rows_first else 1])
        if hx is None:
            states = [torch.zeros(shape, dtype=padded.dtype, device=padded.device) for shape in shapes]
        else:
            states = list(hx) if layer.mode == "LSTM" else [hx]
            for state, shape in zip(states, shapes, strict=True):
                layer.check_hidden_size(state, shape)
            if rows.order is not None:
                states = [state.index_select(1, rows.order[0]) for state in states]
        out, hidden = self._computed(layer, rows, states, weights)
        if rows.order is not None:
            hidden = [state.index_select(1, rows.order[1]) for state in hidden]
        packed = LaterPacked.of(replace(rows, padded=out, clean=True), self)
        return packed, tuple(hidden) if layer.mode == "LSTM" else hidden[0]

    def _computed(
        self, layer: nn.RNNBase, rows: _Rows, states: list[Tensor], weights: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Padded output and last states, all layers at once or, with dropout between them, one after the other."""
        how = self._settings(layer, rows)
        if not layer.dropout or not layer.training or layer.num_layers == 1:
            return self._called(how, rows.padded, rows, states, weights)
        each, out, last = len(weights) // layer.num_layers, rows.padded, list[list[Tensor]]()
        for number in range(layer.num_layers):
            if number > 0:
                out = out * PACKED_NOISE(out.detach(), rows.lengths, layer.dropout, rows.sort, rows.rows_first)
            its_states = [state.chunk(layer.num_layers)[number] for state in states]
            its_weights = weights[number * each : (number + 1) * each]
            out, hidden = self._called(replace(how, layers=1), out, rows, its_states, its_weights)
            last.append(hidden)
        return out, [torch.cat(parts) for parts in zip(*last, strict=True)]

    def for_all_lengths(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A call of torch's recurrent layers as one of the operator.

        Args:
            func: torch's function.
            args: of the call.
            kwargs: of the call.

        Returns:
            Function and arguments; None if torch's function is to be called: no size varies that is known here, rows
            are packed, layers share a weight (eager adds up its gradients over both), autocast casts each weight once
            for all calls, or a library draws for dropout.
        """
        if not self._step.counts or kwargs or type(args[_HAS_BIAS]) is not bool:
            return None
        input, states, weights, bias, layers, dropout, train, bidirectional, rows_first = args
        kind = input.device.type
        cast_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        cached = torch.is_autocast_cache_enabled()
        dropout, trains = dropout if train else 0.0, torch.is_grad_enabled()
        is_cast_once, is_shared = cast_to is not None and cached and trains, len(set(map(id, weights))) < len(weights)
        if is_cast_once or is_shared or (dropout and kind != "cpu"):
            return None
        how = Settings(RECURRENT[func], bias, layers, bidirectional, trains, False, False, cast_to, cached, even=False)
        each = list(states) if func is torch.lstm else [states]
        self._step.follower.kinds[_unpacked] = "call"
        return _unpacked, (how, dropout, rows_first, len(each), input, *each, *weights)

    def unroll(self) -> None:
        """Backward passes are differentiated: what the operator cannot, torch's own layers can."""
        step = self._step
        for func in RECURRENT:
            step.follower.kinds[func] = "call"
        if any(note.func is _unpacked for note in step.notes):
            step.eagerly("the first gradient that is differentiated again, in a step with a recurrent layer")

    def _called(
        self, how: Settings, padded: Tensor, rows: _Rows, states: list[Tensor], weights: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        step = self._step
        step.follower.kinds[_recurrent] = "call"
        args = (how, len(states), rows.lengths, padded, *states, *weights)
        with private.no_torch_functions():  # of which none is the user's
            results = step.__torch_function__(_recurrent, (), args, {})
        out, *hidden = cast("tuple[Tensor, ...]", results)
        return out, hidden

    def _is_cast_once(self, layer: nn.RNNBase, rows: _Rows) -> bool:
        """Whether no call before had the weights that autocast casts once for all calls.

        Eager adds the gradients of all these calls in that dtype; here each call would add its own.
        """
        is_cast = torch.is_autocast_enabled(rows.padded.device.type) and torch.is_autocast_cache_enabled()
        if not is_cast or not torch.is_grad_enabled():
            return True
        weights = private.weights_of(layer)
        is_new = not any(id(weight) in self._cast for weight in weights)
        self._cast.update((id(weight), weight) for weight in weights)
        return is_new

    def _settings(self, layer: nn.RNNBase, rows: _Rows) -> Settings:
        kind = rows.padded.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        even = cast is not None and layer.mode == "LSTM" and kind == "cpu"
        return Settings(
            layer.mode,
            layer.bias,
            layer.num_layers,
            layer.bidirectional,
            torch.is_grad_enabled(),
            rows.sort,
            rows.rows_first,
            cast,
            torch.is_autocast_cache_enabled(),
            even=even and bool((rows.lengths == rows.lengths[0]).all()),
        )

    # ------------------------------------------------------------------ parts
    def parts_of(self, rows: _Rows) -> _Parts:
        """The parts of the packed sequence that eager would make of these rows."""
        padded, lengths, order, inverse = rows.time_major, rows.lengths, None, None
        if rows.order is not None:
            order, inverse = rows.order
        elif rows.sort:
            lengths, order = torch.sort(lengths, descending=True)
            order = order.to(padded.device)
            inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
            padded = padded.index_select(1, order)
        inside = torch.arange(rows.longest()).unsqueeze(1) < lengths
        places = torch.nonzero_static(inside, size=int(lengths.sum())).to(padded.device)
        time, row = places.unbind(1)
        parts = _Parts((padded[time, row], inside.sum(1), order, inverse), rows, (time, row))
        if self._is_followed(padded):
            self._parts[id(parts.fields[1])] = parts
        return parts

    def _rows(self, sequence: Any) -> _Rows | None:
        """The padded rows of a packed sequence; None if torch's own function must handle it."""
        if isinstance(sequence, LaterPacked) and sequence.parts is None:
            return sequence.rows if self._is_followed(sequence.rows.padded) else None
        if not self._is_followed(sequence.data):
            return None
        parts = self._parts.get(id(sequence.batch_sizes))
        if parts is None:
            return self._of_batch(sequence)
        old, data = parts.rows, sequence.data
        if sequence.sorted_indices is not parts.fields[2] or data.shape[0] != parts.fields[0].shape[0]:
            return None
        padded = data.new_zeros(*old.time_major.shape[:2], *data.shape[1:])
        padded = padded.index_put(parts.places, data)
        if old.sort:
            padded = padded.index_select(1, cast("Tensor", parts.fields[3]))
        return replace(old, padded=padded.transpose(0, 1) if old.rows_first else padded, clean=True)

    def _of_batch(self, sequence: PackedSequence) -> _Rows | None:
        """The rows of a packed sequence that was packed elsewhere, in the order that they have in it."""
        data, sizes = sequence.data, sequence.batch_sizes
        if not self._is_followed(sizes):
            return None
        count = int(sizes[0])
        inside = torch.arange(count) < sizes.unsqueeze(1)
        time, row = torch.nonzero_static(inside, size=data.shape[0]).to(data.device).unbind(1)
        padded = data.new_zeros(sizes.shape[0], count, *data.shape[1:]).index_put((time, row), data)
        order = sequence.sorted_indices, sequence.unsorted_indices
        known = None if order[0] is None or order[1] is None else (order[0], order[1])
        rows = _Rows(padded, inside.sum(0), rows_first=False, sort=False, order=known, clean=True)
        self._parts[id(sizes)] = _Parts((data, sizes, *order), rows, (time, row))
        return rows


def _of_length(padded: Tensor, time: int, length: int, value: float) -> Tensor:
    there = padded.shape[time]
    if length <= there:
        return padded.narrow(time, 0, length)
    return F.pad(padded, [0, 0] * (padded.dim() - 1 - time) + [0, length - there], value=value)


class _Recurrent(torch.autograd.Function):
    """The operator with its autograd formula."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, how: Settings, states: int, lengths: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        *results, reserve = PACKED_RNN(
            tensors[0], lengths, tensors[1 : 1 + states], tensors[1 + states :], *how.arguments()
        )
        ctx.how, ctx.states = how, states
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(lengths, reserve, *tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():  # torch's once_differentiable is not heard of by autograd.grad(loss, weights)
            raise CaptureError(
                "a gradient through a recurrent layer over a packed sequence is differentiated again "
                "(create_graph=True), which its operator cannot"
            )
        lengths, reserve, *tensors = ctx.saved_tensors
        wanted, states = list(ctx.needs_input_grad[3:]), ctx.states
        weights = tensors[1 + states :]
        operands = list(gradients), tensors[0], lengths, tensors[1 : 1 + states], weights, reserve, wanted
        found = PACKED_RNN_BACKWARD(*operands, *ctx.how.arguments(), [])
        return None, None, None, *(found[sum(wanted[:i])] if wants else None for i, wants in enumerate(wanted))


def _applied(how: Settings, states: int, lengths: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    its = replace(how, asks=tuple([tensor.requires_grad for tensor in tensors]))
    return cast("tuple[Tensor, ...]", _Recurrent.apply(its, states, lengths, *tensors))


class _RecurrentCall:
    """The operator as a noted call. On real tensors, which may need any gradient, torch's own operators."""

    __name__ = "packed_rnn"

    def __call__(self, how: Settings, states: int, lengths: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        if isinstance(tensors[0], private.FakeTensor):
            return _applied(how, states, lengths, *tensors)
        return tuple(computed_eagerly(how, tensors, lengths, states))


class _UnpackedCall:
    """The operator over rows of one length as a noted call, with the layer's own dropout."""

    __name__ = "recurrent"

    def __call__(
        self, how: Settings, dropout: float, rows_first: bool, states: int, input: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        hx, weights = list(others[:states]), list(others[states:])
        if not isinstance(input, private.FakeTensor):
            return called_as_eager(how, input, hx, weights, rows_first, dropout)
        out = input.transpose(0, 1) if rows_first else input
        parts = how.layers if dropout else 1
        its_weights = len(weights) // parts
        each = zip(*(state.chunk(parts) for state in hx), strict=True)
        last = list[list[Tensor]]()
        for number, its_states in enumerate(each):
            if number > 0:
                out = F.dropout(out, dropout)
            part = weights[number * its_weights : (number + 1) * its_weights]
            operands = out, *its_states, *part
            its = replace(how, layers=how.layers // parts)
            out, *hidden = _applied(its, states, None, *operands)
            last.append(hidden)
        out = out.transpose(0, 1) if rows_first else out
        return out, *(its[0] if parts == 1 else torch.cat(its) for its in zip(*last, strict=True))


_recurrent, _unpacked = _RecurrentCall(), _UnpackedCall()


def _shapes_of_states(layer: nn.RNNBase, rows: Any) -> list[tuple[Any, ...]]:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    shapes = [(count, rows, layer.proj_size or layer.hidden_size), (count, rows, layer.hidden_size)]
    return shapes[: 2 if layer.mode == "LSTM" else 1]
