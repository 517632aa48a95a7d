"""Calls of manual optimization, each noted as one, and the four worlds in which they are executed.

What ``backward`` and ``optimizer.step()`` do depends on the world. On fake tensors a step computes nothing; on copies
it works on a copy of the optimizer's state; under the recorder the swapped optimizer runs; eagerly it is the user's
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.optimizer.accumulation import gradients_behind
from lightning_spmd.stages.capture.optimizer.given_closure import GivenClosure

Roots = tuple[Tensor, ...]
Gradients = Sequence[Tensor | None]
Evaluated = Sequence[Tensor | None]
Settings = list[dict[str, Any]]
"""The parameter groups of an optimizer without their parameters."""


class World(Protocol):
    """Tensors of one kind."""

    def backward(
        self, roots: Roots, weights: Any, leaves: list[Tensor], held: Gradients, retain: bool, create: bool, named: bool
    ) -> tuple[Tensor | None, ...]:
        """``.grad`` of the leaves after a backward pass.

        Args:
            roots: on what ``backward`` is called.
            weights: gradients of the roots.
            leaves: whose gradients it gives.
            held: what their ``.grad`` is before.
            retain: the graph is used again.
            create: the gradients have a history of their own.
            named: the leaves are those that the call names.
        """
        ...

    def step(
        self, number: int, parameters: list[Tensor], gradients: Gradients, settings: Settings, evaluated: Evaluated
    ) -> None:
        """One step of an optimizer.

        Args:
            number: of the optimizer.
            parameters: of all its groups.
            gradients: theirs.
            settings: of the groups.
            evaluated: what the closure has returned that the user gives to a step which is none of torch's own; empty
                without a closure.
        """
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
        return world.backward(*args) if self.number is None else world.step(self.number, *args)


class Computed:
    """A world in which gradients are computed, and ``.grad`` of tensors is not used.

    Args:
        others: tensors whose memory is somebody's.
    """

    def __init__(self, others: Callable[[], Iterable[Tensor]]) -> None:
        self._others = others

    def backward(
        self, roots: Roots, weights: Any, leaves: list[Tensor], held: Gradients, retain: bool, create: bool, named: bool
    ) -> tuple[Tensor | None, ...]:
        """As in every world."""
        given = [*roots, *leaves, *(t for t in (*held, *(weights or ())) if t is not None)]
        taken = {private.storage_of(t) for t in (*given, *self._others())}
        return gradients_behind(roots, weights, leaves, held, taken, retain=retain, create=create)


class OnFakes(Computed):
    """The world of fake tensors. A step of an optimizer raises the versions of parameters and does nothing else."""

    def step(
        self, number: int, parameters: list[Tensor], gradients: Gradients, settings: Settings, evaluated: Evaluated
    ) -> None:
        """As in every world."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
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

    def step(
        self, number: int, parameters: list[Tensor], gradients: Gradients, settings: Settings, evaluated: Evaluated
    ) -> None:
        """As in every world."""
        if number not in self._copies:
            self._copies[number] = private.copy_of_optimizer(self._optimizers[number], parameters, self._states[number])
        _step(self._copies[number], parameters, gradients, settings, evaluated)


class Live:
    """The world of the live tensors and optimizers.

    Args:
        optimizers: the live ones.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def backward(
        self, roots: Roots, weights: Any, leaves: list[Tensor], held: Gradients, retain: bool, create: bool, named: bool
    ) -> tuple[Tensor | None, ...]:
        """As in every world."""
        for leaf, gradient in zip(leaves, held, strict=True):
            leaf.grad = gradient
        private.true_backward(roots, weights, retain, create, inputs=leaves if named else None)
        return tuple([leaf.grad for leaf in leaves])

    def step(
        self, number: int, parameters: list[Tensor], gradients: Gradients, settings: Settings, evaluated: Evaluated
    ) -> None:
        """As in every world."""
        _step(self._optimizers[number], parameters, gradients, settings, evaluated)


def _step(
    optimizer: Any, parameters: list[Tensor], gradients: Gradients, settings: Settings, evaluated: Evaluated
) -> None:
    """A step with the settings that the groups had when it was called; a scheduler may have stepped since."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    before = [dict(group) for group in optimizer.param_groups]
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    try:
        private.step_without_hooks(optimizer, *(GivenClosure(optimizer, loss) for loss in evaluated))
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group.update(own)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """An argument that may be one tensor or a sequence, as a tuple."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def places_of_numbers(settings: Settings, place: int) -> set[tuple[Any, ...]]:
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
