"""Peak speed of a device of this machine: the maker's number for a GPU, a measured large product for a CPU."""

from __future__ import annotations

import functools
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from lightning_spmd.cost.hardware import DEVICES
from lightning_spmd.cost.operators import work_of
from lightning_spmd.ir.sizes import Formula
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.ir.unify import Apart, Fits

# As drivers name the devices of the table. Others of the same name (H100 PCIe, H200 NVL) reach less.
_KNOWN = {
    r"H100 80GB HBM3|H100 SXM": "h100",
    r"H200(?! NVL)": "h200",
    r"A100\b": "a100-80",
    r"L40S\b": "l40s",
    r"B200\b": "b200",
    r"V100-SXM2": "v100",
}
_ROWS, _INNER, _COLUMNS = 2048, 512, 512
_ROUNDS = 5


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second of products on one device; None for an unknown device.

    Args:
        device: a GPU, or the host, whose products are measured at the first call.
        dtype: of the operands.
    """
    if device.type == "cpu":
        return _measured(dtype, torch.get_num_threads())
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = next((known for pattern, known in _KNOWN.items() if re.search(pattern, name)), None)
    return None if found is None else DEVICES[found].peak(dtype)


def products_per_second(dtype: torch.dtype, rounds: int = _ROUNDS) -> float:
    """Operations a second of a large product on the host; the first round fills caches."""
    left, right = torch.ones(_ROWS, _INNER, dtype=dtype), torch.ones(_INNER, _COLUMNS, dtype=dtype)
    seconds: list[float] = []
    with torch.no_grad():
        for _ in range(rounds):
            begin = time.perf_counter()
            torch.mm(left, right)
            seconds.append(time.perf_counter() - begin)
    return 2.0 * _ROWS * _INNER * _COLUMNS / statistics.median(seconds[1:])


@functools.cache
def _measured(dtype: torch.dtype, _threads: int) -> float:
    return products_per_second(dtype)


def products_of(step: CapturedStep) -> Mapping[torch.dtype, float]:
    """Floating-point operations of a step's products by the dtype of their operands, as one device would do them."""
    found: dict[torch.dtype, float] = {}
    for dtype, flops in _products(step):
        found[dtype] = found.get(dtype, 0.0) + flops
    return found


def products_for_all(
    steps: Sequence[CapturedStep], fits: Fits
) -> Callable[[Sequence[int]], Mapping[torch.dtype, float]] | None:
    """The same of a step that was captured for several counts, for others; None if they do not follow from counts.

    Args:
        steps: it, for each of the samples.
        fits: finds formulas of these.
    """
    found: list[tuple[torch.dtype, Formula | int]] = []
    rows = list(map(_products, steps))
    if len(set(map(len, rows))) > 1:  # of nothing in one of them
        return None
    for each in zip(*rows, strict=True):
        values = tuple(int(flops) for _, flops in each)
        try:
            found.append((each[0][0], values[0] if len(set(values)) == 1 else fits.formula(values)))
        except Apart:
            return None

    def products(counts: Sequence[int]) -> Mapping[torch.dtype, float]:
        total: dict[torch.dtype, float] = {}
        for dtype, flops in found:
            total[dtype] = total.get(dtype, 0.0) + (flops.at(counts) if isinstance(flops, Formula) else flops)
        return total

    return products


def _products(step: CapturedStep) -> list[tuple[torch.dtype, float]]:
    works = map(work_of, step.graph_module.graph.nodes)
    return [(work.dtype, work.flops) for work in works if work.flops]
