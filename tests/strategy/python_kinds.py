"""Kinds of Python state that ``training_step`` reads and a hook changes, one class each: values of Python itself.

``write`` is called before the third and the fifth of six batches, ``read`` gives what the loss is multiplied by.
"""

from __future__ import annotations

import argparse
import array
import collections
import configparser
import contextlib
import contextvars
import ctypes
import dataclasses
import decimal
import enum
import functools
import importlib
import itertools
import logging
import operator
import os
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import lightning as L
import numpy
import torch
from torch import nn
from torch.nn import functional as F

VALUES = {0: 1.0, 2: 0.5, 4: 1.5}
"""What is written before which step."""


class Kind(L.LightningModule):
    """One layer and a factor.

    Attributes:
        mode: ``"compiled"`` where the state is plain data, else ``"eager"``.
        told: what the warning says where it is eager.
        graphs: how many graphs there may be.
        tolerance: how far two ranks may be from one device, relative.
    """

    mode: ClassVar[str] = "compiled"
    told: ClassVar[str] = ""
    graphs: ClassVar[int] = 3
    tolerance: ClassVar[float] = 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.start()

    def start(self) -> None:
        """Make the state."""
        self.write(VALUES[0])

    def read(self) -> Any:
        """The factor."""
        raise NotImplementedError

    def write(self, value: float) -> None:
        """Change the state."""
        raise NotImplementedError

    def on_train_start(self) -> None:
        self.write(VALUES[0])  # what is not the module's own is as another run left it

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in VALUES and batch_idx:
            self.write(VALUES[batch_idx])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.layer(batch[0]), batch[1]) * self.read()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ---------------------------------------------------------------------- objects
class Config:
    """A plain object."""

    level: ClassVar[float] = 1.0

    def __init__(self, value: Any = 1.0) -> None:
        self.value = value


class ObjectAttribute(Kind):
    def start(self) -> None:
        self.crit = Config()

    def read(self) -> Any:
        return self.crit.value

    def write(self, value: float) -> None:
        self.crit.value = value


class ReplacedObject(ObjectAttribute):
    def write(self, value: float) -> None:
        self.crit = Config(value)


class NestedObjects(Kind):
    def start(self) -> None:
        self.crit = Config({"a": [Config(), Config((1, Config()))]})

    def read(self) -> Any:
        return self.crit.value["a"][1].value[1].value

    def write(self, value: float) -> None:
        self.crit.value["a"][1].value[1].value = value


class OwnGetattr(Kind):
    class Box:
        def __init__(self) -> None:
            self._data: dict[str, float] = {}

        def __getattr__(self, name: str) -> Any:
            return self.__dict__["_data"][name]

    def start(self) -> None:
        self.box = self.Box()

    def read(self) -> Any:
        return self.box.gamma

    def write(self, value: float) -> None:
        self.box._data["gamma"] = value


class ComputedName(Kind):
    def start(self) -> None:
        self.crit = Config()

    def read(self) -> Any:
        return getattr(self.crit, "val" + "ue"[:2])

    def write(self, value: float) -> None:
        self.crit.value = value


class AttributeGetter(ComputedName):
    def read(self) -> Any:
        return operator.attrgetter("crit.value")(self)


class ThroughDict(ComputedName):
    def read(self) -> Any:
        return self.crit.__dict__["value"] * vars(self)["crit"].value


@dataclasses.dataclass
class Settings:
    """A dataclass."""

    value: float = 1.0
    names: list[str] = dataclasses.field(default_factory=list)


