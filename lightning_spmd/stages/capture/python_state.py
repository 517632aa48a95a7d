"""Python state that training_step reads or changes: guards for what it reads, errors for what it changes.

Nothing may be baked into the graph silently. Simple attributes of every module are guarded by value; counters of the
Trainer become graph inputs; Python's and NumPy's random numbers, assignments to attributes and tensors that stay behind
on the module are errors that name the attribute.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.guards import ValueGuard
from lightning_spmd.stages.capture.host_scalar import Number, scalar_of
from lightning_spmd.stages.capture.recorder import user_location

_SIMPLE = (bool, int, float, str, bytes, type(None))
# Lightning's own: the hook that runs (set around each), and the Trainer, which TrainerView guards value by value
_BOOKKEEPING = frozenset({"_current_fx_name", "_trainer", "_fabric"})


def is_simple(value: Any) -> bool:
    """Whether equality of the value says everything about it."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_simple, value))
    return isinstance(value, _SIMPLE)


def _summary(value: Any) -> Any:
    """What a guard compares: the value itself, the simple contents of containers and configuration objects, or None."""
    if is_simple(value):
        return value
    if isinstance(value, Mapping):
        return tuple((k, v) for k, v in value.items() if is_simple(v))
    if isinstance(value, (list, set)):
        return tuple(v for v in value if is_simple(v))
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value) or not hasattr(value, "__dict__"):
        return None
    return tuple((k, v) for k, v in vars(value).items() if is_simple(v) and not k.startswith("_"))


class AttributeSpy:
    """Notes which attributes of which modules the traced code reads, so that only those are guarded.

    A counter that a hook changes every step must not force a new graph unless training_step looks at it. While active,
    every module's class is replaced by a subclass whose ``__getattribute__`` takes notes.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules = [(path, m) for path, m in root.named_modules() if not isinstance(m, Metric)]
        self.reads: dict[int, set[str]] = {id(m): set() for _, m in self.modules}
        self._root_name = type(root).__name__

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Take notes while inside."""
        original = [(m, type(m)) for _, m in self.modules]
        spied: dict[type, type] = {}
        try:
            for module, kind in original:
                module.__class__ = spied.setdefault(kind, self._spied(kind))
            yield
        finally:
            for module, kind in original:
                module.__class__ = kind

    def _spied(self, kind: type) -> type:
        reads = self.reads

        def __getattribute__(instance: Any, name: str) -> Any:
            noted = reads.get(id(instance))
            if noted is not None:
                noted.add(name)
            return kind.__getattribute__(instance, name)  # pyright: ignore[reportCallIssue]

        body = {"__getattribute__": __getattribute__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        return type(kind.__name__, (kind,), body)

    def forget(self, places: Iterable[tuple[str, str]]) -> None:
        """Guard none of these attributes, given as path of the module and name."""
        for path, module in self.modules:
            self.reads[id(module)] -= {name for owner, name in places if owner == path}

    def guards(self) -> list[ValueGuard]:
        """A guard for every attribute that was read and whose value can be compared."""
        found: list[ValueGuard] = []
        seen: set[int] = set()
        for path, module in self.modules:
            for name in sorted(self.reads[id(module)] - _BOOKKEEPING):
                value = module.__dict__.get(name, _MISSING)
                if isinstance(value, Tensor):
                    found.append(_tensor_guard(f"{path or 'self'}.{name}", module.__dict__, name))
                    continue
                if value is _MISSING or name in _TORCH_INTERNALS or _summary(value) in (None, ()) and value is not None:
                    continue
                if not is_simple(value):
                    if id(value) in seen:
                        continue
                    seen.add(id(value))
                read = _attribute_reader(module.__dict__, name)
                found.append(ValueGuard(f"{path or 'self'}.{name}", read, read()))
        return found

    def tensor_readers(self) -> dict[int, Callable[[], Tensor]]:
        """By ``id`` of each tensor attribute that was read: a function that gives what is in that place now."""
        readers: dict[int, Callable[[], Tensor]] = {}
        for _, module in self.modules:
            for name in self.reads[id(module)]:
                value = module.__dict__.get(name)
                if isinstance(value, Tensor):
                    readers[id(value)] = functools.partial(module.__dict__.__getitem__, name)
        return readers


def _tensor_guard(label: str, attributes: dict[str, Any], name: str) -> ValueGuard:
    """A hook may put another tensor there, of the same kind: the graph reads it anew each step."""

    def kind() -> Any:
        value = attributes.get(name)
        return (
            (tuple(value.shape), value.stride(), value.dtype, value.device)
            if isinstance(value, Tensor)
            else type(value)
        )

    return ValueGuard(label, kind, kind())


def submodules_guard(root: nn.Module) -> ValueGuard:
    """Whether every submodule is still the one that was captured: a hook may have replaced a layer."""
    tables = [(table, list(table.values())) for table in private.child_tables(root)]

    def unchanged() -> bool:
        return all(len(t) == len(kept) and all(map(operator.is_, t.values(), kept)) for t, kept in tables)

    return ValueGuard("whether the submodules are those of the captured graph", unchanged, True)


_MISSING = object()
_TORCH_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}


