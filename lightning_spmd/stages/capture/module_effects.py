"""What a captured step did to modules, whatever its code names, and to random numbers of Python: undone.

self.hooked = True; self.layer.register_forward_hook(...)        in a first forward: a second look shows the rest
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

from torch import nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_spmd.errors import CaptureError
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.code_facts import line_that_changes
from lightning_spmd.stages.capture.holders import Attributes, Entry
from lightning_spmd.stages.capture.kinds import BOOKKEEPING, TORCH_INTERNALS
from lightning_spmd.stages.capture.same_state import MISSING, is_simple, same_simple
from lightning_spmd.stages.capture.side_effects import Effect, advice, is_plain

_DRAWS = ("random", "randint", "randrange", "rand", "randn", "uniform", "choice", "shuffle", "permutation", "normal")
_REGISTER = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_backward_hook",
)  # fmt: skip
_OF_RECURRENT_LAYERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Their list of weights is made anew where these are other tensors; also in a subclass of the user's."""
_TABLES_OF_HOOKS = tuple(name for name in TORCH_INTERNALS if "hooks" in name)


class _Seen:
    """What a module has, and what is in its plain containers and tables of hooks."""

    def __init__(self, path: str, part: nn.Module) -> None:
        self.path, self.part = path, part
        self.attributes = dict(part.__dict__)
        own = not type(part).__module__.startswith("torch.")  # users name lists _outputs, torch keeps its own that way
        self.containers: dict[str, Any] = {
            name: value.copy()
            for name, value in part.__dict__.items()
            if name in _TABLES_OF_HOOKS
            or (type(value) in (list, dict, set) and (not name.startswith("_") or (own and type(value) is list)))
        }

    def changes(self) -> Iterator[ModuleEffect]:
        """What is otherwise now."""
        now = _Seen(self.path, self.part)
        for name in _TABLES_OF_HOOKS:
            if list(now.containers[name].items()) != list(self.containers[name].items()):
                yield ModuleEffect(self, now, name)
        if isinstance(self.part, Metric) or type(self.part).__module__.startswith("torch."):
            return
        torch_s = TORCH_INTERNALS | (_OF_RECURRENT_LAYERS if isinstance(self.part, nn.RNNBase) else set())
        for name in [*now.attributes, *(self.attributes.keys() - now.attributes.keys())]:
            if name not in BOOKKEEPING and name not in torch_s and self._differs(now, name):
                yield ModuleEffect(self, now, name)

    def _differs(self, now: _Seen, name: str) -> bool:
        before, value = self.attributes.get(name, MISSING), now.attributes.get(name, MISSING)
        changed = value is not before and not (is_simple(value) and is_simple(before) and same_simple(before, value))
        return changed or (name in self.containers and len(self.containers[name]) != len(now.containers[name]))

    def restore(self) -> None:
        """Make the module have this again."""
        for name in self.part.__dict__.keys() - self.attributes.keys():
            del self.part.__dict__[name]
        for name in self.attributes:
            self.put(name)

    def put(self, name: str) -> None:
        """Make the module have this again under one name."""
        value = self.attributes.get(name, MISSING)
        if value is MISSING:
            self.part.__dict__.pop(name, None)
            return
        if self.part.__dict__.get(name) is not value:
            self.part.__dict__[name] = value
        if (content := self.containers.get(name)) is None:
            return
        if isinstance(value, list):
            value[:] = content
        else:
            value.clear()
            value.update(content)


class ModuleEffect(Effect):
    """One attribute of a module that the step assigned or filled, or hooks that it registered.

    Args:
        before: what the module had.
        after: what the step left.
        name: of the attribute.
    """

    def __init__(self, before: _Seen, after: _Seen, name: str) -> None:
        self._before, self._after, self._name = before, after, name

    @property
    @override
    def is_plain(self) -> bool:
        if self._name in _TABLES_OF_HOOKS:  # registered once, and there to stay
            before, now = self._before.containers[self._name], self._after.containers[self._name]
            return before.items() <= now.items()
        return is_plain(self._after.attributes.get(self._name, MISSING))

    @override
    def undo(self) -> None:
        self._before.put(self._name)

    @override
    def redo(self) -> None:
        self._after.put(self._name)

    @override
    def places(self) -> list[Entry] | None:
        attributes = self._before.attributes, self._after.attributes
        if self._name in _TABLES_OF_HOOKS or self._after.attributes.get(self._name, MISSING) is MISSING:
            return None
        if attributes[0].get(self._name, MISSING) is attributes[1][self._name]:  # a container that was filled
            return None
        holder = Attributes(self._before.part, self._before.path or "self")
        holder.root = True
        return [holder.see(self._name)]

    @override
    def error(self, codes: Sequence[CodeType]) -> CaptureError:
        owner = f"{self._before.path}." if self._before.path else "self."
        if self._name in _TABLES_OF_HOOKS:
            what, names = f"registers hooks on {owner[:-1]}", _REGISTER
        else:
            what, names = f"changes {owner}{self._name}", (self._name,)
        return CaptureError(f"{the_step()} {what}; {advice()}", _line(codes, names))


@contextlib.contextmanager
def module_unchanged(module: nn.Module, codes: Sequence[CodeType]) -> Iterator[list[Effect]]:
    """Restore what the traced code did to the module and to random numbers.

    Yields a list that gets what had been changed, if the code went well otherwise.

    Args:
        module: the module.
        codes: what was run meanwhile.

    Raises:
        CaptureError: if Python's or NumPy's random numbers were drawn.
    """
    before = [_Seen(path, part) for path, part in module.named_modules()]
    python_random, numpy_random = random.getstate(), _numpy_state()
    effects = list[Effect]()
    try:
        yield effects
        if random.getstate() != python_random or not _same_numpy_state(numpy_random):
            raise CaptureError(
                f"{the_step()} draws from Python's `random` or NumPy: the graph would repeat one draw for ever; draw "
                "with torch (torch.rand, torch.randint), or in on_before_batch_transfer",
                _line(codes, _DRAWS),
            )
        effects += [change for seen in before for change in seen.changes()]
    finally:
        random.setstate(python_random)
        if numpy_random is not None:
            sys.modules["numpy"].random.set_state(numpy_random)
        for seen in before:
            seen.restore()


def _line(codes: Sequence[CodeType], names: Iterable[str]) -> str | None:
    """Where one of these names is assigned or mentioned."""
    return next((line for name in names if (line := line_that_changes(codes, name)) is not None), None)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _same_numpy_state(before: Any) -> bool:
    if before is None:
        return True
    now = sys.modules["numpy"].random.get_state()
    return bool(now[2] == before[2] and (now[1] == before[1]).all())
