"""What torch asks of a GPU beside a device guard: generators, autocast, which kernel attention and recurrence take."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules import rnn
from torch.overrides import handle_torch_function, has_torch_function

from lightning_spmd import _private_api as private

_CUDNN_TANH, _CUDNN_LSTM, _CUDNN_GRU = 1, 2, 3


@contextlib.contextmanager
def gpus(kernel: str = "flash") -> Iterator[None]:
    """As if there were GPUs whose ``scaled_dot_product_attention`` chooses the kernel of that name."""
    generator = torch.Generator()
    with (
        mock.patch.object(F, "scaled_dot_product_attention", _attention_by(kernel)),
        mock.patch.object(rnn._VF, "lstm", _lstm, create=True),
        mock.patch.object(rnn._VF, "gru", functools.partial(_one_state, _CUDNN_GRU), create=True),
        mock.patch.object(rnn._VF, "rnn_tanh", functools.partial(_one_state, _CUDNN_TANH), create=True),
        mock.patch.object(private, "default_generator", return_value=generator),
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        mock.patch.object(torch.cuda, "_lazy_init"),
    ):
        yield


_OPTIONS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _attention_by(kernel: str) -> Callable[..., Tensor]:
    """A function that torch function modes see as one call, as they see torch's."""

    def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> Tensor:
        if has_torch_function((q, k, v)):
            return handle_torch_function(scaled_dot_product_attention, (q, k, v), q, k, v, *others, **options)
        return _attention(kernel, q, k, v, *others, **options)

    return scaled_dot_product_attention


def _attention(kernel: str, q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> Tensor:
    options |= dict(zip(_OPTIONS, others, strict=False))
    mask = options.get("attn_mask")
    q, k, v = (t.to(torch.bfloat16) if torch.is_autocast_enabled("cuda") else t for t in (q, k, v))
    if options.get("enable_gqa"):
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    dropout, causal = options.get("dropout_p", 0.0), options.get("is_causal", False)
    if mask is not None:  # PyTorch's choice too: flash attention takes no mask
        mask = (
            torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else mask
        )
        mask = mask.to(q.dtype).expand(*q.shape[:-1], k.shape[-2])
        return torch.ops.aten._scaled_dot_product_efficient_attention.default(q, k, v, mask, True, dropout, causal)[0]
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, dropout, causal)[0]
    chosen = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
    return chosen(q, k, v, None, True, dropout, causal)[0]


def _lstm(
    x: Tensor, state: Any, weights: Any, biases: bool, layers: int, dropout: float, train: bool, both: bool, first: bool
) -> Any:
    width = state[0].shape[-1]
    stride = len(weights) // (layers * (2 if both else 1))
    output, hidden, cell, *_ = torch._cudnn_rnn(
        x, weights, stride, None, *state, _CUDNN_LSTM, width, 0, layers, first, dropout, train, both, [], None
    )
    return output, hidden, cell


def _one_state(
    mode: int, x: Tensor, state: Tensor, weights: Any, biases: bool, layers: int, dropout: float, train: bool,
    both: bool, first: bool,
) -> Any:  # fmt: skip
    stride = len(weights) // (layers * (2 if both else 1))
    output, hidden, *_ = torch._cudnn_rnn(
        x, weights, stride, None, state, None, mode, state.shape[-1], 0, layers, first, dropout, train, both, [], None
    )
    return output, hidden
