"""True values of single numbers on the host (step counters), computed beside the fake tensors that stand for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd._private_api import pytree
from lightning_spmd.ir.aliasing import written_values


class KnownValues:
    """Values of fake tensors with one element, by the tensor."""

    def __init__(self) -> None:
        self._values: dict[int, Tensor] = {}

    def get(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor, or None if unknown."""
        return self._values.get(id(tensor))

    def equal(self, tensors: Any) -> bool | None:
        """``torch.equal`` of two known values, which ``torch.cov`` needs; None if one is unknown."""
        if any(id(tensor) not in self._values for tensor in tensors):
            return None
        with private.disable_dispatch_modes():
            return torch.equal(*[self._values[id(tensor)] for tensor in tensors])

    def note(self, tensor: Tensor, real: Tensor) -> None:
        """Note the value of a fake tensor; ``.item()`` on what is computed from it is known then, too."""
        self._values[id(tensor)] = real

    def follow(self, func: Any, args: Any, kwargs: Any, entries: list[Any], out: Any) -> None:
        """Compute on true values if all operands are single numbers on the host.

        Args:
            func: the operator that was recorded.
            args: its arguments, with plain numbers.
            kwargs: those with names.
            entries: its arguments, flat, with recorded numbers.
            out: what it gave.
        """
        tensors = [a for a in entries if isinstance(a, Tensor)]
        is_made_here = not tensors and isinstance(out, Tensor) and out.numel() == 1 and out.device.type == "cpu"
        known = all(id(t) in self._values for t in tensors) and not private.is_random(func)
        if not known or not (tensors or is_made_here):
            for t in written_values(func, args, kwargs):
                self._values.pop(id(t), None)
            return
        real_args, real_kwargs = pytree.tree_map_only(Tensor, lambda t: self._values[id(t)], (args, kwargs))
        with private.disable_dispatch_modes():
            real = func(*real_args, **real_kwargs)
        for fake_leaf, real_leaf in zip(pytree.tree_leaves(out), pytree.tree_leaves(real), strict=True):
            if isinstance(fake_leaf, Tensor) and fake_leaf.numel() == 1:
                self._values[id(fake_leaf)] = real_leaf


def draw_key(func: Any, args: Any, kwargs: Any) -> bytes | None:
    """The generator's state, for operators that draw from the default one.

    Fake tensors consume no random numbers, so the recorder advances the real generator by one number a draw:
    activation checkpointing, which restores the state and computes again, then shows itself by an equal key.
    """
    if not private.draws(func, args, kwargs):
        return None
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
    generator = private.default_generator(tensors[0].device if tensors else torch.device("cpu"))
    with private.disable_dispatch_modes():
        key = generator.get_state().numpy().tobytes() + str(func).encode()
        torch.empty(1, device=generator.device).uniform_(generator=generator)
    return key
