"""Measures the speed of this machine's CPU, so that a plan for ``cpu`` is one for this machine.

The calibration runs the kinds of work of which steps consist, for a second or two: products of linear layers,
convolutions, attention, functions, sums, additions, small operators. Each runs as long as a step does, because a short
measurement is unreliable on a shared machine. Operands and results are in allocated memory, but not in caches. All
ranks measure the same work at the same time, since they share cores and memory, and the mean counts. The link's speed
is that of an all-reduce among them, and its processor time is missing elsewhere where no core is free for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import conv2d, scaled_dot_product_attention

from lightning_spmd.cost.collectives import wire_bytes
from lightning_spmd.cost.hardware import DeviceType, LinkType

aten = torch.ops.aten
LEAST_SECONDS = 0.12
"""How long each work goes on."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_ROWS, _WIDTHS = 2048, ((128, 512), (512, 512))
_HEADS, _LENGTH, _SIZE = 16, 128, 32
_IMAGES, _CHANNELS, _PIXELS = 16, (16, 32), 32
_TENSORS, _NUMBERS = 8, 1 << 20
"""Of memory that no cache holds."""
_BYTES = 4.0 * _TENSORS * _NUMBERS
_MEMORY = Path("/proc/meminfo")
_SMALL, _LARGE = 1 << 10, 8 << 20


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Args:
        seconds: of each kind of work, the mean of the ranks.
        all_reduces: seconds of a small and a large all-reduce; None with one rank.
        core: seconds of computing that a second of an all-reduce takes away.
        on_cpu: share of the time for which a process had a core.
    """

    seconds: Mapping[str, float]
    all_reduces: tuple[float, float] | None
    core: float
    on_cpu: float

    def device(self, device: DeviceType) -> DeviceType:
        """The device with measured speeds in place of the maker's."""
        seconds = self.seconds
        products = 3 * sum(2.0 * _ROWS * a * b for a, b in _WIDTHS)
        reached = {name: products / seconds[name] for name in _DTYPES}
        reached["fp16"] = reached["bf16"]
        bandwidth = 3 * _BYTES / seconds["add"]
        convolution = 3 * 2.0 * _IMAGES * _CHANNELS[0] * _CHANNELS[1] * 9 * _PIXELS**2 / seconds["convolution"]
        # two products forward and five backward, of which causality counts half
        attention = 7.0 * _HEADS * 4 * _LENGTH * _LENGTH * _SIZE / seconds["attention"]
        most = max(reached["fp32"], attention, convolution)  # what no kernel surpasses
        return dataclasses.replace(
            device,
            bandwidth=bandwidth,
            flops={name: most / reached["fp32"] * flops for name, flops in reached.items()},
            flops_share=reached["fp32"] / most,
            bandwidth_share=1.0,
            attention_share=attention / most,
            convolution_share=convolution / most,
            curve_share=min(1.0, 2 * _BYTES / seconds["curve"] / bandwidth),
            reduction_share=min(1.0, 3 * _BYTES / seconds["reduction"] / bandwidth),
            launch=seconds["launch"],
            memory=_memory(device.memory),
            source=f"measured here, {torch.get_num_threads()} threads a rank",
        )

    def link(self, link: LinkType) -> LinkType:
        """The link among the ranks with measured speed; unchanged with one rank."""
        if self.all_reduces is None:
            return link
        (small, large), ranks = self.all_reduces, dist.get_world_size()
        bandwidth = wire_bytes("all_reduce", _LARGE - _SMALL, ranks) / max(large - small, 1e-9)
        return dataclasses.replace(
            link,
            bandwidth=bandwidth,
            share=1.0,
            start=small,
            latency=0.0,
            core=self.core,
            source=f"measured here, {ranks} ranks",
        )


def calibrate() -> Calibration:
    """Measure; all ranks together."""
    wall, cpu = time.perf_counter(), time.process_time()
    seconds = {name: mean_seconds(work, LEAST_SECONDS) for name, work in _works().items()}
    seconds["launch"] /= _OPERATORS
    on_cpu = (time.process_time() - cpu) / max(time.perf_counter() - wall, 1e-9) / torch.get_num_threads()
    all_reduces, core = None, 0.0
    if several():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (seconds, on_cpu))
        # not the slowest: on a busy machine that is another rank each time, and no rank is slow in all of a step
        seconds = {name: statistics.mean(found[name] for found, _ in everyone) for name in seconds}
        on_cpu = statistics.mean(share for _, share in everyone)
        small, _ = _all_reduce(_SMALL)
        large, processor = _all_reduce(_LARGE)
        all_reduces, core = (small, large), processor / large * _taken(dist.get_world_size())
    return Calibration(seconds, all_reduces, core, min(1.0, on_cpu))


