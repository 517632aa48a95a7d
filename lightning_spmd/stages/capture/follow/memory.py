"""Memory of a step's tensors that Python sees as well: as a NumPy array, or through something else outside of torch.

Python may write into this memory between two calls, and read there what a call has written; but a graph runs later. So
the memory is compared with its last known content, before calls that use it and wherever a graph runs. The step goes on
eagerly if the content changed after a call used it, or if a call writes into it. The array of a result is a copy; in an
eager step it and the tensor are kept equal.

torch marks memory that it does not own or has given to NumPy: it cannot be resized. Where a step uses such a tensor of
the module, Python's objects are searched, once for all of the module's tensors, for those that share the memory. A
tensor that shares with none moves to memory of torch's own.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage, nn

from lightning_spmd import _private_api as private
from lightning_spmd.ir.first import first
from lightning_spmd.stages.capture.follow.notes import Given, Made, Note, Source, sources_in, tensors_in

ARRAYS = {Tensor.numpy, Tensor.__array__}
"""What gives memory as an array."""
MOST = 64 << 20
"""More bytes than that are not compared in each step."""


class _Step(Protocol):
    """The part of a step that is used here."""

    notes: list[Note]
    sources: dict[int, Source]
    on_values: Callable[[], None]
    looks_closer: bool

    @property
    def is_eager(self) -> bool: ...
    @property
    def has_counts(self) -> bool: ...
    def beside(self) -> contextlib.AbstractContextManager[None]: ...
    def eagerly(self, why: str, place: str | None = None) -> None: ...
    def live_of(self, source: Source) -> Tensor | None: ...
    def root_of(self, source: Source) -> Source: ...
    def tensor_now(self, source: Source) -> Tensor: ...


@dataclass(eq=False)
class _Shared:
    """Memory that is visible to Python.

    Args:
        memory: that.
        before: what was in it when it was looked at last.
        source: the result of which it is a copy; None of memory of live tensors.
        is_foreign: who has it is not known.
    """

    memory: Tensor
    before: Tensor
    source: Made | Given | None
    is_foreign: bool

    @property
    def is_had(self) -> bool:
        """Whether an array may share the memory."""
        return self.is_foreign or not private.is_memory_its_own(self.memory, self.source is None)

    @property
    def has_changed(self) -> bool:
        """Whether Python has written into the memory."""
        return not _are_alike(self.memory, self.before)


def is_foreign(tensor: Tensor) -> bool:
    """Whether a tensor's memory came from outside of torch, NumPy has been given it, or Python has its storage."""
    return is_plain(tensor) and not (tensor.untyped_storage().resizable() and _are_storages_torchs((tensor,)))


def _are_storages_torchs(tensors: Iterable[Tensor]) -> bool:
    """Whether Python has no storage of a tensor; torch has one Python object for each of them."""
    return max(map(sys.getrefcount, map(Tensor.untyped_storage, tensors)), default=0) <= _REFERENCES


_REFERENCES = max(map(sys.getrefcount, map(Tensor.untyped_storage, (torch.empty(1),))))


def _must_stay(tensor: Tensor) -> bool:
    """Whether somebody reads the memory without an array: by its storage, or in the file that is mapped there."""
    return not _are_storages_torchs((tensor,)) or tensor.untyped_storage().filename is not None


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is one of the host that NumPy takes."""
    own = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.layout is torch.strided
    return own and not private.is_wrapped(tensor)


class Holders:
    """The module's tensors whose memory is shared with an array, as far as known.

    Args:
        names: gives those of the module's tensors, by ``id``.

    Attributes:
        names: as they were when they were needed last.
    """

    def __init__(self, names: Callable[[], dict[int, str]]) -> None:
        self.names: dict[int, str] = {}
        self._names = names
        self._had: dict[int, weakref.ref[Tensor]] = {}

    def becomes_torchs(self, tensor: Tensor, *, is_kept: bool = False) -> bool:
        """Move a tensor to memory of torch's own, if no array shares its memory. Returns whether it is there now.

        Args:
            tensor: the tensor; it is checked only if it belongs to the module.
            is_kept: check it in any case, because it was there in earlier steps.
        """
        if not is_foreign(tensor):
            return True
        if _must_stay(tensor):
            return False
        self.names = self.names or self._names()
        if not (is_kept or id(tensor) in self.names) or self._is_had(tensor):
            return False
        if not private.is_memory_its_own(tensor):
            self._had[id(tensor)] = weakref.ref(tensor)
            return False
        arrays, tensors = _in_python()
        ours = {id(t): t for t in tensors if id(t) in self.names and is_foreign(t) and not self._is_had(t)}
        # a weights file gives a model hundreds of such tensors, and looking takes half a second
        for each in {id(tensor): tensor, **ours}.values():
            if not private.is_memory_its_own(each) or _must_stay(each):
                continue
            if _has_memory_of(arrays, each):
                self._had[id(each)] = weakref.ref(each)
            else:
                each.data = each.detach().clone()
        return not is_foreign(tensor)

    def _is_had(self, tensor: Tensor) -> bool:
        """Whether an array is known to share a tensor's memory."""
        known = self._had.get(id(tensor))
        return known is not None and known() is tensor


