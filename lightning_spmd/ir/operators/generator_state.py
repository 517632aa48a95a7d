"""The state of torch's generator on the host, in a graph: read, set and seeded between draws, as the step does.

A GPU's is seeded with it, as ``torch.manual_seed`` does.

All three count as draws of random numbers, which keep their places among one another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from lightning_spmd import _private_api as private
from lightning_spmd.ir.operators import host_copies  # pyright: ignore[reportUnusedImport]  # noqa: F401 - begins the library

_LIBRARY: Any = Library("lightning_spmd", "FRAGMENT")


def _read() -> Tensor:
    return torch.default_generator.get_state()


def _write(state: Tensor) -> None:
    torch.default_generator.set_state(state)


def _seed(seed: int) -> None:
    for generator in private.generators():
        generator.manual_seed(int(seed))


def _shape() -> Tensor:
    return torch.empty(_SIZE, dtype=torch.uint8)


def _nothing(_: Any) -> None:
    pass


_SIZE = len(torch.default_generator.get_state())
_OPERATORS: tuple[tuple[str, Any, Any], ...] = (
    ("read_state() -> Tensor", _read, _shape),
    ("write_state(Tensor state) -> ()", _write, _nothing),
    ("seed(SymInt seed) -> ()", _seed, _nothing),
)
for _schema, _function, _fake in _OPERATORS:
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.nondeterministic_seeded,))
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lightning_spmd::{_name}", _fake, lib=_LIBRARY)  # pyright: ignore[reportUnknownMemberType]

READ_STATE = torch.ops.lightning_spmd.read_state.default
WRITE_STATE = torch.ops.lightning_spmd.write_state.default
SEED = torch.ops.lightning_spmd.seed.default
