"""Modules that optimize manually: ``p.grad`` as live state of their graphs."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.ir.layout import is_dense
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.parallel.state import StateMesh
from lightning_spmd.stages.capture.record.packing import parameter_names
from lightning_spmd.strategy.state.memory import gradients_of


class LiveGradients(MutableMapping[str, Tensor]):
    """``p.grad`` by the parameter's name. It lists no names, because graphs guard which gradients they need.

    Args:
        module: the LightningModule.
        optimizer: its optimizers, which may have parameters of their own.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer
        self._slots: dict[str, tuple[dict[str, Any], str]] = {}

    def _parameter(self, name: str) -> Tensor:
        if name not in self._slots:
            slots = private.tensor_slots(self._module).items()
            self._slots = {n: (table, key) for n, (table, key) in slots if isinstance(table[key], nn.Parameter)}
            names = parameter_names(self._module, self._optimizer)
            theirs = {names[id(p)]: p for group in self._optimizer.param_groups for p in group["params"]}
            self._slots |= {name: (theirs, name) for name in theirs.keys() - self._slots.keys()}
        table, key = self._slots[name]
        return table[key]

    def __getitem__(self, name: str) -> Tensor:
        gradient = self._parameter(name).grad
        if gradient is None:
            raise KeyError(f"{name} has no gradient")
        return gradient

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._parameter(name).grad = private.no_view(value)

    def __delitem__(self, name: str) -> None:
        self._parameter(name).grad = None

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def look_again(self, mesh: StateMesh | None) -> None:
        """Prepare for a step: gradients must have the memory layout that graphs expect."""
        if all(map(_lies_as_expected, self._module.parameters())):
            return
        for name, gradient in gradients_of(self._module, mesh).items():
            if gradient is not self[name]:
                self[name] = gradient


def held_gradients(module: Any, optimizer: Optimizer | None) -> MutableMapping[str, Tensor]:
    """The gradients between batches: a dictionary in automatic optimization, ``p.grad`` in manual optimization."""
    if optimizer is None or module.automatic_optimization:
        return {}
    return LiveGradients(module, optimizer)


def _lies_as_expected(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return True
    parts = isinstance(gradient, DTensor)  # its own part may lie otherwise
    return not parts and gradient.stride() == parameter.stride() and is_dense(TensorSpec.of(parameter))
