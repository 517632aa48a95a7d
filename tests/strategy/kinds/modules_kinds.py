"""Modules and what hangs on them."""

import copy
import functools
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode

from tests.strategy.kinds.base_kinds import VALUES, Config, Kind


class TeacherInList(Kind):
    """A teacher that is no submodule, replaced by a copy now and then."""

    def start(self) -> None:
        self.teachers = [nn.Linear(6, 3)]

    def read(self) -> Any:
        with torch.no_grad():
            return self.teachers[0](torch.ones(1, 6)).mean() + 1.0

    def write(self, value: float) -> None:
        teacher = copy.deepcopy(self.teachers[0])
        with torch.no_grad():
            teacher.weight.mul_(value)
        self.teachers[0] = teacher


class ModuleAttribute(Kind):
    def start(self) -> None:
        self.activation = nn.LeakyReLU(0.1)

    def read(self) -> Any:
        return self.activation(torch.tensor(-1.0)) + 2.0

    def write(self, value: float) -> None:
        self.activation.negative_slope = value


class ModuleSwapped(Kind):
    def start(self) -> None:
        self.activation: nn.Module = nn.Tanh()

    def read(self) -> Any:
        return self.activation(torch.tensor(0.7)) + 1.0

    def write(self, value: float) -> None:
        self.activation = {0.5: nn.ReLU, 1.5: nn.Sigmoid}.get(value, nn.Tanh)()


class TrainingFlag(Kind):
    def start(self) -> None:
        self.norm = nn.BatchNorm1d(6)

    def read(self) -> Any:
        return self.norm(torch.linspace(0, 1, 12).reshape(2, 6))[0, 0] + 2.0

    def write(self, value: float) -> None:
        self.norm.train(value != 0.5)


class RequiresGradient(Kind):
    def start(self) -> None:
        self.gain = nn.Parameter(torch.ones(()))

    def read(self) -> Any:
        return self.gain

    def write(self, value: float) -> None:
        self.layer.bias.requires_grad_(value != 0.5)


class PatchedForward(Kind):
    def start(self) -> None:
        self.gate = nn.Identity()

    def read(self) -> Any:
        return self.gate(torch.tensor(1.0))

    def write(self, value: float) -> None:
        self.gate.forward = lambda x: x * value  # type: ignore[method-assign, assignment]


class ForwardHook(Kind):
    """Hooks that come and go."""

    def start(self) -> None:
        self.gate, self.handles = nn.Identity(), []

    def read(self) -> Any:
        return self.gate(torch.tensor(1.0))

    def write(self, value: float) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles[:] = [self.gate.register_forward_hook(lambda m, args, out: out * value)]


class PreHook(ForwardHook):
    def write(self, value: float) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles[:] = [self.gate.register_forward_pre_hook(lambda m, args: (args[0] * value,))]


class BackwardHook(ForwardHook):
    """Of a layer: what it makes of gradients; it comes in mid-run."""

    def write(self, value: float) -> None:
        if value == VALUES[0]:
            return
        for handle in self.handles:
            handle.remove()
        self.handles[:] = [
            self.layer.register_full_backward_hook(lambda m, into, out: into),
            self.layer.register_full_backward_pre_hook(lambda m, out: (out[0] * value,)),
        ]

    def on_train_end(self) -> None:
        for handle in self.handles:
            handle.remove()


class HookState(Kind):
    """A hook that is always there and reads what changes."""

    def start(self) -> None:
        self.gate, crit = nn.Identity(), Config()
        self.crit = crit
        self.gate.register_forward_hook(lambda m, args, out: out * crit.value)

    def read(self) -> Any:
        return self.gate(torch.tensor(1.0))

    def write(self, value: float) -> None:
        self.crit.value = value


class GlobalHook(ForwardHook):
    """A hook of all modules."""

    def write(self, value: float) -> None:
        self.on_train_end()
        self.handles[:] = [
            torch.nn.modules.module.register_module_forward_hook(
                lambda m, args, out: out * value if isinstance(m, nn.Identity) else None
            )
        ]

    def on_train_end(self) -> None:
        for handle in self.handles:
            handle.remove()


