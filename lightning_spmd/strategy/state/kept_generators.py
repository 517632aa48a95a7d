"""Random states of generators that a module and its submodules keep as attributes, in checkpoints.

    self.rng = np.random.default_rng(3)     random.Random, np.random.RandomState, torch.Generator

A resumed run creates the module again, and its generators would restart: other numbers than those of an uninterrupted
run. The stored states are plain (numbers, lists, strings, tensors), as ``weights_only=True`` requires.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_spmd.messages import warn

Place = str
_Kind = tuple[Callable[[Any], Any], Callable[[Any, Any], None]]


def pack_kept_generators(module: nn.Module | None) -> dict[Place, Any]:
    """The state of each, by ``module path.attribute``."""
    found = ((place, name, generator, ways) for place, name, generator, ways in _generators(module))
    return {place: {"kind": name, "state": _as_plain(ways[0](generator))} for place, name, generator, ways in found}


def restore_kept_generators(states: dict[Place, Any], module: nn.Module | None) -> None:
    """Restore the states, with a warning for generators that the module lacks or has of another kind.

    Args:
        states: by place.
        module: of the resumed run.
    """
    left = dict(states)
    for place, name, generator, ways in _generators(module):
        if place in left and left[place]["kind"] == name:
            ways[1](generator, _from_plain(left.pop(place)["state"]))
    if left:
        warn(
            f"the checkpoint has the state of {', '.join(sorted(left))}, which this module does not have (as a "
            "generator of that kind): their random numbers do not continue from there"
        )


def _generators(module: nn.Module | None) -> Iterator[tuple[Place, str, Any, _Kind]]:
    kinds = _kinds()
    for path, part in [] if module is None else module.named_modules():
        for name, value in vars(part).items():
            for kind, ways in kinds.items():
                if isinstance(value, kind) and not isinstance(value, random.SystemRandom):
                    yield f"{path}.{name}".lstrip("."), _name_of(value), value, ways
                    break


def _name_of(generator: Any) -> str:
    bits = getattr(generator, "bit_generator", None)  # of which NumPy has several
    device = f" on {generator.device.type}" if isinstance(generator, torch.Generator) else ""
    return type(generator).__name__ + device + (f" of {type(bits).__name__}" if bits is not None else "")


def _kinds() -> dict[type, _Kind]:
    kinds: dict[type, _Kind] = {
        random.Random: (random.Random.getstate, random.Random.setstate),
        torch.Generator: (lambda g: g.get_state(), lambda g, state: g.set_state(state.cpu())),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds[numpy.random.RandomState] = (lambda g: g.get_state(legacy=False), lambda g, state: g.set_state(state))
        kinds[numpy.random.Generator] = (
            lambda g: g.bit_generator.state,
            lambda g, state: setattr(g.bit_generator, "state", state),
        )
    return kinds


def _as_plain(value: Any) -> Any:
    """With arrays as lists."""
    if isinstance(value, dict):
        return {key: _as_plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"tuple": [_as_plain(item) for item in value]}
    if type(value).__module__ == "numpy":
        return {"array": value.tolist(), "dtype": str(value.dtype)} if hasattr(value, "shape") else value
    return value


def _from_plain(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tuple"}:
        return tuple(_from_plain(item) for item in value["tuple"])
    if value.keys() == {"array", "dtype"}:
        return sys.modules["numpy"].asarray(value["array"], dtype=value["dtype"])
    return {key: _from_plain(item) for key, item in value.items()}
