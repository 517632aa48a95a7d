"""CUDA graphs without a GPU: a recorder that notes the operators that are dispatched, and repeats them on CPU tensors.

As on a GPU, recording computes nothing: results are of the right shape and hold NaN. A recording has addresses, not
tensors: memory made while it is recorded comes from a pool of blocks, a block is used again as soon as no tensor is in
it, and what a recording reads outside of the pool is the storage that was there then, whatever a module has put in its
place. Blocks that nobody holds can be filled with NaN. So a value that is read too late, an output that was not copied,
and an address that has changed all show as wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_spmd.ir.node_info import TensorSpec

_aten = torch.ops.aten
SYNCHRONIZING = {_aten.nonzero.default, _aten._local_scalar_dense.default, _aten.masked_select.default}
CANNOT = "operation not permitted when stream is capturing"


@dataclass
class _Block:
    """Memory of the pool; free when no tensor is in it."""

    memory: bytearray
    tenant: StorageWeakRef | None = None

    @property
    def is_free(self) -> bool:
        return self.tenant is None or self.tenant.expired()


@dataclass(frozen=True)
class _InPool:
    """A tensor by its address."""

    block: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int


class FakePool:
    """Blocks of memory by size."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.reused = 0
        self._at: dict[int, int] = {}

    def new(self, like: Tensor) -> Tensor:
        """A tensor that lies as ``like``, full of NaN."""
        size = max(1, like.untyped_storage().nbytes())
        found = next((b for b in self.blocks if b.is_free and len(b.memory) == size), None)
        if found is None:
            found = _Block(bytearray(size))
            self.blocks.append(found)
        else:
            self.reused += 1
        flat = torch.frombuffer(found.memory, dtype=torch.uint8)
        self._at.setdefault(flat.data_ptr(), len(self.blocks) - 1)
        found.tenant = StorageWeakRef(flat.untyped_storage())
        made = torch.empty(0, dtype=like.dtype)
        made.set_(flat.untyped_storage(), like.storage_offset(), like.shape, like.stride())
        _spoil(flat)
        return made

    def address(self, tensor: Tensor) -> _InPool | None:
        """Where a tensor of the pool is; None if it is elsewhere."""
        index = self._at.get(tensor.untyped_storage().data_ptr())
        if index is None:
            return None
        return _InPool(index, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.storage_offset())

    def at(self, place: _InPool) -> Tensor:
        """The tensor at an address, whoever is there."""
        flat = torch.frombuffer(self.blocks[place.block].memory, dtype=torch.uint8)
        made = torch.empty(0, dtype=place.dtype)
        return made.set_(flat.untyped_storage(), place.offset, place.shape, place.stride)

    def spoil_free(self) -> None:
        """Nobody may read what nobody holds."""
        for block in self.blocks:
            if block.is_free:
                _spoil(torch.frombuffer(block.memory, dtype=torch.uint8))


def _spoil(flat: Tensor) -> None:
    """NaN in every floating-point type."""
    flat.fill_(255)


class _Capturing(TorchDispatchMode):
    """Notes operators instead of running them."""

    def __init__(self, pool: FakePool) -> None:
        super().__init__()
        self.pool = pool
        self.tape: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SYNCHRONIZING:
            raise RuntimeError(CANNOT)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func.is_view or func is _aten.detach.default or func is _aten._unsafe_view.default:
            return func(*args, **kwargs)  # launches nothing
        result = self._shapes(func, args, kwargs)
        known = {id(t): t for t in tensors}
        twins = dict(zip(self._twins, tensors, strict=True))
        out = tree_map(lambda t: self._result(t, twins, known) if isinstance(t, Tensor) else t, result)
        note = tree_map(self._address, (args, kwargs, out))
        if "empty" not in str(func):
            self.tape.append((func, *note))
        return out

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a run on copies gives; the caller's tensors and random numbers stay as they are."""
        self._twins: list[int] = []
        self._held: list[Tensor] = []

        def twin(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            copy = torch.empty(0, dtype=value.dtype)
            copy.set_(value.untyped_storage().clone(), value.storage_offset(), value.shape, value.stride())
            if not value.is_floating_point():
                copy.untyped_storage().fill_(0)  # indices that are within everything
            self._twins.append(id(copy))
            self._held.append(copy)
            return copy

        state = torch.get_rng_state()
        args, kwargs = tree_map(twin, (args, kwargs))
        result = func(*args, **kwargs)
        torch.set_rng_state(state)
        return result

    def _result(self, value: Tensor, twins: dict[int, Tensor], known: dict[int, Tensor]) -> Tensor:
        return twins[id(value)] if id(value) in twins else self.pool.new(value)

    def _address(self, value: Any) -> Any:
        """What a recording knows of a tensor."""
        if not isinstance(value, Tensor):
            return value
        place = self.pool.address(value)
        if place is not None:
            return place
        there = torch.empty(0, dtype=value.dtype)
        return there.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


class FakeRecorder:
    """Stands in for ``CudaRecorder``.

    Args:
        on_device: of a tensor, whether it counts as one of the GPU.
    """

    def __init__(self, on_device: Callable[[TensorSpec], bool] = lambda _spec: True) -> None:
        self.generation = 0
        self.on_device = on_device
        self.pool = FakePool()
        self.prepared = self.recorded = self.replayed = 0

    def prepare(self) -> None:
        self.prepared += 1

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        mode = _Capturing(self.pool)
        try:
            with mode:
                work()
        except RuntimeError:
            self.generation += 1
            raise
        self.recorded += 1
        return lambda: self._replay(mode.tape)

    def _replay(self, tape: list[tuple[Any, Any, Any, Any]]) -> None:
        self.replayed += 1
        for func, args, kwargs, out in tape:
            args, kwargs, out = tree_map(self._tensor, (args, kwargs, out), is_leaf=lambda v: isinstance(v, _InPool))
            result = func(*args, **kwargs)
            for there, value in zip(tree_leaves(out), tree_leaves(result), strict=True):
                if isinstance(value, Tensor) and there.data_ptr() != value.data_ptr():
                    assert there.stride() == value.stride(), (func, there.stride(), value.stride())
                    _lay_down(there, value)

    def _tensor(self, value: Any) -> Any:
        return self.pool.at(value) if isinstance(value, _InPool) else value


def _lay_down(there: Tensor, value: Tensor) -> None:
    """The value at its address, with whatever is around it."""
    there.untyped_storage().copy_(value.untyped_storage())
