"""Detects the features of a run at setup: one function a feature, which answers in the user's own names."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision, TorchSyncBatchNorm
from torch.distributed.tensor import DTensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.first import first
from lightning_spmd.ir.several_optimizers import shared_parameters
from lightning_spmd.messages import place_of
from lightning_spmd.stages.capture.optimizer.optimizer_swap import is_torchs_own
from lightning_spmd.stages.capture.user_code import is_installed, is_user_code
from lightning_spmd.strategy.user_hooks.fence import FencedHook


@dataclass(frozen=True)
class Context:
    """The inputs of detectors.

    Args:
        trainer: the Trainer.
        module: the LightningModule.
        optimizers: its optimizers.
        in_graphs: whether optimizer steps must be in graphs whatever their class, because state is sharded or in
            float32.
    """

    trainer: Any
    module: LightningModule
    optimizers: list[Any]
    in_graphs: bool = False


Detector = Callable[[Context], str | None]


# ---------------------------------------------------------------------- detectors
GRADIENT_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


def is_overridden(hook: str, instance: Any, parent: type) -> bool:
    """Whether a hook is another one than Lightning's. Lightning's own look takes a decorated one for that within it."""
    method = getattr(instance, hook)
    return getattr(method, "__func__", method) is not getattr(parent, hook)


def _overrides(context: Context, hooks: Iterable[str]) -> str | None:
    for hook in hooks:
        if is_overridden(hook, context.module, LightningModule):
            return f"{type(context.module).__name__}.{hook} is overridden{place_of(getattr(context.module, hook))}"
        for callback in context.trainer.callbacks:
            if hasattr(Callback, hook) and is_overridden(hook, callback, Callback):
                return f"callback {type(callback).__name__}.{hook} is overridden{place_of(getattr(callback, hook))}"
    return None


def _overridden(*hooks: str, by_hand: bool = False) -> Detector:
    """Finds hooks of the user's own; where a step optimizes by hand, those alone that are called then, too."""

    def detect(context: Context) -> str | None:
        return _overrides(context, hooks) if by_hand or context.module.automatic_optimization else None

    return detect


gradient_hooks = _overridden(*GRADIENT_HOOKS)
"""Hooks that look at gradients between backward and step."""
clipping_override = _overridden("configure_gradient_clipping")
zero_grad_override = _overridden("optimizer_zero_grad")
backward_override = _overridden("backward", by_hand=True)


def autograd_hooks(context: Context) -> str | None:
    """Hooks on the gradients of parameters or modules."""
    hooked = [f"{name}{place_of(hook)}" for name, hook in private.autograd_hooks(context.module)]
    return f"autograd hooks are registered on {', '.join(hooked[:3])}" if hooked else None


def optimizer_hooks(context: Context) -> str | None:
    """Hooks around ``optimizer.step()``."""
    return _step_hooks(context) if context.module.automatic_optimization else None


def _step_hooks(context: Context) -> str | None:
    hooked = [(o, hook) for o in context.optimizers for hook in private.step_hooks(o)]
    return f"{type(hooked[0][0]).__name__} has step hooks{place_of(hooked[0][1])}" if hooked else None


def needs_closure(context: Context) -> str | None:
    """Optimizers that call the closure themselves, such as LBFGS, where their step must be in a graph."""
    for optimizer in context.optimizers if context.in_graphs else ():
        parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
        if (
            parameters
            and parameters[0].default is inspect.Parameter.empty
            and parameters[0].kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        ):
            return f"{type(optimizer).__name__}.step{place_of(type(optimizer).step)} evaluates the closure itself"
    return None


def own_optimizer(context: Context) -> str | None:
    """An optimizer that is none of torch's own: its step is Python that runs, with the closure."""
    if context.in_graphs or not context.module.automatic_optimization:
        return None
    for optimizer in context.optimizers:
        if isinstance(optimizer, torch.optim.Optimizer) and not is_torchs_own(optimizer):
            step: Any = vars(optimizer).get("step", type(optimizer).step)
            return f"{type(optimizer).__name__}.step{place_of(step)} is no step of torch's own that is known"
    return None