def mean_of(found: Sequence[Calibration]) -> Calibration:
    """The mean of several calibrations."""
    pairs = [c.all_reduces for c in found if c.all_reduces is not None]
    return Calibration(
        {name: statistics.mean(c.seconds[name] for c in found) for name in found[0].seconds},
        (statistics.mean(a for a, _ in pairs), statistics.mean(b for _, b in pairs)) if pairs else None,
        statistics.mean(c.core for c in found),
        statistics.mean(c.on_cpu for c in found),
    )


def several() -> bool:
    """Whether other ranks are there, which do the same."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def mean_seconds(work: Callable[[], object], least: float) -> float:
    """Mean of one call, while all ranks do the same; the first one fills caches.

    Args:
        work: what is called.
        least: seconds for which it goes on.
    """
    if several():
        dist.barrier()
    work()
    begin, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - begin < least:
        work()
        count += 1
    return (time.perf_counter() - begin) / count


# ---------------------------------------------------------------- pieces
def _works() -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    ones = [torch.randn(_NUMBERS // 512, 512) for _ in range(_TENSORS)]
    query = torch.randn(_HEADS, 4, _LENGTH, _SIZE, requires_grad=True)
    images = torch.randn(_IMAGES, _CHANNELS[0], _PIXELS, _PIXELS, requires_grad=True)
    kernel = torch.randn(_CHANNELS[1], _CHANNELS[0], 3, 3, requires_grad=True)

    results, columns = [torch.empty_like(a) for a in ones], torch.empty(512)
    mean, deviation = torch.empty(len(ones[0]), 1), torch.empty(len(ones[0]), 1)

    def reduction() -> None:
        for a, c in zip(ones, results, strict=True):
            aten.native_layer_norm.out(a, [512], None, None, 1e-5, out0=c, out1=mean, out2=deviation)
            torch.sum(a, 0, out=columns)

    def attention() -> None:
        scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    def convolution() -> None:
        conv2d(images, kernel, padding=1).sum().backward()

    works: dict[str, Callable[[], object]] = {name: _layers(dtype) for name, dtype in _DTYPES.items()}
    return works | {
        "add": lambda: [torch.add(a, b, out=c) for a, b, c in zip(ones, reversed(ones), results, strict=True)],
        "curve": lambda: [aten.gelu.out(a, out=c) for a, c in zip(ones, results, strict=True)],
        "reduction": reduction,
        "attention": attention,
        "convolution": convolution,
        "launch": _small_operators(),
    }


def _layers(dtype: torch.dtype) -> Callable[[], object]:
    """The three products of a linear layer: its result, the gradients of its weight and of its input."""
    layers = [
        (torch.ones(_ROWS, a, dtype=dtype), torch.ones(b, a, dtype=dtype), torch.ones(_ROWS, b, dtype=dtype))
        for a, b in _WIDTHS
    ]

    def work() -> list[tuple[Tensor, ...]]:
        return [(x @ w.t(), g.t() @ x, g @ w) for x, w, g in layers]

    return work


_OPERATORS = 8


def _small_operators() -> Callable[[], object]:
    """Operators whose time is that of being called."""
    value, weight = torch.ones(4, 4), torch.ones(4, 4)

    def work() -> Tensor:
        product = torch.mm(value.t(), weight.view(4, 4))
        return torch.relu((product + value).mul(0.5).sum(1)).unsqueeze(0)

    return work


def _memory(otherwise: float) -> float:
    with contextlib.suppress(OSError, ValueError):
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemTotal"):
                return 1024.0 * int(line.split()[1])
    return otherwise


def _taken(ranks: int) -> float:
    """Seconds of computing that are lost by a second of another thread, where ranks of this machine all have one."""
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    missing = (ranks * (threads + 1) - cores) / ranks
    return min(1.0, max(0.0, missing)) / threads * max(1.0, ranks * threads / cores)


def _all_reduce(size: int) -> tuple[float, float]:
    """Seconds, and those of the processor."""
    tensor = torch.ones(size // 4)
    times = max(1, min(20, (1 << 22) // size))

    def work() -> None:
        for _ in range(times):
            dist.all_reduce(tensor)

    dist.barrier()
    work()
    rounds = 6  # as many on all ranks
    begin, processor = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        work()
    calls = rounds * times
    return (time.perf_counter() - begin) / calls, (time.process_time() - processor) / calls
