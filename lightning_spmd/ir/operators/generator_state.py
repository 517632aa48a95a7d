"""The state of torch's generator on the host, in a graph: read, set and seeded between draws, as the step does.

A GPU's is seeded with it, as ``torch.manual_seed`` does.

All three count as draws of random numbers, which keep their places among one another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.operators.library import define_operator


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
_DRAWS = (torch.Tag.nondeterministic_seeded,)
READ_STATE = define_operator("read_state() -> Tensor", _read, _shape, tags=_DRAWS)
WRITE_STATE = define_operator("write_state(Tensor state) -> ()", _write, _nothing, tags=_DRAWS)
SEED = define_operator("seed(SymInt seed) -> ()", _seed, _nothing, tags=_DRAWS)
