"""Mixed placements in hooks that take all gradients in one list (a norm, clipping): whole beside sharded tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication


@contextlib.contextmanager
def whole_beside_parts(module: nn.Module) -> Iterator[None]:
    """Inside, operators take both at once, where some of the module's parameters are whole and others in parts.

    So it is under tensor parallelism, where a bias behind a row-wise layer is whole; gradients lie as their parameters
    do. What is whole has the same values on all ranks.
    """
    if len({isinstance(parameter, DTensor) for parameter in module.parameters()}) < 2:
        yield
        return
    with implicit_replication():
        yield
