"""Containers of every kind."""

import array
import collections
import queue
import types
from typing import Any

from tests.strategy.kinds.base_kinds import Config, Kind


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