class Memory:
    """The memory of one step that is visible to Python.

    Args:
        step: the step.
        holders: what is known of it from earlier steps.

    Attributes:
        is_shared: there is some.
    """

    def __init__(self, step: _Step, holders: Holders) -> None:
        self._step, self._holders = step, holders
        self._shared: dict[Any, _Shared] = {}
        self._pairs: list[tuple[Tensor, _Shared]] = []
        self.is_shared = False

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        with self._step.beside(), private.no_torch_functions(), torch.no_grad():
            yield

    # ------------------------------------------------------------------ which memory
    def _key(self, source: Source) -> Any:
        """A key that all tensors with this memory share."""
        root = self._step.root_of(source)
        live = None if type(root) is Made else self._step.live_of(root)
        return root if live is None else private.storage_of(live)

    def _add(self, key: Any, memory: Tensor, source: Made | Given | None, *, foreign: bool) -> None:
        self.is_shared = self._step.looks_closer = True
        known = self._shared.get(key)
        if known is None:
            self._shared[key] = _Shared(memory, memory.clone(), source, foreign)
        else:
            known.is_foreign |= foreign

    def _add_live(self, tensor: Tensor, *, foreign: bool) -> None:
        self._step.on_values()
        self._add(private.storage_of(tensor), _whole(tensor), None, foreign=foreign)

    def _meets(self, tensor: Tensor) -> None:
        """The step uses an outside tensor whose memory an array may share."""
        with self._beside():
            self._step.on_values()
            if self._holders.becomes_torchs(tensor):
                return
            known = sum(shared.memory.nbytes for shared in self._shared.values())
            if known + tensor.untyped_storage().nbytes() <= MOST:
                self._add_live(tensor, foreign=True)
                return
        self._step.eagerly(
            "the memory of a large tensor may be an array's as well; give it a copy, torch.tensor(array)"
        )

    def begin(self, known: Iterable[Tensor]) -> bool:
        """Whether no plain outside tensor of earlier steps shares memory with an array now."""
        known = tuple(known)
        # asked in each step of each tensor
        if all(map(UntypedStorage.resizable, map(Tensor.untyped_storage, known))) and _are_storages_torchs(known):
            return True
        found = [tensor for tensor in known if is_foreign(tensor)]
        if found:
            self._step.on_values()
        return all(self._holders.becomes_torchs(tensor, is_kept=True) for tensor in found)

    # ------------------------------------------------------------------ it is handed out
    def hand_out(self, tensor: Tensor) -> None:
        """Python gets the memory of a live tensor, by a pointer for example."""
        if is_plain(tensor):
            with self._beside():
                self._add_live(tensor, foreign=True)

    def live(self, tensor: Tensor) -> Tensor | None:
        """The live tensor that this one is or is a view of; None for results of the step."""
        source = self._step.sources.get(id(tensor))
        if source is None:
            return tensor.detach() if is_plain(tensor) else None
        live = self._step.live_of(self._step.root_of(source))
        if live is None or not is_plain(live):
            return None
        if type(source) is not Made:
            return live.detach()
        note = self._step.notes[source.depth]
        (_, offset), spec = note.roots[source.index], note.specs[source.index]
        is_all = offset == 0 and spec.stride == live.stride() and tensor.shape == live.shape
        if is_all and spec.dtype == live.dtype:
            return live.detach()
        if tensor.shape != spec.shape or self._step.has_counts or spec.dtype != live.dtype:
            raise _Elsewhere
        return live.detach().as_strided(spec.shape, spec.stride, live.storage_offset() + offset)

    def array(self, tensor: Tensor, args: Sequence[Any], kwargs: Any) -> tuple[Any] | None:
        """An array of live memory, in a tuple; None where there is none.

        Args:
            tensor: live, or a view of what is.
            args: of ``numpy``, but for the tensor.
            kwargs: likewise.
        """
        step = self._step
        try:
            with self._beside():
                live = self.live(tensor)
            if live is None or live.dtype.is_complex:
                return None
            key = private.storage_of(live)
            if any(key == self._key(written) for note in step.notes for written in note.writes):
                raise _Elsewhere
        except _Elsewhere:
            step.eagerly("an array of a tensor into which the step has written, or of a part of one")
            return None
        with self._beside():
            self._add_live(live, foreign=False)
            return (array_of(live, *args, **kwargs),)

    def array_of_copy(self, source: Source | None, value: Tensor, args: Sequence[Any], kwargs: Any) -> Any:
        """An array of a copy of a result.

        Args:
            source: the result.
            value: the copy; nothing else references it.
            args: of ``numpy``, but for the tensor.
            kwargs: likewise.
        """
        with self._beside():
            value = value.detach()
            if isinstance(source, (Made, Given)):
                self._add((self._key(source), len(self._shared)), value, source, foreign=False)
            return array_of(value, *args, **kwargs)

    # ------------------------------------------------------------------ it is looked at
    def look(self, operands: Any = None) -> bool:
        """Check for writes by Python before a call reads memory. Returns whether the step is eager now.

        Args:
            operands: of the call; None: a graph runs, or Python is done.
        """
        keys: set[Any] | None = None
        if operands is not None:
            keys = set()
            for tensor in tensors_in(operands):
                source = self._step.sources.get(id(tensor))
                if source is not None:
                    if self.is_shared:
                        keys.add(self._key(source))
                elif is_plain(tensor):
                    key = private.storage_of(tensor)
                    keys.add(key)
                    if key not in self._shared and is_foreign(tensor):
                        self._meets(tensor)
        if self._shared and not self._step.is_eager:
            with self._beside():
                found = {key: s for key, s in self._shared.items() if _is_in(key, keys) and s.has_changed}
                unused = [shared for key, shared in found.items() if shared.source is None and self._user(key) is None]
                for shared in unused:
                    shared.before.copy_(shared.memory)
            if len(unused) < len(found):
                key, shared = first((pair for pair in found.items() if pair[1] not in unused), "changed memory")
                with self._beside():
                    user = self._user(key if shared.source is None else key[0])
                what = "an array is written into behind a call that reads the tensor whose memory it is"
                self._step.eagerly(what, None if user is None else user.source)
        return self._step.is_eager

    def _user(self, key: Any) -> Note | None:
        """The last call of the step that used the memory."""
        for note in reversed(self._step.notes):
            if any(key == self._key(source) for source in (*sources_in((note.args, note.kwargs)), *note.made)):
                return note
        return None

    def refuses(self, note: Note) -> bool:
        """Whether a call writes into memory that an array may share."""
        if not self._shared or not note.writes:
            return False
        written = {self._key(source) for source in note.writes}
        with self._beside():
            return any(_is_in(key, written) and shared.is_had for key, shared in self._shared.items())

    def has(self, tensors: Sequence[Tensor]) -> bool:
        """Whether an array may share memory with one of these outside tensors."""
        return bool(self._shared) and any(private.storage_of(tensor) in self._shared for tensor in tensors)

    def let_go(self) -> None:
        """Python is done. The arrays of results are still known by their results."""
        self._pairs.clear()
        self._shared = {key: shared for key, shared in self._shared.items() if shared.source is not None}

    def of_kept(self, source: Source, value: Tensor) -> Tensor:
        """The value of a kept result, in the memory of an array of it if there is one."""
        for shared in self._shared.values():
            if shared.source == source and shared.is_had and shared.memory.stride() == value.stride():
                return shared.memory
        return value

    # ------------------------------------------------------------------ a step runs for good
    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """A context in which live memory has the content that the calls so far have read."""
        with private.no_torch_functions(), private.disable_dispatch_modes():
            live = [s for s in self._shared.values() if s.source is None and s.has_changed]
            now = [shared.memory.clone() for shared in live]
            for shared in live:
                shared.memory.copy_(shared.before)
        yield
        with private.no_torch_functions(), private.disable_dispatch_modes():
            for shared, value in zip(live, now, strict=True):
                shared.memory.copy_(value)

    def for_good(self) -> None:
        """The step runs eagerly: results have memory now, and arrays of their copies exist."""
        copies = [(shared.source, shared) for shared in self._shared.values() if shared.source is not None]
        with private.no_torch_functions(), private.disable_dispatch_modes():
            self._pairs = [(self._step.tensor_now(of), s) for of, s in copies if s.is_had or s.has_changed]

    @property
    def is_apart(self) -> bool:
        """Whether tensors of an eager step and arrays of copies of them must be kept equal."""
        return bool(self._pairs)

    def sync(self) -> None:
        """Copy what was written into arrays to their tensors, and the other way round, hidden from autograd."""
        if not self._pairs:
            return
        with private.no_torch_functions(), private.disable_dispatch_modes(), torch.no_grad():
            for tensor, shared in self._pairs:
                if shared.has_changed:
                    tensor.data.copy_(shared.memory)
                elif not _are_alike(tensor, shared.before):
                    shared.memory.copy_(tensor)
                else:
                    continue
                shared.before.copy_(shared.memory)