def by_hand_eagerly(context: Context) -> str | None:
    """Features that prevent manual optimization (``automatic_optimization=False``) from being a graph."""
    module = context.module
    if module.automatic_optimization:
        return None
    found = _overrides(context, GRADIENT_HOOKS[1:]) or _step_hooks(context)  # nothing calls on_before_zero_grad
    if found is None and getattr(context.trainer.precision_plugin, "scaler", None) is not None:
        found = "the precision scales the loss"
    if found is None and not any(isinstance(o, torch.optim.Optimizer) for o in context.optimizers):
        found = f"configure_optimizers{place_of(module.configure_optimizers)} returned no optimizer"
    if found is None and (shared := shared_parameters(context.optimizers)):
        names = [name for name, p in module.named_parameters() if p is shared[0]]
        found = f"{first(names, 'name') if names else 'a parameter'} is in two optimizers"
    where = f"{type(module).__name__}.training_step{place_of(module.training_step)}"
    return None if found is None else f"{where} optimizes manually, and {found}"


def no_optimizer(context: Context) -> str | None:
    """Nothing that updates parameters."""
    real = [o for o in context.optimizers if isinstance(o, torch.optim.Optimizer)]
    if any(not private.is_no_optimizer(o) for o in real) or not context.module.automatic_optimization:
        return None
    return f"configure_optimizers{place_of(context.module.configure_optimizers)} returned no optimizer"


def dataloader_iter(context: Context) -> str | None:
    """A step that fetches its own data."""
    names = inspect.signature(context.module.training_step).parameters
    taken = f"training_step{place_of(context.module.training_step)} takes dataloader_iter"
    return taken if "dataloader_iter" in names else None


def detect_anomaly(context: Context) -> str | None:
    """Trainer's anomaly detection."""
    return "Trainer(detect_anomaly=True)" if private.detects_anomaly(context.trainer) else None


def foreign_scaler(context: Context) -> str | None:
    """Mixed precision with a scaler of a class that this package does not know."""
    scaler = getattr(context.trainer.precision_plugin, "scaler", None)
    known = scaler is None or type(scaler) in private.SCALERS
    return None if known else f"loss scaling by {type(scaler).__module__}.{type(scaler).__name__}"


def foreign_precision(context: Context) -> str | None:
    """Precision plugins that this package does not know."""
    known = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
    plugin = context.trainer.precision_plugin
    return None if type(plugin) in known else f"precision plugin {type(plugin).__name__}"


def foreign_accelerator(context: Context) -> str | None:
    """Devices that this package does not know."""
    kind = context.trainer.strategy.root_device.type
    return None if kind in ("cpu", "cuda") else f"accelerator {kind!r}"


def foreign_layer_sync(context: Context) -> str | None:
    """Layer-sync plugins that this package does not know."""
    sync = private.layer_sync(context.trainer.strategy)
    return None if sync is None or type(sync) is TorchSyncBatchNorm else f"layer sync plugin {type(sync).__name__}"


def pruning(context: Context) -> str | None:
    """Pruning, which replaces parameters."""
    return "callback ModelPruning" if any(isinstance(c, ModelPruning) for c in context.trainer.callbacks) else None


