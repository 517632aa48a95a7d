"""Objects and classes: state in what the module holds, in closures, in classes and in the file's own names."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import pickle
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.untidy.untidy import Untidy


class Config:
    """As many projects have one."""

    def __init__(self) -> None:
        self.scale, self.steps = 1.0, 0


class PlainObject(Untidy):
    """A factor in an object is changed by every step."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.config.scale *= 0.99
        self.config.steps += 1
        return self.loss(*batch) * self.config.scale

    def kept(self) -> Any:
        return vars(self.config)


class Meter:
    """An average, without a dictionary of its attributes."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def update(self, value: float) -> None:
        self.count += 1
        self.total += value

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)


class Slotted(Untidy):
    """A meter with __slots__ is told each loss; the loss is weighed by its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.meter.update(loss.item())
        return loss / (1 + self.meter.mean)

    def kept(self) -> Any:
        return self.meter.count, self.meter.total


@dataclass
class Progress:
    seen: int = 0
    by_class: dict[int, int] = field(default_factory=dict)
    best: float = float("inf")


class Dataclass(Untidy):
    """Counts by class and the best loss so far, in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.loss(x, y)
        self.progress.seen += len(x)
        for label in y.tolist():
            self.progress.by_class[label] = self.progress.by_class.get(label, 0) + 1
        self.progress.best = min(self.progress.best, float(loss))
        return loss + 0.01 * (loss - self.progress.best).abs()

    def kept(self) -> Any:
        return dataclasses.asdict(self.progress)


@dataclass(frozen=True)
class Weights:
    data: float = 1.0
    decay: float = 0.0


class FrozenDataclass(Untidy):
    """A frozen dataclass of weights is replaced by a changed one in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = Weights()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.weights = dataclasses.replace(self.weights, decay=self.weights.decay + 1e-3)
        return self.weights.data * self.loss(*batch) + self.weights.decay * self.head.weight.square().sum()

    def kept(self) -> Any:
        return dataclasses.astuple(self.weights)


class Phase(enum.Enum):
    WARMUP = "warmup"
    MAIN = "main"
    COOLDOWN = "cooldown"


class Phases(Untidy):
    """An enum says which loss counts, and goes on by the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.steps = Phase.WARMUP, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        if self.phase is Phase.WARMUP and self.steps > 5:
            self.phase = Phase.MAIN
        elif self.phase is Phase.MAIN and self.steps > 15:
            self.phase = Phase.COOLDOWN
        loss = self.loss(*batch)
        return {Phase.WARMUP: loss * 0.1, Phase.MAIN: loss, Phase.COOLDOWN: loss.sqrt()}[self.phase]

    def kept(self) -> Any:
        return self.phase.value, self.steps


def made_weigher() -> Callable[[Tensor], Tensor]:
    """A function that remembers how often it was called."""
    calls = 0

    def weigh(loss: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return loss / (1 + 0.1 * calls)

    return weigh


class Closure(Untidy):
    """The weight of the loss is a variable of a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = made_weigher()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weigh(self.loss(*batch))

    def kept(self) -> Any:
        return [cell.cell_contents for cell in self.weigh.__closure__ or ()]  # type: ignore[attr-defined]


def remembered(value: float, before: list[float] = []) -> float:  # noqa: B006
    """The mean of all values so far, kept in a default."""
    before.append(value)
    return sum(before) / len(before)


class MutableDefault(Untidy):
    """A default of a function grows in every step, and its mean is the weight."""

    def __init__(self) -> None:
        super().__init__()
        remembered.__defaults__[0].clear()  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        return loss * (2 - remembered(loss.item()))

    def kept(self) -> Any:
        return list(remembered.__defaults__[0])  # type: ignore[index]


STEPS_SO_FAR = 0
EVENTS: list[str] = []


class Globals(Untidy):
    """A number and a list of the file are changed by the step."""

    def __init__(self) -> None:
        super().__init__()
        global STEPS_SO_FAR
        STEPS_SO_FAR = 0
        EVENTS.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        global STEPS_SO_FAR
        STEPS_SO_FAR += 1
        if STEPS_SO_FAR % 7 == 0:
            EVENTS.append(f"step {STEPS_SO_FAR}")
        return self.loss(*batch) * (1 + 0.02 * STEPS_SO_FAR + 0.1 * len(EVENTS))

    def kept(self) -> Any:
        return STEPS_SO_FAR, list(EVENTS)