class Dataclass(Kind):
    def start(self) -> None:
        self.settings = Settings()

    def read(self) -> Any:
        return dataclasses.asdict(self.settings)["value"] * (1 + len(self.settings.names))

    def write(self, value: float) -> None:
        self.settings.value = value
        self.settings.names.append("more")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen dataclass with slots."""

    value: float = 1.0


class FrozenDataclass(Kind):
    def start(self) -> None:
        self.settings = Frozen()

    def read(self) -> Any:
        return self.settings.value

    def write(self, value: float) -> None:
        self.settings = dataclasses.replace(self.settings, value=value)


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("inner", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self.inner = [1.0]


class Slots(Kind):
    def start(self) -> None:
        self.slotted = Slotted()

    def read(self) -> Any:
        return self.slotted.value * self.slotted.inner[0]

    def write(self, value: float) -> None:
        self.slotted.value = value
        self.slotted.inner[0] = value


class Property(Kind):
    @property
    def gamma(self) -> float:
        return self._hidden.value * 2

    def start(self) -> None:
        self._hidden = Config()

    def read(self) -> Any:
        return self.gamma

    def write(self, value: float) -> None:
        self._hidden.value = value


class CachedProperty(Kind):
    class Box:
        def __init__(self) -> None:
            self.raw = 1.0

        @functools.cached_property
        def gamma(self) -> float:
            return self.raw * 2

    def start(self) -> None:
        self.box = self.Box()

    def read(self) -> Any:
        return self.box.gamma

    def write(self, value: float) -> None:
        self.box.raw = value
        self.box.__dict__.pop("gamma", None)


class Descriptor(Kind):
    class Gamma:
        values: ClassVar[dict[int, float]] = {}

        def __get__(self, owner: Any, kind: Any = None) -> Any:
            return self.values.get(0, 1.0)

    gamma = Gamma()

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return self.gamma

    def write(self, value: float) -> None:
        self.Gamma.values[0] = value


class Point(NamedTuple):
    """A named tuple."""

    x: float = 1.0
    y: float = 2.0


class NamedTuples(Kind):
    def start(self) -> None:
        self.point = Point()

    def read(self) -> Any:
        return self.point.x * self.point[1]

    def write(self, value: float) -> None:
        self.point = self.point._replace(x=value)


class Color(enum.Enum):
    """An enumeration."""

    RED = 1.0
    BLUE = 0.5
    GREEN = 1.5


class EnumMember(Kind):
    def start(self) -> None:
        self.color = Color.RED

    def read(self) -> Any:
        return self.color.value if self.color is not Color.GREEN else 3.0

    def write(self, value: float) -> None:
        self.color = Color(value)


class Tuned(enum.Enum):
    """An enumeration whose members keep something that changes."""

    ONE = types.SimpleNamespace(value=1.0)

    @property
    def gamma(self) -> float:
        return self.value.value


class InsideEnum(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return Tuned.ONE.gamma

    def write(self, value: float) -> None:
        Tuned.ONE.value.value = value


class ValueOfEnum(InsideEnum):
    def read(self) -> Any:
        return Tuned.ONE.value.value


class OnEnum(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return getattr(Color.RED, "weight", 1.0)

    def write(self, value: float) -> None:
        Color.RED.weight = value  # type: ignore[attr-defined]


class Namespace(Kind):
    def start(self) -> None:
        self.options = argparse.Namespace(inner=types.SimpleNamespace(value=1.0))

    def read(self) -> Any:
        return self.options.inner.value

    def write(self, value: float) -> None:
        self.options.inner.value = value


class ClassAttribute(Kind):
    def start(self) -> None:
        self.crit = Config()

    def read(self) -> Any:
        return self.crit.level * Config.level

    def write(self, value: float) -> None:
        Config.level = value


class OwnClassAttribute(Kind):
    scale = 1.0

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return type(self).scale

    def write(self, value: float) -> None:
        type(self).scale = value


class AppearingAttribute(Kind):
    def start(self) -> None:
        self.crit = Config()

    def read(self) -> Any:
        return self.crit.extra if hasattr(self.crit, "extra") else 1.0

    def write(self, value: float) -> None:
        if value != VALUES[0]:
            self.crit.extra = value  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- containers
class NestedContainers(Kind):
    def start(self) -> None:
        self.cfg = {"a": {"b": [1.0, {"c": 1.0}]}}

    def read(self) -> Any:
        return self.cfg["a"]["b"][1]["c"]  # type: ignore[index]

    def write(self, value: float) -> None:
        self.cfg["a"]["b"][1]["c"] = value  # type: ignore[index]


class HyperParameters(Kind):
    def __init__(self, nested: Any = None, flat: float = 1.0) -> None:
        self.nested_default = {"b": {"c": 1.0}}
        super().__init__()
        nested = {"b": {"c": 1.0}}
        self.save_hyperparameters()
        self.hparams["nested"] = nested

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return self.hparams["nested"]["b"]["c"] * self.hparams.flat  # type: ignore[attr-defined]

    def write(self, value: float) -> None:
        self.hparams["nested"]["b"]["c"] = value
        self.hparams["flat"] = value


class InContainer(Kind):
    """One of a kind of container in a plain object."""

    def make(self) -> Any:
        raise NotImplementedError

    def start(self) -> None:
        self.box = Config(self.make())


class InDict(InContainer):
    def make(self) -> Any:
        return {"one": 1.0}

    def read(self) -> Any:
        return sum(self.box.value.values())

    def write(self, value: float) -> None:
        self.box.value["one" if value == 1.0 else "two"] = value


class InOrderedDict(InContainer):
    def make(self) -> Any:
        return collections.OrderedDict(a=1.0, b=2.0)

    def read(self) -> Any:
        return next(iter(self.box.value.values()))

    def write(self, value: float) -> None:
        self.box.value.move_to_end("a" if value == 0.5 else "b")


class InDefaultDict(InDict):
    def make(self) -> Any:
        return collections.defaultdict(float, one=1.0)


class InCounter(InContainer):
    def make(self) -> Any:
        return collections.Counter("abb")

    def read(self) -> Any:
        return self.box.value["b"] / self.box.value.total()

    def write(self, value: float) -> None:
        self.box.value.update("b" * int(2 * value))


class InChainMap(InContainer):
    def make(self) -> Any:
        return collections.ChainMap({"a": 1.0}, {"b": 2.0})

    def read(self) -> Any:
        return self.box.value["a"]

    def write(self, value: float) -> None:
        self.box.value["a"] = value


class InUserDict(InChainMap):
    def make(self) -> Any:
        return collections.UserDict(a=1.0)


class InMappingProxy(InContainer):
    def make(self) -> Any:
        self.behind = {"a": 1.0}
        return types.MappingProxyType(self.behind)

    def read(self) -> Any:
        return self.box.value["a"]

    def write(self, value: float) -> None:
        self.behind["a"] = value


class InList(InContainer):
    def make(self) -> Any:
        return [1.0]

    def read(self) -> Any:
        return sum(self.box.value) / len(self.box.value)

    def write(self, value: float) -> None:
        self.box.value.append(value)


class InDeque(InList):
    def make(self) -> Any:
        return collections.deque([1.0], maxlen=2)


class InArray(InList):
    def make(self) -> Any:
        return array.array("d", [1.0])


class InSet(InContainer):
    def make(self) -> Any:
        return {1.0}

    def read(self) -> Any:
        return sum(sorted(self.box.value))

    def write(self, value: float) -> None:
        self.box.value.add(value)


class InFrozenSet(InSet):
    def make(self) -> Any:
        return frozenset({1.0})

    def write(self, value: float) -> None:
        self.box.value |= {value}


class InQueue(InContainer):
    def make(self) -> Any:
        return queue.Queue()

    def read(self) -> Any:
        return 1.0 + self.box.value.qsize()

    def write(self, value: float) -> None:
        self.box.value.put(value)


class InBytes(InContainer):
    def make(self) -> Any:
        return bytearray(b"abc")

    def read(self) -> Any:
        return self.box.value[0] / 97

    def write(self, value: float) -> None:
        self.box.value[0] = int(97 * value)


class KeyOfDict(InContainer):
    def make(self) -> Any:
        return {1: "x", 2: "y"}

    def read(self) -> Any:
        return float(min(self.box.value)) * len(self.box.value)

    def write(self, value: float) -> None:
        self.box.value[value] = "z"


class LongList(Kind):
    def start(self) -> None:
        self.table = [1.0] * 5000

    def read(self) -> Any:
        return self.table[3]

    def write(self, value: float) -> None:
        self.table[3] = value


# ---------------------------------------------------------------------- functions, scopes, modules
GLOBAL = 1.0
TABLE = {"gamma": 1.0}
FACTORY: Any = None


class GlobalNumber(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return GLOBAL * TABLE["gamma"]

    def write(self, value: float) -> None:
        global GLOBAL
        GLOBAL = value
        TABLE["gamma"] = value


class ImportedModule(Kind):
    """A configuration module, imported inside the step."""

    def start(self) -> None:
        sys.modules.setdefault("kinds_config", types.ModuleType("kinds_config"))
        sys.modules["kinds_config"].gamma = 1.0  # type: ignore[attr-defined]

    def read(self) -> Any:
        import kinds_config

        return kinds_config.gamma * importlib.import_module("kinds_config").gamma

    def write(self, value: float) -> None:
        sys.modules["kinds_config"].gamma = value  # type: ignore[attr-defined]


class Closure(Kind):
    def start(self) -> None:
        gamma = 1.0

        def tell() -> float:
            return gamma

        def change(value: float) -> None:
            nonlocal gamma
            gamma = value

        self.tell, self.change = tell, change

    def read(self) -> Any:
        return self.tell()

    def write(self, value: float) -> None:
        self.change(value)


class ClosedOverObject(Kind):
    def start(self) -> None:
        self.crit = crit = Config()
        self.tell = lambda: crit.value

    def read(self) -> Any:
        return self.tell()

    def write(self, value: float) -> None:
        self.crit.value = value


class DecoratedClosure(Closure):
    """The user's function is inside one of torch's."""

    def start(self) -> None:
        super().start()
        self.tell = torch.no_grad()(self.tell)


class ContextManager(Kind):
    """A context manager of the user's that closes over what changes."""

    def start(self) -> None:
        crit = self.crit = Config()

        @contextlib.contextmanager
        def scope() -> Iterator[float]:
            yield crit.value * 2

        self.scope = scope

    def read(self) -> Any:
        with self.scope() as gamma:
            return gamma

    def write(self, value: float) -> None:
        self.crit.value = value


