"""Tensors that are no parameters."""

import collections
from typing import Any

import torch
from torch import Tensor

from tests.strategy.kinds.base_kinds import VALUES, Config, Kind


class TensorKind(Kind):
    """A tensor."""


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

    def start(self) -> None:
        self.queue: collections.deque[Tensor] = collections.deque(maxlen=2)
        self.write(1.0)
        self.write(2.0)

    def read(self) -> Any:
        return torch.stack(list(self.queue)).mean()

    def write(self, value: float) -> None:
        self.queue.append(torch.tensor(value))


class TensorsSwapped(TensorKind):
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

    def read(self) -> Any:
        weight: Any = self.layer.weight
        weight.count = getattr(weight, "count", 0) + 1
        return float(weight.count)


class ReadByOptimizer(OnParameter):
    """As ``p._no_weight_decay``, asked in ``step``."""

    mode = "split"

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

    def start(self) -> None:
        self.level = torch.ones(())

    def read(self) -> Any:
        self.level.mul_(0.9)
        return self.level.clone()

    def write(self, value: float) -> None:
        pass
