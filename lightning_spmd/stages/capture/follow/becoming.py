"""A tensor becomes another one: ``tensor.data = x``, ``transpose_``, ``out=`` of an empty tensor."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.stages.capture.follow import placeholders
from lightning_spmd.stages.capture.follow.notes import Given, Made, Source, sources_in, tensors_in
from lightning_spmd.stages.capture.follow.recorder import Recorder
from lightning_spmd.stages.capture.follow.step_state import StepState

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


class Becoming:
    """The tensors of one step that become others.

    Args:
        step: the step.
        recorder: of its calls.
    """

    def __init__(self, step: StepState, recorder: Recorder) -> None:
        self._step, self._recorder = step, recorder

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
        """Whether ``tensor.data = value`` may be a write into the tensor: no one else sees its memory.

        Nothing else has the memory of either, and both are alike but for their values.
        """
        step = self._step
        source = step.sources.get(id(value)) if isinstance(value, Tensor) else None
        if type(source) is not Made or self._recorder.asks(value) or step.memory.is_shared:
            return False
        if type(step.sources.get(id(tensor))) in (Made, Given) or not private.is_memory_its_own(tensor):
            return False
        note = step.notes[source.depth]
        if note.roots[source.index][0] != source or note.specs[source.index] != TensorSpec.of(tensor):
            return False
        known = step.sources.get(id(tensor))
        key = step.here, known, source
        if key not in step.follower.aliases:
            step.follower.aliases[key] = self._aliases(known, source)
        aliases = step.follower.aliases[key]
        return aliases is not None and not any(self._is_had(handed, index) for handed, index in aliases)

    def _aliases(self, tensor: Source | None, value: Made) -> list[tuple[list[Tensor], int]] | None:
        """Where placeholders are that share memory with one of the two; None if autograd may have saved the tensor."""
        step = self._step
        for note in step.notes:
            if any(note.trained) and any(step.root_of(s) == tensor for s in sources_in((note.args, note.kwargs))):
                return None
        return [
            (note.handed, index)
            for note in step.notes
            for index, (root, _) in enumerate(note.roots)
            if root in (tensor, value) and note.made[index] != value
        ]

    def _is_had(self, handed: list[Tensor], index: int) -> bool:
        """Whether Python references a placeholder, apart from calls that are still to be compiled."""
        others, arguments = sys.getrefcount(handed[index]) - placeholders.OURS, self._step.held.values()
        return others > 0 and others > sum(t is handed[index] for held in arguments for t in tensors_in(held))

    def write_data(self, tensor: Tensor, value: Tensor) -> None:
        """The tensor gets the values of a result; the result has the tensor's memory from now on."""
        step = self._step
        step.called(Tensor.copy_, (step.called(Tensor.detach, (tensor,), {}), value), {})
        alias = value if step.is_eager else step.called(Tensor.detach, (tensor,), {})
        if step.is_eager:
            tensor.data = value
            return
        self._becomes(value, alias)

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
