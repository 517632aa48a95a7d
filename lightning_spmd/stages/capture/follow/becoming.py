"""A tensor becomes another one: ``tensor.data = x``, ``transpose_``, ``out=`` of an empty tensor."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.stages.capture.follow import placeholders
from lightning_spmd.stages.capture.follow.notes import Given, Made, Source, tensors_in
from lightning_spmd.stages.capture.follow.recorder import Recorder
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed, StepState

VIEWED_IN_PLACE = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name)
    for name in ("squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims")
}
VIEWED_IN_PLACE |= {
    getattr(getattr(torch.ops.aten, f"{name}_"), overload): getattr(getattr(torch.ops.aten, name), overload)
    for name in ("squeeze", "unsqueeze", "transpose", "t")
    for overload in getattr(torch.ops.aten, f"{name}_").overloads()
    if overload in getattr(torch.ops.aten, name).overloads()
}
"""What makes a tensor a view of itself, and what gives that view."""


def data_written(tensor: Tensor, value: Tensor) -> None:
    """``tensor.data = value`` where neither's memory is seen elsewhere."""
    with torch.no_grad():
        tensor.detach().copy_(value.detach())


def data_given(tensor: Tensor, value: Tensor) -> None:
    """``tensor.data = value`` in a step that runs eagerly: they have that memory in common from here on."""
    tensor.data = value


