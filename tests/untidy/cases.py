"""All cases, by name."""

from __future__ import annotations

from types import ModuleType

from tests.untidy import containers, drawn, objects, tables
from tests.untidy.untidy import Untidy

PARTS: tuple[ModuleType, ...] = (objects, containers, drawn, tables)
CASES: dict[str, type[Untidy]] = {kind.__name__: kind for part in PARTS for kind in part.CASES}
"""In the order of the files."""
