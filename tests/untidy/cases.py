"""All cases, by name."""

from __future__ import annotations

from types import ModuleType

from tests.untidy import (
    by_hand,
    containers,
    drawn,
    gradients,
    kept_tensors,
    layers,
    logged,
    objects,
    reads,
    tables,
    texts,
)
from tests.untidy.untidy import Untidy

PARTS: tuple[ModuleType, ...] = (
    objects,
    containers,
    drawn,
    tables,
    reads,
    texts,
    kept_tensors,
    layers,
    gradients,
    logged,
    by_hand,
)
CASES: dict[str, type[Untidy]] = {kind.__name__: kind for part in PARTS for kind in part.CASES}
"""In the order of the files."""
