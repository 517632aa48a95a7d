"""On several ranks Python gets a batch whose containers are copies, with what stands for the rows of all ranks.

What a step does to these containers (``batch["logits"] = logits``, ``batch.pop("extra")``) is done to the batch itself
when its Python is done, because hooks and callbacks get that one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from typing import Any

from torch import Size


class BatchChanges:
    """The containers of one step's batch.

    Args:
        batch: as hooks get it.
        handed: what Python gets, built alike.
    """

    def __init__(self, batch: Any, handed: Any) -> None:
        self._containers: list[tuple[Any, Any, dict[Any, Any]]] = []  # the batch's, Python's, its items at first
        self._own: dict[int, Any] = {}  # by ``id`` of what Python gets
        self._compare(batch, handed)

    def take_over(self) -> None:
        """Change the batch as Python has changed what it got. Nothing is held afterwards."""
        for container, handed, before in self._containers:
            now = _items(handed)
            if now is None or (now.keys() == before.keys() and all(now[key] is value for key, value in before.items())):
                continue
            _change(container, {key: self._own.get(id(value), value) for key, value in now.items()})
        self._containers.clear()
        self._own.clear()

    def _compare(self, batch: Any, handed: Any) -> None:
        if batch is handed:
            return
        self._own[id(handed)] = batch
        items, own = _items(handed), _items(batch)
        if items is None or own is None or type(batch) is not type(handed):
            return
        if not isinstance(batch, tuple):
            self._containers.append((batch, handed, items))
        for key, value in items.items():
            if key in own:
                self._compare(own[key], value)


def _items(value: Any) -> dict[Any, Any] | None:
    """What a container holds, by key, place or name of a field; None of what is none, or makes others of its items."""
    if getattr(type(value), "is_tree_leaf", False):
        return None
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return None if isinstance(getattr(value, "batch_size", None), Size) else dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(getattr(value, "__dict__", {}))
    return None


def _change(container: Any, items: dict[Any, Any]) -> None:
    if isinstance(container, list):
        container[:] = items.values()
        return
    target = container if isinstance(container, MutableMapping) else container.__dict__
    for key in [key for key in target if key not in items]:
        del target[key]
    for key, value in items.items():
        if target.get(key) is not value:
            target[key] = value
