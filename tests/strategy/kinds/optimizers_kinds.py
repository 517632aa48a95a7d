"""Optimizers and their groups."""

from typing import Any, ClassVar

import torch

from tests.strategy.kinds.base_kinds import VALUES, Kind


class OptimizerKind(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 1.0

    @property
    def own(self) -> Any:
        return self.optimizers().optimizer  # type: ignore[union-attr]


class GroupSetting(OptimizerKind):
    """Numbers of parameter groups are inputs."""

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
    mode = "split"

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
    mode = "split"

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

    mode = "split"

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

    def read(self) -> Any:
        scheduler: Any = self.lr_schedulers()
        return 1.0 + scheduler.last_epoch
