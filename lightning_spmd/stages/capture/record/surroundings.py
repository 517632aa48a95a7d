"""Guards on what every step depends on: submodules, kinds of parameters, hooks, torch's switches."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.ir.guards import ValueGuard
from lightning_spmd.messages import place_of

_HOOKS = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "optimizer_zero_grad",
    "configure_gradient_clipping", "backward",
)  # fmt: skip


def submodules_guard(root: nn.Module) -> ValueGuard:
    """Whether every submodule is still the one that was captured: a hook may have replaced a layer."""
    tables = [(table, list(table.values())) for table in private.child_tables(root)]

    def unchanged() -> bool:
        return all(len(t) == len(kept) and all(map(operator.is_, t.values(), kept)) for t, kept in tables)

    return ValueGuard("whether the submodules are those of the captured graph", unchanged, True)


def settings_guard() -> ValueGuard:
    """The switches of torch that decide which operators Python code becomes."""
    readers = private.readers_of_settings()

    def settings() -> list[Any]:
        # a default device is a mode of torch functions, so without one nobody has set it
        modes = len(private.function_modes())
        return [modes, torch.get_default_device() if modes else None, *[read() for read in readers]]

    return ValueGuard("torch's settings (default device, determinism, float32 precision, ...)", settings, settings())


def hooks_guard(module: nn.Module, optimizer: Optimizer | None, trainer: Any) -> ValueGuard:
    """Hooks that a graph would skip: those of autograd, of the optimizer's step, of the module and of callbacks."""
    registered = private.prepared_hooks(module, optimizer)

    def hooks() -> list[Any]:
        kind = type(module)
        methods = [module.__dict__.get(name) or getattr(kind, name, None) for name in _HOOKS]
        return [*methods, *registered(), *map(id, trainer.callbacks)]

    def difference(before: list[Any], now: list[Any]) -> str:
        names = {id(callback): f"callback {type(callback).__name__}" for callback in trainer.callbacks}

        def told(hook: Any) -> str:
            if isinstance(hook, int):
                return names.get(hook, "a callback")
            return f"{getattr(hook, '__qualname__', type(hook).__name__)}{place_of(hook)}"

        sides = (("is new", now, before), ("is gone", before, now))
        parts = [
            (what, [told(hook) for hook in one if hook is not None and hook not in other]) for what, one, other in sides
        ]
        return "; ".join(f"{', '.join(found)} {what}" for what, found in parts if found) or "their order is another"

    return ValueGuard("the callbacks, or the hooks on gradients and steps", hooks, hooks(), difference)


def tensor_kinds_guard(module: nn.Module) -> ValueGuard:
    """Shapes and dtypes of parameters and buffers: a hook may put others there, or other data."""
    slots = private.tensor_slots(module)
    tables, keys = [table for table, _ in slots.values()], [key for _, key in slots.values()]

    def kinds() -> _Kinds:
        tensors = list(map(dict.get, tables, keys))
        present = [t for t in tensors if t is not None]
        return _Kinds(
            [
                [t is None for t in tensors],
                list(map(Tensor.size, present)),
                [t.dtype for t in present],
            ]
        )

    return ValueGuard("the shapes or dtypes of parameters and buffers", kinds, kinds())


def trained_guard(module: nn.Module, optimizer: Optimizer) -> ValueGuard:
    """A parameter that takes another one's place is not the one that the optimizer updates."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    slots = [(n, t, k, t[k]) for n, (t, k) in private.tensor_slots(module).items() if id(t[k]) in trained]

    def replaced() -> tuple[str, ...]:
        return tuple([name for name, tensors, key, parameter in slots if tensors.get(key) is not parameter])

    return ValueGuard("the parameters of the module that are the optimizer's", replaced, replaced())


class _Kinds:
    """The kinds of many tensors."""

    def __init__(self, kinds: list[Any]) -> None:
        self.kinds = kinds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kinds) and self.kinds == other.kinds

    def __repr__(self) -> str:
        return f"those of {len(self.kinds[0])} tensors"