class _Elsewhere(Exception):
    """Control flow: the tensor of which Python wants an array is not in live memory now."""


def _is_in(key: Any, keys: set[Any] | None) -> bool:
    return keys is None or (key[0] if isinstance(key, tuple) else key) in keys


def _whole(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    one, other = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)


def array_of(memory: Tensor, dtype: Any = None, **_: Any) -> Any:
    """``memory.numpy()``, or ``memory.__array__(dtype)``, that leaves no mark on the memory."""
    kind: Any = torch.empty(0, dtype=memory.dtype).numpy().dtype
    strides = tuple([step * memory.element_size() for step in memory.stride()])
    shown = {"data": (memory.data_ptr(), False), "shape": tuple(memory.shape), "strides": strides, "version": 3}
    # which keeps the memory alive
    holder = SimpleNamespace(memory=memory.detach(), __array_interface__={**shown, "typestr": kind.str})
    found = sys.modules["numpy"].asarray(holder)
    return found if dtype is None else found.astype(dtype, copy=False)


def _in_python() -> tuple[list[Any] | None, list[Tensor]]:
    """(arrays over the memory of Python's objects: arrays, buffers, files; None if unknown; and Python's tensors)."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None, []
    leaves: list[Any] = gc.get_referents(*gc.get_objects())
    for frame in sys._current_frames().values():  # noqa: SLF001 - the only way to all threads' variables
        at: Any = frame
        while at is not None:
            leaves += at.f_locals.values()
            at = at.f_back
    arrays, tensors = list[Any](), list[Tensor]()
    have_memory: dict[type, bool] = {bytes: False, str: False}
    for leaf in leaves:
        kind = type(leaf)
        found = have_memory.get(kind)
        if found is None:
            found = have_memory[kind] = _shows_memory(leaf)
        if found:
            arrays.append(_as_array(numpy, leaf))
        elif kind is Tensor or kind is nn.Parameter:
            tensors.append(leaf)
    return arrays, tensors


def _has_memory_of(arrays: list[Any] | None, tensor: Tensor) -> bool:
    """Whether one of these arrays may have some of a tensor's memory."""
    if arrays is None:
        return True
    mine, may_share_memory = array_of(_whole(tensor)), sys.modules["numpy"].may_share_memory
    return any(may_share_memory(mine, array) for array in arrays)


def _as_array(numpy: Any, leaf: Any) -> Any:
    try:
        return leaf if isinstance(leaf, numpy.ndarray) else numpy.asarray(memoryview(leaf))
    except Exception:  # released, or of a format that NumPy has not
        return numpy.empty(0)


def _shows_memory(leaf: Any) -> bool:
    try:
        memoryview(leaf)
    except Exception:  # also: a released memoryview, which is of a kind that has memory
        return isinstance(leaf, memoryview)
    return True
