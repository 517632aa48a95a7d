"""Functions, scopes and modules of Python."""

import configparser
import contextlib
import contextvars
import decimal
import functools
import importlib
import logging
import os
import statistics
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from tests.strategy.kinds.base_kinds import VALUES, Config, Kind

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
    def start(self) -> None:
        pass

    def read(self) -> Any:
        return float(decimal.Decimal(1) / decimal.Decimal(3))

    def write(self, value: float) -> None:
        decimal.getcontext().prec = 5 if value == 0.5 else 28


class WorkingDirectory(Kind):
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