class ParameterGradientHook(ForwardHook):
    """A hook on a parameter's gradient that comes in mid-run."""

    def write(self, value: float) -> None:
        if value == VALUES[0]:
            return
        for handle in self.handles:
            handle.remove()
        self.handles[:] = [self.layer.weight.register_hook(lambda gradient: gradient * value)]


class GlobalBackwardHook(BackwardHook):
    """A hook on the backward passes of all modules."""

    def write(self, value: float) -> None:
        if value != VALUES[0]:
            self.on_train_end()
            self.handles[:] = [
                torch.nn.modules.module.register_module_full_backward_hook(
                    lambda m, into, out: tuple(g if g is None else g * value for g in into)
                )
            ]


class Parametrized(Kind):
    """A layer whose weight becomes a function of others in mid-run."""

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 1.0

    def write(self, value: float) -> None:
        if value == 0.5:
            parametrize.register_parametrization(self.layer, "bias", nn.Softplus())
        elif value == 1.5:
            parametrize.remove_parametrizations(self.layer, "bias")


class SwappedData(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 1.0

    def write(self, value: float) -> None:
        self.layer.weight.data = torch.full_like(self.layer.weight, value)


class RegisteredLate(Kind):
    """A parameter and a buffer of the module's own that come in mid-run."""

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return self.gain * self.shift if hasattr(self, "gain") else 1.0

    def write(self, value: float) -> None:
        if value != VALUES[0]:
            self.gain = nn.Parameter(torch.tensor(value))
            self.register_buffer("shift", torch.tensor(value))


class GrowingParameterList(Kind):
    def start(self) -> None:
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(()))])

    def read(self) -> Any:
        return sum(self.gains) / len(self.gains)

    def write(self, value: float) -> None:
        if value != VALUES[0]:
            self.gains.append(nn.Parameter(torch.tensor(value)))
            self.optimizers().add_param_group({"params": [self.gains[-1]]})  # type: ignore[union-attr]


class ModuleListOrder(Kind):
    def start(self) -> None:
        self.blocks = nn.ModuleList([nn.Hardtanh(-1.0, 0.5), nn.LeakyReLU(0.1), nn.Softplus()])

    def read(self) -> Any:
        x = torch.tensor(0.8)
        for block in self.blocks:
            x = block(x)
        return x

    def write(self, value: float) -> None:
        if value != VALUES[0]:
            self.blocks = nn.ModuleList([*self.blocks[1:], self.blocks[0]])


class Pruned(Kind):
    """Pruning puts a mask in as a buffer and a hook that applies it."""

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 1.0

    def write(self, value: float) -> None:
        if value == 0.5:
            prune.l1_unstructured(self.layer, "bias", amount=1)
        elif value == 1.5:
            prune.remove(self.layer, "bias")


def _scale_gradient(module: Kind, value: float) -> None:
    """Too deep in the hook's calls for the look at setup whether hooks read gradients."""
    assert module.layer.weight.grad is not None
    module.layer.weight.grad.mul_(value)


_UNSEEN = [[_scale_gradient]]  # where a look at the code of hooks, before the run, does not find it


class OverridesLate(Kind):
    """A hook on gradients that is put on the module in mid-run."""

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 1.0

    def write(self, value: float) -> None:
        if value != VALUES[0]:
            self.on_after_backward = functools.partial(_UNSEEN[0][0], self, value)  # type: ignore[method-assign]


class ScalesGradients(L.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pl_module.layer.weight.grad.mul_(0.5)


class CallbackLate(OverridesLate):
    """A callback that comes in mid-run."""

    def write(self, value: float) -> None:
        if value == 0.5:
            self.trainer.callbacks.append(ScalesGradients())  # type: ignore[attr-defined]


class FunctionMode(Kind):
    """A mode that changes what functions of torch do, entered in mid-run."""

    class Doubles(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return result * 2 if function is torch.sinc else result

    def start(self) -> None:
        self.active: Any = None

    def read(self) -> Any:
        return torch.sinc(torch.tensor(0.3))

    def write(self, value: float) -> None:
        self.on_train_end()
        if value == 0.5:
            self.active = self.Doubles()
            self.active.__enter__()

    def on_train_end(self) -> None:
        if self.active is not None:
            self.active.__exit__(None, None, None)
        self.active = None
