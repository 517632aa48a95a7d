"""``pytorch_lightning`` is a second copy of Lightning with classes and a strategy registry of its own.

Its Trainer does not know this strategy and says only "invalid strategy name". So that the user learns the reason, the
name ``"spmd"`` is put into its registry too, with a factory that raises the explanation.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_spmd.errors import ConfigurationError

_WATCHED = "pytorch_lightning.strategies"
EXPLANATION = (
    "strategy='spmd' works with the package `lightning`, and this is a Trainer of `pytorch_lightning`, which has "
    "classes of its own: write `import lightning as L` and use L.Trainer, L.LightningModule (`pip install lightning`)"
)


def explain_in_pytorch_lightning() -> None:
    """Register the explanation now, or when ``pytorch_lightning`` gets imported."""
    loaded = sys.modules.get(_WATCHED)
    if loaded is not None:
        _register(loaded)
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def _explain(*_: Any, **__: Any) -> None:
    raise ConfigurationError(EXPLANATION)


def _register(strategies: ModuleType) -> None:
    strategies.StrategyRegistry.register("spmd", _explain, description=EXPLANATION, override=True)


class _Watcher(MetaPathFinder):
    """Waits for one module to be imported, then leaves."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
