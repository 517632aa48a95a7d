"""Batches: tensors become graph inputs, everything else is the user's Python.

Where several ranks have rows, lists with an entry for each of this rank's rows, and numbers that count them, are a
rank's own: looking at one is noticed (``rows_of_rank.py``, ``follow/tripwires.py``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from lightning_spmd import _private_api as private
from lightning_spmd.errors import BatchError
from lightning_spmd.ir.layout import is_dense, layout_of
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.tree import PLAIN, leaves, map_leaves, structure
from lightning_spmd.stages.capture.batch.objects import tensors_inside
from lightning_spmd.stages.capture.batch.rows_of_rank import (
    about_list,
    about_number,
    about_object,
    is_count,
    is_plain,
    lists_of_rows,
    rows_of,
)
from lightning_spmd.stages.capture.user_code import not_in_graphs

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""In the ``repr`` of a dictionary's key: another one in every process."""


@functools.lru_cache(maxsize=4096)
def _without_addresses(path: str) -> str:
    """A path as it reads on every rank: a key that is an object may have an address in it."""
    return _ADDRESS.sub("", path)


class Batch:
    """The arguments of one training_step call, taken apart.

    Attributes:
        tensor_values: the tensor leaves, in order.

    Args:
        batch: what holds the batch (the first positional argument), as Lightning passes it.
        shared: paths of tensors that are the same for every sample although they have dimensions (class weights). Those
            without dimensions always are.
        part: other ranks have rows of the same step.
        looks_inside: tensors of objects that Lightning moves as a whole (torch_geometric's ``Data``) are the batch's,
            behind all others.
    """

    def __init__(
        self, batch: Any, shared: Collection[str] = (), *, part: bool = False, looks_inside: bool = False
    ) -> None:
        self.tree = batch
        self.shared = shared
        found = leaves(batch)
        if looks_inside:
            others = [(path, leaf) for path, leaf in found if type(leaf) not in PLAIN]
            found += [inner for path, leaf in others for inner in tensors_inside(path, leaf)]
        self.paths = [path for path, _ in found]
        self.values = [leaf for _, leaf in found]
        self.tensors = [i for i, leaf in enumerate(self.values) if isinstance(leaf, Tensor)]
        self._own = rows_of([self.values[i] for i in self.tensors if self.paths[i] not in shared]) if part else None
        self._lists = {} if self._own is None else {id(one): one for one in lists_of_rows(batch, self._own)}
        if self._lists:  # what is in them belongs to one row each
            inside = self._inside_lists()
            self.tensors = [i for i in self.tensors if i not in inside]
        self._copied: list[tuple[Tensor, Tensor, int]] = []
        if part:
            self._close_gaps()
        self.tensor_values: list[Tensor] = [self.values[i] for i in self.tensors]

    def is_shared(self, index: int) -> bool:
        """Whether a tensor leaf is the same for every sample."""
        return self.values[index].ndim == 0 or self.paths[index] in self.shared

    def rows(self) -> int:
        """Size of the common first dimension of the tensors.

        Raises:
            BatchError: if tensors disagree, naming each with its shape; 0-dim tensors are not batched.
        """
        for i in self.tensors:
            if (strange := not_in_graphs(self.values[i])) is not None:
                raise BatchError(f"batch{self.paths[i]} is {strange}", is_ragged=True)
        trained = next((i for i in self.tensors if is_trained(self.values[i])), None)
        if trained is not None:
            text = f"batch{self.paths[trained]} is a parameter, or computed by a hook that has a gradient"
            raise BatchError(text, is_ragged=True)
        sizes = {self.values[i].shape[0] for i in self.tensors if not self.is_shared(i)}
        if len(sizes) == 1:
            return sizes.pop()
        shapes = ", ".join(f"batch{self.paths[i]}: {tuple(self.values[i].shape)}" for i in self.tensors)
        if not sizes:
            text = f"the batch holds no tensor with a batch dimension ({shapes or 'no tensor at all'})"
            raise BatchError(text, is_ragged=True)
        raise BatchError(
            f"the tensors of the batch have no common first dimension: {shapes}. The batch is split over the devices "
            "along dimension 0 of every tensor; make the collate function return tensors with the batch first, or keep "
            "values that are the same for every sample 0-dimensional or on the module; or let each rank have a batch "
            "of its own, SPMDStrategy(batch='local')",
            is_ragged=True,
        )

    def first_sizes(self) -> tuple[int, ...]:
        """Size of every tensor's first dimension: what :meth:`cache_key` leaves out."""
        return tuple([t.shape[0] for t in self.tensor_values if t.ndim > 0])

    def cache_key(self, *, sizes: bool = True) -> tuple[Any, ...]:
        """What must be equal for two batches of this rank to run the same graph, without the first dimensions.

        Args:
            sizes: with the other ones.
        """
        described = tuple(
            (
                *((self._sizes(i), self._order(t)) if sizes else (self.is_shared(i), layout_of(t.shape, t.stride()))),
                *(t.ndim, t.dtype, t.device, t.requires_grad),
            )
            for i, t in zip(self.tensors, self.tensor_values, strict=True)
        )
        return (structure(self.tree), tuple(self.tensors), described)

    def own_key(self) -> tuple[Any, ...]:
        """What must be equal for two batches of this rank to run the same graph, where the batch is the rank's own."""
        described = tuple((t.shape, t.dtype, t.device, t.requires_grad, self._order(t)) for t in self.tensor_values)
        return (structure(self.tree), tuple(self.tensors), described)

    def kinds(self) -> tuple[Any, ...]:
        """The kinds of the tensors: everything but their sizes."""
        return tuple(
            (_without_addresses(self.paths[i]), t.ndim, t.dtype, t.device.type, t.requires_grad)
            for i, t in zip(self.tensors, self.tensor_values, strict=True)
        )

    def _sizes(self, index: int) -> tuple[Any, ...]:
        """Shape of a tensor leaf without its rows."""
        shape = tuple(self.values[index].shape)
        return ("shared", *shape) if self.is_shared(index) else shape[1:]

    def _order(self, tensor: Tensor) -> Any:
        """Strides where they are not the plain ones: kernels depend on them. Plain ones contain the number of rows."""
        is_plain = tensor.is_contiguous() if self._own is not None else layout_of(tensor.shape, tensor.stride()) is None
        return True if is_plain else tensor.stride()

    def shared_key(self) -> tuple[Any, ...]:
        """What must be equal for the batches of all ranks to be one.

        Ranks have devices of their own, so only the kind of device counts; and strides contain the number of rows, so
        only their order does.
        """
        return tuple(
            (
                _without_addresses(self.paths[i]),
                self._sizes(i),
                t.ndim,
                t.dtype,
                t.device.type,
                t.requires_grad,
                memory_order(t),
            )
            for i, t in zip(self.tensors, self.tensor_values, strict=True)
        )

    def make_contiguous(self) -> None:
        """Put copies in the plain memory order in place of tensors in another one."""
        for i in self.tensors:
            self.values[i] = self.values[i].contiguous()
        self.tensor_values = [self.values[i] for i in self.tensors]

    def _close_gaps(self) -> None:
        """Put plain copies in place of rows with gaps between their elements, or none (``x[:, :length]``, ``expand``).

        Graphs of several ranks have pieces of a whole batch, which has no gaps.
        """
        for i in self.tensors:
            live = self.values[i]
            if live.is_contiguous() or self.is_shared(i) or is_dense(TensorSpec.of(live)):
                continue
            copy = live.detach().clone(memory_format=torch.contiguous_format).requires_grad_(live.requires_grad)
            self.values[i] = copy
            self._copied.append((live, copy, private.version_of(copy)))

    def write_back(self) -> None:
        """Write what a step wrote into copies into the user's tensors as well."""
        for live, copy, version in self._copied:
            if private.version_of(copy) != version:
                live.copy_(copy.detach())

    def digests(self) -> list[str]:
        """A digest of the values of every tensor leaf."""
        return [_digest(tensor) for tensor in self.tensor_values]

    def digest(self) -> str:
        """A digest of the whole batch."""
        return repr(self.digests())

    def shared_values(self) -> tuple[str, ...]:
        """Digests of what is the same for every sample, where looking at it does not wait for a device."""
        leaves = [self.values[i] for i in self.tensors if self.is_shared(i)]
        return tuple(_digest(leaf) for leaf in leaves if leaf.device.type == "cpu")

    def describe(self, *, layout: bool = True) -> str:
        """Readable names, shapes and dtypes of the tensors, and whatever else ranks must have in common.

        Args:
            layout: name memory orders that are not the plain one.
        """

        def one(path: str, tensor: Tensor) -> str:
            text = f"batch{_without_addresses(path)}: {str(tensor.dtype)[6:]}{list(tensor.shape)}"
            text += "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
            text += " that requires grad" if tensor.requires_grad else ""
            order = memory_order(tensor)
            return text if order is None or not layout else f"{text} with dimensions in memory order {list(order)}"

        return ", ".join(one(self.paths[i], self.values[i]) for i in self.tensors) or "no tensor"

    def is_list_of_rows(self, value: Any) -> bool:
        """Whether a leaf is a list of rows."""
        return id(value) in self._lists

    def refusal(self, path: str, value: Any) -> str | None:
        """Why a step may not look at a list of rows or a leaf that is no tensor; None if it may."""
        if self._own is None:
            return None
        if self.is_list_of_rows(value):
            return about_list(path, self._own)
        if self.counts_rows(value):
            return about_number(path, self._own)
        return None if is_plain(value) else about_object(path, value)

    def counts_rows(self, value: Any) -> bool:
        """Whether a number is that of this rank's rows, and the step sees more."""
        return self._own is not None and is_count(value, self._own)

    def _inside_lists(self) -> set[int]:
        """Indices of the leaves in lists of rows."""
        index, inside = 0, set[int]()

        def count(_: str, value: Any) -> None:
            nonlocal index
            size = len(leaves(value)) if id(value) in self._lists else 1
            inside.update(range(index, index + size) if id(value) in self._lists else ())
            index += size

        map_leaves(count, self.tree, ends_at=lambda value: id(value) in self._lists)
        return inside


def is_trained(tensor: Tensor) -> bool:
    """Whether a tensor of the batch is a parameter or has a history in autograd: a hook has put it there."""
    return private.history_of(tensor) is not None or isinstance(tensor, nn.Parameter)


def _digest(tensor: Tensor) -> str:
    numbers = tensor.detach().reshape(-1).to(torch.complex128 if tensor.is_complex() else torch.float64)
    places = torch.arange(1, numbers.numel() + 1, dtype=torch.float64, device=numbers.device)
    return repr((tuple(tensor.shape), numbers.sum().item(), (numbers * places.sqrt()).sum().item()))


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions from the innermost in memory to the outermost; None for the plain order.

    It does not depend on the number of rows, strides do. Repeated elements (strides of 0) count as plain: graphs see
    the whole batch of all ranks, in which they are not repeated.
    """
    strides = tensor.stride()
    if tensor.is_contiguous() or 0 in strides:
        return None
    order = tuple(sorted(range(tensor.ndim), key=lambda d: (strides[d], -d)))
    return None if order == tuple(reversed(range(tensor.ndim))) else order
