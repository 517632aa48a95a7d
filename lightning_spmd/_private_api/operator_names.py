"""What torch says about its operators: what a call writes, shares, draws."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload


def is_operator(target: Any) -> bool:
    """Whether a node calls an operator of the dispatcher. Without it a function of Python would be taken for one."""
    return type(target) is OpOverload


def returns_alias(func: Any) -> bool:
    """Whether the operator's result shares memory with an argument. Without it a lost write could not be refused."""
    return any(r.alias_info is not None for r in func._schema.returns)


def is_mutating(func: Any) -> bool:
    """Whether the operator's schema writes into an argument. Without it hazards could not be verified."""
    return func._schema.is_mutable


def decide_shapes(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments on which more than values may depend: sizes, dimensions; without it shapes would freeze."""
    values_alone = {"aten::roll": ("shifts",), "aten::select": ("index",), "lightning_spmd::seed": ("seed",)}
    free = values_alone.get(func._schema.name, ())
    sized = func._schema.name in ("aten::arange", "aten::linspace", "aten::logspace")
    values = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    kinds = {a.name: str(a.type) for a in func._schema.arguments if a.name in values and a.name not in free}
    return [values[name] for name, kind in kinds.items() if sized or "int" in kind or "bool" in kind]


def is_random(func: Any) -> bool:
    """Whether the operator draws random numbers (dropout masks must differ a shard and repeat under recomputation)."""
    return torch.Tag.nondeterministic_seeded in func.tags


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call draws random numbers: attention without dropout is tagged as random, and draws none.

    Without it such a call would keep its place among the draws, choose a random stream and be kept under activation
    checkpointing, whose whole point is to make it again.
    """
    return is_random(func) and not any(_is_zero(func, name, args, kwargs) for name in ("dropout_p", "dropout"))


def _is_zero(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            value = args[index] if index < len(args) else kwargs.get(name, argument.default_value)
            return type(value) in (int, float) and value == 0
    return False


def is_composite(func: Any) -> bool:
    """Whether an operator is made of others; inference mode does not take it apart. Its schema knows no aliases."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def entry_of(func: Any) -> Any:
    """The C function behind an operator; anything else as it is. Without it each call goes through a Python frame."""
    return func._op if type(func) is OpOverload else func


@functools.cache
def method_binding_of(func: Any) -> Any:
    """The C method of tensors with the operator's name, or None. Without it each call goes through the boxed entry."""
    name = func._schema.name.rpartition("::")[2]
    method = vars(torch._C.TensorBase).get(name)
    return method if method is not None and getattr(torch.Tensor, name, None) is method else None


@functools.cache
def function_bindings_of(func: Any) -> list[Any]:
    """The C functions with the operator's name. Without them each call goes through the boxed entry."""
    name = func._schema.name.rpartition("::")[2]
    bindings: Any = torch._C
    found = [getattr(part, name, None) for part in (bindings._VariableFunctions, bindings._nn)]
    return [function for function in found if function is not None]