class Becoming:
    """The tensors of one step that become others.

    Args:
        step: the step.
        recorder: of its calls.

    Attributes:
        apart: tensors that have memory of their own, and the results whose memory they should have.
    """

    def __init__(self, step: StepState, recorder: Recorder) -> None:
        self._step, self._recorder = step, recorder
        self.apart: list[tuple[Source, Made]] = []

    def viewed_in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A result becomes a view of itself (``transpose_``): a call makes the view, and the result is the view now."""
        step = self._step
        tensor = args[0]
        before = step.sources.get(id(tensor))
        if type(before) is not Made:
            return step.called(func, args, kwargs)
        view = step.called(VIEWED_IN_PLACE[func], args, kwargs)
        if step.is_eager:
            return func(*args, **kwargs)
        with step.beside(), private.disable_dispatch_modes(), private.no_torch_functions():
            func(*args, **kwargs)
        self._is_now(tensor, view)
        return tensor

    def takes_the_size_of(self, out: Any, args: Any, kwargs: Any) -> bool:
        """Whether ``out=`` of a call is an empty result of the step, which gets the size of the values."""
        if not isinstance(out, Tensor) or out.numel() or type(self._step.sources.get(id(out))) is not Made:
            return False
        return not any(self._recorder.asks(t) for t in tensors_in((args, kwargs)))  # with them it is an error

    def made_as(self, out: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a call without ``out=``; the given tensor is its result from now on."""
        step = self._step
        words = {name: value for name, value in kwargs.items() if name != "out"}
        if not tensors_in((args, words)):  # of functions that make tensors it says dtype and device as well
            words = {"dtype": out.dtype, "device": out.device, **words}
        made = step.called(func, args, words)
        if step.is_eager:
            return step.for_good(func, args, kwargs)
        if not isinstance(made, Tensor) or made.dtype != out.dtype:
            step.eagerly(f"{getattr(func, '__name__', func)} with out= of another dtype")
            return step.for_good(func, args, kwargs)
        self._becomes(out, made)
        return out

    def is_all_of(self, tensor: Tensor, value: Any) -> bool:
        """Whether ``tensor.data = value`` changes nothing, as at the end of ``tensor.data *= 2``: it is that memory."""
        step = self._step
        own, source = step.sources.get(id(tensor)), step.sources.get(id(value))
        if step.is_eager or own is None or type(source) is not Made or value.shape != tensor.shape:
            return False
        note = step.notes[source.depth]
        place, spec = note.roots[source.index], note.specs[source.index]
        if note.sizes is not None or spec.dtype.is_complex:  # a conjugate has the same memory
            return False
        if type(own) is Made:
            other = step.notes[own.depth]
            return other.sizes is None and (other.roots[own.index], other.specs[own.index]) == (place, spec)
        return ((own, 0), TensorSpec.of(tensor)) == (place, spec)

    def can_be_written(self, tensor: Tensor, value: Any) -> bool:
        """Whether ``tensor.data = value`` may be a write into the tensor: no one else sees the memory that it has.

        Both are alike but for their values, and those of the other are a result's.
        """
        step = self._step
        source = step.sources.get(id(value)) if isinstance(value, Tensor) else None
        if type(source) is not Made or type(step.root_of(source)) is not Made or step.memory.is_shared:
            return False
        known = step.sources.get(id(tensor))
        if type(known) is Given or type(known) is not Made and not private.is_memory_its_own(tensor):
            return False
        if type(known) is Made and not self._recorder.is_leaf(tensor):  # what autograd has saved is another object
            return False
        note, mine = step.notes[source.depth], step.notes[known.depth] if type(known) is Made else None
        spec = TensorSpec.of(tensor) if mine is None or type(known) is not Made else mine.specs[known.index]
        if note.specs[source.index] != spec or note.sizes is not None or mine is not None and mine.sizes is not None:
            return False
        key = step.here, known, source
        if key not in step.follower.aliases:
            step.follower.aliases[key] = self._aliases(known, source)
        aliases = step.follower.aliases[key]
        return aliases is not None and not any(self._is_had(handed, index) for handed, index in aliases)

    def _aliases(self, tensor: Source | None, value: Made) -> list[tuple[list[Tensor], int]] | None:
        """Where placeholders are that share memory with the tensor; None if autograd has saved such, or the value."""
        step = self._step
        roots = {step.root_of(source) for source in (value, tensor) if source is not None}
        try:
            recording = self._recorder.so_far()
        except CannotBeFollowed:
            return None
        with step.beside(), private.disable_dispatch_modes(), private.no_torch_functions():
            memory = {private.storage_of(recording.values.of(root)) for root in roots}
            if any(private.storage_of(saved) in memory for saved in private.saved_for(recording.values.made.values())):
                return None
        return [] if tensor is None else self._sharing(step.root_of(tensor), tensor)

    def _sharing(self, root: Source, but: Source | None = None) -> list[tuple[list[Tensor], int]]:
        return [
            (note.handed, index)
            for note in self._step.notes
            for index, (of, _) in enumerate(note.roots)
            if of == root and note.made[index] != but
        ]

    def _is_had(self, handed: list[Tensor], index: int) -> bool:
        """Whether Python references a placeholder, apart from calls that are still to be compiled."""
        others, arguments = sys.getrefcount(handed[index]) - placeholders.OURS, self._step.held.values()
        return others > 0 and others > sum(t is handed[index] for held in arguments for t in tensors_in(held))

    def give_data(self, tensor: Tensor, value: Tensor) -> None:
        """The tensor gets the values of a result, and a plain result the tensor's memory, as Python may write there.

        One of several with the same memory, or with a history, has memory of its own, which shows where it is written.
        """
        step = self._step
        source: Any = step.sources[id(value)]
        others = self._sharing(source, source)
        is_plain = step.root_of(source) == source and not self._recorder.asks(value)
        self.apart = [pair for pair in self.apart if pair[0] != step.sources.get(id(tensor))]  # it leaves that memory
        step.called(data_written, (tensor, value), {})
        if step.is_eager:
            return
        if is_plain and not any(self._is_had(handed, index) for handed, index in others):
            alias = step.called(Tensor.detach, (tensor,), {})
            if not step.is_eager:
                self._becomes(value, alias)
            return
        self.apart.append((step.source_of(tensor), source))
        step.looks_closer = True

    def is_seen(self, writes: Collection[Source] | None = None) -> bool:
        """Whether a call that writes there would show that a tensor has not the memory that it was given.

        Args:
            writes: the memory; None: the step is over, and whatever Python still has may be written.
        """
        apart, self.apart = self.apart, []
        for pair in apart:
            mine, theirs = map(self._step.root_of, pair)
            if writes is not None and mine not in writes and theirs not in writes:
                self.apart.append(pair)
            elif any(self._is_had(handed, index) for handed, index in self._sharing(theirs)):
                self.apart = apart
                return True
        return False

    def _becomes(self, tensor: Tensor, other: Tensor) -> None:
        """A result becomes another one, which is new and not referenced elsewhere."""
        with self._step.beside(), private.disable_dispatch_modes(), private.no_torch_functions():
            private.exchange(tensor, other)
        self._is_now(tensor, other)

    def _is_now(self, tensor: Tensor, other: Tensor) -> None:
        """Note that a result is another one from here on."""
        step = self._step
        before: Any = step.sources[id(tensor)]
        after: Any = step.sources.pop(id(other))
        note = step.notes[before.depth]
        note.handed[before.index] = note.moulds[before.index].detach()
        step.notes[after.depth].handed[after.index] = tensor
        step.sources[id(tensor)] = after
