"""Time of a collective by the alpha-beta model: a fixed latency, then bytes over bandwidth.

=====================  ==============================  =====================================
collective of N ranks  bytes through each rank's link  ``size`` is
=====================  ==============================  =====================================
``all_reduce``         2 (N - 1) / N × size            the tensor
``all_gather``         (N - 1) × size                  what one rank contributes
``reduce_scatter``     (N - 1) / N × size              the tensor that is reduced
``all_to_all``         (N - 1) / N × size              what one rank sends, its own piece included
=====================  ==============================  =====================================

These are the bytes of the ring algorithms, which are optimal in bandwidth (Patarasuk and Yuan 2009, "Bandwidth optimal
all-reduce algorithms for clusters of workstations").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch

DeviceKind = Literal["cpu", "cuda"]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

LATENCY = 1000.0
"""Bytes that a collective counts before its first one, where placements are chosen: more than any local work."""
LOCAL_WORK = 1e-3
"""What a byte that a rank only copies counts there."""
SPLIT_ACTIVATION = 4.0
"""Factor on moving what is split: it usually is an activation, and its next reader wants it split again."""


@dataclass(frozen=True)
class Link:
    """The link between ranks, in typical numbers, not measured ones.

    Args:
        latency: seconds from the call until the first byte arrives, launch included.
        bandwidth: bytes a second in and out of one rank.
        memory: bytes a second of a copy in the rank's own memory.
    """

    latency: float
    bandwidth: float
    memory: float


LINKS = {
    # Gloo over 1 Gbit/s Ethernet: the slowest that is in use, for which overlap matters most
    "cpu": Link(latency=150e-6, bandwidth=0.125e9, memory=5e9),
    # NCCL between hosts with 400 Gbit/s a GPU
    "cuda": Link(latency=25e-6, bandwidth=50e9, memory=1.5e12),
}


_DECIDED_FOR: ContextVar[DeviceKind | None] = ContextVar("decided_for", default=None)


@contextlib.contextmanager
def decided_for(kind: DeviceKind) -> Iterator[None]:
    """A context in which decisions by the kind of device are made for this one, wherever the tensors are (``plan``)."""
    token = _DECIDED_FOR.set(kind)
    try:
        yield
    finally:
        _DECIDED_FOR.reset(token)


def kind_of(device: torch.device) -> DeviceKind:
    """The kind of device for which to decide; unknown accelerators count as CUDA devices."""
    return _DECIDED_FOR.get() or ("cpu" if device.type == "cpu" else "cuda")


def link_of(device: torch.device) -> Link:
    """The link between ranks whose tensors live on ``device``; unknown accelerators count as CUDA devices."""
    return LINKS[kind_of(device)]


def wire_bytes(kind: Kind, size: int, ranks: int) -> float:
    """Bytes through each rank's link; see the table above for what ``size`` is."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks * size
    return (ranks - 1) * size if kind == "all_gather" else (ranks - 1) / ranks * size


def relative_bytes(kind: Kind, ranks: int) -> float:
    """Bytes through each rank's link for a byte of the whole tensor; gathering it counts 1 at any number of ranks.

    So gatherings, reductions and scatterings compare alike, and graphs are the same, at any number of ranks.
    """
    if kind == "all_reduce":
        return 2.0
    return 1.0 / ranks if kind == "all_to_all" else 1.0


def seconds(kind: Kind, size: int, ranks: int, link: Link) -> float:
    """Time of one collective; none on one rank."""
    return 0.0 if ranks == 1 else link.latency + wire_bytes(kind, size, ranks) / link.bandwidth
