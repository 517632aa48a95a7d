"""``loss``: the projection to the classes. Cross-entropy then works on split classes: scores are never gathered.

Two numbers a row are reduced: the largest score and the sum of exponentials. Same options as ``colwise``.
"""

from __future__ import annotations

from lightning_spmd.parallel.styles import colwise
from lightning_spmd.parallel.styles.target import PlacementsByName, Target


def place(target: Target) -> PlacementsByName:
    """PlacementsByName of weight and bias: the classes are split."""
    if "parts" in target.options:
        raise target.error("the classes are one part")
    return colwise.place(target)