class ClassAttribute(Untidy):
    """All instances share a count and a dictionary."""

    steps = 0
    shared: dict[str, float] = {}

    def __init__(self) -> None:
        super().__init__()
        ClassAttribute.steps = 0
        self.shared.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        type(self).steps += 1
        self.shared["scale"] = self.shared.get("scale", 1.0) * 0.98
        return self.loss(*batch) * self.shared["scale"] + 0.01 * self.steps

    def kept(self) -> Any:
        return self.steps, dict(self.shared), "steps" in vars(self)


class Properties(Untidy):
    """A property counts how often it is asked, its setter refuses what is too small."""

    def __init__(self) -> None:
        super().__init__()
        self._temperature, self.asked = 2.0, 0

    @property
    def temperature(self) -> float:
        self.asked += 1
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._temperature = max(value, 0.7)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.temperature = self.temperature * 0.95
        return F.cross_entropy(self(x) / self.temperature, y)

    def kept(self) -> Any:
        return self.asked, self._temperature


class Box:
    """Holds a tensor, and can be referred to weakly."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class WeakReferences(Untidy):
    """A cache of weak references: what nobody holds any more is gone in the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: weakref.WeakValueDictionary[int, Box] = weakref.WeakValueDictionary()
        self.held: list[Box] = []
        self.alive: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        box = self.cache[batch_idx] = Box(h.detach().mean(0))
        if batch_idx % 5 == 0:
            self.held = [*self.held[-1:], box]
        self.alive.append(len(self.cache))
        near = torch.stack([other.value for other in self.cache.values()]).mean(0)
        return F.cross_entropy(self.head(h), batch[1]) + 0.1 * (h.mean(0) - near).square().sum()

    def kept(self) -> Any:
        return self.alive, sorted(self.cache), [box.value.tolist() for box in self.held]


class WeakTensor(Untidy):
    """A weak reference to the last hidden tensor, which is alive while the module holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.reference: Callable[[], Tensor | None] = lambda: None
        self.seen: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        before = self.reference()
        self.seen.append(before is not None and before is self.last)
        pulled = 0.05 * (h - before).square().mean() if before is not None else 0.0
        self.last = h.detach() if batch_idx % 3 else None
        self.reference = weakref.ref(self.last) if self.last is not None else (lambda: None)
        return F.cross_entropy(self.head(h), batch[1]) + pulled

    def kept(self) -> Any:
        return self.seen


class Helper:
    """Knows its owner by a weak reference, and counts for it."""

    def __init__(self, owner: Untidy) -> None:
        self.owner, self.calls = weakref.ref(owner), 0

    def penalty(self) -> Tensor:
        self.calls += 1
        owner = self.owner()
        assert owner is not None
        return owner.head.weight.square().sum() / self.calls


class BackReference(Untidy):
    """An object refers back to the module that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch) + 0.1 * self.helper.penalty()

    def kept(self) -> Any:
        return self.helper.calls


class Settings:
    """Attributes that are not there are made up, and noted."""

    def __init__(self) -> None:
        self.__dict__["values"], self.__dict__["missed"] = {"rate": 0.5}, []

    def __getattr__(self, name: str) -> float:
        values: dict[str, float] = self.__dict__["values"]
        if name not in values:
            self.__dict__["missed"].append(name)
            values[name] = 1.0 / (2 + len(values))
        return values[name]

    def __setattr__(self, name: str, value: float) -> None:
        self.__dict__["values"][name] = round(value, 4)


class GetAttr(Untidy):
    """Settings that answer __getattr__ and __setattr__ themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = getattr(self.settings, f"factor{batch_idx // 6}")
        self.settings.rate = self.settings.rate * 0.97
        return self.loss(*batch) * (factor + self.settings.rate)

    def kept(self) -> Any:
        return self.settings.__dict__["values"], self.settings.__dict__["missed"]


class Scope:
    """Says inside of which names one is."""

    def __init__(self) -> None:
        self.depth, self.entered = 0, []

    def __enter__(self) -> Scope:
        self.depth += 1
        self.entered.append(self.depth)
        return self

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1


class ContextManagers(Untidy):
    """A user's own context manager is entered twice in a step, and its counts weigh the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scope = Scope()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.scope:
            h = self.hidden(batch[0]) / self.scope.depth
            with self.scope as scope:
                loss = F.cross_entropy(self.head(h) / scope.depth, batch[1])
        return loss * (1 + 0.01 * len(self.scope.entered))

    def kept(self) -> Any:
        return self.scope.depth, self.scope.entered


