"""What is in place of a metric's attributes while calls of it wait for a graph: whoever looks at one is told of first.

An object finds its attributes in its dictionary without asking anybody. What is not there is asked of ``__getattr__``,
so a dictionary that lacks them tells of every look, whatever the name, and costs the methods of the metric's class
nothing: a subclass with a ``__getattribute__`` of its own makes a small step a tenth slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torchmetrics import Metric

METHODS = ("update", "forward", "compute", "reset")
"""Of metrics, that are queued."""
# What torch asks of every module that it calls or walks through, and no call of a metric changes.
_SHADOWS = "lightning_spmd.stages.capture.follow.queue"
_SEEN = (*vars(nn.Module()), "_device", "_dtype", *METHODS)

_hashing = list[Any]()
"""Metrics that are being hashed: a wrapper asks those inside for their states, and nobody has looked."""


class HeldBack(dict[str, Any]):
    """The dictionary of a metric in which only :data:`METHODS` and what all modules have is found.

    Args:
        metric: whose it is from now on.
        look: called before anybody looks at another attribute, or at all of them; it gives them back.
    """

    __slots__ = ("_look", "_metric", "_own", "_size")

    def __init__(self, metric: Metric, look: Callable[[], None]) -> None:
        own = vars(metric)
        super().__init__([(name, own[name]) for name in _SEEN if name in own])
        self._metric, self._own, self._look, self._size = metric, own, look, dict.__len__(self)
        self.hold()

    def hold(self) -> None:
        """Be the metric's dictionary."""
        object.__setattr__(self._metric, "__dict__", self)

    def give_back(self) -> None:
        """The metric has its own again, with what was put past everybody into this one."""
        object.__setattr__(self._metric, "__dict__", self._own)
        if dict.__len__(self) != self._size:
            self._own.update({name: value for name, value in dict.items(self) if name not in _SEEN})

    def own(self) -> dict[str, Any]:
        """The metric's own dictionary, for somebody who looks at it."""
        if vars(self._metric) is self and not _hashing:
            self._look()
        return self._own

    def hashed(self, compute: Callable[[Any], int]) -> int:
        """The metric's hash, for which torchmetrics takes its states: who walks through modules has them in a set."""
        self.give_back()
        _hashing.append(self)
        try:
            return compute(self._metric)
        finally:
            _hashing.pop()
            self.hold()


def _as_own(name: str) -> Callable[..., Any]:
    def method(self: HeldBack, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.own(), name)(*args, **kwargs)

    return method


_OF_OBJECTS = {"__doc__", "__hash__", "__setattr__", "__delattr__", "__getattribute__", "__class_getitem__"}
_OF_OBJECTS |= {"__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__"}
for _name in set(dir(dict)) - _OF_OBJECTS:
    setattr(HeldBack, _name, _as_own(_name))


class Misses:
    """Classes of metrics that are asked for attributes which are not in a metric's dictionary."""

    def __init__(self) -> None:
        self._before: dict[type, list[tuple[str, Any]]] = {}

    def tell_of(self, kind: Any) -> None:
        """Metrics of a class find what is held back, until :meth:`end`: a change of a class is slow."""
        if kind in self._before:
            return
        compute, state, find = kind.__hash__, kind.__getstate__, vars(kind).get("__getattr__")

        def hashed(metric: Any) -> int:
            held = vars(metric)
            return held.hashed(compute) if type(held) is HeldBack else compute(metric)

        def missing(metric: Any, name: str) -> Any:
            held = vars(metric)
            if type(held) is HeldBack and name in (own := held.own()):
                return own[name]
            return super(kind, metric).__getattr__(name) if find is None else find(metric, name)

        def copied(metric: Any) -> Any:
            found = state(metric)  # a shadow in a copy would call the metric that is copied
            shadows = {name for name in METHODS if getattr(vars(metric).get(name), "__module__", "") == _SHADOWS}
            return {name: found[name] for name in found if name not in shadows} if shadows else found

        self._before[kind] = [(n, vars(kind).get(n, self)) for n in ("__hash__", "__getstate__", "__getattr__")]
        kind.__hash__, kind.__getstate__, kind.__getattr__ = hashed, copied, missing

    def end(self) -> None:
        """Classes are as they were."""
        while self._before:
            kind, before = self._before.popitem()
            for name, value in before:
                delattr(kind, name) if value is self else setattr(kind, name, value)


MISSES = Misses()
