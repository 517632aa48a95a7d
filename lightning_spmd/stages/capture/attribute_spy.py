"""Notes which attributes of which modules the traced code reads, whoever's code it is: so that only those are guarded.

A counter that a hook changes every step must not force a new graph unless training_step looks at it. While active, the
classes of the modules have a ``__getattribute__`` that takes notes; the modules keep their classes, for code may ask
for them (``type(layer) is nn.Linear``, ``type(self).count += 1``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torchmetrics import Metric


class AttributeSpy:
    """The notes.

    Args:
        root: the module; what is below it is watched too.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules = [(path, m) for path, m in root.named_modules() if not isinstance(m, Metric)]
        self.reads: dict[int, set[str]] = {id(m): set() for _, m in self.modules}
        self._watched: dict[type, Any] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Take notes while inside."""
        self._watched = {}
        try:
            self._watch({type(m) for _, m in self.modules})
            yield
        finally:
            for kind, own in self._watched.items():
                if own is None:
                    del kind.__getattribute__  # type: ignore[attr-defined]
                else:
                    kind.__getattribute__ = own  # type: ignore[method-assign, assignment]
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
        new = kinds - self._watched.keys()
        originals = {kind: _original(kind, self._watched) for kind in new}  # before the first of them is replaced
        for kind, original in originals.items():
            self._watched[kind] = vars(kind).get("__getattribute__")
            kind.__getattribute__ = self._noting(original)  # type: ignore[method-assign, assignment]

    def _noting(self, original: Any) -> Any:
        reads = self.reads

        def __getattribute__(instance: Any, name: str) -> Any:
            noted = reads.get(id(instance))
            if noted is not None:
                noted.add(name)
            return original(instance, name)

        return __getattribute__

    def forget(self, places: Iterable[tuple[str, str]]) -> None:
        """Take back notes, given as path of the module and name."""
        for path, module in self.modules:
            self.reads[id(module)] -= {name for owner, name in places if owner == path}


def _original(kind: type, watched: dict[type, Any]) -> Any:
    """The method that a class has of its own or inherits, when no class is watched."""
    for base in kind.__mro__:
        own = watched[base] if base in watched else vars(base).get("__getattribute__")
        if own is not None:
            return own
    return object.__getattribute__
