"""Cases that do not train as without the strategy yet, and in what, found by running them."""

from __future__ import annotations

NOT_YET: dict[str, str] = {
    "KeptWithHistory": "the tensor that is kept has no grad_fn",
    "WorkerQueue": "another thread reads a value that there is none of yet",
}
"""On one device, where all bits must be eager's."""

CAPTURED: frozenset[str] = frozenset()
"""Where Python does not run once in each step: what it does is not followed yet, and captured once instead."""

PARTLY_EAGER = frozenset(
    [
        "MomentumQueue",
        "DataAssigned",
        "MetricWeighs",
        "MaskedColumns",
        "HardestRows",
        "SortedTensors",
        "SeveralReads",
        "SavedTensors",
        "GrowingTensor",
        "Added",
        "NewParameter",
        "SmoothingScheduled",
        "Tied",
        "Bags",
        "Focal",
        "MetricLogged",
        "MetricCollections",
    ]
)
"""Where Python runs once in each step and some steps, or all, are no graphs."""

_CAPTURED = "eager: DDP, rows of a rank"
NOT_YET_ON_RANKS: dict[str, str] = {
    **NOT_YET,
    "MetricWeighs": _CAPTURED,
    "MetricCollections": "a collection that is made in the step is given the rows of all ranks, on each of them",
    "MomentumQueue": "raises: eager, rows of a rank",
    "HalfPrecision": "sums over ranks round otherwise in half precision",
    "SkipsSteps": "raises: Lightning refuses None on several ranks",
}
"""On two ranks, which are to be near one device; these and those above."""
