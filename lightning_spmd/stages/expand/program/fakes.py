"""Results of a program's calls: remembered (``ir/known_results``), or computed on fake tensors.

A program is written once for every size of a rank's piece, and again if the ranks find a difference, so nearly all of
its calls are known. Fake tensors are only made for new calls.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd._private_api import (
    FakeTensorMode,
    disable_dispatch_modes,
    is_random,
    new_fake,
    pytree,
    zeros_like_fake,
)
from lightning_spmd.ir.aliasing import aliased_argument, written_arguments
from lightning_spmd.ir.known_results import Unlike, is_known, key_of, known, remember
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.operators.shape_functions import empty_result

aten = torch.ops.aten

_taken: set[Any] = set()
"""calls that kernels take on ranks without rows"""
_ENDS_WITHOUT_ROWS = {aten.native_batch_norm, aten._native_batch_norm_legit}
"""Kernels that end the process where a tensor is empty."""
_LAZY = {aten._conj, aten._neg_view}
"""Where conjugates and negatives come from that are not computed before something reads them."""


class Fakes:
    """The specs of a program's values, and fake tensors of those that a new call needs.

    Args:
        has_rows: no operand is empty for want of rows.
    """

    def __init__(self, has_rows: bool) -> None:
        self._mode = FakeTensorMode()
        self._mode.cache_enabled = False  # `known_results` is in front of it
        self._has_rows = has_rows
        self._made: dict[fx.Node, Any] = {}
        self._reshaped: set[fx.Node] = set()
        self._makes_lazy = False

    def spec(self, node: fx.Node) -> TensorSpec:
        """The present spec of a node's tensor, which ``transpose_`` and similar operators change."""
        return TensorSpec.of(self._made[node]) if node in self._reshaped else node.meta["val"]

    def is_lazy(self, node: fx.Node) -> bool:
        """Whether a tensor's memory holds the conjugates or the negatives of its elements."""
        if not self._makes_lazy:
            return False
        tensor = self._fake(node)
        return tensor.is_conj() or tensor.is_neg()

    def result(self, op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The result of a call: its specs and, if they were made, its fake tensors."""
        self._makes_lazy |= getattr(op, "overloadpacket", None) in _LAZY
        if op is operator.getitem and args[0] not in self._made:
            return args[0].meta["val"][args[1]], None
        key = key_of(op, args, kwargs, self._look)
        if is_known(key) and (self._has_rows or key in _taken):
            return known(key), None
        fake = self._compute(op, args, kwargs)
        value = pytree.tree_map_only(torch.Tensor, TensorSpec.of, fake)
        remember(key, value)
        if not self._has_rows:
            _taken.add(key)
        return value, fake

    def keep(self, node: fx.Node, fake: Any) -> None:
        """Store ``fake`` as the node's result. It was computed and may be a view."""
        if fake is None:
            return
        self._made[node] = fake
        if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
            self._reshaped.update([node, *written_arguments(node)])

    def _compute(self, op: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = fx.map_arg(args, self._fake), fx.map_arg(kwargs, self._fake)
        if not self._has_rows:
            _try_kernel(op, args, kwargs)
        if op is aten.view.default:
            _try_view(*args)
        with self._mode:
            return empty_result(op, args, kwargs)

    def _fake(self, node: fx.Node) -> Any:
        """The fake tensor of a node. One that shares storage comes about as it does in the program."""
        found = self._made.get(node)
        if found is not None:
            return found
        value = node.meta["val"]
        source = aliased_argument(node)
        if source is not None and node.target is not operator.getitem and source in written_arguments(node):
            made = self._fake(source)
        elif source is not None:
            with self._mode:
                operation: Any = node.target
                made = operation(*fx.map_arg(node.args, self._fake), **fx.map_arg(node.kwargs, self._fake))
        else:
            made = pytree.tree_map_only(TensorSpec, functools.partial(new_fake, self._mode), value)
        if isinstance(made, (torch.Tensor, tuple, list)):
            self._made[node] = made
        return made

    def _look(self, value: Any) -> Any:
        """An argument as part of a call's key."""
        if not isinstance(value, fx.Node):
            return value
        seen = self.spec(value)
        if isinstance(seen, TensorSpec) and seen.dtype.is_complex:
            raise Unlike
        return seen


def _try_kernel(op: Any, args: Any, kwargs: Any) -> None:
    """Run the kernel where a rank without rows calls it: some refuse empty tensors that their shape function takes.

    Raises:
        RuntimeError: what the kernel says.
    """
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    if not hasattr(op, "_schema") or is_random(op) or all(t.numel() for t in tensors):
        return
    if op.overloadpacket in _ENDS_WITHOUT_ROWS:
        raise RuntimeError("the kernel divides by the number of rows, which is zero on some rank")
    with disable_dispatch_modes(), torch.no_grad():
        args, kwargs = pytree.tree_map_only(torch.Tensor, zeros_like_fake, (args, kwargs))
        op(*args, **kwargs)


def _try_view(tensor: torch.Tensor, size: Sequence[int]) -> None:
    """Take a view as kernels do: on fake tensors torch 2.13 takes (2, 4, 1, 2) of strides (2, 4, 1, 1) for (2, 8).

    Raises:
        RuntimeError: it is none.
    """
    with disable_dispatch_modes():
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        like.view(size)
