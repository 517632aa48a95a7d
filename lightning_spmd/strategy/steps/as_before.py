"""Restores what an abandoned step changed in its module: attributes, plain containers, random states.

Such a step ran on placeholders and cannot continue, or belongs to another rank. Changes elsewhere (a file, a global)
stay; the caller tells the user so.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import nn

from lightning_spmd.ir.random_states import python_random_states, set_python_random_states
from lightning_spmd.strategy.state.kept_generators import pack_kept_generators, restore_kept_generators

_PLAIN = (list, dict, set, deque)
_MOST_INSIDE = 64
"""Of a container with more entries those that are containers themselves are not looked into."""
_OF_TORCH = set(vars(nn.Module())) - {"_buffers", "_parameters"}


class AsBefore:
    """How things are before a step.

    Args:
        module: whose step it is.
        tensors: whether its parameters and buffers are put back as well, should the step exchange one.
    """

    def __init__(self, module: nn.Module, *, tensors: bool) -> None:
        leaves_out = _OF_TORCH if tensors else _OF_TORCH | {"_buffers", "_parameters"}
        self._attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
        self._containers: dict[int, tuple[Any, Any]] = {}
        for _, attributes in self._attributes:
            for name, value in attributes.items():
                if isinstance(value, _PLAIN) and name not in leaves_out:
                    self._keep(value)
        self._random = python_random_states()
        self._module, self._own = module, pack_kept_generators(module)

    def _keep(self, container: Any) -> None:
        if id(container) in self._containers:
            return
        kept = dict(container) if isinstance(container, dict) else list(container)
        self._containers[id(container)] = container, kept
        if len(kept) <= _MOST_INSIDE:
            for item in kept.values() if isinstance(kept, dict) else kept:
                if isinstance(item, _PLAIN):
                    self._keep(item)

    def put_back(self) -> None:
        """Put them back."""
        for live, before in self._attributes:
            if len(live) != len(before) or any(live.get(name, before) is not value for name, value in before.items()):
                live.clear()
                live.update(before)
        for container, before in self._containers.values():
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(before)
        set_python_random_states(self._random)
        restore_kept_generators(self._own, self._module)
