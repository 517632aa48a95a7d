"""Lists with an entry for each of a rank's rows, in a step whose tensors have the rows of all ranks.

File names that ``predict_step`` returns beside its results may pass through. A step that looks at such a list takes
row 3 of the tensors and of the list for the same: somebody is told, before that happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OF_OBJECTS = {
    "__class__", "__new__", "__init__", "__del__", "__getattribute__", "__setattr__", "__delattr__", "__hash__",
    "__init_subclass__", "__subclasshook__", "__class_getitem__", "__doc__", "__sizeof__",
}  # fmt: skip


class _Watched:
    """What stands for such a list.

    Attributes:
        itself: the list.
        on_look: called before anybody learns what is in it.
    """

    itself: Any
    on_look: Callable[[], None]


def _looking(base: type, name: str) -> Callable[..., Any]:
    own = getattr(base, name)

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.on_look()
        return own(self, *args, **kwargs)

    return look


def _watched(base: type) -> type:
    methods = {n: _looking(base, n) for n in dir(base) if n not in _OF_OBJECTS and callable(getattr(base, n))}
    return type(f"{base.__name__} of rows", (_Watched, base), methods)


_KINDS = {list: _watched(list), tuple: _watched(tuple)}


def watched(rows: Any, on_look: Callable[[], None]) -> Any:
    """What stands for a list or tuple, and is one.

    Args:
        rows: the list or tuple.
        on_look: called before anybody learns what is in it.
    """
    found = _KINDS[type(rows)](rows)
    vars(found).update(itself=rows, on_look=on_look)
    return found


def is_watched(value: Any) -> bool:
    """Whether a value stands for such a list."""
    return isinstance(type(value), type) and issubclass(type(value), _Watched)