def scaled(x: float, by: Any = [1.0]) -> float:  # noqa: B006 - the kind of state that is meant
    """``x``, scaled by what its default argument holds."""
    return x * by[0]


class MutableDefault(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return scaled(1.0)

    def write(self, value: float) -> None:
        scaled.__defaults__[0][0] = value  # type: ignore[index]


class ReplacedDefaults(MutableDefault):
    def write(self, value: float) -> None:
        scaled.__defaults__ = ([value],)


class FunctionAttribute(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return scaled(1.0, [1.0]) * scaled.weight  # type: ignore[attr-defined]

    def write(self, value: float) -> None:
        scaled.weight = value  # type: ignore[attr-defined]


class Partial(Kind):
    def start(self) -> None:
        self.scaled = functools.partial(scaled, by=[1.0])

    def read(self) -> Any:
        return self.scaled(2.0)

    def write(self, value: float) -> None:
        self.scaled.keywords["by"][0] = value


class Cached(Kind):
    """A cached function of a global; clearing the cache is part of the change."""

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return cached_gamma()

    def write(self, value: float) -> None:
        TABLE["gamma"] = value
        cached_gamma.cache_clear()


@functools.lru_cache
def cached_gamma() -> float:
    """Of the table."""
    return TABLE["gamma"]


@functools.singledispatch
def dispatched(value: object) -> float:
    """A function that depends on what was registered."""
    return 1.0


class SingleDispatch(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return dispatched(1)

    def write(self, value: float) -> None:
        dispatched.register(int, lambda _: value)


class Environment(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return float(os.environ["KINDS_GAMMA"]) * float(os.getenv("KINDS_GAMMA", "1"))

    def write(self, value: float) -> None:
        os.environ["KINDS_GAMMA"] = str(value)


CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)
LOCAL = threading.local()
EVENT = threading.Event()


class ContextVariable(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return CONTEXT.get()

    def write(self, value: float) -> None:
        CONTEXT.set(value)


class ThreadLocal(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return LOCAL.gamma

    def write(self, value: float) -> None:
        LOCAL.gamma = value


class ThreadingEvent(Kind):
    """An object of the standard library, whose attributes the user's code does not name."""

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 2.0 if EVENT.is_set() else 1.0

    def write(self, value: float) -> None:
        (EVENT.set if value == 0.5 else EVENT.clear)()


class Parser(Kind):
    def start(self) -> None:
        self.parser = configparser.ConfigParser()
        self.parser["loss"] = {"gamma": "1.0"}

    def read(self) -> Any:
        return self.parser.getfloat("loss", "gamma") * float(self.parser["loss"]["gamma"])

    def write(self, value: float) -> None:
        self.parser["loss"]["gamma"] = str(value)


class WeakReference(Kind):
    def start(self) -> None:
        self.crit = Config()
        self.reference, self.proxy = weakref.ref(self.crit), weakref.proxy(self.crit)

    def read(self) -> Any:
        return self.reference().value * self.proxy.value  # type: ignore[union-attr]

    def write(self, value: float) -> None:
        self.crit.value = value


class WeakMapping(Kind):
    def start(self) -> None:
        self.crit = Config()
        self.weights = weakref.WeakKeyDictionary({self.crit: 1.0})

    def read(self) -> Any:
        return self.weights[self.crit]

    def write(self, value: float) -> None:
        self.weights[self.crit] = value


class PatchedMethod(Kind):
    def start(self) -> None:
        self.crit = Config()

    def factor(self) -> float:
        return 1.0

    def read(self) -> Any:
        return self.factor()

    def write(self, value: float) -> None:
        self.factor = types.MethodType(lambda self: value, self)  # type: ignore[method-assign]


class PatchedClass(PatchedMethod):
    def write(self, value: float) -> None:
        PatchedClass.factor = lambda self: value  # type: ignore[method-assign, misc, assignment]


class PatchedLibrary(Kind):
    """A function of torch that somebody replaces."""

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return F.relu6(torch.tensor(2.0))

    def write(self, value: float) -> None:
        original = torch.nn.functional.hardtanh
        F.relu6 = lambda x: original(x) * value  # type: ignore[assignment]

    def on_train_end(self) -> None:
        F.relu6 = RELU6


RELU6 = F.relu6


class LoggerLevel(Kind):
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return 2.0 if LOGGER.isEnabledFor(logging.INFO) else 1.0

    def write(self, value: float) -> None:
        LOGGER.setLevel(logging.INFO if value == 0.5 else logging.ERROR)


LOGGER = logging.getLogger("kinds")


class DecimalContext(Kind):
    graphs = 2

    def start(self) -> None:
        pass

    def read(self) -> Any:
        return float(decimal.Decimal(1) / decimal.Decimal(3))

    def write(self, value: float) -> None:
        decimal.getcontext().prec = 5 if value == 0.5 else 28


class WorkingDirectory(Kind):
    graphs = 2

    def start(self) -> None:
        self.before = os.getcwd()

    def read(self) -> Any:
        return 2.0 if os.getcwd() == tempfile.gettempdir() else 1.0

    def write(self, value: float) -> None:
        os.chdir(tempfile.gettempdir() if value == 0.5 else self.before)


class CaughtAttribute(Kind):
    """An attribute that comes, and whose error is caught as long as it is not there."""

    def start(self) -> None:
        self.crit: Any = Config()

    def read(self) -> Any:
        try:
            return self.crit.extra
        except AttributeError:
            return 1.0

    def write(self, value: float) -> None:
        if value != VALUES[0]:
            self.crit.extra = value


class ReadOnlyProperty(Kind):
    """A number behind a property, and in the slot that it reads, of an object of the standard library."""

    def start(self) -> None:
        self.distribution = statistics.NormalDist(1.0, 2.0)

    def read(self) -> Any:
        return self.distribution.mean

    def write(self, value: float) -> None:
        self.distribution = statistics.NormalDist(value, 2.0)


# ---------------------------------------------------------------------- NumPy, C
class NumpyArray(Kind):
    def start(self) -> None:
        self.box = Config(numpy.ones(3))

    def read(self) -> Any:
        return float(self.box.value.mean()) + self.box.value[0]

    def write(self, value: float) -> None:
        self.box.value[0] = value


class NumpyScalar(Kind):
    def start(self) -> None:
        self.gamma = numpy.float64(1.0)

    def read(self) -> Any:
        return self.gamma

    def write(self, value: float) -> None:
        self.gamma = numpy.float64(value)


class NumpyView(Kind):
    def start(self) -> None:
        self.whole = numpy.ones((40, 2000))
        self.view = self.whole[3:7, 5:8]

    def read(self) -> Any:
        return float(self.view.mean())

    def write(self, value: float) -> None:
        self.whole[4, 6] = value


class NumpyOfTensor(Kind):
    """An array that shares the memory of a tensor."""

    def start(self) -> None:
        self.tensor = torch.ones(3)
        self.box = Config(self.tensor.numpy())

    def read(self) -> Any:
        return float(self.box.value[0])

    def write(self, value: float) -> None:
        self.tensor.fill_(value)


class TensorOfNumpy(Kind):
    def start(self) -> None:
        self.array = numpy.ones(3, dtype="float32")

    def read(self) -> Any:
        return torch.from_numpy(self.array).mean() + torch.as_tensor(self.array)[0]

    def write(self, value: float) -> None:
        self.array[:] = value


class LargeArray(Kind):
    """Too large to be compared as a whole, but a tensor of it is read anew each step."""

    graphs = 1

    def start(self) -> None:
        self.array = numpy.ones(100_000, dtype="float32")

    def read(self) -> Any:
        return torch.from_numpy(self.array)[77_777]

    def write(self, value: float) -> None:
        self.array[77_777] = value


class CtypesNumber(Kind):
    def start(self) -> None:
        self.number = ctypes.c_double(1.0)

    def read(self) -> Any:
        return self.number.value

    def write(self, value: float) -> None:
        self.number.value = value


# ---------------------------------------------------------------------- what gives another answer each time
class Eager(Kind):
    mode = "eager"
    graphs = 0

    def start(self) -> None:
        pass

    def write(self, value: float) -> None:
        pass


class Count(Eager):
    told = "self.numbers, a count"

    def start(self) -> None:
        self.numbers = itertools.count(1)

    def read(self) -> Any:
        return float(next(self.numbers))


class Generator(Eager):
    told = "self.numbers, a generator"

    def start(self) -> None:
        self.numbers = (float(i) for i in range(1, 1000))

    def read(self) -> Any:
        return next(self.numbers)


class OwnIterator(Eager):
    told = "changes self.numbers.at"

    class Numbers:
        def __init__(self) -> None:
            self.at = 0.0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> float:
            self.at += 1.0
            return self.at

    def start(self) -> None:
        self.numbers = self.Numbers()

    def read(self) -> Any:
        return next(self.numbers)


class File(Eager):
    told = "calls open"

    def start(self) -> None:
        self.path = os.path.join(tempfile.gettempdir(), f"kinds_{os.getpid()}")

    def read(self) -> Any:
        with open(self.path) as file:
            return float(file.read())

    def write(self, value: float) -> None:
        with open(self.path, "w") as file:
            file.write(str(value))

    def on_train_end(self) -> None:
        os.unlink(self.path)


class FileExists(File):
    told = "calls stat"

    def read(self) -> Any:
        return 2.0 if os.path.exists(self.path) else 1.0

    def write(self, value: float) -> None:
        if value == 0.5:
            os.unlink(self.path)
        else:
            super().write(value)


class Folder(Eager):
    told = "calls scandir"

    def read(self) -> Any:
        return 1.0 + 0 * len(list(os.scandir(tempfile.gettempdir())))


class NumpyFile(File):
    told = "calls "

    def read(self) -> Any:
        return float(numpy.loadtxt(self.path))


class Clock(Eager):
    told = "calls time()"

    def read(self) -> Any:
        return 1.0 + 0.0 * time.time()


class PythonRandom(Eager):
    told = "draws from Python's `random`"

    def read(self) -> Any:
        return random.random()


class NumpyRandom(Eager):
    told = "or NumPy"

    def read(self) -> Any:
        return numpy.random.rand()


class OwnRandom(Eager):
    told = "random"

    def start(self) -> None:
        self.random = random.Random(3)
        self.numpy_random = numpy.random.default_rng(3)

    def read(self) -> Any:
        return self.random.random() + self.numpy_random.random()


class OwnCounter(Eager):
    told = "changes self.crit.value"

    def start(self) -> None:
        self.crit = Config()

    def read(self) -> Any:
        self.crit.value += 0.1
        return self.crit.value


class NonlocalCounter(Eager):
    told = "changes count"

    def start(self) -> None:
        count = 0.0

        def tell() -> float:
            nonlocal count
            count += 1.0
            return count

        self.tell = tell

    def read(self) -> Any:
        return self.tell()


class GrowingDefault(Eager):
    told = "changes"

    def start(self) -> None:
        grown.__defaults__[0].clear()  # type: ignore[index]

    def read(self) -> Any:
        return grown()


def grown(items: Any = []) -> float:  # noqa: B006 - the kind of state that is meant
    """How often it was called."""
    items.append(1)
    return float(len(items))


class MissingKey(Kind):
    """Reading a ``defaultdict`` makes the entry: another one at each step."""

    graphs = 6

    def start(self) -> None:
        self.table: Any = collections.defaultdict(float)

    def write(self, value: float) -> None:
        pass

    def read(self) -> Any:
        return 1.0 + self.table[f"batch {self.trainer.fit_loop.epoch_loop.batch_idx}"] + len(self.table)
