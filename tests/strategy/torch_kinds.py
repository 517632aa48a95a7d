"""More kinds of state, as in ``python_kinds``: tensors, modules, optimizers, torch's switches, Lightning's objects."""

from __future__ import annotations

import collections
import copy
import functools
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode

from tests.strategy.python_kinds import VALUES, Config, Eager, Kind


# ---------------------------------------------------------------------- tensors
class TensorKind(Kind):
    graphs = 1


class TensorInPlace(TensorKind):
    def start(self) -> None:
        self.box = Config(torch.ones(()))

    def read(self) -> Any:
        return self.box.value

    def write(self, value: float) -> None:
        self.box.value.fill_(value)


class TensorRebound(TensorInPlace):
    def write(self, value: float) -> None:
        self.box.value = torch.tensor(value)


class TensorInList(TensorKind):
    def start(self) -> None:
        self.tensors = [torch.ones(()), torch.ones(())]

    def read(self) -> Any:
        return self.tensors[1]

    def write(self, value: float) -> None:
        self.tensors[1] = torch.tensor(value)


class TensorQueue(Kind):
    """A full queue of features, as contrastive methods keep them."""

    graphs = 1

    def start(self) -> None:
        self.queue: collections.deque[Tensor] = collections.deque(maxlen=2)
        self.write(1.0)
        self.write(2.0)

    def read(self) -> Any:
        return torch.stack(list(self.queue)).mean()

    def write(self, value: float) -> None:
        self.queue.append(torch.tensor(value))


class TensorsSwapped(TensorKind):
    graphs = 3

    def start(self) -> None:
        self.tensors = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}

    def read(self) -> Any:
        return self.tensors["a"] + 0 * self.tensors["b"]

    def write(self, value: float) -> None:
        self.tensors = {"a": self.tensors["b"], "b": self.tensors["a"]}


class TensorGrows(Kind):
    def start(self) -> None:
        self.memory = torch.ones(1)

    def read(self) -> Any:
        return self.memory.sum()

    def write(self, value: float) -> None:
        self.memory = torch.cat([self.memory, torch.tensor([value])])


class TensorResized(Kind):
    """The same object with other data."""

    def start(self) -> None:
        self.box = Config(torch.ones(1))

    def read(self) -> Any:
        return self.box.value.sum()

    def write(self, value: float) -> None:
        self.box.value.data = torch.full((int(2 * value),), value)


