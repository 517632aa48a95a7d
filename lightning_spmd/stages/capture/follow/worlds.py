"""Calls of manual optimization, each noted as one, and the four worlds in which they are executed.

What ``backward`` and ``optimizer.step()`` do depends on the world. On fake tensors a step computes nothing; on copies
it works on a copy of the optimizer's state; under the recorder the swapped optimizer runs; eagerly it is the user's
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.optimizer.accumulation import BackwardPass, gradients_behind
from lightning_spmd.stages.capture.optimizer.given_closure import GivenClosure


class Update(NamedTuple):
    """One step of an optimizer.

    Args:
        parameters: of all its groups.
        gradients: theirs.
        settings: the groups without their parameters.
        evaluated: what the closure has returned that the user gives to a step which is none of torch's own; empty
            without a closure.
    """

    parameters: list[Tensor]
    gradients: Sequence[Tensor | None]
    settings: list[dict[str, Any]]
    evaluated: Sequence[Tensor | None]


class World(Protocol):
    """Tensors of one kind."""

    def backward(self, call: BackwardPass) -> tuple[Tensor | None, ...]:
        """``.grad`` of the leaves after a backward pass."""
        ...

    def step(self, number: int, update: Update) -> None:
        """One step of the optimizer of this number."""
        ...


class CallByHand:
    """The function of a note for manual optimization: a backward pass, or a step of an optimizer.

    Args:
        name: for the user.
        world: that of whoever calls it.
        number: of the optimizer; None: it is a backward pass.
    """

    keeps_shapes = True
    """No number among the arguments decides the size of anything."""

    def __init__(self, name: str, world: Callable[[], World], number: int | None = None) -> None:
        self.__name__, self.number = name, number
        self._world = world

    def __call__(self, *args: Any) -> Any:
        """Perform it where it is called."""
        return self.make(self._world(), *args)

    def make(self, world: World, *args: Any) -> Any:
        """Perform the call."""
        return world.backward(BackwardPass(*args)) if self.number is None else world.step(self.number, Update(*args))


class Computed:
    """A world in which gradients are computed, and ``.grad`` of tensors is not used.

    Args:
        others: tensors whose memory is somebody's.
    """

    def __init__(self, others: Callable[[], Iterable[Tensor]]) -> None:
        self._others = others

    def backward(self, call: BackwardPass) -> tuple[Tensor | None, ...]:
        """As in every world."""
        given = [*call.roots, *call.leaves, *(t for t in (*call.held, *(call.weights or ())) if t is not None)]
        return gradients_behind(call, {private.storage_of(t) for t in (*given, *self._others())})


class OnFakes(Computed):
    """The world of fake tensors. A step of an optimizer raises the versions of parameters and does nothing else."""

    def step(self, number: int, update: Update) -> None:
        """As in every world."""
        for parameter, gradient in zip(update.parameters, update.gradients, strict=True):
            if gradient is not None:
                torch.autograd.graph.increment_version(parameter)


class OnCopies(Computed):
    """The world of copies: optimizers work on copies of their states.

    Args:
        others: gives tensors whose memory is in use.
        optimizers: the live ones.
        states: the live optimizers' states.
    """

    def __init__(
        self, others: Callable[[], Iterable[Tensor]], optimizers: Sequence[Optimizer], states: Sequence[Any]
    ) -> None:
        super().__init__(others)
        self._optimizers, self._states = optimizers, states
        self._copies: dict[int, Any] = {}

    def step(self, number: int, update: Update) -> None:
        """As in every world."""
        if number not in self._copies:
            live, state = self._optimizers[number], self._states[number]
            self._copies[number] = private.copy_of_optimizer(live, update.parameters, state)
        _step(self._copies[number], update)


class Live:
    """The world of the live tensors and optimizers.

    Args:
        optimizers: the live ones.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def backward(self, call: BackwardPass) -> tuple[Tensor | None, ...]:
        """As in every world."""
        for leaf, gradient in zip(call.leaves, call.held, strict=True):
            leaf.grad = gradient
        inputs = call.leaves if call.named else None
        private.true_backward(call.roots, call.weights, call.retain, call.create, inputs=inputs)
        return tuple([leaf.grad for leaf in call.leaves])

    def step(self, number: int, update: Update) -> None:
        """As in every world."""
        _step(self._optimizers[number], update)


def _step(optimizer: Any, update: Update) -> None:
    """A step with the settings that the groups had when it was called; a scheduler may have stepped since."""
    for parameter, gradient in zip(update.parameters, update.gradients, strict=True):
        parameter.grad = gradient
    before = [dict(group) for group in optimizer.param_groups]
    for group, own in zip(optimizer.param_groups, update.settings, strict=True):
        group.update(own)
    try:
        private.step_without_hooks(optimizer, *(GivenClosure(optimizer, loss) for loss in update.evaluated))
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group.update(own)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """An argument that may be one tensor or a sequence, as a tuple."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def places_of_numbers(settings: Sequence[dict[str, Any]], place: int) -> set[tuple[Any, ...]]:
    """The places of the groups' numbers among a step's arguments. All may change in the next step.

    Args:
        settings: of the groups.
        place: of the settings among the arguments.
    """
    found: set[tuple[Any, ...]] = set()
    for index, group in enumerate(settings):
        for key, value in group.items():
            if type(value) in (int, float):
                found.add((0, place, index, key))
            elif type(value) is tuple:
                found |= {(0, place, index, key, i) for i, v in enumerate(value) if type(v) in (int, float)}
    return found