def _attribute_reader(attributes: dict[str, Any], name: str) -> Callable[[], Any]:
    if is_simple(attributes[name]):
        return lambda: attributes.get(name)
    return lambda: _summary(attributes.get(name))


class TrainerView:
    """The Trainer as training_step sees it during capture: every simple value read becomes an input or a guard.

    Args:
        trainer: the real Trainer.
        host_value: makes a number a graph input: ``(name, value) -> SymInt``.
    """

    def __init__(self, trainer: Any, host_value: Callable[[str, Number], Any]) -> None:
        object.__setattr__(self, "_real", trainer)
        object.__setattr__(self, "_host_value", host_value)
        object.__setattr__(self, "guards", {})

    def __getattr__(self, name: str) -> Any:
        real = object.__getattribute__(self, "_real")
        if name in ("logger", "loggers"):
            raise CaptureError(
                "training_step uses self.logger: that call would run once, at capture; use self.log, or call the "
                "logger in on_train_batch_end",
                user_location(),
            )
        value = getattr(real, name)
        if name in ("global_step", "current_epoch"):
            return object.__getattribute__(self, "_host_value")(f"trainer.{name}", value)
        if is_simple(value):
            guards = object.__getattribute__(self, "guards")
            guards.setdefault(name, ValueGuard(f"trainer.{name}", lambda: getattr(real, name), value))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        raise CaptureError(f"training_step assigns trainer.{name}; do it in a hook such as on_train_batch_end")

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] - isinstance(trainer, Trainer)
        return type(object.__getattribute__(self, "_real"))


@contextlib.contextmanager
def trainer_seen_as(module: nn.Module, view: Any) -> Iterator[None]:
    """Let every LightningModule below ``module`` see ``view`` as its Trainer."""
    holders = [m for m in module.modules() if m.__dict__.get("_trainer") is not None]
    saved = [m.__dict__["_trainer"] for m in holders]
    for holder in holders:
        holder.__dict__["_trainer"] = view
    try:
        yield
    finally:
        for holder, trainer in zip(holders, saved, strict=True):
            holder.__dict__["_trainer"] = trainer


def learning_rate_name(scheduler: int, group: int) -> str:
    """Name of the host value behind ``lr_schedulers()[scheduler].get_last_lr()[group]``."""
    return f"lr_schedulers.{scheduler}.last_lr.{group}"


