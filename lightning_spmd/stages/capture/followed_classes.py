"""Classes whose instances are followed for a while: methods that stand between the user's code and attributes.

Instances and classes stay what they are, so that whatever code asks about them (``isinstance``, ``type``, ``is``) is
answered as ever.
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol

from lightning.pytorch.loggers import Logger

from lightning_spmd.errors import CaptureError
from lightning_spmd.messages import batch_hook, the_step
from lightning_spmd.stages.capture.user_code import is_user_file, user_location

_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")
LIBRARIES = ("lightning.", "torch.")
"""Where classes are from of which calls change no attribute that tells something."""
_WRITERS = {
    "torch.utils.tensorboard.writer": "SummaryWriter",
    "tensorboardX.writer": "SummaryWriter",
    "wandb.sdk.wandb_run": "Run",
}
_LASTING = frozenset({"name", "version", "save_dir", "log_dir", "root_dir", "run_id", "group_separator"})
_BY_OTHER_NAMES = frozenset({"setattr", "__dict__", "vars", "__setattr__"})
_RECORDED = ("__call__", "__getitem__", "__setitem__", "__delitem__")
_REFUSED = (
    "__iter__", "__next__", "__len__", "__bool__", "__contains__", "__enter__", "__exit__", "__str__", "__repr__",
    "__format__", "__add__", "__iadd__", "__sub__", "__isub__", "__or__", "__ior__", "__lshift__", "__rshift__",
    "__int__", "__float__", "__index__", "__reversed__",
)  # fmt: skip

_LOADS = frozenset(dis.opmap[name] for name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR") if name in dis.opmap)


class Follows(Protocol):
    """Knows what is followed, and what becomes of it."""

    def place_of(self, owner: Any) -> Any:
        """Of an object that is followed, else None."""
        ...

    def attribute(self, owner: Any, place: Any, name: str) -> Any:
        """What the user's code gets for ``owner.name``."""
        ...

    def call(self, place: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call."""
        ...


class FollowedClasses:
    """Puts methods into classes, and takes them out again.

    Args:
        follows: told what the user's code does with instances.
    """

    def __init__(self, follows: Follows) -> None:
        self._follows = follows
        self._before: list[tuple[type, str, Any]] = []
        self._known: dict[type, bool] = {}
        self._hooks: set[int] = set()

    def add(self, kind: type) -> bool:
        """Follow a class; whether that can be: not those of C."""
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = self._patched(kind)
        return known

    def restore(self) -> None:
        """Classes are as they were."""
        for kind, name, before in reversed(self._before):
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)
        self._before.clear()
        self._known.clear()

    def _patched(self, kind: type) -> bool:
        always = (
            ("__getattribute__", self._reading),
            ("__setattr__", self._assigning),
            ("__delattr__", self._assigning),
        )
        with contextlib.suppress(TypeError):  # a class that nobody may change
            for name, made in always:
                self._put(kind, name, made(getattr(kind, name)))
            for name in (*_RECORDED, *_REFUSED):
                before = next((vars(base)[name] for base in kind.__mro__[:-1] if name in vars(base)), None)
                if callable(before):
                    make = self._recording if name in _RECORDED else self._refusing
                    self._put(kind, name, make(name, before))
            return True
        return False

    def _put(self, kind: type, name: str, method: Any) -> None:
        if id(getattr(kind, name)) in self._hooks:  # a base has it
            return
        own = vars(kind).get(name)
        setattr(kind, name, method)
        self._before.append((kind, name, own))
        self._hooks.add(id(method))

    # ------------------------------------------------------------------ the methods
    def _reading(self, before: Callable[[Any, str], Any]) -> Any:
        follows = self._follows

        def __getattribute__(owner: Any, name: str) -> Any:
            if name[:2] == "__" or (place := follows.place_of(owner)) is None or is_asked_by_capture():
                return before(owner, name)
            return follows.attribute(owner, place, name)

        return __getattribute__

    def _assigning(self, before: Callable[..., Any]) -> Any:
        follows = self._follows

        def assign(owner: Any, name: str, *value: Any) -> None:
            place = follows.place_of(owner)
            if place is not None and not is_asked_by_capture():
                raise CaptureError(
                    f"{the_step()} changes {place.path}.{name}: that statement would run once, at capture; do it in "
                    f"{batch_hook('end')}",
                    user_location(),
                )
            before(owner, name, *value)

        return assign

    def _recording(self, name: str, before: Callable[..., Any]) -> Any:
        follows = self._follows

        def record(owner: Any, *args: Any, **kwargs: Any) -> Any:
            place = follows.place_of(owner)
            if place is None or is_asked_by_capture():
                return before(owner, *args, **kwargs)
            return follows.call(place.at(name), args, kwargs)

        return record

    def _refusing(self, name: str, before: Callable[..., Any]) -> Any:
        follows = self._follows

        def refuse(owner: Any, *args: Any, **kwargs: Any) -> Any:
            place = follows.place_of(owner)
            if place is None or is_asked_by_capture():
                return before(owner, *args, **kwargs)
            raise CaptureError(
                f"{the_step()} uses {place.path} ({name}), which a graph cannot know: calls of loggers are made after "
                f"it ran; do this in {batch_hook('end')}",
                user_location(),
            )

        return refuse


def kinds_of_loggers() -> tuple[type, ...]:
    """Classes of loggers, and of experiments that users make themselves without one, as far as they are imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _WRITERS.items())
    return (Logger, *(kind for kind in found if isinstance(kind, type)))


def may_change(owner: Any, name: str) -> bool:
    """Whether calls of an object's methods may change one of its attributes, as far as its class tells."""
    if name in _LASTING:
        return False
    kinds = [kind for kind in type(owner).__mro__[:-1] if not kind.__module__.startswith(LIBRARIES)]
    if any(hasattr(vars(kind).get(name), "__get__") for kind in kinds):
        return True
    functions = [(n, f) for kind in kinds for n, f in vars(kind).items() if n != "__init__"]
    codes = [f.fget if isinstance(f, property) else getattr(f, "__wrapped__", f) for _, f in functions]
    return any(_puts(code, name) for f in codes if (code := getattr(f, "__code__", None)) is not None)


def _puts(code: CodeType, name: str) -> bool:
    if not _BY_OTHER_NAMES.isdisjoint(code.co_names):
        return True
    inside = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    stores = name in code.co_names and any(
        s.opname == "STORE_ATTR" and s.argval == name for s in dis.get_instructions(code)
    )
    return stores or any(_puts(each, name) for each in inside)


def is_asked_by_capture() -> bool:
    """Whether the frame that called the method that asks this is of this package."""
    frame = _asking()
    return (
        frame is not None and frame.f_code.co_filename.startswith(_OWN) and not is_user_file(frame.f_code.co_filename)
    )


def is_asked_whether() -> bool:
    """Whether the frame that called the method that asks this calls ``hasattr`` or ``getattr``."""
    frame = _asking()
    return frame is not None and frame.f_code.co_code[frame.f_lasti] not in _LOADS


def _asking() -> FrameType | None:
    return sys._getframe(3)  # noqa: SLF001 - documented in `sys`
