"""Measures what this machine's CPU reaches, so that a plan for ``cpu`` is one for this machine.

Half a second of products and copies. Where several ranks run, all of them measure at the same time, for they share
cores and memory; the link is what an all-reduce among them takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import gelu, scaled_dot_product_attention

from lightning_spmd.cost.collectives import wire_bytes
from lightning_spmd.cost.hardware import DeviceType, LinkType

ROUNDS = 7
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_ROWS, _INNER, _COLUMNS = 2048, 512, 512
_HEADS, _LENGTH, _SIZE = 16, 128, 32
_BYTES = 16 << 20
_MEMORY = Path("/proc/meminfo")
_SMALL, _LARGE = 1 << 10, 8 << 20


def calibrated_device(device: DeviceType) -> DeviceType:
    """The device with what this process reaches in place of what a maker says."""
    flops = {name: _products(dtype) for name, dtype in _DTYPES.items()}
    flops["fp16"] = flops["bf16"]
    bandwidth = _bandwidth()
    return dataclasses.replace(
        device,
        bandwidth=bandwidth,
        flops=flops,
        flops_share=1.0,
        bandwidth_share=1.0,
        attention_share=min(1.0, _attention() / flops["fp32"]),
        curve_share=min(1.0, _curves() / bandwidth),
        launch=_launch(),
        memory=_memory(device.memory),
        source=f"measured here, {torch.get_num_threads()} threads a rank",
    )


def calibrated_link(link: LinkType) -> LinkType:
    """The link among the ranks that run now; as it is where there is one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return link
    ranks = dist.get_world_size()
    small, large = (_all_reduce(size) for size in (_SMALL, _LARGE))
    bandwidth = wire_bytes("all_reduce", _LARGE - _SMALL, ranks) / max(large - small, 1e-9)
    return dataclasses.replace(
        link, bandwidth=bandwidth, share=1.0, start=small, latency=0.0, source=f"measured here, {ranks} ranks"
    )


# ---------------------------------------------------------------- pieces
def _seconds(work: Callable[[], object], times: int = 1) -> float:
    """Median of one call; the first round fills caches."""
    found: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - begin) / times)
    return statistics.median(found[1:])


def _products(dtype: torch.dtype) -> float:
    left, right = torch.ones(_ROWS, _INNER, dtype=dtype), torch.ones(_INNER, _COLUMNS, dtype=dtype)
    return 2.0 * _ROWS * _INNER * _COLUMNS / _seconds(lambda: left @ right)


def _bandwidth() -> float:
    one, other = torch.ones(_BYTES // 4), torch.ones(_BYTES // 4)
    return 3.0 * _BYTES / _seconds(lambda: torch.add(one, other))


def _attention() -> float:
    """Operations a second, forward and backward: two products and five, of which causality counts half."""
    query = torch.randn(_HEADS, 4, _LENGTH, _SIZE, requires_grad=True)

    def work() -> None:
        scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    return 7.0 * _HEADS * 4 * _LENGTH * _LENGTH * _SIZE / _seconds(work)


def _curves() -> float:
    values = torch.randn(_BYTES // 16)
    return 2.0 * (_BYTES // 4) / _seconds(lambda: gelu(values))


def _launch() -> float:
    small = torch.ones(8)
    return _seconds(lambda: small.add_(1.0), times=200)


def _memory(otherwise: float) -> float:
    with contextlib.suppress(OSError, ValueError):
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemTotal"):
                return 1024.0 * int(line.split()[1])
    return otherwise


def _all_reduce(size: int) -> float:
    tensor = torch.ones(size // 4)
    dist.barrier()
    return _seconds(lambda: dist.all_reduce(tensor))
