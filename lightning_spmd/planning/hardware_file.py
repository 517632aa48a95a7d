"""Devices and links of the user's own, from a YAML file, on top of the table's.

::

    devices:
      our-gpu: {like: h100, memory: 96.0e9, flops: {bf16: 800.0e12}}
    links:
      our-network: {like: ethernet-25, bandwidth: 6.25e9}
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lightning_spmd.cost.hardware import DEVICES, LINKS, DeviceType, LinkType
from lightning_spmd.errors import ConfigurationError

_FLOPS = ("bf16", "fp16", "tf32", "fp32", "fp64")
_WORDS = {"kind": ("cuda", "cpu"), "per": ("device", "node")}
_MAY_BE_ZERO = ("reserved", "launch", "latency", "start", "core")
_SHARES = (
    "flops_share",
    "bandwidth_share",
    "attention_share",
    "convolution_share",
    "curve_share",
    "reduction_share",
    "share",
)
_Entry = TypeVar("_Entry", DeviceType, LinkType)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Devices and links by name."""

    devices: Mapping[str, DeviceType]
    links: Mapping[str, LinkType]

    def device(self, name: str, key: str) -> DeviceType:
        """The device of that name; ``key`` is the place in the file."""
        return self.devices[known(name, self.devices, key)]

    def link(self, name: str, key: str) -> LinkType:
        """The link of that name; ``key`` is the place in the file."""
        return self.links[known(name, self.links, key)]


def known(name: Any, names: Iterable[str], key: str) -> str:
    """``name``, if it is one of ``names``.

    Raises:
        ConfigurationError: it is not; ``key`` is where it was written.
    """
    names = list(names)
    if name in names:
        return str(name)
    near = difflib.get_close_matches(str(name), names, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigurationError(f"{key}: there is no {name!r}; known are {', '.join(names)}.{guess}")


def read_hardware(file: str | None) -> Hardware:
    """The built-in table with the changes of a file.

    Raises:
        ConfigurationError: the file cannot be read, or a key or value in it is wrong; the message names its path.
    """
    if file is None:
        return Hardware(DEVICES, LINKS)
    content = _content(file)
    for key in content:
        known(key, ("devices", "links"), file)
    links = dict(LINKS)
    for name, entry in _mapping(content.get("links") or {}, f"{file}: links").items():
        links[name] = _made(LinkType, name, entry, links, f"{file}: links.{name}")
    devices = dict(DEVICES)
    for name, entry in _mapping(content.get("devices") or {}, f"{file}: devices").items():
        devices[name] = _made(DeviceType, name, entry, devices, f"{file}: devices.{name}")
        known(devices[name].link, links, f"{file}: devices.{name}.link")
    return Hardware(devices, links)


def _content(file: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--hardware {file}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--hardware {file} is no YAML: {' '.join(str(error).split())}") from error
    return _mapping(content, file)


def _mapping(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{key}: give keys and values, not {value!r}")
    return {str(k): v for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _made(kind: type[_Entry], name: str, entry: Any, table: Mapping[str, _Entry], key: str) -> _Entry:
    given = _mapping(entry, key)
    fields = [f.name for f in dataclasses.fields(kind) if f.name != "name"]
    for word in given:
        known(word, ["like", *fields], key)
    like = given.pop("like", name if name in table else None)
    values = {word: _value(word, value, f"{key}.{word}") for word, value in given.items()}
    if like is not None:
        base = table[known(like, table, f"{key}.like")]
        if isinstance(base, DeviceType) and "flops" in values:
            values["flops"] = {**base.flops, **values["flops"]}
        return dataclasses.replace(base, name=name, **{"source": f"like {base.name}, " + key, **values})
    needed = [
        f.name
        for f in dataclasses.fields(kind)
        if f.name not in ("name", *values) and f.default is dataclasses.MISSING and f.name != "within"
    ]
    if needed:
        raise ConfigurationError(f"{key}: {', '.join(needed)} missing; give them, or like: one of {', '.join(table)}")
    return kind(name=name, **values)


def _value(word: str, value: Any, key: str) -> Any:
    if word in _WORDS:
        return known(value, _WORDS[word], key)
    if word in ("source", "link"):
        return str(value)
    if word == "flops":
        numbers = _mapping(value, key)
        return {known(k, _FLOPS, key): _number(v, f"{key}.{k}") for k, v in numbers.items()}
    number = _number(value, key, zero=word in _MAY_BE_ZERO)
    if word in _SHARES and number > 1:
        raise ConfigurationError(f"{key}: {value!r} is no share; give a number above 0 and at most 1")
    return number


def _number(value: Any, key: str, *, zero: bool = False) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # YAML reads 1e12 as a word
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ConfigurationError(f"{key}: {value!r} is no number {'of at least' if zero else 'above'} 0")
    return number
