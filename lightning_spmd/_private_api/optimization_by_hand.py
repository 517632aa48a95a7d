"""What ``training_step`` calls to optimize manually, for the time of a capture."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch


class backward_replaced:
    """``torch.autograd.backward``, to which ``Tensor.backward`` hands everything on, is another function inside.

    Autograd's own accumulation decides by reference counts whether ``p.grad`` is a copy, and a recorder holds
    references.

    Args:
        backward: that.
    """

    def __init__(self, backward: Callable[..., None]) -> None:
        self._backward = backward

    def __enter__(self) -> None:
        self._before = torch.autograd.backward
        torch.autograd.backward = self._backward  # pyright: ignore[reportAttributeAccessIssue]

    def __exit__(self, *error: object) -> None:
        torch.autograd.backward = self._before


true_backward = torch.autograd.backward
"""As torch has it, whatever stands in its place."""


def step_without_hooks(optimizer: Any, *closure: Any) -> None:
    """``optimizer.step()`` of the class, without what is registered around steps: its profiling, counting, hooks.

    ``Optimizer.__init__`` puts a wrapper of its own around each class's ``step`` (``profile_hook_step``) and says so.
    """
    step = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, *closure)


def copy_of_optimizer(optimizer: Any, parameters: list[Any], state: Any) -> Any:
    """Another optimizer for other parameters, with a copy of the state.

    Args:
        optimizer: the live one.
        parameters: in place of its own, in order of the groups.
        state: the live one's.
    """
    made: Any = object.__new__(type(optimizer))
    vars(made).update({name: value for name, value in vars(optimizer).items() if name not in ("step", "state")})
    left, states = iter(parameters), {}
    made.param_groups = []
    for group in optimizer.param_groups:
        pairs = list(zip(group["params"], left, strict=False))
        for own, other in pairs:
            if own in state:
                states[other] = {key: _copied(value) for key, value in state[own].items()}
        made.param_groups.append({**group, "params": [other for _, other in pairs]})
    made.state = defaultdict(dict, states)
    return made


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
