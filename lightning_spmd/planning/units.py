"""Formats numbers with units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def bytes_text(size: float) -> str:
    """``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.{_digits(size)}f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def seconds_text(seconds: float) -> str:
    """``12.3 ms``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.{_digits(seconds / scale)}f} {unit}"
    return f"{seconds * 1e6:.0f} us" if seconds else "0"


def count_text(count: float) -> str:
    """``1.21 G``."""
    for scale, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.{_digits(count / scale)}f} {unit}"
    return f"{count:.0f}"


def nodes_text(run: Mapping[str, Any]) -> str:
    """``4 nodes of 8``."""
    return "one node" if run["nodes"] == 1 else f"{run['nodes']} nodes of {run['devices']}"


def _digits(value: float) -> int:
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
