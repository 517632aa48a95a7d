"""All optimizers of a module with manual optimization, presented as one.

Groups are numbered through, and a parameter's state is in the optimizer that has the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class SeveralOptimizers(Optimizer):
    """Several optimizers presented as one, without state of its own.

    Args:
        parts: the live optimizers; they have no parameter in common.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.parts = tuple(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of all, one optimizer after the other."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state of all."""
        return _States(self)


class _States(Mapping[Tensor, Any]):
    """State by parameter, each in its optimizer."""

    def __init__(self, optimizer: SeveralOptimizers) -> None:
        self._owners = {p: part for part in optimizer.parts for g in part.param_groups for p in g["params"]}

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._owners[parameter].state[parameter]

    def __contains__(self, parameter: object) -> bool:
        owner = self._owners.get(parameter)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return owner is not None and parameter in owner.state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._owners[parameter].state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return (p for p, owner in self._owners.items() if p in owner.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers behind this one; the optimizer itself if it is not a :class:`SeveralOptimizers`."""
    return optimizer.parts if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def optimizer_of(optimizer: Optimizer, parameter: Tensor) -> Optimizer:
    """The one that has the parameter."""
    if not isinstance(optimizer, SeveralOptimizers):
        return optimizer
    for part in parts_of(optimizer):
        if any(p is parameter for group in part.param_groups for p in group["params"]):
            return part
    raise KeyError("no optimizer has this parameter")


def group_of(optimizer: Optimizer, index: int) -> tuple[Optimizer, int]:
    """The optimizer that has a group, and the group's number there."""
    for part in parts_of(optimizer):
        if index < len(part.param_groups):
            return part, index
        index -= len(part.param_groups)
    raise IndexError("no optimizer has this group")


def shared_parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Parameters that several of the optimizers have."""
    owners: dict[int, int] = {}
    found: list[Tensor] = []
    for index, optimizer in enumerate(optimizers):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if owners.setdefault(id(parameter), index) != index:
                found.append(parameter)
    return found
