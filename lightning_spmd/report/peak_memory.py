"""Highest memory of a training: of the process on CPU, of tensors, and the caching allocator's on CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_spmd import _private_api as private

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): the high-water mark of the resident set becomes what it is now


class PeakMemory:
    """The peak memory of a training, above what the process held when this object was made.

    On CPU that is growth of the resident set, whose peak Linux alone lets a process reset; freed memory is handed back
    first, for an earlier training's heap would hide a later one's. On CUDA it is what the caching allocator gave out at
    most.
    """

    def __init__(self) -> None:
        gc.collect()
        _return_free_memory()
        self._before = _resident("VmRSS")
        self._device: torch.device | None = None
        self._allocated = 0
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._allocated = torch.cuda.memory_allocated()

    def begin(self, device: torch.device) -> None:
        """Begin to measure. Earlier memory (capture, compilation) counts only if it is still held."""
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _return_free_memory()
            with contextlib.suppress(OSError):
                _CLEAR.write_text(_RESET_PEAK)

    def peak(self) -> int | None:
        """Bytes since :meth:`begin`; None where the system does not tell."""
        if self._device is None:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._allocated
        highest = _resident("VmHWM")
        return None if highest is None or self._before is None else max(0, highest - self._before)


class AllocatedMemory:
    """What the allocator gave out at most in a part of a training, above what there was before: of tensors alone.

    On CPU torch's profiler tells, which makes the part slower; on CUDA the caching allocator does.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = PeakMemory() if device.type == "cuda" else None
        self._profile = None
        if self._on_cuda is not None:
            self._on_cuda.begin(device)
        else:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()

    def peak(self) -> int | None:
        """Bytes so far. Ends it."""
        if self._profile is None:
            return None if self._on_cuda is None else self._on_cuda.peak()
        self._profile.stop()
        now = highest = 0
        for _, change in sorted(private.allocations_in(self._profile)):
            now += change
            highest = max(highest, now)
        return highest


def _resident(name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
    return None


def _return_free_memory() -> None:
    with contextlib.suppress(OSError, AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
