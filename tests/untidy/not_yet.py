"""Cases that do not train as without the strategy yet, and in what, found by running them."""

from __future__ import annotations

NOT_YET: dict[str, str] = {
    "WorkerQueue": "another thread reads a value that there is none of yet",
}
"""On one device, where all bits must be eager's."""

PARTLY_EAGER = frozenset(
    [
        "HardestRows",
        "SortedTensors",
        "SeveralReads",
        "Added",
        "NewParameter",
        "Tied",
        "Bags",
        "MetricWeighs",
        "MetricLogged",
    ]
)
"""Where Python runs once in each step and some steps, or all, are no graphs."""

_EAGER = "eager: DDP, rows of a rank"
NOT_YET_ON_RANKS: dict[str, str] = {
    **NOT_YET,
    "MetricWeighs": _EAGER,
    "HalfPrecision": "sums over ranks round otherwise in half precision",
    "SkipsSteps": "raises: Lightning refuses None on several ranks",
}
"""On two ranks, which are to be near one device; these and those above."""
