"""Records calls on fake tensors, behind the path so far."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_spmd import _private_api as private
from lightning_spmd.errors import SPMDError
from lightning_spmd.ir.aliasing import written_values
from lightning_spmd.ir.first import first
from lightning_spmd.ir.layout import layout_of, strides_as
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.sizes import Dimension, Formula, Size
from lightning_spmd.stages.capture.follow import placeholders
from lightning_spmd.stages.capture.follow.counts import CountsWanted, FormsOnFakes, Told
from lightning_spmd.stages.capture.follow.engine import Engine, EngineCall, Saving, is_ours
from lightning_spmd.stages.capture.follow.matching import decides_as_torch, keeps_shapes
from lightning_spmd.stages.capture.follow.notes import (
    Given,
    Made,
    Note,
    Outside,
    Place,
    Source,
    in_step,
    leaf_at,
    leaves_by_place,
    mapped,
    sized,
    sources_in,
    tensors_in,
    with_numbers,
)
from lightning_spmd.stages.capture.follow.refused_dtypes import check_dtypes
from lightning_spmd.stages.capture.follow.same_calls import same_before
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed, StepState
from lightning_spmd.stages.capture.follow.values import Values, new_tensors, structure_of
from lightning_spmd.stages.capture.numbers.opened import is_open, samples_of, stretches_of
from lightning_spmd.stages.capture.record.fake_calls import FakeCalls, flat
from lightning_spmd.stages.capture.record.inputs import twin_of
from lightning_spmd.stages.capture.record.known_values import KnownValues
from lightning_spmd.stages.capture.user_code import user_location

_DEVICE = torch.ops.prim.device.default
_MOST_ALIKE = 256
"""Of so many stretches and counts a call remembers that all numbers are alike there."""
CHECK = torch.ops.aten._linalg_check_errors.default  # noqa: SLF001 - an operator's public name
"""Raises an error if a decomposition found that a matrix has none."""


class Checks(Exception):
    """Control flow: a call raises an error by values, which the user's code may catch."""


class HasOwnBackward(Exception):
    """Control flow: in an operator's backward pass there is Python, which is to run in every step."""


