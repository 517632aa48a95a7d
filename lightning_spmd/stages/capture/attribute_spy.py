"""Notes which attributes of which modules the traced code reads, whoever's code it is: so that only those are guarded.

A counter that a hook changes every step must not force a new graph unless training_step looks at it. While active, the
classes of the modules have a ``__getattribute__`` that takes notes; the modules keep their classes, for code may ask
for them (``type(layer) is nn.Linear``, ``type(self).count += 1``).

It also notes what the user's code assigns, even if that is what was there: after a step of another kind it may not be.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_spmd.stages.capture.same_state import MISSING
from lightning_spmd.stages.capture.user_code import is_user_file


class AttributeSpy:
    """The notes.

    Args:
        root: the module; what is below it is watched too.

    Attributes:
        reads: names by the ``id`` of the module.
        before: what was there before the first assignment, by path of the module and name.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules = [(path, m) for path, m in root.named_modules() if not isinstance(m, Metric)]
        self.reads: dict[int, set[str]] = {id(m): set() for _, m in self.modules}
        self.before: dict[tuple[str, str], Any] = {}
        self._paths = {id(module): path for path, module in self.modules}
        self._watched: dict[type, dict[str, Any]] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Take notes while inside."""
        self._watched = {}
        try:
            self._watch({type(m) for _, m in self.modules})
            yield
        finally:
            for kind, methods in self._watched.items():
                for name, own in methods.items():
                    if own is None:
                        delattr(kind, name)
                    else:
                        setattr(kind, name, own)
            self._watched = None

    def add(self, module: nn.Module) -> None:
        """Watch a module that was found elsewhere, from now on."""
        if id(module) not in self.reads and not isinstance(module, Metric):
            self.reads[id(module)] = set()
            self.modules.append(("", module))
            self._watch({type(module)})

    def _watch(self, kinds: set[type]) -> None:
        if self._watched is None:
            return
        noting = {"__getattribute__": self._noting, "__setattr__": self._noting_writes}
        new = kinds - self._watched.keys()
        # before the first of them is replaced
        originals = {(kind, name): _original(kind, name, self._watched) for kind in new for name in noting}
        for kind in new:
            self._watched[kind] = {name: vars(kind).get(name) for name in noting}
            for name, make in noting.items():
                setattr(kind, name, make(originals[kind, name]))

    def _noting(self, original: Any) -> Any:
        reads = self.reads

        def __getattribute__(instance: Any, name: str) -> Any:
            noted = reads.get(id(instance))
            if noted is not None:
                noted.add(name)
            return original(instance, name)

        return __getattribute__

    def _noting_writes(self, original: Any) -> Any:
        paths, before = self._paths, self.before

        def __setattr__(instance: Any, name: str, value: Any) -> None:
            path = paths.get(id(instance))
            if path is not None and is_user_file(sys._getframe(1).f_code.co_filename):  # noqa: SLF001 - who assigns
                before.setdefault((path, name), object.__getattribute__(instance, "__dict__").get(name, MISSING))
            original(instance, name, value)

        return __setattr__

    def forget(self, places: Iterable[tuple[str, str]]) -> None:
        """Take back notes, given as path of the module and name."""
        for path, module in self.modules:
            self.reads[id(module)] -= {name for owner, name in places if owner == path}


def _original(kind: type, name: str, watched: dict[type, dict[str, Any]]) -> Any:
    """The method that a class has of its own or inherits, when no class is watched."""
    for base in kind.__mro__:
        own = watched[base][name] if base in watched else vars(base).get(name)
        if own is not None:
            return own
    return getattr(object, name)