@contextlib.contextmanager
def learning_rates_followed(trainer: Any, host_value: Callable[[str, Number], Any]) -> Iterator[None]:
    """``get_last_lr()`` of the Trainer's schedulers gives graph inputs; training steps like to log it."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    with contextlib.ExitStack() as stack:
        for index, scheduler in enumerate(schedulers):

            def lift(group: int, value: Any, index: int = index) -> Any:
                return host_value(learning_rate_name(index, group), value) if type(value) is float else value

            stack.enter_context(private.last_learning_rates_replaced(scheduler, lift))
        yield


def complain_about_new_tensors(module: nn.Module, known: set[str]) -> None:
    """Raise if the traced code registered parameters or buffers.

    Raises:
        CaptureError: naming them.
    """
    now = {name for name, (tensors, key) in private.tensor_slots(module).items() if tensors[key] is not None}
    added = sorted(now - known)
    if added:
        raise CaptureError(
            f"training_step registers {', '.join(added)}: that would happen once, at capture; register parameters and "
            "buffers in __init__ or configure_model"
        )


@contextlib.contextmanager
def python_state_unchanged(module: nn.Module) -> Iterator[None]:
    """Restore what the traced code did to Python state, and complain about it if it went well otherwise.

    Raises:
        CaptureError: if Python's or NumPy's random numbers were drawn, an attribute was assigned or a container on a
            module was changed.
    """
    before = [(path, part, dict(part.__dict__), _containers(part)) for path, part in module.named_modules()]
    python_random, numpy_random = random.getstate(), _numpy_state()
    try:
        yield
        if random.getstate() != python_random or not _same_numpy_state(numpy_random):
            raise CaptureError(
                "training_step draws from Python's `random` or NumPy: the graph would repeat one draw for ever; draw "
                "with torch (torch.rand, torch.randint), or in on_before_batch_transfer"
            )
        _complain_about_changes(before)
    finally:
        random.setstate(python_random)
        if numpy_random is not None:
            sys.modules["numpy"].random.set_state(numpy_random)
        for _, part, attributes, containers in before:
            _restore(part, attributes, containers)


def _containers(part: nn.Module) -> dict[str, Any]:
    own = not type(part).__module__.startswith("torch.")  # users name lists _outputs, torch keeps its own that way
    return {
        k: v.copy()
        for k, v in part.__dict__.items()
        if type(v) in (list, dict, set) and (not k.startswith("_") or (own and type(v) is list))
    }


def _complain_about_changes(before: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
    for path, part, attributes, containers in before:
        if isinstance(part, Metric) or type(part).__module__.startswith("torch."):  # LSTM caches its list of weights
            continue
        owner = f"{path}." if path else "self."
        for name, value in part.__dict__.items():
            if name in _BOOKKEEPING or name in _TORCH_INTERNALS:
                continue
            old = attributes.get(name)
            changed = value is not old and not (is_simple(value) and is_simple(old) and value == old)
            if changed or (name in containers and len(value) != len(containers[name])):
                raise CaptureError(
                    f"training_step changes {owner}{name}; that statement would run once, at capture, and never again. "
                    "Register tensors with register_buffer, or do it in on_train_batch_end"
                )
            if isinstance(value, private.FakeTensor) or scalar_of(value) is not None:
                raise CaptureError(
                    f"training_step leaves a tensor of the graph in {owner}{name}; register a buffer for it"
                )


def _restore(part: nn.Module, attributes: dict[str, Any], containers: dict[str, Any]) -> None:
    for name in [n for n in part.__dict__ if n not in attributes]:
        del part.__dict__[name]
    for name, value in attributes.items():
        if part.__dict__.get(name) is not value:
            part.__dict__[name] = value
    for name, content in containers.items():
        container = part.__dict__[name]
        if isinstance(container, list):
            container[:] = content
        else:
            container.clear()
            container.update(content)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _same_numpy_state(before: Any) -> bool:
    if before is None:
        return True
    now = sys.modules["numpy"].random.get_state()
    return bool(now[2] == before[2] and (now[1] == before[1]).all())


def tensors_on_other_devices(module: nn.Module, device: Any) -> list[str]:
    """Names of parameters, buffers and plain tensor attributes that are not on ``device``."""
    found = [n for n, t in [*module.named_parameters(), *module.named_buffers()] if t.device.type != device.type]
    for path, part in module.named_modules():
        if isinstance(part, Metric):
            continue
        found += [
            f"{path}.{name}".lstrip(".")
            for name, value in part.__dict__.items()
            if isinstance(value, Tensor) and value.ndim > 0 and value.device.type != device.type
        ]
    return found