class TensorGlobal(TensorKind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return LEVEL

    def write(self, value: float) -> None:
        global LEVEL
        LEVEL = torch.tensor(value)


LEVEL = torch.tensor(1.0)


class TensorClosed(TensorKind):
    def start(self) -> None:
        level = torch.tensor(1.0)

        def change(value: float) -> None:
            nonlocal level
            level = torch.tensor(value)

        self.tell, self.change = lambda: level, change

    def read(self) -> Any:
        return self.tell()

    def write(self, value: float) -> None:
        self.change(value)


class OnTensor(Kind):
    """What users hang on tensors."""

    def start(self) -> None:
        self.tensor: Any = torch.ones(())
        self.tensor.gain = 1.0

    def read(self) -> Any:
        return self.tensor * self.tensor.gain

    def write(self, value: float) -> None:
        self.tensor.gain = value


class OnParameter(OnTensor):
    """What users hang on parameters."""

    def read(self) -> Any:
        return getattr(self.layer.weight, "gain", 3.0)

    def write(self, value: float) -> None:
        self.layer.weight.gain = value  # type: ignore[assignment]


class ComesOnParameter(OnParameter):
    def write(self, value: float) -> None:
        if value != VALUES[0]:
            super().write(value)


class CountsOnParameter(OnParameter):
    """The step itself writes there."""

    mode = "eager"
    told = "training_step changes layer.weight.count"

    def read(self) -> Any:
        weight: Any = self.layer.weight
        weight.count = getattr(weight, "count", 0) + 1
        return float(weight.count)


class ReadByOptimizer(OnParameter):
    """As ``p._no_weight_decay``, asked in ``step``."""

    class Decays(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad * group["lr"] * getattr(p, "gain", 1.0))
            return loss

    def read(self) -> Any:
        return 1.0

    def configure_optimizers(self) -> Any:
        return self.Decays(self.parameters(), lr=0.1)


class TensorItem(Kind):
    """A tensor whose value becomes Python's."""

    def start(self) -> None:
        self.box = Config(torch.ones(2))

    def read(self) -> Any:
        return self.box.value.tolist()[0]

    def write(self, value: float) -> None:
        self.box.value.fill_(value)


class BufferRebound(TensorKind):
    def start(self) -> None:
        self.register_buffer("level", torch.ones(()), persistent=False)

    def read(self) -> Any:
        return self.level

    def write(self, value: float) -> None:
        self.level = torch.tensor(value)


class BufferToNone(Kind):
    def start(self) -> None:
        self.register_buffer("level", torch.ones(()))

    def read(self) -> Any:
        return 3.0 if self.level is None else self.level

    def write(self, value: float) -> None:
        self.level = None if value == 0.5 else torch.tensor(value)


class OwnTensorStep(TensorKind):
    """A tensor that is no buffer and that the step itself changes."""

    graphs = 2

    def start(self) -> None:
        self.level = torch.ones(())

    def read(self) -> Any:
        self.level.mul_(0.9)
        return self.level.clone()

    def write(self, value: float) -> None:
        pass


# ---------------------------------------------------------------------- modules
class TeacherInList(Kind):
    """A teacher that is no submodule, replaced by a copy now and then."""

    graphs = 3

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

    mode = "eager"
    told = "autograd hooks are registered on layer"

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

    mode = "eager"
    told = "autograd hooks are registered on layer.weight"

    def write(self, value: float) -> None:
        if value == VALUES[0]:
            return
        for handle in self.handles:
            handle.remove()
        self.handles[:] = [self.layer.weight.register_hook(lambda gradient: gradient * value)]


class GlobalBackwardHook(BackwardHook):
    """A hook on the backward passes of all modules."""

    told = "autograd hooks are registered on all modules"

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
    graphs = 1

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


class OverridesLate(Kind):
    """A hook on gradients that is put on the module in mid-run."""

    mode = "eager"
    told = "on_after_backward"

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 1.0

    def write(self, value: float) -> None:
        if value != VALUES[0]:
            self.on_after_backward = functools.partial(_scale_gradient, self, value)  # type: ignore[method-assign]


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


# ---------------------------------------------------------------------- torch's switches
class DefaultDtype(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return float(torch.ones(1).element_size())

    def write(self, value: float) -> None:
        torch.set_default_dtype(torch.float64 if value == 0.5 else torch.float32)

    def on_train_end(self) -> None:
        torch.set_default_dtype(torch.float32)


class Deterministic(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0

    def write(self, value: float) -> None:
        torch.use_deterministic_algorithms(value == 0.5)

    def on_train_end(self) -> None:
        torch.use_deterministic_algorithms(False)


class Backends(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 2.0 if torch.backends.cudnn.benchmark else 1.0

    def write(self, value: float) -> None:
        torch.backends.cudnn.benchmark = value == 0.5

    def on_train_end(self) -> None:
        torch.backends.cudnn.benchmark = False


class BackendsByName(Backends):
    def read(self) -> Any:
        import torch.backends.cudnn as switches

        return 2.0 if switches.benchmark or torch.backends.mkldnn.deterministic else 1.0

    def write(self, value: float) -> None:
        torch.backends.cudnn.benchmark = value == 0.5
        torch.backends.mkldnn.deterministic = value == 1.5

    def on_train_end(self) -> None:
        self.write(1.0)


class Sdp(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 2.0 if torch.backends.cuda.flash_sdp_enabled() else 1.0

    def write(self, value: float) -> None:
        torch.backends.cuda.enable_flash_sdp(value != 0.5)

    def on_train_end(self) -> None:
        torch.backends.cuda.enable_flash_sdp(True)


class FastPath(Sdp):
    def read(self) -> Any:
        return 2.0 if torch.backends.mha.get_fastpath_enabled() else 1.0

    def write(self, value: float) -> None:
        torch.backends.mha.set_fastpath_enabled(value != 0.5)

    def on_train_end(self) -> None:
        torch.backends.mha.set_fastpath_enabled(True)


class MatmulPrecision(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 2.0 if torch.get_float32_matmul_precision() == "high" else 1.0

    def write(self, value: float) -> None:
        torch.set_float32_matmul_precision("high" if value == 0.5 else "highest")

    def on_train_end(self) -> None:
        torch.set_float32_matmul_precision("highest")


class Anomaly(Kind):
    """Autograd looks for NaNs then, which no graph can."""

    mode = "eager"
    told = "a tensor's value is read in Python"

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 2.0 if torch.is_anomaly_enabled() else 1.0

    def write(self, value: float) -> None:
        torch.autograd.set_detect_anomaly(value == 0.5)

    def on_train_end(self) -> None:
        torch.autograd.set_detect_anomaly(False)


class Threads(Kind):
    def start(self) -> None:
        self.threads = torch.get_num_threads()

    def read(self) -> Any:
        return float(torch.get_num_threads())

    def write(self, value: float) -> None:
        torch.set_num_threads(2 if value == 0.5 else 1)

    def on_train_end(self) -> None:
        torch.set_num_threads(self.threads)


class Attention(Kind):
    """Which kernel attention takes."""

    def start(self) -> None:
        pass

    def read(self) -> Any:
        q = torch.linspace(-1, 1, 2 * 4 * 8).reshape(1, 2, 4, 8)
        return F.scaled_dot_product_attention(q, q, q).mean() + 1.0

    def write(self, value: float) -> None:
        torch.backends.cuda.enable_flash_sdp(value != 0.5)

    def on_train_end(self) -> None:
        torch.backends.cuda.enable_flash_sdp(True)


class Autocast(Kind):
    """Switched on and off around the step."""

    tolerance = 1e-2  # bfloat16

    def start(self) -> None:
        self.context: Any = None

    def read(self) -> Any:
        return 2.0 if torch.is_autocast_enabled("cpu") else 1.0

    def write(self, value: float) -> None:
        self.on_train_end()
        if value == 0.5:
            self.context = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
            self.context.__enter__()

    def on_train_end(self) -> None:
        if self.context is not None:
            self.context.__exit__(None, None, None)
        self.context = None


class AutocastFlag(Kind):
    """An autocast region inside the step that an attribute switches."""

    def start(self) -> None:
        self.crit = Config(True)

    def read(self) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.crit.value):
            return (torch.ones(2, 2) * 1.001 @ torch.ones(2, 2)).mean().float()

    def write(self, value: float) -> None:
        self.crit.value = value != 0.5


class GradientFlag(Kind):
    """A part of the step without gradients, as an attribute says."""

    def start(self) -> None:
        self.crit = Config(True)

    def read(self) -> Any:
        with torch.set_grad_enabled(self.crit.value):
            return 1.0 + self.layer.weight.square().mean()

    def write(self, value: float) -> None:
        self.crit.value = value != 0.5


# ---------------------------------------------------------------------- optimizers
class OptimizerKind(Kind):
    graphs = 3

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 1.0

    @property
    def own(self) -> Any:
        return self.optimizers().optimizer  # type: ignore[union-attr]


class GroupSetting(OptimizerKind):
    """Numbers of parameter groups are inputs."""

    graphs = 2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def write(self, value: float) -> None:
        for group in self.own.param_groups:
            group.update(lr=0.01 * value, betas=(0.9 * value / 1.5, 0.99), eps=1e-6 * value, weight_decay=0.1 * value)


class GroupFlag(OptimizerKind):
    def write(self, value: float) -> None:
        for group in self.own.param_groups:
            group["maximize"] = value == 0.5


class Momentum(OptimizerKind):
    graphs = 4

    def write(self, value: float) -> None:
        for group in self.own.param_groups:
            group["momentum"], group["nesterov"] = (0.0, False) if value == 1.0 else (0.9 * value / 1.5, value == 0.5)


class Lookahead(torch.optim.SGD):
    """Every third step the weights go half the way back; the counter and the slow weights are its own Python state."""

    rate: ClassVar[float] = 1.0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.count, self.slow = 0, [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.count += 1
        if self.count % 3 == 0:
            for p, slow in zip((p for g in self.param_groups for p in g["params"]), self.slow, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)
        return loss


class OwnStateOfOptimizer(OptimizerKind):
    mode = "eager"
    told = "changes optimizer.count"
    graphs = 0

    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters(), lr=0.1)

    def write(self, value: float) -> None:
        pass


class Scaled(torch.optim.SGD):
    """Its steps are scaled by an attribute of its own, one of its class, and a text in its defaults."""

    rate: ClassVar[float] = 1.0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.own, self.defaults["extra"] = {"scale": 1.0}, 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] * self.own["scale"] * type(self).rate * self.defaults["extra"])
        return loss


class ScaledKind(OptimizerKind):
    def configure_optimizers(self) -> Any:
        return Scaled(self.parameters(), lr=0.1)


class OptimizerAttribute(ScaledKind):
    def write(self, value: float) -> None:
        self.own.own["scale"] = value


class OptimizerDefaults(ScaledKind):
    def write(self, value: float) -> None:
        self.own.defaults["extra"] = value


class OptimizerClass(ScaledKind):
    class OfItsOwn(Scaled):
        pass

    def configure_optimizers(self) -> Any:
        return self.OfItsOwn(self.parameters(), lr=0.1)

    def write(self, value: float) -> None:
        self.OfItsOwn.rate = value


class PythonInState(OptimizerKind):
    """Numbers and texts in the optimizer's ``state``."""

    class Counting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        scale = state.get("scale", 1.0)
                        p.sub_(p.grad * group["lr"] * scale)
            return loss

    def configure_optimizers(self) -> Any:
        return self.Counting(self.parameters(), lr=0.1)

    def write(self, value: float) -> None:
        for p in self.parameters():
            self.own.state[p]["scale"] = value


class OptimizerHook(OptimizerKind):
    """A hook after each step of the optimizer that comes in mid-run."""

    mode = "eager"
    told = "SGD has step hooks"

    def start(self) -> None:
        self.handles: list[Any] = []

    def write(self, value: float) -> None:
        def scale(optimizer: Any, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                self.layer.weight.mul_(value)

        if value == VALUES[0]:
            return
        for handle in self.handles:
            handle.remove()
        self.handles[:] = [self.own.register_step_post_hook(scale)]


class SchedulerState(OptimizerKind):
    graphs = 3

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def read(self) -> Any:
        scheduler: Any = self.lr_schedulers()
        return scheduler.gamma

    def write(self, value: float) -> None:
        self.lr_schedulers().gamma = value  # type: ignore[union-attr]


class SchedulerCounter(SchedulerState):
    """Counts at each step."""

    graphs = 4

    def read(self) -> Any:
        scheduler: Any = self.lr_schedulers()
        return 1.0 + scheduler.last_epoch


# ---------------------------------------------------------------------- Lightning
class CallbackState(L.Callback):
    """A callback that anneals something."""

    def __init__(self) -> None:
        self.gamma, self.table = 1.0, {"x": [1.0]}


class LightningKind(Kind):
    graphs = 3

    def start(self) -> None:
        pass

    def on_train_start(self) -> None:
        pass


class CallbackAttribute(LightningKind):
    def configure_callbacks(self) -> Any:
        return [CallbackState()]

    def found(self) -> Any:
        return next(c for c in self.trainer.callbacks if isinstance(c, CallbackState))  # type: ignore[attr-defined]

    def read(self) -> Any:
        return self.found().gamma * self.found().table["x"][0]

    def write(self, value: float) -> None:
        self.found().gamma = value
        self.found().table["x"][0] = value


class Metrics(LightningKind):
    """What was logged before; each step another value."""

    graphs = 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        known = self.trainer.callback_metrics.get("seen")
        loss = super().training_step(batch, batch_idx)
        if known is not None:
            loss = loss + known
        self.log("seen", loss.detach())
        return loss

    def read(self) -> Any:
        return 1.0

    def write(self, value: float) -> None:
        pass


class DatamoduleAttribute(LightningKind):
    def read(self) -> Any:
        return getattr(self.trainer.datamodule, "gamma", 1.0)  # type: ignore[attr-defined]

    def write(self, value: float) -> None:
        self.trainer.datamodule.gamma = value  # type: ignore[attr-defined]


class LoaderAttribute(LightningKind):
    def read(self) -> Any:
        return getattr(self.trainer.train_dataloader, "gamma", 1.0)

    def write(self, value: float) -> None:
        self.trainer.train_dataloader.gamma = value  # type: ignore[union-attr]


class DatasetLength(LightningKind):
    def read(self) -> Any:
        return float(len(self.trainer.train_dataloader.dataset)) * 0.02  # type: ignore[union-attr]

    def write(self, value: float) -> None:
        dataset: Any = self.trainer.train_dataloader.dataset  # type: ignore[union-attr]
        if value == 0.5:
            dataset.append(dataset[0])


class TrainerAttribute(LightningKind):
    def read(self) -> Any:
        return 1.0 + self.trainer.max_epochs / 2 + self.trainer.should_stop  # type: ignore[operator]

    def write(self, value: float) -> None:
        self.trainer.fit_loop.max_epochs = int(2 * value)


class LoopAttribute(LightningKind):
    """A counter of a loop: another number at each step."""

    graphs = 6

    def read(self) -> Any:
        return 1.0 + self.trainer.fit_loop.epoch_loop.batch_idx / 10

    def write(self, value: float) -> None:
        pass


class LastBatch(LightningKind):
    def read(self) -> Any:
        return 2.0 if self.trainer.is_last_batch else 1.0

    def write(self, value: float) -> None:
        pass


class Counters(LightningKind):
    graphs = 4

    def read(self) -> Any:
        return 1.0 + self.global_step + (2 if self.current_epoch % 2 else 1) * self.trainer.global_step

    def write(self, value: float) -> None:
        pass


class EachStep(Kind):
    """A number of a plain object that changes at each batch becomes an input."""

    graphs = 3

    def start(self) -> None:
        self.crit = Config()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.crit.value *= 0.9

    def read(self) -> Any:
        return self.crit.value

    def write(self, value: float) -> None:
        self.crit.value = value


class KeepsTensor(Eager):
    told = "changes self.box.value"

    def start(self) -> None:
        self.box = Config(None)

    def read(self) -> Any:
        kept = self.box.value
        self.box.value = self.layer.weight.detach().mean()
        return 1.0 if kept is None else 1.0 + kept
