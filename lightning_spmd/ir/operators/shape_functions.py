"""Shape functions where torch's own disagree with its kernels; for everything else torch is asked.

``_grouped_mm`` (mixture of experts): torch's function knows bfloat16 alone and asks for a GPU, and the kernel itself on
zeros of the global batch's size would take the memory that capture is there to avoid.

``_cudnn_rnn``: torch's function forgets that the kernel packs weights that do not lie in one piece, so that no backward
pass can be traced, and that with ``batch_first`` results have time outermost in memory. The backward kernel relies on
the latter, without a check; it has no shape function at all.

``_thnn_fused_gru_cell``, one time step of a GRU on GPUs, has none, as its gradient has none; that of an LSTM fails
without biases.

``_ctc_loss`` is said to have a shape that depends on data; with lengths that are integers of Python it does not. Its
gradient has no shape function.

``_pin_memory`` copies into memory that GPUs read; torch's fake tensors refuse it.

Some gradients of losses and norms, and log-sigmoid on CPUs, are contiguous whatever the operands are (``contiguous``);
torch's functions think as these.

``native_batch_norm`` and its gradient lie on CPUs as the memory format of the input says, and torch's functions think
as the input does, or as its gradient.

``batch_norm_stats`` and its kind, which ``torch.nn.SyncBatchNorm`` is made of, have kernels for GPUs and nothing else;
``batch_norm_update_stats`` has kernels alone.

``upsample_bilinear2d`` and its kind are computed, operator by operator, in torch's functions: up to 65 ms a call where
sizes vary, and with sizes that are symbols decisions that no kernel makes.

``index_put`` takes values of any shape in torch's function; its kernels those that broadcast to what is indexed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private

aten = torch.ops.aten
_ALIGNMENT = 16
"""Bytes to which kernels of grouped products pad the rows of their result."""


def empty_result(op: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives of fake tensors."""
    function = _SHAPES.get(op)
    return op(*args, **kwargs) if function is None else function(op, *args, **kwargs)