class Recording:
    """The calls of one step on fake tensors, with their autograd.

    Args:
        step: the step.
        given: the tensors of the batch, if not those of the step.
        mode: of the fake tensors.
        sizes: of tensors of the batch, where they are not their own.
    """

    def __init__(
        self,
        step: StepState,
        given: Sequence[Tensor] | None = None,
        mode: Any = None,
        sizes: Sequence[tuple[Dimension, Any]] = (),
    ) -> None:
        self._step, self._sizes = step, dict(sizes)
        self._given = step.follower.given if given is None else given
        self.mode = private.FakeTensorMode(allow_non_fake_inputs=True) if mode is None else mode
        self.below = _FakeBelow(self.mode)
        self.outside: dict[Source, Tensor] = {}
        self._roots: dict[int, tuple[Source, Tensor]] = {}
        self._rooted = set[Source]()
        self.values = Values(self._fake, Engine(self.active, is_fake=True))
        self.values.instead[sized] = self._sized
        self.values.on_same = self.below.sized.forms.same
        if step.by_hand is not None:
            self.values.world = step.by_hand.on_fakes(lambda: self.values.made.values())

    def _fake(self, source: Given | Outside) -> Tensor:
        step = self._step
        if source not in self.outside:
            live = self._given[source.position] if type(source) is Given else step.tensor_of(source)
            with step.beside():
                self.outside[source] = fake = self._of(source, live)
            if step.by_hand is not None and fake.is_leaf:
                fake.requires_grad_(step.by_hand.trained_at_first(live))
        return self.outside[source]

    def _of(self, source: Given | Outside, live: Tensor) -> Tensor:
        position = source.position if type(source) is Given else -1
        shape = [self._sizes.get((position, dim), size) for dim, size in enumerate(live.shape)]
        is_its_own = all(type(size) is int and size == its for size, its in zip(shape, live.shape, strict=True))
        if is_its_own and position not in self._step.stand_ins:
            if (place := placeholders.place_of_gone(live)) is not None:
                return placeholders.without_history(twin_of(live.detach(), self.mode), place)
            return twin_of(live, self.mode)
        # the tensor may be met first where the user's inference mode is on
        with private.disable_dispatch_modes(), self.mode, torch.inference_mode(live.is_inference()):
            # what stands for the batch of all ranks has no layout
            layout = None if position in self._step.stand_ins else layout_of(live.shape, live.stride())
            fake = torch.empty_strided(shape, strides_as(layout, shape), dtype=live.dtype, device=live.device)
            return fake.requires_grad_(live.requires_grad)

    def _sized(self, tensor: Tensor, *shape: Any) -> Tensor:
        """A tensor from outside as large as Python tells."""
        source = first((source for source, fake in self.outside.items() if fake is tensor), "tensor from outside")
        if any(type(size) is not int for size in shape) or shape != tuple(tensor.shape):
            self.unmet(source)
            self.outside[source] = twin_of(self._step.tensor_of(source), self.mode, shape)  # type: ignore[arg-type]
        return self.outside[source]

    def unmet(self, source: Source) -> None:
        """A tensor from outside has not been met."""
        self.outside.pop(source, None)
        self._rooted.discard(source)
        self._roots = {storage: root for storage, root in self._roots.items() if root[0] != source}

    def root_of(self, storage: int) -> tuple[Source, Tensor] | None:
        """The first tensor with this memory, and where it comes from."""
        for tensors in (self.outside, self.values.made):
            new: list[Any] = []
            for source in reversed(tensors):
                if source in self._rooted:
                    break
                new.append(source)
            for source in reversed(new):
                self._rooted.add(source)
                self._roots.setdefault(private.storage_of(tensors[source]), (source, tensors[source]))
        return self._roots.get(storage)

    def root_of_source(self, source: Source) -> Source:
        """What a tensor shares memory with, itself if nothing."""
        root = self.root_of(private.storage_of(self.values.of(source)))
        return source if root is None else root[0]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A context in which calls are on fake tensors."""
        with self._step.above_autograd(), private.disable_dispatch_modes(), self.mode, self.below:
            yield


class _FakeBelow(private.TorchDispatchMode):
    """Performs calls on fake tensors, with known results where possible; counts them.

    Attributes:
        seen: operators with their arguments and results, if somebody wants to know.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._calls = FakeCalls(mode)
        self.count = self.draws = self.checks = 0
        self.written = list[Tensor]()
        self.seen: list[tuple[Any, Any, Any, Any]] | None = None
        self._known, self._held = KnownValues(), list[Tensor]()
        self.asked: Tensor | None = None  # for its value
        self.sized = FormsOnFakes(lambda func, *args, **kwargs: self._calls.make(func, args, kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if func is _DEVICE and type(args[0]) is private.FakeTensor:  # autograd asks several times a call
            return args[0].fake_device
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        self.checks += func is CHECK and private.graph_task() == -1  # nobody looks at values within a backward pass
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - an operator's public name
            self.asked = args[0]
        self.written += [value for value in written_values(func, args, kwargs) if isinstance(value, Tensor)]
        if func is torch.ops.aten.equal.default and (told := self._known.equal(args)) is not None:
            return told
        form = self.sized.forms.form_of(func, args, kwargs)
        out = self._calls.make(func, args, kwargs) if form is None else form()
        check_dtypes(func, args, kwargs)
        if self.seen is not None:
            self.seen.append((func, args, kwargs, out))
        if isinstance(out, Tensor) and out.ndim == 0 and out.device.type == "cpu":
            entries = flat(args, kwargs)
            if not any(isinstance(entry, (torch.SymInt, torch.SymFloat, torch.SymBool)) for entry in entries):
                self._held.append(out)
                self._known.follow(func, args, kwargs, entries, out)
        return out


class Recorder:
    """Records the new calls of one step.

    Args:
        step: the step.

    Attributes:
        now: the path so far on fake tensors; None as long as all of it is known.
        failed: a call that could not be recorded, with its arguments.
        just_told: the data-dependent sizes that the last recorded call gave.
    """

    def __init__(self, step: StepState) -> None:
        self._step = step
        self.now: Recording | None = None
        self.failed: tuple[Any, Any, Any] | None = None
        self.just_told: Sequence[int] | None = None

    def so_far(self) -> Recording:
        """The path so far on fake tensors, made again where a step leaves a known path: calls may write in place."""
        step = self._step
        recording = Recording(step) if self.now is None else self.now
        try:
            with step.beside():
                for note in step.notes[recording.values.done :]:
                    recording.below.sized.begin(told_of(note, step.counts))
                    with recording.active():
                        recording.values.run(note, step.numbers_of(note))
        except Exception as error:
            name = step.notes[recording.values.done].name
            raise CannotBeFollowed(f"{name} cannot be recorded again ({first_line(error)})") from error
        self.now = recording
        return recording

    def record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        around: Any,
        counts_of: Callable[[Note, Any, Any], Told],
        by_python: Mapping[Place, tuple[Place, int]],
    ) -> Note | None:
        """Record a new call after the path so far; None for a question that computes nothing.

        Args:
            func: what is called.
            args: its arguments.
            kwargs: likewise.
            around: torch's switches.
            counts_of: gives the data-dependent sizes of the results of a call that is not noted yet.
            by_python: places of numbers that Python tells, each with the place of the one that is this much less, or
                with its own.

        Raises:
            CannotBeFollowed: the step goes on eagerly.
            Checks: the call raises an error by values.
            HasOwnBackward: the call's backward pass is Python that can be followed.
        """
        step = self._step
        recording = self.so_far()
        known = len(step.outside)
        note = Note(len(step.notes), func, mapped(step.noted, args), mapped(step.noted, kwargs), around)
        self.complete(note, known)
        with self._told(note, args, kwargs, by_python):
            return self._recorded(recording, note, args, kwargs, counts_of)

    @contextlib.contextmanager
    def _told(self, note: Note, args: Any, kwargs: Any, by_python: Mapping[Place, tuple[Place, int]]) -> Iterator[None]:
        """While a new call with numbers that are counts is recorded."""
        counts, numbers, known = self._step.counts, dict[Place, Any](), len(self._step.counts)
        for place, (base, more) in by_python.items():
            number = leaf_at((args, kwargs), place)
            if place == base:
                note.told[place] = len(counts)
                counts.append(number)
            code = f"s{note.told[base]}" + (f" + {more}" if more else "")
            numbers[place] = Size(number, Formula(code), self._step.follower.counts)
        note.args, note.kwargs = with_numbers((note.args, note.kwargs), numbers)
        try:
            yield
        finally:
            del counts[known:]

    def _recorded(
        self, recording: Recording, note: Note, args: Any, kwargs: Any, counts_of: Callable[[Note, Any, Any], Told]
    ) -> Note | None:
        step, func = self._step, note.func
        given = mapped(self._as_fake, args), mapped(self._as_fake, kwargs)
        operands, draws, checks = tensors_in(given), recording.below.draws, recording.below.checks
        before, count, known_kind = (
            [TensorSpec.of(t) for t in operands],
            recording.below.count,
            func in step.follower.kinds or isinstance(func, EngineCall),
        )
        versions, trained = list(map(version_of, operands)), [t.requires_grad for t in operands]
        told: Told = {}
        recording.below.asked = None
        recording.below.written.clear()
        step.applied.clear()
        first_node = private.next_sequence_number()
        try:
            recording.below.sized.begin(told)
            try:
                with step.beside(), recording.active():
                    out = recording.values.call(func, *given)
            except CountsWanted:
                told = counts_of(note, args, kwargs)
                recording.below.sized.begin(told)
                with step.beside(), recording.active():
                    out = recording.values.call(func, *given)
            if recording.below.checks != checks:
                raise Checks
        except (CannotBeFollowed, Checks):
            raise
        except private.DataDependentOutputException:
            asked, is_method = recording.below.asked, getattr(Tensor, getattr(func, "__name__", ""), None) is func
            numbers = [p for p, v in leaves_by_place(given) if v is asked and v.ndim == 0]
            numbers = [p for p in numbers if not (is_method and p == (0, 0))]  # the method's own tensor is no number
            if numbers:
                step.follower.numbers.setdefault(func, set()).update(numbers)
            if numbers or not known_kind:
                raise
            if not step.is_below:
                raise Checks from None
            raise CannotBeFollowed(f"{note.name} reads the values of a tensor") from None
        except private.DynamicOutputShapeException as error:
            raise CannotBeFollowed(f"what {note.name} returns is as large as the data say") from error
        except SPMDError as error:
            raise CannotBeFollowed(str(error)) from error
        except Exception as error:  # the user's own mistake shows when it runs for good
            raise CannotBeFollowed(f"{note.name} could not be recorded ({first_line(error)})") from error
        if out is NotImplemented:
            step.follower.refused.add((func, *map(type, args)))
            return None
        self._look_at_history(note, tensors_in(out), first_node)
        if before != [TensorSpec.of(t) for t in operands]:
            raise CannotBeFollowed(f"{note.name} changes the size of a tensor in place")
        if isinstance(out, torch.nn.utils.rnn.PackedSequence) or any(
            t.layout is not torch.strided or t.is_quantized or not isinstance(t, private.FakeTensor)
            for t in new_tensors(out, given)
        ):
            raise CannotBeFollowed(f"{note.name} makes a tensor of another kind")
        of_engine = isinstance(func, EngineCall)
        is_empty = out is None or (type(out) is tuple and not out)
        if not (of_engine or tensors_in(out) or is_empty or recording.below.count == count):  # Python reads numbers
            raise private.DataDependentOutputException(func)
        if not known_kind:
            is_question = not tensors_in(out) and recording.below.count == count
            step.follower.kinds[func] = "history" if is_question else "call"
            if is_question:
                return None
        if asked := recording.below.sized.asked:
            if len(asked) > 1:
                raise CannotBeFollowed(f"{note.name} makes several things that are as large as the data say")
            note.slot, number = asked[0]
            note.counts = range(len(step.counts), len(step.counts) + number)
        recording.values.keep(note.depth, out, given)
        for tensor, fake, was in zip(tensors_in((args, kwargs)), operands, trained, strict=True):
            source = step.sources.get(id(tensor))
            if fake.requires_grad is not was and type(source) is Made:
                step.notes[source.depth].written.add(source.index)
        changed = [t for t, version in zip(operands, versions, strict=True) if version_of(t) != version]
        if any(stride == 0 and size > 1 for t in changed for stride, size in zip(t.stride(), t.shape, strict=True)):
            raise CannotBeFollowed(f"{note.name} writes into a tensor with elements in the same place (expand)")
        written = {private.storage_of(t) for t in (*changed, *recording.below.written)}
        roots = [root[0] for storage in written if (root := recording.root_of(storage)) is not None]
        note.writes = frozenset(
            r for r in roots if not (type(r) is Made and r.depth == note.depth)
        )  # but what it makes
        shared = {i for pair in enumerate(step.follower.shared) if pair[1] is not None for i in pair}
        if any(type(root) is Given and root.position in shared for root in note.writes):
            raise CannotBeFollowed(f"{note.name} writes into one of two tensors of the batch that share memory")
        note.draws = recording.below.draws != draws
        note.fakes = new_tensors(out, given)
        note.results = structure_of(out, given)
        with step.beside():
            note.moulds = [step.follower.moulds.of(TensorSpec.of(fake)) for fake in note.fakes]
        note.specs, note.trained = [TensorSpec.of(t) for t in note.fakes], [t.requires_grad for t in note.fakes]
        note.versions = list(map(version_of, note.fakes))
        note.made = [Made(note.depth, index) for index in range(len(note.fakes))]
        for fake, made in zip(note.fakes, note.made, strict=True):
            root, first_fake = recording.root_of(private.storage_of(fake)) or (made, fake)
            note.roots.append((root, int(fake.storage_offset()) - int(first_fake.storage_offset())))
        if not step.memory.is_shared:  # what is written into arrays nobody sees
            note.same = same_before(
                note, step.notes, step.here.children, recording.root_of_source, sizes_vary=step.tree is not None
            )
            with step.beside():
                recording.values.tell_same(note)
        note.marked(step.here)
        step.here.children.append(note)
        step.follower.recorded += 1
        if note.counts:
            self.just_told = told[note.slot]
        return note

    def _look_at_history(self, note: Note, results: Sequence[Tensor], first: int) -> None:
        """What a call left in autograd's graph that is not torch's own: an operator of somebody's own did.

        In C++ it keeps numbers where none can be replaced: another one is another call.

        Args:
            note: the call.
            results: its results.
            first: the number of the first node that it may have made.

        Raises:
            HasOwnBackward: Python, as the function that the call is.
            CannotBeFollowed: Python beside other nodes.
        """
        with self._step.beside(), private.disable_dispatch_modes():  # torch makes views anew that were written
            nodes = private.nodes_since(results, first)
        own = [node for node in nodes if isinstance(node, BackwardCFunction) and not is_ours(node)]
        if own and len(nodes) == 1 and type(own[0])._forward_cls in self._step.applied:  # type: ignore[attr-defined]  # noqa: SLF001
            raise HasOwnBackward
        if own:
            raise CannotBeFollowed(f"in the backward pass of {note.name} runs Python that no graph sees")
        if any(map(private.is_of_extension, nodes)):
            places = leaves_by_place((note.args, note.kwargs))
            note.plain.update(place for place, leaf in places if type(leaf) in (int, float))

    def complete(self, note: Note, known: int) -> None:
        """Complete the note of a new call.

        Args:
            note: the call.
            known: so many tensors from outside had been met before it.
        """
        step = self._step
        for number in range(known, len(step.outside)):
            kind = step.kind(step.outside[number], number)
            note.met[number] = kind.of_any_size() if note.func is sized else kind
        note.module, note.source = step.module_path(), user_location() or ""
        for source in sources_in((note.args, note.kwargs)):
            if type(source) is Given:
                step.on_given(source.position)

    def _as_fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or self.now is None:
            return value
        return self.now.values.of(self._step.source_of(value))

    def unmet(self, known: int) -> None:
        """Take back a call that failed: keep this many outside tensors."""
        step = self._step
        for number in range(known, len(step.outside)):
            del step.sources[id(step.outside[number])]
            if self.now is not None:
                self.now.unmet(Outside(number))
        del step.outside[known:]

    def forget(self) -> None:
        """Release the recording, when Python is done or the step goes on eagerly."""
        recording, self.now = self.now, None
        if recording is None:
            return
        notes = self._step.notes
        for source, fake in recording.values.made.items():
            note = notes[source.depth] if source.depth < len(notes) else None  # the user's code raised
            if note is not None and version_of(fake) != note.versions[source.index]:
                note.written.add(source.index)
        recording.values.engine.close()

    def is_alike(self, note: Note, args: Any, kwargs: Any, numbers: Mapping[Place, Any]) -> bool:
        """Whether the results of a call with other numbers have the noted sizes, and are made by the same operators.

        Args:
            note: the call that is known.
            args: of the call.
            kwargs: likewise.
            numbers: those that are others, by place.
        """
        step = self._step
        if keeps_shapes(note.func) or note.func is sized:
            return note.func is not sized
        # of floats between two quarters all are like one, if those near the ends are
        free = {place: leaf_at((args, kwargs), place) for place in sorted(note.free | numbers.keys(), key=repr)}
        are_open = decides_as_torch(func := note.func) and all(type(n) is float and is_open(n) for n in free.values())
        stretch = stretches_of(*free.values()), tuple(step.counts)
        if are_open and note.alike.get(stretch):
            return True
        recording = Recording(step)
        if is_saving := isinstance(func, Saving):
            func = func.without_place

        def fake(value: Any) -> Any:
            source = step.sources.get(id(value)) if isinstance(value, Tensor) else None
            if type(source) is Made:
                seen = step.notes[source.depth].specs_at(step.counts)[source.index]
                with recording.active(), torch.no_grad():
                    return torch.empty_strided(seen.shape, seen.stride, dtype=seen.dtype, device=seen.device)
            return recording.values.of(source) if source is not None else value

        def made_with(numbers: dict[Place, Any]) -> tuple[list[TensorSpec], list[Any]]:
            args, kwargs = with_numbers(given, numbers)
            recording.below.seen = []
            with recording.active(), torch.no_grad():
                made = [TensorSpec.of(tensor) for tensor in new_tensors(func(*args, **kwargs), given)]
            return made, [func for func, *_ in recording.below.seen]

        try:
            with step.beside():
                given = mapped(fake, (args, kwargs))
                made, operators = made_with({})
                # a norm's order, for one, chooses the kernel
                known = {
                    p: in_step(leaf_at((note.args, note.kwargs), p)) for p, n in numbers.items() if type(n) is float
                }
                is_other = bool(known) and made_with(known)[1] != operators
                specs = note.specs_at(step.counts)[: len(made) if is_saving else None]  # without what autograd saves
                is_it = not is_other and made == specs
                if are_open and is_it and stretch not in note.alike:
                    samples = [dict(zip(free, its, strict=True)) for its in samples_of(list(free.values()))]
                    if len(note.alike) == _MOST_ALIKE:
                        note.alike.clear()
                    note.alike[stretch] = False
                    with contextlib.suppress(Exception):
                        note.alike[stretch] = all(made_with(its) == (made, operators) for its in samples)
        except Exception:  # then the call itself will say so
            return False
        return is_it

    def fits(self, given: Sequence[Tensor]) -> bool:
        """Whether a batch of other sizes fits the calls so far, and one that could not be recorded.

        Args:
            given: the batch's tensors.
        """
        step = self._step
        recording = Recording(step, given)

        def fake(value: Any) -> Any:
            return recording.values.of(step.source_of(value)) if isinstance(value, Tensor) else value

        try:
            with step.beside():
                for note in step.notes:
                    with recording.active():
                        recording.values.run(note, step.numbers_of(note))
                if self.failed is not None:
                    func, args, kwargs = self.failed
                    args, kwargs = mapped(fake, args), mapped(fake, kwargs)
                    with recording.active():
                        func(*args, **kwargs)
        except Exception:
            return False
        return True

    def fake_of(self, source: Made) -> Tensor:
        """A result as recorded, with its autograd history. Of another size it is recorded again."""
        note = self._step.notes[source.depth]
        fake = note.fakes[source.index]
        if note.sizes is not None and note.specs_at(self._step.counts)[source.index] != TensorSpec.of(fake):
            return self.so_far().values.made[source]
        return fake

    def fake_now(self, source: Made) -> Tensor:
        """A result with its autograd history after the calls so far, which may have written into it."""
        if self.now is None and source.index not in self._step.notes[source.depth].written:
            return self.fake_of(source)
        return self.so_far().values.made[source]

    def fake_made(self, placeholder: Tensor) -> Tensor:
        """A result as recorded, if no call writes into it."""
        return self.fake_of(self._step.sources[id(placeholder)])  # type: ignore[arg-type]

    def asks(self, tensor: Tensor) -> bool:
        """Whether a tensor requires gradients."""
        source = self._step.sources.get(id(tensor))
        if type(source) is not Made:
            return tensor.requires_grad
        if self.now is None and source.index not in self._step.notes[source.depth].written:
            return self.is_trained(source)
        known = self._step.here.asking
        if source not in known:
            known[source] = self.fake_now(source).requires_grad
        return known[source]

    def is_trained(self, source: Made) -> bool:
        """Whether a result requires gradients."""
        return self._step.notes[source.depth].fakes[source.index].requires_grad

    def is_leaf(self, tensor: Tensor) -> bool:
        """Whether autograd puts gradients into the tensor."""
        source = self._step.sources.get(id(tensor))
        return (self.fake_of(source) if type(source) is Made else tensor).is_leaf

    def tensors(self) -> list[Tensor]:
        """The results of the calls so far, on fake tensors."""
        return [] if self.now is None else list(self.now.values.made.values())

    def leaves(self, roots: Sequence[Any], leaves_of: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor] | None:
        """The leaves of autograd's graph; None if some are unknown to the step.

        Args:
            roots: where the others come from.
            leaves_of: gives them, on fake tensors.

        Raises:
            CannotBeFollowed: what was called so far cannot be recorded again.
        """
        recording = self.so_far()
        sources = {
            id(fake): source for known in (recording.outside, recording.values.made) for source, fake in known.items()
        }
        found = [sources.get(id(leaf)) for leaf in leaves_of([recording.values.of(root) for root in roots])]
        return None if None in found else [self._step.tensor_in_hand(source) for source in found if source is not None]


def told_of(note: Note, counts: Sequence[int]) -> Told:
    """The counts of a call, given those of its path."""
    return {note.slot: [counts[i] for i in note.counts]} if note.counts else {}


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory has been written."""
    with private.no_torch_functions():
        return private.version_of(tensor)


def first_line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error)
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
