"""Modules that optimize by hand: ``p.grad`` as live state of their graphs, and what is done again after each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn

from lightning_spmd import _private_api as private
from lightning_spmd.parallel.state import StateMesh
from lightning_spmd.stages.capture.by_hand import OPTIMIZER_STEP
from lightning_spmd.stages.capture.stepped_schedulers import SCHEDULER_STEP
from lightning_spmd.strategy.memory import gradients_of


class LiveGradients(MutableMapping[str, Tensor]):
    """``p.grad`` by the parameter's name. It lists no names: graphs guard themselves which gradients they want.

    Args:
        module: the LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters: dict[str, Tensor] = {}

    def _parameter(self, name: str) -> Tensor:
        if name not in self._parameters:
            self._parameters = dict(self._module.named_parameters(remove_duplicate=False))
        return self._parameters[name]

    def __getitem__(self, name: str) -> Tensor:
        gradient = self._parameter(name).grad
        if gradient is None:
            raise KeyError(f"{name} has no gradient")
        return gradient

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._parameter(name).grad = value

    def __delitem__(self, name: str) -> None:
        self._parameter(name).grad = None

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def look_again(self, mesh: StateMesh | None) -> None:
        """A step is about to begin: parameters may be others, and gradients must lie as graphs expect them."""
        self._parameters = {}
        for name, gradient in gradients_of(self._module, mesh).items():
            if gradient is not self[name]:
                self[name] = gradient


def replayed(module: Any, method: str) -> Callable[..., None] | None:
    """What a recorded call of optimization by hand does after a run; None for calls of other kinds."""
    trainer = module.trainer

    def step(index: int, counted: bool) -> None:
        private.mark_stepped(trainer.optimizers[index])
        if counted:
            private.count_step(trainer.strategy, index)

    def schedule(index: int, *args: Any, **kwargs: Any) -> None:
        trainer.lr_scheduler_configs[index].scheduler.step(*args, **kwargs)

    return {OPTIMIZER_STEP: step, SCHEDULER_STEP: schedule}.get(method)
