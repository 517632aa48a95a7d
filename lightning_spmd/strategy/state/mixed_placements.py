"""Mixed placements: hooks take plain and sharded gradients in one list, for a norm or for clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from lightning_spmd.strategy.state.state_layout import StateLayout


@contextlib.contextmanager
def mixed_placements_allowed(layout: StateLayout, module: nn.Module) -> Iterator[None]:
    """Let operators take plain tensors and DTensors together, if the module has parameters of both kinds.

    Under tensor parallelism the bias of a row-wise layer is a plain tensor and its weight is a DTensor; gradients are
    placed like their parameters. Plain tensors have equal values on all ranks, so torch may treat them as replicated.
    """
    if layout.state is None or len({isinstance(parameter, DTensor) for parameter in module.parameters()}) < 2:
        yield
        return
    with implicit_replication():
        yield
