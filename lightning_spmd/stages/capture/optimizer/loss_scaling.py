"""Loss scaling in the graph: the user's own ``GradScaler`` on fake tensors, and a skipped step without a branch.

What Lightning's ``MixedPrecision`` does around a step, in its order::

    scaled = loss * scale                                  before backward
    found = non-finite anywhere in the gradients?          gradients divided by the scale, before clipping
    optimizer.step()                                       unless found
    scale, growth_tracker = update(scale, growth_tracker, found)

Python reads ``found`` there, once a step. Here it stays a tensor: torch's fused optimizers take it, and of all others
everything that the step wrote is taken back where it is 1 (:mod:`skipped_step`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.guards import ValueGuard
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.stages.capture.optimizer.given_closure import GivenClosure
from lightning_spmd.stages.capture.optimizer.optimizer_swap import is_torchs_own
from lightning_spmd.stages.capture.optimizer.skipped_step import StepTakenBack
from lightning_spmd.stages.capture.record.inputs import InputTable


class LossScaling:
    """A scaler in one capture; without one, every method does what an unscaled step does.

    Args:
        scaler: gives the user's now; None for a precision that scales nothing.
        device: where its tensors are, if it has none yet.
        inputs: where fake twins come from.
    """

    def __init__(self, scaler: Callable[[], Any], device: torch.device, inputs: InputTable) -> None:
        self.scaler = scaler()
        self.found: Tensor | None = None
        self._now = scaler
        self._device = device
        self._inputs = inputs
        self._scale: Tensor | None = None
        self._updates = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The scaler works on fake tensors inside."""
        if self.scaler is None:
            yield
            return
        live = private.scaler_tensors(self.scaler, self._device)
        fakes = {name: self._inputs.tensor(t, InputRole.LOSS_SCALE, (name,), name) for name, t in live.items()}
        self._scale = fakes["scale"]
        with private.scaler_works_on(self.scaler, fakes):
            yield

    def scaled(self, loss: Tensor) -> Tensor:
        """The scaled loss, with which the backward pass begins."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Any, *, looked_already: bool) -> None:
        """Divide gradients by the scale, and look for values that are not finite.

        Args:
            optimizer: whose gradients.
            looked_already: gradients come from hooks, behind that look; what it found is an input.

        Raises:
            CaptureError: the optimizer wants the scaler itself.
        """
        scaler = self.scaler
        if scaler is None:
            return
        if "grad_scaler" in inspect.signature(type(optimizer).step).parameters:
            raise CaptureError(f"{type(optimizer).__name__}.step takes the GradScaler itself, and may read its values")
        self._updates = not looked_already
        if looked_already:
            spec = TensorSpec((), (), torch.float32, self._device)
            self.found = self._inputs.fresh_tensor(spec, InputRole.LOSS_SCALE, ("found_inf",), "found_inf")
        elif private.takes_found_inf(optimizer):
            self.found = private.check_gradients(scaler, optimizer)
        else:
            scaler.unscale_(optimizer)
            self.found = private.found_inf(scaler, optimizer)

    def step(self, optimizer: Any, made: Callable[[], Sequence[Tensor]], loss: Tensor | None) -> None:
        """The update, which changes nothing where a gradient was not finite; then that of the scale.

        Args:
            optimizer: the user's.
            made: gives the state that the step made.
            loss: of the batch; None where the graph has none.
        """
        found = self.found
        if found is None:  # a GradScaler steps without a closure
            recorder = self._inputs.recorder
            given = {} if is_torchs_own(optimizer) else {"closure": GivenClosure(optimizer, loss, recorder)}
            type(optimizer).step(optimizer, **given)
            return
        if private.takes_found_inf(optimizer):
            with private.steps_with(optimizer, self._scale, found):
                type(optimizer).step(optimizer)
        else:
            back = StepTakenBack(self._inputs, found, type(optimizer).__name__)
            type(optimizer).step(optimizer)
            back.take(made())
        if self._updates:
            self.scaler.update()

    def guards(self) -> list[ValueGuard]:
        """Guards on the numbers that the graph has as constants."""

        def factors() -> tuple[Any, ...] | None:
            scaler = self._now()
            return None if scaler is None else (id(scaler), *private.scaler_factors(scaler))

        return [ValueGuard("the GradScaler, its factors or its interval", factors, factors())]
