"""``nn.Module._apply``, behind ``module.to``, ``float`` and the like."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def conversions_that_change_nothing() -> Iterator[None]:
    """``layer.to(dtype)`` in a step leaves a layer alone that has the dtype, also where its parameters are fake.

    ``nn.Module._apply`` gives every fake parameter another tensor, whatever it is told to do with it, and torch refuses
    that for one that somebody knows. Layers that do change are still refused.
    """
    original = nn.Module._apply

    def apply(self: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        parts = self.modules() if recurse else (self,)
        tensors = [t for part in parts for table in (part._parameters, part._buffers) for t in table.values()]
        with torch.no_grad():
            if all(t is None or function(t) is t for t in tensors):
                return self
        return original(self, function, recurse)

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]
