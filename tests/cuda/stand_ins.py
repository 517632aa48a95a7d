"""What torch asks of a GPU beside a device guard: generators, autocast, which kernel attention and recurrence take."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules import rnn

from lightning_spmd import _private_api as private

_CUDNN_LSTM = 2


@contextlib.contextmanager
def gpus(kernel: str = "flash") -> Iterator[None]:
    """As if there were GPUs whose ``scaled_dot_product_attention`` chooses the kernel of that name."""
    generator = torch.Generator()
    with (
        mock.patch.object(F, "scaled_dot_product_attention", functools.partial(_attention, kernel)),
        mock.patch.object(rnn._VF, "lstm", _lstm, create=True),
        mock.patch.object(private, "default_generator", return_value=generator),
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        mock.patch.object(torch.cuda, "_lazy_init"),
    ):
        yield


def _attention(kernel: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (t.to(torch.bfloat16) if torch.is_autocast_enabled("cuda") else t for t in (q, k, v))
    if options.get("enable_gqa"):
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    dropout, causal = options.get("dropout_p", 0.0), options.get("is_causal", False)
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
