"""Every underscore name of torch and Lightning that this package uses: why, and what breaks without it.

Seen to work on torch 2.11 and 2.13 and lightning 2.6. A name that disappears fails here, at import, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Capture sees operators below autograd through a dispatch mode; without it there is no graph at all.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# Capture computes on true values while its own modes are active (step counters); without it they would be recorded.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "current_backward_sequence_number",
    "default_generator",
    "disable_dispatch_modes",
    "is_mutating",
    "is_random",
    "mutated_arguments",
    "next_sequence_number",
]

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
disable_dispatch_modes = _disable_current_modes


def next_sequence_number() -> int:
    """Number that the next autograd node gets: ties a backward node to the module and line of its forward.

    Without it backward nodes have no module name in dumps and messages; nothing else breaks.
    """
    return torch._C._autograd._get_sequence_nr()


def current_backward_sequence_number() -> int | None:
    """Sequence number of the autograd node whose backward runs now, or None. Same use as above."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def is_mutating(func: Any) -> bool:
    """Whether the operator's schema writes into an argument. Without it hazards could not be verified."""
    return func._schema.is_mutable


def is_random(func: Any) -> bool:
    """Whether the operator draws random numbers (dropout masks must differ a shard and repeat under recomputation)."""
    return torch.Tag.nondeterministic_seeded in func.tags


def mutated_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors among the arguments that the operator writes into, by its schema."""
    found: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found.extend(value if isinstance(value, (list, tuple)) else [value])
    return [v for v in found if v is not None]


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on ``device`` draw from when none is given."""
    if device.type == "cpu":
        return torch.default_generator
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]
