"""Objects: attributes, properties, slots, classes."""

import argparse
import dataclasses
import enum
import functools
import operator
import types
from typing import Any, ClassVar, NamedTuple

from tests.strategy.kinds.base_kinds import VALUES, Config, Kind


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