def scripted(context: Context) -> str | None:
    """Submodules that torch.jit compiled: they run without Python, and their tensors cannot be exchanged."""
    found = [name for name, part in context.module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    return f"{', '.join(found[:3])} is a torch.jit.ScriptModule" if found else None


def averaging_of_parts(context: Context) -> str | None:
    """Callbacks that average weights while weights are sharded."""
    if not any(isinstance(p, DTensor) for p in context.module.parameters()):
        return None
    kinds = (StochasticWeightAveraging, WeightAveraging)
    found = [type(c).__name__ for c in context.trainer.callbacks if isinstance(c, kinds)]
    return f"callback {found[0]}, with parameters in parts on the ranks" if found else None


# ---------------------------------------------------------------------- who reads p.grad
_CALLED_LATE = ("optimizer_step", "lr_scheduler_step", "transfer_batch_to_device", "state_dict")
_DEEP = 4
_MANY = 64
"""Items of a container that are looked at."""


def late_gradient_readers(context: Context) -> str | None:
    """What runs between two steps and whose code, or code of the user's that it reaches, names ``.grad``."""
    if not context.module.automatic_optimization:
        return None
    trainer, module = context.trainer, context.module
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    for owner in (module, *trainer.callbacks, *trainer.loggers, *schedulers, trainer.profiler):
        is_hooked = owner is module or isinstance(owner, Callback)
        for name, value in _attributes(owner).items():
            is_late = name.startswith("on_") and name not in GRADIENT_HOOKS[1:] or name in _CALLED_LATE
            for function in map(_function_in, _with_items([value]) if is_late or not is_hooked else ()):
                if function is not None and _is_the_users(function) and _reaches_grad(function, (owner, module)):
                    return f"{type(owner).__name__}.{name}{place_of(function)} reads p.grad"
    return None


_GRADIENT_UTILITIES = ("lightning.pytorch.utilities.grads", "torch.nn.utils.clip_grad")


def _is_the_users(function: FunctionType) -> bool:
    return is_user_code(function.__code__, function.__globals__)


def _reaches_grad(function: FunctionType, owners: Iterable[Any]) -> bool:
    """Whether a function, or one that it may call, names ``.grad``.

    Args:
        function: whose globals, modules, closure, defaults and objects are looked through, and those of what is found.
        owners: objects that it may call methods of.
    """
    waiting, seen = [function], set[FunctionType]()
    of_owners, known = [_attributes(owner) for owner in owners], set(map(id, owners))
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        if at.__module__ in _GRADIENT_UTILITIES:
            return True
        if not _is_the_users(at):
            continue
        names = set(_names(at.__code__))
        if "grad" in names:
            return True
        found: list[Any] = [cell.cell_contents for cell in at.__closure__ or () if cell != _EMPTY_CELL]
        found += [*(at.__defaults__ or ()), *(at.__kwdefaults__ or {}).values()]
        found += [sys.modules[name] for name in names if name in sys.modules]  # imported where it is used
        places: list[Mapping[str, Any]] = [at.__globals__, *of_owners]
        for _ in range(_DEEP):  # ``self.monitor.parts.read()``
            found += [place[name] for place in places for name in names if name in place]
            places = []
            for value in _with_items(found):
                inner = _function_in(value)
                if inner is not None:
                    waiting.append(inner)
                if type(value) is ModuleType:
                    places.append(vars(value))
                    continue
                value = value.__self__ if type(value) is MethodType else value
                if id(value) not in known and _has_users_code(value):
                    known.add(id(value))
                    attributes = _attributes(value)
                    places.append(attributes)
                    of_owners.append(attributes)
                    special = [v for name, v in attributes.items() if name.startswith("__")]  # called without a name
                    waiting += [f for f in map(_function_in, special) if f is not None]
            found = []
    return False


_EMPTY_CELL = CellType()


def _with_items(values: Iterable[Any]) -> Iterator[Any]:
    """Values, and what is in those that are containers."""
    for value in values:
        yield value
        if type(value) is dict:  # those of the user's own classes would run their code
            yield from itertools.islice(list(value.values()), _MANY)
        elif type(value) in (list, tuple, set, frozenset, deque):
            yield from itertools.islice(list(value), _MANY)


def _has_users_code(value: Any) -> bool:
    """Whether a value is an object or class of the user's, and of no installed package: those lead anywhere."""
    kinds = _kinds(value)
    functions = [f for kind in kinds for f in vars(kind).values() if isinstance(f, FunctionType)]
    return any(_is_the_users(f) and not is_installed(f.__code__.co_filename) for f in functions)


def _attributes(owner: Any) -> Mapping[str, Any]:
    """What an object or class has, without asking for it, which may run code."""
    places: list[Mapping[str, Any]] = [vars(kind) for kind in reversed(_kinds(owner))]
    if not issubclass(type(owner), type):
        with contextlib.suppress(AttributeError):  # it has slots
            places.append(object.__getattribute__(owner, "__dict__"))
            places.append(places[-1].get("_modules", {}))
    return {name: value for place in places for name, value in place.items()}


def _kinds(value: Any) -> tuple[type, ...]:
    return value.__mro__ if issubclass(type(value), type) else type(value).__mro__


def _function_in(value: Any) -> FunctionType | None:
    """The function behind a method, a property or what wraps one."""
    while (kind := type(value)) is not FunctionType:
        if kind is functools.partial:
            value = value.func
        elif kind in (MethodType, classmethod, staticmethod):
            value = value.__func__
        elif kind is property:
            value = value.fget
        elif kind is _CACHED or kind is FencedHook:
            value = value.__wrapped__
        else:
            return None
    return inspect.unwrap(value)  # type: ignore[return-value]


_CACHED = type(functools.lru_cache(len))


def _names(code: CodeType) -> Iterator[str]:
    """Names and texts, for ``getattr(p, "grad")``."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant
