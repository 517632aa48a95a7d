"""Operators that keep a GPU's tensor in host memory for a while: copies on streams of their own.

    host = offload(x)                   x may go: the copy is under way, and its memory is used again only behind it
    y = fetch(host, device)             memory for it, and a copy into it that begins now
    arrive_(y, host)                    from here on y is what x was

``fetch`` gives a tensor in which nothing is yet; what reads it comes behind ``arrive_``, which the graph knows as a
write. On the host, where a copy is a copy, ``fetch`` fills floating-point tensors with NaN, so that a reader that comes
too early is seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.ir.operators.library import define_operator


@dataclass(frozen=True)
class _Streams:
    """Of one GPU.

    Args:
        away: carries copies to the host.
        back: carries copies from it.
        coming: by address, what ends when a copy from the host has arrived.
    """

    away: torch.cuda.Stream
    back: torch.cuda.Stream
    coming: dict[int, Any]


_STREAMS: dict[torch.device, _Streams] = {}


def _streams(device: torch.device) -> _Streams:
    if device not in _STREAMS:
        _STREAMS[device] = _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device), {})
    return _STREAMS[device]


def _offload(x: Tensor) -> Tensor:
    host = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, pin_memory=x.is_cuda)
    if not x.is_cuda:
        return host.copy_(x)
    away = _streams(x.device).away
    away.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(away):
        host.copy_(x, non_blocking=True)
    x.record_stream(away)  # whoever gets this memory next is behind the copy
    return host


def _fetch(host: Tensor, device: torch.device) -> Tensor:
    x = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    if not x.is_cuda:
        return x.fill_(math.nan) if x.is_floating_point() else x.zero_()
    streams = _streams(x.device)
    streams.back.wait_stream(streams.away)  # it may not have left yet
    streams.back.wait_stream(torch.cuda.current_stream(x.device))  # which may still use what this memory was
    with torch.cuda.stream(streams.back):
        x.copy_(host, non_blocking=True)
        streams.coming[x.data_ptr()] = streams.back.record_event()
    return x


def _arrive(x: Tensor, host: Tensor) -> None:
    if not x.is_cuda:
        x.copy_(host)
        return
    torch.cuda.current_stream(x.device).wait_event(_streams(x.device).coming.pop(x.data_ptr()))


OFFLOAD = define_operator("offload(Tensor x) -> Tensor", _offload)
FETCH = define_operator("fetch(Tensor host, Device device) -> Tensor", _fetch)
ARRIVE = define_operator("arrive_(Tensor(a!) x, Tensor host) -> ()", _arrive)
