"""What calls produce, found by making them once on fake tensors.

A program is written once for every size that a rank's piece has, again where the ranks found a difference, and the
layers of a model repeat the same calls. What a call of torch's own operators produces depends on what its operands look
like and on nothing else, so it is remembered for the process, and fake tensors are made where a call is new.

Not remembered: operators of others (their shape functions may look at anything), results that depend on data or on the
place in a storage, complex numbers (a conjugate view looks like any other tensor), and what changes the shape of its
operand in place.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd._private_api import FakeTensorMode, disable_dispatch_modes, is_random, pytree, zeros_like_fake
from lightning_spmd.ir.aliasing import aliased_argument, written_arguments
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.shape_functions import empty_result

aten = torch.ops.aten

_MOST = 1 << 15
"""Calls that are remembered; then it begins anew. A model of 12 layers has some hundreds."""
_results: dict[Any, Any] = {}
_taken: set[Any] = set()
"""calls that kernels take on ranks without rows"""

BY_PLACE = {aten.as_strided, aten.as_strided_, aten.as_strided_copy, aten.as_strided_scatter}
"""Operators whose result depends on how their first operand lies in its storage."""
_UNLIKE = (torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_ENDS_WITHOUT_ROWS = {aten.native_batch_norm, aten._native_batch_norm_legit}
"""Kernels that end the process where a tensor is empty."""


class Fakes:
    """The specs of a program's values, and fake tensors of those that a new call needs.

    Args:
        has_rows: no operand is empty for want of rows.
    """

    def __init__(self, has_rows: bool) -> None:
        self._mode = FakeTensorMode()
        self._has_rows = has_rows
        self._made: dict[fx.Node, Any] = {}
        self._reshaped: set[fx.Node] = set()

    def spec(self, node: fx.Node) -> TensorSpec:
        """What the tensor of a node looks like by now: ``transpose_`` and the like change it."""
        return TensorSpec.of(self._made[node]) if node in self._reshaped else node.meta["val"]

    def is_lazy(self, node: fx.Node) -> bool:
        """Whether a tensor's memory holds the conjugates or the negatives of its elements."""
        tensor = self._fake(node)
        return tensor.is_conj() or tensor.is_neg()

    def result(self, op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What a call produces: its specs and, where it was made, its fake tensors."""
        if op is operator.getitem and args[0] not in self._made:
            return args[0].meta["val"][args[1]], None
        key = self._key(op, args, kwargs)
        if key is not None and key in _results and (self._has_rows or key in _taken):
            return _results[key], None
        fake = self._compute(op, args, kwargs)
        value = pytree.tree_map_only(torch.Tensor, TensorSpec.of, fake)
        if key is not None and not _has_complex(value):
            if len(_results) >= _MOST:
                _results.clear()
                _taken.clear()
            _results[key] = value
            if not self._has_rows:
                _taken.add(key)
        return value, fake

    def keep(self, node: fx.Node, fake: Any) -> None:
        """``fake`` is what the node produces; it was computed, so it may be a view that nothing else tells of."""
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
                made = node.target(*fx.map_arg(node.args, self._fake), **fx.map_arg(node.kwargs, self._fake))
        else:
            with self._mode:
                made = pytree.tree_map_only(TensorSpec, _empty, value)
        if isinstance(made, (torch.Tensor, tuple, list)):
            self._made[node] = made
        return made

    def _key(self, op: Any, args: Any, kwargs: Any) -> Any:
        """What a call's result depends on; None where nobody can tell."""
        if getattr(op, "namespace", None) != "aten" or op.overloadpacket in BY_PLACE or op is aten.view.dtype:
            return None
        if any(tag in op.tags for tag in _UNLIKE):
            return None
        try:
            key = (op, torch.get_default_dtype(), self._look(args), self._look(kwargs))
            hash(key)
        except TypeError:
            return None
        return key

    def _look(self, value: Any) -> Any:
        """An argument as part of a key."""
        if isinstance(value, fx.Node):
            value = self.spec(value)
        if isinstance(value, TensorSpec):
            if value.dtype.is_complex:
                raise TypeError("a conjugate looks like any other tensor")
            return value
        if isinstance(value, dict):
            return tuple((name, self._look(entry)) for name, entry in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(map(self._look, value))
        return type(value), value


def _has_complex(value: Any) -> bool:
    return any(isinstance(v, TensorSpec) and v.dtype.is_complex for v in pytree.tree_leaves(value))


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)


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