def recurrent(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Empty tensors like the results of ``aten._cudnn_rnn``."""
    call = _bound(op, args, kwargs)
    output, hidden, cell, reserve, packed = op(*args, **kwargs)
    if packed is None:
        weights = call["weight"]
        packed = torch.empty(sum(w.numel() for w in weights), dtype=weights[0].dtype, device=weights[0].device)
    return _as_cudnn(output, call), hidden, cell, reserve, packed


def recurrent_backward(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Empty tensors like the results of ``aten._cudnn_rnn_backward``."""
    call = _bound(op, args, kwargs)
    wants_input, wants_hidden, wants_cell, wants_weights = call["output_mask"]
    cell = call["cx"]
    return (
        _as_cudnn(call["input"], call) if wants_input else None,
        call["hx"].new_empty(call["hx"].shape) if wants_hidden else None,
        cell.new_empty(cell.shape) if wants_cell and cell is not None else None,
        [w.new_empty(w.shape) for w in call["weight"]] if wants_weights else [],
    )


def lstm_cell(_: Any, gates: Tensor, __: Tensor, cx: Tensor, *___: Any, **____: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The next hidden and cell state, and what the gradient needs: the gates."""
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), gates.new_empty(gates.shape)


def gru_cell(_: Any, __: Tensor, ___: Tensor, hx: Tensor, *____: Any, **_____: Any) -> tuple[Tensor, Tensor]:
    """The next state, and what the gradient needs: five numbers a unit."""
    rows, units = hx.shape
    return hx.new_empty(rows, units), hx.new_empty(rows, 5 * units)


def gru_cell_backward(_: Any, grad: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Gradients of three gates a unit of input and of state, of the state, and of two biases."""
    rows, units = grad.shape
    gates = (kept.new_empty(rows, 3 * units), kept.new_empty(rows, 3 * units))
    biases = [kept.new_empty(3 * units) if has_bias else None for _ in gates]
    return (*gates, grad.new_empty(rows, units), *biases)


def statistics(_: Any, x: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    """Two numbers a channel, in the precision in which sums are kept."""
    return tuple(_channels(x) for _ in range(2))  # type: ignore[return-value]


def _channels(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def normalized(op: Any, x: Tensor, *others: Any, **more: Any) -> tuple[Tensor, ...]:
    """A normalized tensor and its statistics."""
    out, *statistics = op(x, *others, **more)
    return _as_kernel(out, x), *statistics


def normalized_backward(op: Any, gradient: Tensor, x: Tensor, *others: Any, **more: Any) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight and bias."""
    out, *sums = op(gradient, x, *others, **more)
    return _as_kernel(out, x), *sums


def _as_kernel(out: Tensor | None, x: Tensor) -> Any:
    if out is None or x.device.type != "cpu":
        return out
    return torch.empty_like(x, dtype=out.dtype, memory_format=private.suggested_memory_format(x))


def like_first(_: Any, x: Tensor, *__: Any, **___: Any) -> Tensor:
    """A tensor like the first one, in its memory format."""
    return torch.empty_like(x, memory_format=private.suggested_memory_format(x))


def like_second(op: Any, _: Any, x: Tensor, *__: Any, **___: Any) -> Tensor:
    """A tensor like the second one, in its memory format."""
    return like_first(op, x)


def contiguous(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch's function gives, laid out row by row."""
    return private.pytree.tree_map_only(Tensor, Tensor.contiguous, op(*args, **kwargs))


def log_sigmoid(op: Any, x: Tensor) -> Any:
    """The logarithm of a sigmoid, and what CPUs keep for its gradient."""
    return contiguous(op, x) if x.device.type == "cpu" else op(x)


def sums_of_gradients(
    _: Any, __: Tensor, x: Tensor, mean: Tensor, ___: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor | None, ...]:
    """Two sums a channel, the gradients of weight and bias."""
    of_input, of_weight, of_bias = wanted
    like = mean if weight is None else weight
    return (
        *((_channels(x) if of_input else None) for _ in range(2)),
        *((like.new_empty(like.shape) if wants else None) for wants in (of_weight, of_bias)),
    )


def ctc_losses(
    _: Any, scores: Tensor, __: Tensor, lengths: Sequence[int], target_lengths: Sequence[int], *___: Any, **____: Any
) -> tuple[Tensor, Tensor]:
    """A loss a sequence, and the kernel's table: two places a target and one more, by time."""
    rows = len(lengths)
    table = (rows, scores.shape[0], 2 * max(target_lengths, default=0) + 1)
    return scores.new_empty(rows), scores.new_empty(table)


def resampled(op: Any, x: Tensor, size: Sequence[int] | None, *others: Any, **more: Any) -> Tensor:
    """A batch of signals, images or volumes of another size, in its memory format.

    Raises:
        RuntimeError: there is nothing of one of them.
    """
    layout = private.suggested_memory_format(x)
    lies_otherwise = x.device.type != "cpu" and layout is not torch.contiguous_format
    if size is None or lies_otherwise:
        return op(x, size, *others, **more)
    if any(n <= 0 for n in (*x.shape[1:], *size)):
        raise RuntimeError(f"{op} resamples a tensor of shape {list(x.shape)} to {list(size)}; no size may be 0")
    return torch.empty((*x.shape[:2], *size), dtype=x.dtype, device=x.device, memory_format=layout)


def put(op: Any, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *others: Any, **more: Any) -> Any:
    """What ``index_put`` and its kind give. How many places a mask chooses is unknown, so it takes any values.

    Raises:
        RuntimeError: the values do not broadcast to what is indexed.
    """
    if not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        wanted = aten.index.Tensor(x, indices).shape
        ends = zip(reversed(values.shape), reversed(wanted), strict=False)
        if len(values.shape) > len(wanted) or not all(size == place or size == 1 for size, place in ends):
            raise RuntimeError(
                f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of "
                f"shape {list(wanted)}"
            )
    return op(x, indices, values, *others, **more)


def _bound(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in op._schema.arguments]  # noqa: SLF001 - an operator's description
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _as_cudnn(like: Tensor, call: dict[str, Any]) -> Tensor:
    """Empty, of this shape, with time outermost in memory."""
    if not call["batch_first"] or call["batch_sizes"]:
        return like.new_empty(like.shape)
    rows, time, *rest = like.shape
    return like.new_empty((time, rows, *rest)).transpose(0, 1)


def grouped_product(
    _: Any,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """An empty tensor like the result of ``aten._grouped_mm`` of the same arguments.

    Args:
        _: the operator.
        a: (rows, inner), or (groups, rows, inner).
        b: (groups, inner, columns), or (inner, columns).
        offs: where each group ends, if one of them has no dimension of groups.
        bias: not taken by any kernel.
        out_dtype: of the result; ``a``'s by default.

    Raises:
        RuntimeError: the shapes do not fit.
    """
    flat = (a.dim() == 2, b.dim() == 2)
    fits = {a.dim(), b.dim()} <= {2, 3} and a.shape[-1] == b.shape[-2] and (offs is not None) == any(flat)
    groups = {t.shape[0] for t, is_flat in zip((a, b), flat, strict=True) if not is_flat}
    groups |= set() if offs is None else {offs.shape[0]}
    if not fits or len(groups) > 1:
        raise RuntimeError(f"a grouped product of {list(a.shape)} and {list(b.shape)} has no shape")
    rows, columns = a.shape[-2], b.shape[-1]
    shape = [rows, columns] if flat[0] != flat[1] else [*groups, rows, columns]
    dtype = a.dtype if out_dtype is None else out_dtype
    padded = -(-columns * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT // dtype.itemsize
    stride = [rows * padded, padded, 1][-len(shape) :]
    return torch.empty_strided(shape, stride, dtype=dtype, device=a.device)


_SHAPES: dict[Any, Callable[..., Any]] = {
    getattr(aten, name).default: function
    for name, function in {
        "_grouped_mm": grouped_product,
        "_cudnn_rnn": recurrent,
        "_ctc_loss": ctc_losses,
        "_ctc_loss_backward": like_second,
        "_cudnn_rnn_backward": recurrent_backward,
        "_log_softmax_backward_data": contiguous,
        "_pin_memory": like_first,
        "_thnn_fused_lstm_cell": lstm_cell,
        "_thnn_fused_gru_cell": gru_cell,
        "_thnn_fused_gru_cell_backward": gru_cell_backward,
        "huber_loss_backward": contiguous,
        "log_sigmoid_forward": log_sigmoid,
        "mse_loss_backward": contiguous,
        "smooth_l1_loss_backward": contiguous,
        "native_layer_norm_backward": contiguous,
        "native_batch_norm": normalized,
        "_native_batch_norm_legit": normalized,
        "native_batch_norm_backward": normalized_backward,
        "batch_norm_stats": statistics,
        "batch_norm_update_stats": statistics,
        "batch_norm_gather_stats_with_counts": statistics,
        "batch_norm_elemt": like_first,
        "batch_norm_backward_reduce": sums_of_gradients,
        "batch_norm_backward_elemt": like_second,
        "index_put": put,
        "index_put_": put,
        "_index_put_impl_": put,
        "_unsafe_index_put": put,
    }.items()
    if hasattr(aten, name)
}
for _op in (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten.upsample_trilinear3d):
    _SHAPES.update(dict.fromkeys((_op.default, _op.vec), resampled))
