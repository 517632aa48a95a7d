"""How the operators of this package are told to torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.library import Library

_LIBRARY: Any = Library("lightning_spmd", "DEF")


def define_operator(
    schema: str,
    kernels: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    shape: Callable[..., Any] | None = None,
    *,
    tags: Sequence[torch.Tag] = (),
) -> Any:
    """Define an operator; gives it.

    Args:
        schema: its name, arguments and results, as torch writes them.
        kernels: one for all devices, or one a dispatch key.
        shape: gives results for fake tensors.
        tags: what torch shall know of it.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    for key, kernel in ({"CompositeExplicitAutograd": kernels} if callable(kernels) else kernels).items():
        _LIBRARY.impl(name, kernel, key)
    if shape is not None:
        torch.library.register_fake(f"lightning_spmd::{name}", shape, lib=_LIBRARY)  # pyright: ignore[reportUnknownMemberType]
    return getattr(torch.ops.lightning_spmd, name).default
