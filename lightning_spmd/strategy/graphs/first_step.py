"""Creates the optimizer's state before the first step, so that the first step needs no graph of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor
from torch.optim import Optimizer

from lightning_spmd.errors import SPMDError
from lightning_spmd.ir.several_optimizers import parts_of
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages.capture.optimizer.newborn_state import (
    OnBirths,
    StateKey,
    births_of_first_step,
    constants_of,
    is_same_step,
    make_state,
)
from lightning_spmd.stages.capture.optimizer.optimizer_swap import is_torchs_own


def with_state(
    capture: Callable[[OnBirths | None], CapturedStep],
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    lay_out: Callable[[StateKey, Tensor], Tensor],
) -> CapturedStep:
    """The graph of all later steps also for the first one, whose state is created here.

    Args:
        capture: captures the step; hands over the state that it would create to what it is given.
        optimizer: the live optimizer.
        parameters: its parameters by name.
        lay_out: gives a whole tensor of state its placement in the plan.

    Returns:
        The graph of the first step alone where that is not like the others; the optimizer is as it was then.
    """
    born = _Born(optimizer, parameters, lay_out)
    if all(map(is_torchs_own, parts_of(optimizer))):
        with born.unless_this_fails():
            return capture(born.make)
    captured = capture(None)
    births = births_of_first_step(captured)
    if not births:
        return captured
    with contextlib.suppress(SPMDError), born.unless_this_fails():
        born.make(make_state(births, constants_of(captured)))
        steady = capture(None)
        if is_same_step(captured, births, steady):
            return steady
    born.forget()
    return captured


class _Born:
    """State that an optimizer got before its first step.

    Args:
        optimizer: the live optimizer.
        parameters: its parameters by name.
        lay_out: gives a whole tensor of state its placement in the plan.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        lay_out: Callable[[StateKey, Tensor], Tensor],
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._lay_out = lay_out
        self._entries: list[StateKey] = []

    def make(self, state: Mapping[StateKey, Tensor]) -> None:
        """The optimizer has it from here on."""
        for (owner, key), value in state.items():
            self._optimizer.state[self._parameters[owner]][key] = self._lay_out((owner, key), value)
            self._entries.append((owner, key))

    @contextlib.contextmanager
    def unless_this_fails(self) -> Iterator[None]:
        """The optimizer is as it was if what runs inside fails."""
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """The optimizer is as it was."""
        state = self._optimizer.state
        while self._entries:
            owner, key = self._entries.pop()
            parameter = self._parameters[owner]
            del state[parameter][key]
            if not state[parameter]:
                del state[parameter]
