"""Creates the optimizer's state before the first step, so that the first step needs no graph of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor
from torch.optim import Optimizer

from lightning_spmd.errors import SPMDError
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages.capture.optimizer.newborn_state import StateKey, is_same_step, make_state, newborn_state


def with_state(
    captured: CapturedStep,
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    lay_out: Callable[[StateKey, Tensor], Tensor],
    again: Callable[[], CapturedStep],
) -> CapturedStep:
    """Replace the graph of the first step by the graph of all later steps, and create the state that it needs.

    Args:
        captured: the step, captured while the optimizer had no state for some parameters.
        optimizer: the live optimizer.
        parameters: its parameters by name.
        lay_out: gives a whole tensor of state its placement in the plan.
        again: captures the step once more.

    Returns:
        What ``again`` gave; ``captured`` where the first step is not like the others, and the optimizer is as it was.
    """
    births = newborn_state(captured)
    if not births:
        return captured
    for (owner, key), value in make_state(captured, births).items():
        optimizer.state[parameters[owner]][key] = lay_out((owner, key), value)
    steady = None
    try:
        with contextlib.suppress(SPMDError):
            found = again()
            steady = found if is_same_step(captured, births, found) else None
    finally:
        if steady is None:
            _forget(births, optimizer, parameters)
    return captured if steady is None else steady


def _forget(births: Iterable[StateKey], optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
    for owner, key in births:
        parameter = parameters[owner]
        del optimizer.state[parameter][key]
        if not optimizer.state[parameter]:
            del optimizer.state[parameter]
