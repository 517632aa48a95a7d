# pyright: basic, reportAttributeAccessIssue=false
# (this module walks values of any type; every access follows a check that pyright cannot see)
"""Nested batches and outputs: tensors, tuples, named tuples, dicts, mappings, dataclasses, any mixture.

``torch.utils._pytree`` knows neither dataclasses nor Hugging Face's ``BatchEncoding``; Lightning moves both to the
device, so both must pass through a graph.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Size, Tensor

PLAIN = frozenset((Tensor, int, float, bool, str, type(None)))
"""Kinds that need no question what they contain: asked for each leaf in each step."""


def map_leaves(
    function: Callable[[str, Any], Any],
    tree: Any,
    path: str = "",
    ends_at: Callable[[Any], bool] = lambda _: False,
) -> Any:
    """Rebuild ``tree`` with ``function(path, leaf)`` in place of every leaf.

    Args:
        function: called with a readable path such as ``['image']`` or ``[0].mask``.
        tree: nested tuples, named tuples, lists, mappings and dataclass instances; everything else is a leaf, and so is
            what has a true ``is_tree_leaf`` on its class.
        path: prefix of the paths.
        ends_at: whether a container is a leaf as a whole.
    """
    if type(tree) in PLAIN:
        return function(path, tree)

    def inside(value: Any, path: str) -> Any:
        return map_leaves(function, value, path, ends_at)

    # first: isinstance would ask the object for its class
    if getattr(type(tree), "is_tree_leaf", False) or ends_at(tree):
        return function(path, tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[inside(getattr(tree, f), f"{path}.{f}") for f in tree._fields])
    if isinstance(tree, (list, tuple)) and type(tree) in (list, tuple):
        return type(tree)(inside(v, f"{path}[{i}]") for i, v in enumerate(tree))
    if isinstance(tree, MutableMapping):
        if isinstance(_attribute(tree, "batch_size"), Size):
            return _of_their_size(tree, {key: inside(value, f"{path}[{key!r}]") for key, value in tree.items()})
        rebuilt = copy.copy(tree)
        if isinstance(_attribute(rebuilt, "data"), dict):  # UserDict shares its data when copied
            rebuilt.data = dict(rebuilt.data)
        for key, value in tree.items():
            rebuilt[key] = inside(value, f"{path}[{key!r}]")
        return rebuilt
    if isinstance(tree, Mapping):
        return {k: inside(v, f"{path}[{k!r}]") for k, v in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        rebuilt = copy.copy(tree)
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                value = inside(getattr(tree, field.name), f"{path}.{field.name}")
                _put(rebuilt, field.name, value)
        return rebuilt
    return function(path, tree)


def _attribute(tree: Any, name: str) -> Any:
    """An attribute that is one: of some dictionaries the keys are attributes, too."""
    return getattr(tree, name) if inspect.getattr_static(tree, name, None) is not None else None


def _of_their_size(tree: Any, items: dict[Any, Any]) -> Any:
    """A container that knows the size of its batch (TensorDict), with items that may be others' size."""
    sizes = [value.shape[: len(tree.batch_size)] for value in items.values() if hasattr(value, "shape")]
    if all(size == tree.batch_size for size in sizes):
        rebuilt = copy.copy(tree)
        for key, value in items.items():
            rebuilt[key] = value
        return rebuilt
    return type(tree)(items, batch_size=sizes[0])


def _put(instance: Any, name: str, value: Any) -> None:
    """Set a field directly: a class may be frozen, or check values of its fields."""
    own = getattr(instance, "__dict__", {})
    if name in own:
        own[name] = value
    else:  # a slot
        object.__setattr__(instance, name, value)


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the order of :func:`map_leaves`."""
    found: list[tuple[str, Any]] = []

    def note(path: str, leaf: Any) -> Any:
        found.append((path, leaf))
        return leaf

    map_leaves(note, tree)
    return found


def structure(tree: Any) -> Any:
    """A hashable description of the nesting, without leaves."""
    if type(tree) in PLAIN:
        return None
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return (type(tree), tuple(structure(getattr(tree, f)) for f in tree._fields))
    if isinstance(tree, (list, tuple)) and type(tree) in (list, tuple):
        return (type(tree), tuple(map(structure, tree)))
    if isinstance(tree, Mapping):
        return (type(tree), tuple((k, structure(v)) for k, v in tree.items()))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return (type(tree), tuple((f.name, structure(getattr(tree, f.name, None))) for f in dataclasses.fields(tree)))
    return None
