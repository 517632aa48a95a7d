"""Loss scaling between graphs: the Trainer's ``GradScaler``, and its calls around hooks on gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError


class TrainersScaler:
    """The scaler of a Trainer's precision plugin, read anew each time.

    Args:
        trainer: the Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __call__(self) -> Any:
        """The scaler; None where the precision has none, or a disabled one."""
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        return scaler if scaler is not None and scaler.is_enabled() else None

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self._trainer.strategy.root_device

    def tensor(self, name: str) -> Tensor:
        """A tensor of the scaler for a graph: ``scale``, ``growth_tracker``, or ``found_inf`` of the last look."""
        if name == "found_inf":
            return private.found_inf(self(), self._trainer.optimizers[0])
        return private.scaler_tensors(self(), self.device)[name]

    def advice(self, optimizer: Optimizer) -> str | None:
        """Advice for an optimizer that could skip steps itself but was not asked to."""
        could = any(group.get("fused", True) in (None, False) for group in optimizer.param_groups)
        if self() is None or not could or private.takes_found_inf(optimizer):
            return None
        return (
            f"strategy='spmd' copies what {type(optimizer).__name__} is about to write, for loss scaling may skip the "
            "step; with fused=True the optimizer skips it itself, and nothing is copied"
        )

    def unscale(self, optimizer: Optimizer, *, on_ranks: bool) -> None:
        """Unscale gradients after the backward pass for hooks, as Lightning does, unless the optimizer's kernels do it.

        Args:
            optimizer: its ``p.grad`` are divided by the scale.
            on_ranks: whether other ranks hold other parts of gradients.

        Raises:
            ConfigurationError: a hook did it, and the optimizer would do it again.
        """
        scaler = self()
        if scaler is None:
            return
        if private.takes_found_inf(optimizer) and private.is_unscaled(scaler, optimizer):
            raise ConfigurationError(
                f"a hook calls scaler.unscale_, and the fused {type(optimizer).__name__} unscales gradients itself: "
                "take the call out, or use fused=False"
            )
        private.scaler_tensors(scaler, self.device)
        private.unscale_parts(scaler, optimizer)
        if on_ranks:
            dist.all_reduce(private.found_inf(scaler, optimizer), dist.ReduceOp.MAX)

    def step(self, optimizer: Optimizer) -> None:
        """``optimizer.step()``, if it must run itself."""
        scaler = self()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)

    def update(self) -> None:
        """After the step that followed :meth:`unscale`."""
        scaler = self()
        if scaler is not None:
            scaler.update()
