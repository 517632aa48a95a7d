"""Guards on what a module's parameters are: which of them are trained, by whom."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.ir.guards import ValueGuard


def frozen_guard(module: nn.Module) -> ValueGuard:
    """Freezing or unfreezing a parameter changes which gradients the graph computes."""
    slots = [(n, t, k) for n, (t, k) in private.tensor_slots(module).items() if isinstance(t[k], nn.Parameter)]

    def frozen() -> tuple[str, ...]:
        return tuple(
            [name for name, tensors, key in slots if (t := tensors.get(key)) is not None and not t.requires_grad]
        )

    return ValueGuard("the frozen parameters", frozen, frozen())


def trained_guard(module: nn.Module, optimizer: Optimizer) -> ValueGuard:
    """A parameter that takes another one's place is not the one that the optimizer updates."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    slots = [(n, t, k, t[k]) for n, (t, k) in private.tensor_slots(module).items() if id(t[k]) in trained]

    def replaced() -> tuple[str, ...]:
        return tuple([name for name, tensors, key, parameter in slots if tensors.get(key) is not parameter])

    return ValueGuard("the parameters of the module that are the optimizer's", replaced, replaced())
