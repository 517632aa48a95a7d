"""Sees every frame of the user's code that runs while a step is captured, by a profile hook.

At the start of a frame its arguments, closure and globals are looked at (``walk.py``), before it changes anything;
so is what its calls give back to it. Calls of C functions whose answer no graph can hold (clocks) are refused.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.messages import batch_hook, the_step
from lightning_spmd.stages.capture import attribute_spy, followed_classes, number_types
from lightning_spmd.stages.capture.code_facts import CodeFacts, facts_of
from lightning_spmd.stages.capture.recorded_builtins import Builtins
from lightning_spmd.stages.capture.same_state import SIMPLE
from lightning_spmd.stages.capture.user_code import is_installed, is_standard, is_user_code
from lightning_spmd.stages.capture.walk import Walk

_CLOCKS = {
    getattr(time, name)
    for name in (
        "time",
        "time_ns",
        "perf_counter",
        "perf_counter_ns",
        "monotonic",
        "monotonic_ns",
        "process_time",
        "process_time_ns",
        "thread_time",
        "thread_time_ns",
        "localtime",
        "gmtime",
        "ctime",
        "strftime",
    )
}
_FROM_OUTSIDE = {io.open, os.open, os.urandom, os.listdir, os.scandir, os.stat, os.times, os.getloadavg}
_TELLING = {os.getcwd, os.getpid}
_CLOCK_METHODS = frozenset({"now", "utcnow", "today"})
_ASKED = frozenset(f.__name__ for f in _CLOCKS | _FROM_OUTSIDE | _TELLING) | _CLOCK_METHODS
# Files that Python reads for itself: source lines of a warning, modules at their first import.
_OF_PYTHON = ("linecache.py", "tokenize.py", "warnings.py", "traceback.py", "inspect.py", "logging/__init__.py")
# Of the standard library, what keeps caches and books of its own that decide nothing, or is followed in another way.
_NO_GUESTS = (
    *_OF_PYTHON, "abc.py", "_weakrefset.py", "weakref.py", "contextlib.py", "copy.py", "enum.py", "functools.py",
    "os.py", "random.py", "re/__init__.py", "re/_compiler.py", "re/_parser.py", "typing.py", "dataclasses.py", "ast.py",
)  # fmt: skip
_OF_NO_INTEREST: frozenset[type] = SIMPLE | {
    Tensor, torch.nn.Parameter, private.FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool,
}  # fmt: skip
_OF_ATTRIBUTES = (attribute_spy.__file__, followed_classes.__file__, number_types.__file__)
_GETTER = re.compile(r"(is|are|get|has)_\w+|\w+_(enabled|available)|getcwd|getpid")
_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})


class FrameWatch:
    """The profile hook.

    Args:
        walk: told what frames can see.

    Attributes:
        codes: of the user's frames.
        builtins: puts stand-ins of functions into modules.
        getters: functions of torch without arguments that tell them how a switch stands.
        on_identity: told that code asks whether something *is* ``True``.
    """

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.codes: list[CodeType] = []
        self.getters: dict[int, Any] = {}
        self._facts: dict[int, CodeFacts | None] = {}
        self._guests: dict[int, CodeFacts | None] = {}
        self._users: set[int] = set()
        self._strangers: set[int] = set()
        self._followed: set[int] = set()
        self._alive: list[CodeType] = []
        self._problem: BaseException | None = None
        self._on = False
        self.builtins = Builtins()
        self.on_identity: Callable[[], None] = lambda: None
        self._hook = self._sieve()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Watch while inside; another profile hook is put back at the end.

        Raises:
            CaptureError: something was seen that no graph can follow.
        """
        before = sys.getprofile()
        self._on = True
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            self._on = False
            sys.setprofile(None)
            self.builtins.put_back()
            if callable(before):
                sys.setprofile(before)
            elif before is not None:  # cProfile: an object that is no function
                before.enable()
            if self._problem is not None:
                raise self._problem

    def pause(self) -> bool:
        """Nothing of interest happens until :meth:`go_on`; whether it watched."""
        if self._on:
            sys.setprofile(None)
        return self._on

    def go_on(self) -> None:
        """After a :meth:`pause` that gave true."""
        sys.setprofile(self._hook)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing of interest happens."""
        watched = self.pause()
        try:
            yield
        finally:
            if watched:
                self.go_on()

    # ------------------------------------------------------------------ events
    def _sieve(self) -> Callable[[FrameType, str, Any], None]:
        """The hook: drops what cannot be of interest, which is nearly all, at the least cost.

        Codes are known by their ids: hashing one takes its whole text.
        """
        users, strangers, followed, seen, asked = self._users, self._strangers, self._followed, self._seen, _ASKED

        def hook(frame: FrameType, event: str, arg: Any) -> None:
            if event == "c_call":
                if id(frame.f_code) not in users and arg.__name__ not in asked:
                    return
            elif event == "call":
                if id(frame.f_code) in strangers:
                    back = frame.f_back
                    if back is None or id(back.f_code) not in followed:
                        return
            elif event == "return":
                back = frame.f_back
                if back is None or id(back.f_code) not in users:
                    return
            else:
                return
            seen(frame, event, arg)

        return hook

    def _seen(self, frame: FrameType, event: str, arg: Any) -> None:
        try:
            if event == "call":
                facts = self._facts_of(frame)
                if facts is not None:
                    self._begins(frame, facts)
                elif frame.f_back is not None and self._guest_facts(frame, frame.f_back) is not None:
                    self._guest_begins(frame)
            elif event == "return":
                if type(arg) not in _OF_NO_INTEREST and frame.f_back is not None:
                    facts = self._facts.get(id(frame.f_back.f_code))
                    if facts is not None:
                        self._gives_back(frame, arg, facts)
                elif type(arg) in SIMPLE and frame.f_code.co_argcount == 0 and frame.f_back is not None:
                    self._tells(frame.f_back, frame.f_globals.get(frame.f_code.co_name))
            elif arg in _TELLING:
                self._tells(frame, arg)
            elif arg.__name__ in _ASKED:
                self._asks(frame, arg)
            elif _GETTER.fullmatch(arg.__name__):
                self._tells(frame, arg)
        except Exception as problem:
            self._problem = self._problem or problem  # raised again at the end: code on the way might swallow it
            raise

    def _facts_of(self, frame: FrameType) -> CodeFacts | None:
        code = frame.f_code
        key = id(code)
        if key in self._facts:
            return self._facts[key]
        self._alive.append(code)
        facts = self._facts[key] = None
        if is_user_code(code, frame.f_globals):
            facts = self._facts[key] = facts_of(code)
            self.codes.append(code)
            self._users.add(key)
            self._followed.add(key)
            self.walk.look_at_globals(frame.f_globals, facts)
            self.builtins.meet(code, frame.f_globals)
            if number_types.asks_for_identity(code, frame.f_globals):
                number_types.refuse_undecided(frame)
                self.on_identity()
            for name in facts.imports:
                self._imported(name, frame.f_globals, facts)
            if facts.environment:
                self.walk.look_at_environment(facts)
        else:
            self._strangers.add(key)
        return facts

    def _guest_facts(self, frame: FrameType, caller: FrameType) -> CodeFacts | None:
        """Of code of the standard library that the user's code calls, at once or through other such code."""
        by = id(caller.f_code)
        if self._facts.get(by) is None and self._guests.get(by) is None:
            return None
        code = frame.f_code
        key = id(code)
        if key not in self._guests:
            follow = is_standard(code.co_filename) and not code.co_filename.endswith(_NO_GUESTS)
            self._guests[key] = facts_of(code) if follow else None
            if follow:
                self._followed.add(key)
        return self._guests[key]

    def _guest_begins(self, frame: FrameType) -> None:
        """What its arguments keep is the user's: whether an event is set, the entries of a parser."""
        facts = facts_of(frame.f_code)
        for name in facts.arguments:
            value = frame.f_locals.get(name)
            if type(value) not in _OF_NO_INTEREST:
                self.walk.look_at(value, f"{name} of {frame.f_code.co_qualname}", facts)

    def _imported(self, name: str, scope: dict[str, Any], facts: CodeFacts) -> None:
        package = scope.get("__package__")
        for candidate in (name, name.partition(".")[0], f"{package}.{name}"):
            if candidate in sys.modules:
                self.walk.look_at(sys.modules[candidate], candidate, facts)

    def _begins(self, frame: FrameType, facts: CodeFacts) -> None:
        code, values = frame.f_code, frame.f_locals
        arguments = facts.arguments
        if arguments and arguments[0] in values:
            owner = values[arguments[0]]
            self.walk.look_at_method(owner, code.co_name, facts)
            if code.co_name in _CONSTRUCTORS:
                self.walk.sightings.was_made_here(owner)
        for name in arguments:
            value = values.get(name)
            if type(value) not in _OF_NO_INTEREST:
                self.walk.look_at(value, f"{name} of {code.co_qualname}", facts)

    def _gives_back(self, frame: FrameType, value: Any, facts: CodeFacts) -> None:
        if frame.f_code.co_filename in _OF_ATTRIBUTES:
            return  # reading an attribute, which is noted there
        look = self.walk.look_at if self._facts.get(id(frame.f_code)) is not None else self.walk.look_at_gift
        look(value, f"what {frame.f_code.co_qualname}() gives", facts)

    def _tells(self, caller: FrameType, function: Any) -> None:
        """A function of torch tells a frame how a switch stands."""
        if function in _TELLING:
            asked = _asking_frame(caller) is not None
        else:
            module, name = str(getattr(function, "__module__", None)), getattr(function, "__name__", "")
            asked = module.partition(".")[0] == "torch" and self._facts.get(id(caller.f_code)) is not None
            asked = asked and _GETTER.fullmatch(name) is not None
        if asked:
            self.getters[id(function)] = function

    def _asks(self, frame: FrameType, function: Any) -> None:
        """A frame calls a function of C whose answer may be another one each time."""
        asking: FrameType | None = None
        if function in _FROM_OUTSIDE:
            asking = _asking_frame(frame)
        elif (function in _CLOCKS or _is_clock_method(function)) and self._facts.get(id(frame.f_code)) is not None:
            asking = frame
        if asking is not None:
            raise CaptureError(
                f"{the_step()} calls {function.__qualname__}(): the graph would repeat one answer for ever; call it "
                f"in {batch_hook('start')} or {batch_hook('end')}",
                f"{asking.f_code.co_filename}:{asking.f_lineno}",
            )


def _asking_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the user's own code on whose behalf the standard library or NumPy asks, if it is one's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_OF_PYTHON) or file.startswith("<frozen importlib"):
            return None
        if is_user_code(frame.f_code, frame.f_globals):
            return None if is_installed(file) else frame
        if not (is_standard(file) or file.startswith("<frozen") or f"{os.sep}numpy{os.sep}" in file):
            return None
        frame = frame.f_back
    return None


def _is_clock_method(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and owner.__module__ == "datetime" and function.__name__ in _CLOCK_METHODS
