"""Tensors of batches that are objects: torch_geometric's ``Data``, PyG's mini-batches, DGL-like containers.

Lightning moves such an object to the device by its own ``to``, which tells it from all else that a batch may hold. What
it has in its attributes is of the batch, so that sizes that differ from batch to batch are known as the batch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_NO_CONTAINERS = (Tensor, nn.Module)
_DEPTH = 4
_MOST = 256
"""Objects, containers and tensors in one that are looked at."""


def tensors_inside(path: str, leaf: Any) -> list[tuple[str, Tensor]]:
    """(path, tensor) of each tensor that an object holds; none of what is no such object.

    Args:
        path: of the leaf in the batch.
        leaf: of the batch.
    """
    if isinstance(leaf, _NO_CONTAINERS) or not callable(getattr(type(leaf), "to", None)):
        return []
    found: list[tuple[str, Tensor]] = []
    seen: set[int] = set()

    def look(path: str, value: Any, depth: int) -> None:
        if id(value) in seen or len(seen) > _MOST or depth > _DEPTH:
            return
        if isinstance(value, Tensor):
            seen.add(id(value))
            if value.is_leaf and not value.requires_grad:
                found.append((path, value))
        elif not isinstance(value, nn.Module | type):
            seen.add(id(value))
            for name, part in _parts(value):
                look(f"{path}{name}", part, depth + 1)

    look(path, leaf, 0)
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
