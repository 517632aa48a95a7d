"""The contract of a pass, and the check of a pass list before anything runs.

As in DeepSpeed's ``compile/passes/contract.py``, the requirements of a list are checked as a whole. A wrong order is an
error at setup that names the pass and the missing one, never a wrong graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.steps import ShardedStep

REDUCE_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The names that ``reduce_dtype`` takes."""


@dataclass
class PassState:
    """The state of one run of the passes over one graph; never shared between graphs.

    Args:
        bucket_size_mb: cap of a communication bucket in MiB, or ``"auto"``.
        reduce_dtype: dtype in which gradients are reduced, a name in REDUCE_DTYPES; None: their own.
        rematerialize: the share of the activations' bytes to free, or as an integer the bytes to leave; None: keep all.
        offload: as ``rematerialize``, for activations that move to host memory.
        in_order: buckets must not depend on the order in which gradients become ready, because ranks have other graphs.
        notes: a note of each pass, for dumps and messages.
    """

    bucket_size_mb: float | str = "auto"
    reduce_dtype: str | None = None
    rematerialize: float | int | None = None
    offload: float | int | None = None
    in_order: bool = False
    notes: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class GraphPass:
    """A function on a sharded step, with its contract.

    Args:
        name: its name in error messages, dumps and ``SPMDStrategy(passes=[...])``.
        run: changes the step's graph in place.
        requires: passes that must have run before.
        after: passes that, if they are in the list, must come before this one.
        changes_numerics: whether the order of floating-point operations may change.
    """

    name: str
    run: Callable[[ShardedStep, PassState], None]
    requires: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    changes_numerics: bool = False


def check_order(passes: Sequence[GraphPass]) -> None:
    """Check a pass list.

    Raises:
        ConfigurationError: naming the pass and the one that is missing or comes too late.
    """
    names = [p.name for p in passes]
    for position, current in enumerate(passes):
        before = set(names[:position])
        if current.name in before:
            raise ConfigurationError(f"pass {current.name!r} is in the list twice")
        missing = current.requires - before
        if missing:
            raise ConfigurationError(f"pass {current.name!r} requires {sorted(missing)} before it; the list is {names}")
        late = current.after & set(names[position:])
        if late:
            raise ConfigurationError(f"pass {current.name!r} must come after {sorted(late)}; the list is {names}")


def select(requested: Sequence[Any], known: Sequence[GraphPass]) -> list[GraphPass]:
    """The passes for a user's list of names and :class:`GraphPass` objects, checked.

    Raises:
        ConfigurationError: for an unknown name (with those that exist) or a wrong order.
    """
    by_name = {p.name: p for p in known}
    chosen: list[GraphPass] = []
    for item in requested:
        if isinstance(item, GraphPass):
            chosen.append(item)
        elif item in by_name:
            chosen.append(by_name[item])
        else:
            raise ConfigurationError(f"unknown pass {item!r} in SPMDStrategy(passes=...); known are {list(by_name)}")
    check_order(chosen)
    return chosen
