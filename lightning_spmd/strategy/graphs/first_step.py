"""Creates the optimizer's state before the first step, so that the first step needs no graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor
from torch.optim import Optimizer

from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages.capture.optimizer.newborn_state import OnBirths, StateKey


def with_state(
    capture: Callable[[OnBirths], CapturedStep],
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    lay_out: Callable[[StateKey, Tensor], Tensor],
) -> CapturedStep:
    """The graph of all later steps also for the first one, whose state is created here.

    Args:
        capture: captures the step, and hands over the state that it would create to what it is given.
        optimizer: the live optimizer.
        parameters: its parameters by name.
        lay_out: gives a whole tensor of state its placement in the plan.
    """
    made: list[StateKey] = []

    def make(state: Mapping[StateKey, Tensor]) -> None:
        for (owner, key), value in state.items():
            optimizer.state[parameters[owner]][key] = lay_out((owner, key), value)
            made.append((owner, key))

    try:
        return capture(make)
    except BaseException:
        _forget(made, optimizer, parameters)
        raise


def _forget(made: Iterable[StateKey], optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
    for owner, key in made:
        parameter = parameters[owner]
        del optimizer.state[parameter][key]
        if not optimizer.state[parameter]:
            del optimizer.state[parameter]
