"""What the device reaches in bfloat16: the yardstick of every utilisation in the report."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from tests.gpu.child import Setting, settle

ROUNDS, PRODUCTS = 5, 20


def measure(setting: Setting, _argument: str) -> dict[str, Any]:
    """Floating-point operations a second of the best of a few large products."""
    sizes = (256,) if setting.toy else (4096, 8192, 16384)
    reached = {size: _reached(size, setting.device) for size in sizes}
    name = torch.cuda.get_device_name() if setting.device == "cuda" else "cpu"
    facts = {"device": name, "torch": torch.__version__, "peak_flops": max(reached.values()), "by_size": reached}
    if setting.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"memory_bytes": properties.total_memory, "capability": [properties.major, properties.minor]}
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {"passed": True, **facts}


def _reached(size: int, device: str) -> float:
    # random numbers, not zeros: a GPU draws less power on zeros, and so runs faster
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    seconds: list[float] = []
    for _ in range(1 + ROUNDS):
        settle(device)
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=out)
        settle(device)
        seconds.append((time.perf_counter() - began) / PRODUCTS)
    return 2 * size**3 / statistics.median(seconds[1:])