class Place(NamedTuple):
    step: int
    weight: float


class NamedTuples(Untidy):
    """A named tuple is replaced by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Place(0, 1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.place = self.place._replace(step=self.place.step + 1, weight=self.place.weight * 0.97)
        return self.loss(*batch) * self.place.weight

    def kept(self) -> Any:
        return tuple(self.place)


@functools.lru_cache(maxsize=4)
def rate_of(step: int, length: int) -> float:
    """A cosine from 1 to 0, by hand."""
    return 0.5 * (1 + torch.cos(torch.tensor(3.1415 * step / length)).item())


class LruCache(Untidy):
    """A cached function gives the weight of every other step, one value twice."""

    def __init__(self) -> None:
        super().__init__()
        rate_of.cache_clear()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch) * (0.1 + rate_of(batch_idx // 2, 12))

    def kept(self) -> Any:
        return tuple(rate_of.cache_info())


class CachedProperty(Untidy):
    """A cached property is thrown away every few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    @functools.cached_property
    def scale(self) -> float:
        self.made += 1
        return 1.0 + self.made / 10

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 4 == 3:
            self.__dict__.pop("scale", None)
        return self.loss(*batch) * self.scale

    def kept(self) -> Any:
        return self.made, self.__dict__.get("scale")


def doubled_hidden(self: Untidy, x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(self.body(x))


class MethodReplaced(Untidy):
    """The step gives the module another method, and takes it away again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 8:
            self.hidden = types.MethodType(doubled_hidden, self)  # type: ignore[method-assign]
        if batch_idx == 17:
            del self.hidden
        return self.loss(*batch)

    def kept(self) -> Any:
        return "hidden" in vars(self)


class Formula(Untidy):
    """The loss is a formula in a text, which the step changes and evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.formula = "loss"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 6 == 5:
            self.formula = f"0.9 * ({self.formula}) + 0.01 * norm"
        names = {"loss": self.loss(*batch), "norm": self.head.weight.norm()}
        return eval(self.formula, {}, names)

    def kept(self) -> Any:
        return self.formula


class CopiedState(Untidy):
    """The state is copied, changed and put back; every fifth step goes through pickle."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"weights": [1.0, 0.5], "step": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state: Any = copy.deepcopy(self.state)
        state["step"] += 1
        state["weights"].append(state["weights"][-1] * 0.9)
        self.state = pickle.loads(pickle.dumps(state)) if batch_idx % 5 == 0 else state
        return self.loss(*batch) * state["weights"][-1] + self.head.bias.square().sum() / state["step"]

    def kept(self) -> Any:
        return self.state


class Scale:
    """A number with arithmetic of its own that counts what is done with it."""

    made = 0

    def __init__(self, value: float) -> None:
        self.value = value
        type(self).made += 1

    def __mul__(self, other: Any) -> Any:
        return Scale(self.value * other) if isinstance(other, float) else self.value * other

    def __lt__(self, other: float) -> bool:
        return self.value < other


class OwnArithmetic(Untidy):
    """The scale of the loss is a number of the user's own class."""

    def __init__(self) -> None:
        super().__init__()
        Scale.made = 0
        self.scale = Scale(1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.scale = Scale(1.5) if self.scale < 0.8 else self.scale * 0.95
        return self.scale * self.loss(*batch)

    def kept(self) -> Any:
        return self.scale.value, Scale.made


CASES = (
    PlainObject,
    Slotted,
    Dataclass,
    FrozenDataclass,
    Phases,
    Closure,
    MutableDefault,
    Globals,
    ClassAttribute,
    Properties,
    WeakReferences,
    WeakTensor,
    BackReference,
    GetAttr,
    ContextManagers,
    NamedTuples,
    LruCache,
    CachedProperty,
    MethodReplaced,
    Formula,
    CopiedState,
    OwnArithmetic,
)
