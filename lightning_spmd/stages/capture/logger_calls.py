"""Loggers that a step calls itself: ``self.logger.experiment.add_scalar("x", loss.item(), self.global_step)``.

A call is recorded, and made again after each run with that run's values, in its place among everything else that is
done then. Nothing reaches a logger while a step is captured. What a logger is asked for (``name``, ``log_dir``) is
answered truly, and the graph holds for the answer. What a call gives back exists only after the graph ran.

The user's code sees the Trainer's own loggers, whatever it asks about them (``isinstance``, ``type``, ``is``): their
classes get methods for the time of the capture which stand between them and their attributes (``followed_classes.py``).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.steps import CallRef, OutputRef, RecordedCall
from lightning_spmd.ir.tree import leaves
from lightning_spmd.messages import batch_hook, the_step
from lightning_spmd.stages.capture.drawn_array import DrawnArray
from lightning_spmd.stages.capture.followed_classes import (
    LIBRARIES,
    FollowedClasses,
    is_asked_by_capture,
    is_asked_whether,
    kinds_of_loggers,
    may_change,
)
from lightning_spmd.stages.capture.holders import Entry
from lightning_spmd.stages.capture.host_scalar import SYMBOLS
from lightning_spmd.stages.capture.later_value import LaterValue
from lightning_spmd.stages.capture.same_state import SIMPLE, is_simple
from lightning_spmd.stages.capture.user_code import user_location

_DEEPEST = 4
_MANY = 64
_UNKNOWN = object()
Record = Callable[[str, tuple[Any, ...], dict[str, Any]], int]


class Itself:
    """An object in a recorded call, into which nobody looks.

    Args:
        subject: the object.
        read: gives what is in its place now; without it, it is the object that counts.
    """

    __slots__ = ("read", "subject")
    is_tree_leaf = True

    def __init__(self, subject: Any, read: Callable[[], Any] | None = None) -> None:
        self.subject = subject
        self.read = (lambda: subject) if read is None else read

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.subject is self.subject

    def __hash__(self) -> int:
        return id(self.subject)

    def __repr__(self) -> str:
        return type(self.subject).__name__


class Place:
    """How something of a logger is found in each run.

    Args:
        root: an object that lasts, or what a recorded call gives.
        names: of attributes, from there on.
        path: readable.
    """

    def __init__(self, root: Itself | CallRef, names: tuple[str, ...], path: str) -> None:
        self.root, self.names, self.path = root, names, path

    def at(self, name: str) -> Place:
        """An attribute of it."""
        return Place(self.root, (*self.names, name), f"{self.path}.{name}")


class LoggerCalls:
    """What one trace does with loggers.

    Args:
        record: ``(name, args, kwargs)`` of what is done after each run, gives the position of the call.

    Attributes:
        see: notes what there is at the end of some attributes: ``(object, path, names)``; gives it.
        leave_alone: told each object of a logger that needs no other look.
        unwatched: entered while a logger's own code runs.
        loggers: the Trainer's.
        ask_for_loggers: lets the graph hold for the Trainer's loggers, and has them met.
        entry_of: what leads to an object, where the step's code has it.
        asked_for_rank: where the step asks on which of several ranks it is.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self.see: Callable[[Any, str, Sequence[str]], Any] = lambda _subject, _path, _names: None
        self.leave_alone: Callable[[Any], None] = lambda _: None
        self.unwatched: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.asked_for_rank: str | None = None
        self.loggers: Sequence[Any] = ()
        self.ask_for_loggers: Callable[[], Any] = lambda: None
        self.entry_of: Callable[[Any], Entry | None] = lambda _: None
        self._experiments: dict[int, Any] = {}
        self._places: dict[int, tuple[Any, Place]] = {}
        self._thread = 0
        self._asleep = True
        self._called = False
        self._classes = FollowedClasses(self)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, calls of loggers are recorded."""
        self._thread, self._asleep = threading.get_ident(), False
        try:
            for kind in kinds_of_loggers():
                self._classes.add(kind)
            self._look_at_experiments()
            with self._functions_followed():
                yield
        finally:
            self._asleep = True
            self._classes.restore()

    @contextlib.contextmanager
    def _functions_followed(self) -> Iterator[None]:
        """``wandb.log``."""
        module = sys.modules.get("wandb")
        if module is None or not callable(before := vars(module).get("log")):
            yield
            return
        vars(module)["log"] = Standing(self, Place(Itself(module), ("log",), "wandb.log"), before)
        try:
            yield
        finally:
            vars(module)["log"] = before

    def meet(self, loggers: Sequence[Any]) -> None:
        """The step asks for the Trainer's loggers."""
        for index, logger in enumerate(loggers):
            self._follow(logger, Place(Itself(logger), (), "self.logger" if index == 0 else f"self.loggers[{index}]"))

    def rank_is_asked(self, place: str) -> None:
        """The step asks on which of several ranks it is."""
        self.asked_for_rank = self.asked_for_rank or place

    def check(self, calls: Sequence[RecordedCall]) -> None:
        """Ranks make the same graph.

        Raises:
            CaptureError: this one may give a logger tensors that others do not.
        """
        if self.asked_for_rank is None:
            return
        for call in calls:
            given = [leaf for _, leaf in leaves((list(call.args), call.kwargs)) if type(leaf) is OutputRef]
            if call.method == "logger" and given and not call.on_rank_zero:
                raise CaptureError(
                    f"{the_step()} asks which rank it is on, and gives a logger values of tensors ({call.source}), "
                    "which all ranks make together; put these calls into a function with @rank_zero_only, or leave the "
                    "question out: Lightning's loggers write on rank 0 alone",
                    self.asked_for_rank,
                )

    # ------------------------------------------------------------------ what the classes' methods ask
    def place_of(self, owner: Any) -> Place | None:
        """Of an object that is followed; None: it is none, or capture itself asks."""
        if self._asleep or threading.get_ident() != self._thread:
            return None
        known = self._places.get(id(owner))
        if known is None and id(owner) in self._experiments:
            self.ask_for_loggers()
            logger = self._experiments[id(owner)]
            self._follow(owner, self._places[id(logger)][1].at("experiment"))
            known = self._places[id(owner)]
        elif known is None and issubclass(type(owner), kinds_of_loggers()):  # not the Trainer's
            self._follow(owner, self._elsewhere(owner))
            known = self._places[id(owner)]
        return None if known is None else known[1]

    def _elsewhere(self, owner: Any) -> Place:
        entry = self.entry_of(owner)
        if entry is None:
            raise CaptureError(
                f"{the_step()} has a {type(owner).__name__}, and no graph can tell from where; keep it on the module, "
                f"or call it in {batch_hook('end')}",
                user_location(),
            )
        with self._own_code():
            self.see(owner, entry.path, ("__class__",))  # another of its class may come in its place
        return Place(Itself(owner, entry.reader()), (), entry.path)

    def attribute(self, owner: Any, place: Place, name: str) -> Any:
        """What the user's code gets for ``owner.name``.

        Raises:
            CaptureError: no graph can follow it.
        """
        if owner is _UNKNOWN:
            return Standing(self, place.at(name), _UNKNOWN)
        with self._own_code():
            value = getattr(owner, name)
        here, root = place.at(name), place.root if isinstance(place.root, Itself) else None
        if is_simple(value) or type(value) in SYMBOLS:
            if self._called and may_change(owner, name):
                raise CaptureError(
                    f"{the_step()} reads {here.path} after a call of a logger, which is made after the graph ran; read "
                    "it first",
                    user_location(),
                )
            with self._own_code():
                return value if root is None else self.see(root.subject, _start(here), here.names)
        if isinstance(value, type):
            return value
        if isinstance(value, (Tensor, nn.Module)):
            raise CaptureError(f"{the_step()} reads {here.path}, which no graph can follow", user_location())
        if not callable(value) and self._follow(value, here):
            return value
        return Standing(self, here, value)

    def call(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Standing:
        """Record a call.

        Raises:
            CaptureError: of something whose effect cannot wait.
        """
        self._check_root(place)
        for path, leaf in leaves((list(args), kwargs)):
            if not _may_be_given(leaf):
                raise CaptureError(
                    f"{the_step()} gives {place.path}(){path[3:]} a {type(leaf).__name__}: a logger gets what it is "
                    "given after the graph ran, and by then that may be another; give it tensors, numbers and texts, "
                    f"or call the logger in {batch_hook('end')}",
                    user_location(),
                )
        self._called = True
        number = self._record("logger", (place.root, place.names, *args), kwargs)
        return Standing(self, Place(CallRef(number), (), f"{place.path}()"), _UNKNOWN)

    def found(self, place: Place) -> CallRef:
        """What is there in each run, as an argument of another call."""
        if isinstance(place.root, CallRef) and not place.names:
            return place.root
        return CallRef(self._record("logger's", (place.root, place.names), {}))

    # ------------------------------------------------------------------ pieces
    def _look_at_experiments(self) -> None:
        """The step may have one of them under another name."""
        for logger in self.loggers:
            with self._own_code():
                experiment = getattr(logger, "experiment", None)
            known = experiment is None or experiment is logger or type(experiment) in SIMPLE
            if not known and self._classes.add(type(experiment)):
                self._experiments[id(experiment)] = logger
                self.leave_alone(experiment)

    @contextlib.contextmanager
    def _own_code(self) -> Iterator[None]:
        self._asleep = True
        try:
            with self.unwatched(), private.disable_dispatch_modes():
                yield
        finally:
            self._asleep = False

    def _follow(self, value: Any, place: Place) -> bool:
        if id(value) not in self._places:
            if not self._classes.add(type(value)):
                return False
            self._places[id(value)] = value, place
            self.leave_alone(value)
        return True

    def _check_root(self, place: Place) -> None:
        """What looks at the model when it is called would find it updated."""
        root = place.root.subject if isinstance(place.root, Itself) else None
        if root is None or type(root).__module__.startswith(LIBRARIES):
            return
        with self._own_code():
            knows = _knows(root, _DEEPEST, set())
        if knows:
            raise CaptureError(
                f"{the_step()} calls {place.path}(), and {type(root).__name__} has the module, a weight of it or the "
                f"Trainer: it would be called when the weights are updated already; call it in {batch_hook('end')}",
                user_location(),
            )


class Standing(LaterValue):
    """Stands for what a logger has (a method, a list), or for what a recorded call gives.

    Args:
        calls: records what is done with it.
        place: where it is found in each run.
        value: what is there now, if that is known.
    """

    def __init__(self, calls: LoggerCalls, place: Place, value: Any) -> None:
        own = {"_calls": calls, "_place": place, "_value": value, "_made_of": None, "_mark": None}
        for name, each in own.items():
            object.__setattr__(self, name, each)

    @property
    def _reference(self) -> CallRef:
        calls, place, _ = _parts(self)
        return calls.found(place)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] - as the thing itself answers
        value = object.__getattribute__(self, "_value")
        return Standing if value is _UNKNOWN else type(value)

    @override
    def misuse(self) -> CaptureError:
        """The error for any use but calls, and as an argument of them."""
        return CaptureError(
            f"{the_step()} uses {_parts(self)[1].path}, which a graph cannot know: calls of loggers are made after it "
            f"ran; make them there and use nothing of them, or do this in {batch_hook('end')}",
            user_location(),
        )

    def __getattribute__(self, name: str) -> Any:
        if name[:2] == "__" or is_asked_by_capture():
            return object.__getattribute__(self, name)
        calls, place, value = _parts(self)
        if value is _UNKNOWN and is_asked_whether():
            raise self._used()
        return calls.attribute(value, place, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Recorded."""
        calls, place, _ = _parts(self)
        return calls.call(place, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        calls, place, _ = _parts(self)
        return calls.call(place.at("__getitem__"), (key,), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        calls, place, _ = _parts(self)
        calls.call(place.at("__setitem__"), (key, value), {})

    def _refused(self, *_: Any) -> Any:
        raise self.misuse()

    __enter__ = __exit__ = __next__ = __delitem__ = __iadd__ = __isub__ = __imul__ = __ior__ = __or__ = _refused
    __and__ = __lshift__ = __rshift__ = __format__ = __contains__ = __iter__ = __len__ = _refused  # type: ignore[assignment]


def _start(place: Place) -> str:
    """Readable path of what a place begins with."""
    return place.path.removesuffix("".join(f".{name}" for name in place.names))


def _parts(value: Standing) -> tuple[LoggerCalls, Place, Any]:
    read = object.__getattribute__
    return read(value, "_calls"), read(value, "_place"), read(value, "_value")


def _knows(value: Any, depth: int, met: set[int]) -> bool:
    """Whether something holds a module, a weight or a Trainer."""
    if isinstance(value, (nn.Module, nn.Parameter, Trainer)):
        return True
    if depth == 0 or id(value) in met or len(met) > _MANY**2 or is_simple(value):
        return False
    met.add(id(value))
    inside: list[Any] = []
    if isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)[:_MANY]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    elif isinstance(value, dict):
        inside = list(value.values())[:_MANY]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    elif hasattr(value, "__self__"):
        inside = [value.__self__]
    elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
        inside = list(vars(value).values())
    return any(_knows(each, depth - 1, met) for each in inside)


def _may_be_given(leaf: Any) -> bool:
    if is_simple(leaf) or isinstance(leaf, (Tensor, LaterValue, DrawnArray, type)) or type(leaf) in SYMBOLS:
        return True
    if (numpy := sys.modules.get("numpy")) is not None and type(leaf) is numpy.ndarray:
        return bool(leaf.dtype != object)
    return type(leaf).__module__.startswith("lightning_spmd.")
