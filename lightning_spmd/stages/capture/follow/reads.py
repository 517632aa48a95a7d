"""Reads of values: a graph runs up to there, or the calls run on copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.follow.copies import Copies
from lightning_spmd.stages.capture.follow.counts import may_have
from lightning_spmd.stages.capture.follow.matching import numbers_that_differ
from lightning_spmd.stages.capture.follow.memory import ARRAYS
from lightning_spmd.stages.capture.follow.notes import (
    Made,
    Note,
    Source,
    leaves_by_place,
    mapped,
    sources_in,
    tensors_in,
)
from lightning_spmd.stages.capture.follow.own_generator import OwnGenerator
from lightning_spmd.stages.capture.follow.recorder import Recorder
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed, StepState
from lightning_spmd.stages.capture.follow.values import Values

_MOST_PINNED = 4
"""A read for whose number alone so many paths did (an unrolled GRU of this length) is no longer a count."""
_LONGEST_LIST = 64
"""Numbers of a longer list are no counts: each is one more of the path, and none is looked at."""
_COMMON = 2
"""Numbers up to this one are dimensions as well."""
_TEXTS = {Tensor.__repr__, Tensor.__format__}


class Reads:
    """The reads of one step.

    Args:
        step: the step.
        recorder: of its calls.
        copies: give values that no graph gives.
        generator: torch's.
    """

    def __init__(self, step: StepState, recorder: Recorder, copies: Copies, generator: OwnGenerator) -> None:
        self._step, self._recorder, self._copies, self._generator = step, recorder, copies, generator
        self._own_calls: tuple[int, Values] | None = None

    def read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Python reads values: run the calls so far, by a graph that goes on later, or on copies."""
        step = self._step
        mine = tensors_in((args, kwargs))
        if step.memory.look():
            return step.for_good(func, args, kwargs)
        is_array = func in ARRAYS and (kwargs.get("force") or not self._recorder.asks(args[0]))
        if is_array and (array := step.memory.array(args[0], args[1:], kwargs)) is not None:
            return array[0]
        if step.is_eager:
            return step.for_good(func, args, kwargs)
        if not any(id(t) in step.sources or isinstance(t, DTensor) for t in mine):
            step.on_values()
            if any(step.shares(t, len(step.outside)) is not None for t in mine if t.layout is torch.strided):
                step.eagerly(
                    f"{getattr(func, '__name__', func)} of a tensor that shares memory with others of the step"
                )
            with step.beside():
                return func(*args, **kwargs)
        if (reason := step.refuses_read(func, mine)) is not None:
            step.eagerly(reason)
        source = step.sources.get(id(args[0])) if args else None
        fake = self._recorder.fake_of(source) if type(source) is Made and func in _TEXTS else None
        node = None if fake is None else private.history_of(fake)
        history = None if node is None else type(node).__name__
        given_args, given_kwargs, told = args, kwargs, None
        try:
            step.take(self._read_note(func, args, kwargs), args, kwargs)
            values = self._values()
            if values is not None and not any(isinstance(value, Tensor) for value in values):
                told = list(values) if func is Tensor.tolist and args[0].dim() else values[0]
                self._generator.look()  # the graph that gives it may have drawn
            else:
                writable = func is private.reduced or is_array  # memory is kept
                args, kwargs = self._copies.with_values((args, kwargs), values, writable=writable)
        except CannotBeFollowed as error:
            step.eagerly(str(error))
        is_alone = self._take_out()
        if is_array and not (is_alone or step.is_eager or args[0].is_complex()):
            return step.memory.array_of_copy(source, args[0], args[1:], kwargs)
        with step.beside():
            found = func(*args, **kwargs) if told is None else told
        whole: list[Any] = found[: _LONGEST_LIST + 1] if type(found) is list else [found]
        whole = whole if len(whole) <= _LONGEST_LIST else []
        if all(type(n) is int for n in whole) and not (is_alone or step.is_eager):
            self._count(whole, func, given_args, given_kwargs)
        if func in _TEXTS and history is not None and not step.is_eager:
            found = str(found).replace("requires_grad=True", f"grad_fn=<{history}>")
        return found

    def _known(self, func: Any, args: Any, kwargs: Any) -> Iterator[Note]:
        """The notes of this read, the likeliest first."""
        step = self._step
        for note in reversed(step.here.children):
            # with other numbers, too: they are no graph's, since the call is made on what that gives
            if note.func == func and note.reads and numbers_that_differ(note, args, kwargs, step) is not None:
                yield note

    def _read_note(self, func: Any, args: Any, kwargs: Any) -> Note:
        known = next(self._known(func, args, kwargs), None)
        return known or self._new(func, args, kwargs, len(self._step.outside))

    def _new(self, func: Any, args: Any, kwargs: Any, known: int) -> Note:
        step = self._step
        if step.knows_too_many() and not step.must_be_graph:
            raise CannotBeFollowed(f"{getattr(func, '__name__', func)} reads something else in every step")
        note = Note(len(step.notes), func, mapped(step.noted, args), mapped(step.noted, kwargs), reads=True)
        self._recorder.complete(note, known)
        note.marked(step.here)
        step.here.children.append(note)
        return note

    def decide_sizes(self, *, lists_alone: bool) -> bool:
        """A call has other sizes than before by Python's numbers. Those that it has read are counts from now on.

        Returns whether there are any that were none.

        Args:
            lists_alone: so far it has had other numbers with other counts alone, of which single ones may follow.
        """
        sizes_at = self._step.follower.sizes_at
        known = len(sizes_at)
        for note in self._step.notes:
            if note.whole is None:
                continue
            wanted = {n for n in note.whole if n > _COMMON}
            left = self._without_used(wanted, note)
            if (len(note.whole) == 1 and not lists_alone) or (len(wanted) > 1 and not left):
                sizes_at.setdefault(note.source, 0)
            elif left and len(wanted) > 1:  # one that was may have been so by chance
                seen = self._step.follower.unused_at
                seen[note.source] = seen.get(note.source, 0) + (2 if left == wanted else 1)
        if len(sizes_at) == known:
            return False
        self._step.follower.told_at.clear()  # they may follow from these
        return True

    @staticmethod
    def _without_used(numbers: set[int], read: Note) -> set[int]:
        """The numbers of a list that no call got. For its largest or their sum, a path for each will do."""
        left, note = set(numbers), read
        while note.children and left:
            note = note.children[0]
            left -= {int(leaf) for _, leaf in leaves_by_place((note.args, note.kwargs)) if isinstance(leaf, int)}
        return left

    def _count(self, numbers: list[int], func: Any, args: Any, kwargs: Any) -> None:
        """Python has read whole numbers, which are counts if sizes may depend on them."""
        step, note = self._step, self._step.notes[-1]
        note.whole = numbers if note.whole is None else note.whole
        pinned = step.follower.sizes_at.get(note.source, _MOST_PINNED)
        source = step.sources.get(id(args[0]))
        needs = step.notes[source.depth].needs if type(source) is Made else ()
        is_fixed = all(i < step.opened for i in needs)  # else a list is as long as the data say
        # what is said of sizes is true of no negative numbers
        counts = is_fixed and min(numbers, default=-1) >= 0 and pinned < _MOST_PINNED
        if not (counts or note.counts):
            return
        position = len(step.counts)
        step.counts += numbers * counts
        number = len(numbers) * counts
        if len(note.counts) == number and may_have(step.counts, note.pins, note.conditions):
            return
        step.cut(note.depth)
        del step.held[note.depth]
        known = self._known(func, args, kwargs)
        alike = (n for n in known if len(n.counts) == number and may_have(step.counts, n.pins, n.conditions))
        if (other := next(alike, None)) is None:
            try:
                other = self._new(func, args, kwargs, len(step.outside))
            except CannotBeFollowed as error:
                del step.counts[position:]
                step.eagerly(str(error))
                return
            other.met, other.whole = note.met, note.whole
            other.counts = range(position, len(step.counts))
        step.take(other, args, kwargs)

    def _values(self) -> Sequence[Any] | None:
        """What a graph gives Python now; None if none does."""
        step = self._step
        self._generator.watch()
        with step.beside():
            given = step.on_read()
        step.was_told_draws = step.was_told_draws or any(note.draws for note in step.notes)
        return given

    def asks_for_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that reads values, and may compute beside."""
        found = self.read(func, args, kwargs)
        if self._step.is_eager or not tensors_in(found):
            return found
        self._step.eagerly(f"{getattr(func, '__name__', func)} reads the values of a tensor")
        return func(*args, **kwargs)

    def leaves_path(self, calls: int, told: Mapping[Source, Tensor]) -> Sequence[Tensor]:
        """Python reads results of calls that are only for itself; they leave the step. Returns the values.

        Args:
            calls: so many calls of the step are before that.
            told: values of what these gave.
        """
        step = self._step
        values = Values(lambda source: told[source] if source in told else step.tensor_of(source))
        values.made.update({source: value for source, value in told.items() if type(source) is Made})
        *own, read = step.notes[calls:]
        with step.beside(), private.disable_dispatch_modes(), torch.no_grad():
            for note in own:
                values.run(note, step.numbers_of(note))
        self._own_calls = calls, values
        return [values.of(source) for source in sources_in((read.args, read.kwargs))]

    def _take_out(self) -> bool:
        """Take calls that Python made for itself out of the path; their results become plain tensors."""
        step = self._step
        if self._own_calls is None:
            return False
        (calls, values), self._own_calls = self._own_calls, None
        own = step.cut(calls)
        with step.beside(), torch.no_grad():
            for note in own:
                step.held.pop(note.depth, None)
                for index, placeholder in enumerate(note.handed):
                    del step.sources[id(placeholder)]
                    private.exchange(placeholder, values.made[Made(note.depth, index)].detach())
                note.handed.clear()
        met = min((number for note in own for number in note.met), default=len(step.outside))
        for tensor in step.outside[met:]:
            del step.sources[id(tensor)]
        del step.outside[met:]
        self._recorder.now = None
        return True

    def value_now(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor that no call of the step has met."""
        self._step.on_values()
        with self._step.beside(), torch.no_grad():
            return tensor.detach().clone()
