"""Sees every torch call of a step. It follows known paths, records new calls, and computes nothing.

A call that torch functions do not show (``jit.script``) reaches the dispatcher, where it is followed or recorded like
others. A step that cannot be followed runs eagerly: first the calls up to there, then the rest.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_spmd import _private_api as private
from lightning_spmd.ir.aliasing import written_values
from lightning_spmd.ir.counted import CountFits, samples_of
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.operators.generator_state import READ_STATE, SEED, WRITE_STATE
from lightning_spmd.ir.random_states import TorchRandomState
from lightning_spmd.ir.shared_memory import may_meet, shared
from lightning_spmd.ir.sizes import Counts, Dimension
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.ir.unify import Apart
from lightning_spmd.stages.capture.follow import placeholders
from lightning_spmd.stages.capture.follow.counts import (
    CountsWanted,
    FormsOnFakes,
    Told,
    compiled_specs,
    counted,
    counts_in,
    sized,
    specs_for,
)
from lightning_spmd.stages.capture.follow.engine import Begin, Engine, EngineCall, Saving
from lightning_spmd.stages.capture.follow.functions import Functions
from lightning_spmd.stages.capture.follow.matching import MISSED, compiled, keeps_shapes, never, numbers_that_differ
from lightning_spmd.stages.capture.follow.memory import ARRAYS, Holders, Memory, is_foreign, is_plain
from lightning_spmd.stages.capture.follow.notes import (
    Fresh,
    Given,
    Kind,
    Made,
    Note,
    Operand,
    Outside,
    Place,
    Source,
    around_now,
    leaves_by_place,
    mapped,
    sources_in,
    tensors_in,
    with_numbers,
)
from lightning_spmd.stages.capture.follow.packed import PackedSequences
from lightning_spmd.stages.capture.follow.queue import known
from lightning_spmd.stages.capture.follow.same_calls import same_before
from lightning_spmd.stages.capture.follow.saved import Saved
from lightning_spmd.stages.capture.follow.sizes import OpenTree, moved
from lightning_spmd.stages.capture.follow.values import Values, new_tensors, structure_of, surroundings
from lightning_spmd.stages.capture.follow.worlds import CallByHand, World
from lightning_spmd.stages.capture.record.fake_calls import FakeCalls, flat
from lightning_spmd.stages.capture.record.inputs import twin_of
from lightning_spmd.stages.capture.record.known_values import KnownValues
from lightning_spmd.stages.capture.user_code import user_location

_SPARE = 64
"""Sizes of the results of a call whose placeholders are kept."""
MOST_NEXT = 32
"""A call behind which more than that many others have come next is one that no graph will know."""

_READS = {
    Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__complex__, Tensor.tolist,
    Tensor.numpy, Tensor.__array__, Tensor.__contains__, Tensor.__format__, Tensor.__repr__, Tensor.__reversed__,
    Tensor.equal, Tensor.allclose, Tensor.is_nonzero, torch.is_nonzero, torch.equal, torch.allclose,
}  # fmt: skip
_SIZES = frozenset(
    {"size", "dim", "is_floating_point", "is_complex", "numel", "__len__", "element_size", "nelement", "ndimension",
     "is_signed"}
)  # fmt: skip
_STRIDES = frozenset({"stride", "is_contiguous", "storage_offset", "is_non_overlapping_and_dense", "dim_order"})
_PROPERTIES = frozenset({"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_nested", "itemsize",
                         "is_quantized", "is_meta", "is_mkldnn", "is_cpu", "nbytes"})  # fmt: skip
_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
_MEMORY = {Tensor.storage, Tensor.untyped_storage, Tensor.data_ptr, Tensor.__dlpack__,
           Tensor.__dlpack_device__, Tensor.share_memory_, Tensor.set_}  # fmt: skip
"""What hands out the memory of a tensor, or exchanges it."""
_DEVICE = torch.ops.prim.device.default
_CHECK = torch.ops.aten._linalg_check_errors.default  # noqa: SLF001 - an operator's public name
"""Raises an error if a decomposition found that a matrix has none."""
_READ_OPERATORS = {
    _CHECK,
    *(getattr(torch.ops.aten, name).default for name in ("_local_scalar_dense", "item", "equal", "is_nonzero")),
}
_VIEWED_IN_PLACE = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name)
    for name in ("squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims")
}
_VIEWED_IN_PLACE |= {
    getattr(getattr(torch.ops.aten, f"{name}_"), overload): getattr(getattr(torch.ops.aten, name), overload)
    for name in ("squeeze", "unsqueeze", "transpose", "t")
    for overload in getattr(torch.ops.aten, f"{name}_").overloads()
    if overload in getattr(torch.ops.aten, name).overloads()
}
"""What makes a tensor a view of itself, and what gives that view."""
_NOWHERE = torch.device("meta")
_TEXTS = {Tensor.__repr__, Tensor.__format__}
_OF_GENERATORS = frozenset({"get_rng_state", "set_rng_state", "manual_seed"})
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
_POSITIONS = {torch.int8, torch.int16, torch.int32, torch.int64}


class CannotBeFollowed(Exception):
    """Control flow: the step goes on eagerly."""


class _Checks(Exception):
    """Control flow: a call raises an error by values, which the user's code may catch."""


class HandStep(Protocol):
    """The manual optimization of a step; implemented in ``by_hand.py``."""

    def handles(self, name: str, owner: str) -> bool:
        """Whether a function of torch is about manual optimization."""
        ...

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note a call of such a function."""
        ...

    @property
    def has_gradients(self) -> bool:
        """Whether the step has put gradients into ``.grad`` of parameters."""
        ...

    def gradient(self, tensor: Tensor) -> Tensor | None:
        """``tensor.grad`` in the step. For callers outside of the step's modes."""
        ...

    def trained_at_first(self, tensor: Tensor) -> bool:
        """Whether a live tensor asked for gradients when the step met it."""
        ...

    def refuse_state(self, tensor: Tensor) -> None:
        """Raise if a tensor belongs to the state of an optimizer that steps in this step."""
        ...

    def on_fakes(self, others: Callable[[], Any]) -> World:
        """The world for recording."""
        ...

    def on_copies(self, values: Values) -> World:
        """The world that computes values for Python on copies."""
        ...

    def live(self) -> World:
        """The world of a step that runs eagerly."""
        ...

    def let_go(self, sources: dict[int, Source]) -> None:
        """Drop gradients of tensors that the step made and that no longer exist."""
        ...

    def settle(self) -> None:
        """Write the step's gradients into ``.grad``."""
        ...

    def exchange(self, new: Mapping[int, Tensor]) -> None:
        """Put other tensors in place of some, by ``id``."""
        ...

    def zero(self) -> None:
        """Zero gradients, as Lightning does before the backward pass of the loss."""
        ...

    def added(self) -> list[tuple[Tensor, Tensor]]:
        """The gradients that backward passes within that of the loss gave to parameters."""
        ...


class Follower:
    """The known paths of one method of a module.

    Args:
        names: gives the name of every parameter and buffer of the module and its optimizers, by ``id``.
        is_named: whether a tensor has this name now.
    """

    def __init__(self, names: Callable[[], dict[int, str]], is_named: Callable[[str, Tensor], bool]) -> None:
        self.given: list[Tensor] = []
        self._roots: dict[Any, Note] = {}
        self._trees: dict[Any, OpenTree] = {}
        self.names, self.is_named = names, is_named
        self.kinds: dict[Any, str] = {}
        self.begins: dict[Any, Begin] = {}
        self.saving: dict[Any, Saving] = {}
        self.numbers: dict[Any, set[Place]] = {}
        """Where functions take tensors as numbers (``arange``, sizes of ``zeros``)."""
        self.holders = Holders(names)
        self.bound: dict[tuple[int, int], Tensor] = {}
        """The tensors on the host with which compiled notes compare, by number of the note and its own."""
        self.aliases: dict[Any, list[tuple[list[Tensor], int]] | None] = {}
        """Where placeholders are that share memory with a tensor or a result, by the call before and both sources."""
        self.recorded = 0
        """Calls that were recorded, of all steps."""

    def _key(self) -> tuple[Any, ...]:
        return tuple([(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in self.given])

    def root(self) -> Note:
        """The root of the notes of steps whose batches have tensors like the given ones."""
        key = self._key()
        found = self._roots.get(key)
        if found is None:
            found = self._roots[key] = Note(-1)
            found.marked(found)
        return found

    def tree(self, places: Sequence[Dimension]) -> OpenTree | None:
        """The tree of steps with batches like the given tensors but for these sizes; None if each size has its own."""
        tensors = [self.given[position] for position, _ in places]
        if not places or not all(t.is_contiguous() or not any(t.stride()) for t in tensors):
            return None
        if self._key() in self._roots:  # from before sizes were seen to vary
            return None
        key = tuple(places), _kind_of_batch(places, self._key())
        found = self._trees.setdefault(key, OpenTree(places))
        return None if found.has_failed else found

    def closed(self, tree: OpenTree, first_note: Note) -> None:
        """Move calls that were recorded for all sizes to the tree of these sizes alone."""
        tree.root.children.remove(first_note)
        self.root().children.append(first_note)
        below = [first_note]
        while below:
            note = below.pop()
            note.at = note.fakes_at = None
            below += note.children

    def others(self, places: Sequence[Dimension]) -> list[tuple[tuple[int, ...], Note]]:
        """The roots of such steps with one set of sizes each, and these sizes."""
        mine = _kind_of_batch(places, self._key())
        return [
            (tuple([key[position][0][dim] for position, dim in places]), root)
            for key, root in self._roots.items()
            if len(key) == len(self.given) and _kind_of_batch(places, key) == mine
        ]

    def forget_objects(self) -> None:
        """Forget the objects of the last step: the next one has others, and its comparisons are compiled again."""
        self.bound.clear()
        for note in self._notes():
            note.take = None

    def let_go(self) -> None:
        """No step follows: what the last one handed out goes, and parameters that autograd has saved with it."""
        self.forget_objects()
        for note in self._notes():
            note.handed.clear()

    def _notes(self) -> Iterator[Note]:
        notes = [*self._roots.values(), *(tree.root for tree in self._trees.values())]
        while notes:
            note = notes.pop()
            notes += note.children
            yield note


def _kind_of_batch(places: Sequence[Dimension], tensors: Sequence[Any]) -> Any:
    """The kinds of tensors, given as (shape, strides, ...), without the sizes at these places."""
    found: list[Any] = []
    for position, (shape, stride, *rest) in enumerate(tensors):
        dims = {dim for at, dim in places if at == position}
        closed = tuple([None if dim in dims else size for dim, size in enumerate(shape)])
        found.append((closed, None if dims else stride, *rest))
    return tuple(found)


class _Recording:
    """The calls of one step on fake tensors, with their autograd.

    Args:
        step: the step.
        given: the tensors of the batch, if not those of the step.
        mode: of the fake tensors.
        sizes: of tensors of the batch, where they are not their own.
    """

    def __init__(
        self,
        step: Step,
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
        self.values.on_same = self.below.sized.forms.same
        if step.by_hand is not None:
            self.values.world = step.by_hand.on_fakes(lambda: self.values.made.values())

    def _fake(self, source: Given | Outside) -> Tensor:
        if source not in self.outside:
            live = self._given[source.position] if type(source) is Given else self._step.tensor_of(source)
            with self._step.beside():
                self.outside[source] = fake = self._of(source, live)
            if self._step.by_hand is not None and fake.is_leaf:
                fake.requires_grad_(self._step.by_hand.trained_at_first(live))
        return self.outside[source]

    def _of(self, source: Given | Outside, live: Tensor) -> Tensor:
        position = source.position if type(source) is Given else -1
        shape = [self._sizes.get((position, dim), size) for dim, size in enumerate(live.shape)]
        if all(type(size) is int for size in shape) and position not in self._step.stand_ins:
            if (place := placeholders.place_of_gone(live)) is not None:
                return placeholders.without_history(twin_of(live.detach(), self.mode), place)
            return twin_of(live, self.mode)
        # the tensor may be met first where the user's inference mode is on
        with private.disable_dispatch_modes(), self.mode, torch.inference_mode(live.is_inference()):
            return torch.empty(shape, dtype=live.dtype, device=live.device).requires_grad_(live.requires_grad)

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
    """Performs calls on fake tensors, with known results where possible; counts them."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._calls = FakeCalls(mode)
        self.count = self.draws = self.checks = 0
        self.written = list[Tensor]()
        self._known, self._held = KnownValues(), list[Tensor]()
        self.asked: Tensor | None = None  # for its value
        self.sized = FormsOnFakes(lambda func, *args, **kwargs: self._calls.make(func, args, kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if func is _DEVICE and type(args[0]) is private.FakeTensor:  # autograd asks several times a call
            return args[0].fake_device
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        self.checks += func is _CHECK
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - an operator's public name
            self.asked = args[0]
        self.written += [value for value in written_values(func, args, kwargs) if isinstance(value, Tensor)]
        if func is torch.ops.aten.equal.default and (told := self._known.equal(args)) is not None:
            return told
        form = self.sized.forms.form_of(func, args, kwargs)
        out = self._calls.make(func, args, kwargs) if form is None else form()
        if isinstance(out, Tensor) and out.ndim == 0 and out.device.type == "cpu":
            entries = flat(args, kwargs)
            if not any(isinstance(entry, (torch.SymInt, torch.SymFloat, torch.SymBool)) for entry in entries):
                self._held.append(out)
                self._known.follow(func, args, kwargs, entries, out)
        return out


class _Below(private.TorchDispatchMode):
    """Sees calls in the dispatcher that no torch function showed."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        step = self._step
        if step.is_eager and step.stale:  # C++ code above holds what placeholders were
            args, kwargs = mapped(step.current, args), mapped(step.current, kwargs)
        if step.is_apart or step.is_eager or func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if kwargs.get("device") == _NOWHERE or any(t.is_meta for t in tensors_in((args, kwargs))):
            return func(*args, **kwargs)  # torch asks how large a result is
        reads = func in _READ_OPERATORS and step.concerns(args[0])
        if not reads and not any(step.concerns(t) for t in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        step.is_below = True
        try:
            return self._followed(func, args, kwargs, reads=reads)
        finally:
            step.is_below = False

    def _followed(self, func: Any, args: Any, kwargs: Any, *, reads: bool) -> Any:
        step = self._step
        if reads:
            return step.read(func, args, kwargs)
        if func.namespace == "c10d":  # what torch.distributed does cannot be tried out, and computes nothing
            step.eagerly(f"torch.distributed's {func.name().partition('::')[2].strip('_')} in the step")
            return func(*mapped(step.current, args), **mapped(step.current, kwargs))
        if func in _VIEWED_IN_PLACE:
            return step.viewed_in_place(func, args, kwargs)
        if not step.has_transforms:
            return step.called(func, args, kwargs)
        out = step.called(func, args, kwargs)
        return out if step.is_eager else step.fresh(out)


class _Beside:
    """A context in which calls are not the user's; entered for many calls, so it is no generator."""

    __slots__ = ("_before", "_step")

    def __init__(self, step: Step) -> None:
        self._step = step

    def __enter__(self) -> None:
        self._before, self._step.is_apart = self._step.is_apart, True

    def __exit__(self, *error: object) -> None:
        self._step.is_apart = self._before


class Step(TorchFunctionMode):
    """One step.

    Args:
        follower: the known paths of such steps.
        given: the tensors of the batch.
        vary: the sizes of tensors of the batch that differ from step to step.

    Attributes:
        notes: the path so far.
        here: its last call.
        sources: where tensors come from, by ``id``.
        held: arguments of calls that are to be compiled or have numbers that differ in other steps, by depth.
        outside: tensors that the step did not make, in the order in which it met them.
        numbers: the numbers of calls that differ from step to step, by depth and place.
        counts: the data-dependent sizes of results, in the order in which Python got them.
        reason: why the step went on eagerly, with ``file:line``; None if it did not.
        is_apart: whether calls now come from other code than the user's.
        stand_ins: positions of batch tensors that are stand-ins without values.
        was_told_draws: whether Python has read a value that depends on random numbers.
        is_over: whether Python is done.
        wanted: sources of queued values, and the number of calls behind which each is wanted.
        on_eager: the step goes on eagerly; given what tells the tensor that was wanted there.
        has_transforms: whether the step has used transforms of torch.func.
        looks_closer: whether compiled comparisons are not enough: there are transforms, saved-tensor hooks or arrays.
        is_below: whether the current call is one inside another, which the dispatcher alone sees.
        functions: the user's Python in backward passes.
        saved: saved-tensor hooks and checkpointed parts.
        scaled: gives the scaled loss, with which its backward pass begins.
        draws_as_eager: whether graphs draw eager training's numbers, from torch's own generators.
        parameters: gives the parameters whose gradients Lightning zeroes before this backward pass.
        added: (parameter, gradient) of backward passes within the backward pass of the loss.
        whole: gives the whole tensors of the batch on several ranks, where Python gets stand-ins.
        needed: the number of first calls that the step itself needs, for its loss and logged values; later calls
            are for kept results.
        must_be_graph: whether the step must not run eagerly.
        draws_elsewhere: whether graphs draw other numbers than torch's generator, as on several ranks.
        stale: (placeholder, its tensor) of a step that runs eagerly, by ``id``.
    """

    def __init__(self, follower: Follower, given: Sequence[Tensor], vary: Sequence[Dimension] = ()) -> None:
        super().__init__()
        self.follower = follower
        follower.given[:] = given
        self.notes: list[Note] = []
        self.outside: list[Tensor] = []
        self.counts: list[int] = []
        self.reason: tuple[str, str | None] | None = None
        self.is_apart = self.is_over = self.was_told_draws = self.must_be_graph = self.draws_elsewhere = False
        self.has_transforms = self.looks_closer = self.is_below = False
        self.functions = Functions(self, follower.begins)
        self.saved = Saved(self, self.functions, follower.saving)
        self.scaled: Callable[[Tensor], Tensor] = lambda loss: loss
        self.parameters: Callable[[], Iterable[Tensor]] = tuple
        self.added: list[tuple[Source, Source]] = []
        self._live: Values | None = None
        self.draws_as_eager = True
        self.whole: Callable[[], Sequence[Tensor]] | None = None
        self.stand_ins: Collection[int] = ()
        self.stale: dict[int, tuple[Tensor, Tensor]] = {}
        self.module_path: Callable[[], str] = lambda: ""
        self.on_eager: Callable[[Callable[[Source, int], Tensor]], None] = lambda _: None
        self.wanted: Callable[[], Iterable[tuple[Source, int]]] = tuple
        self.before_eager: Callable[[], None] = lambda: None
        self.on_values: Callable[[], None] = lambda: None
        self.on_given: Callable[[int], None] = lambda _: None
        self.on_read: Callable[[], Sequence[Any] | None] = lambda: None
        self.refuses_read: Callable[[Any, Sequence[Tensor]], str | None] = lambda _, __: None
        self.by_hand: HandStep | None = None
        self.tree = follower.tree(vary)
        self._at = None if self.tree is None else self.tree.begin(given)
        self.here = follower.root() if self.tree is None else self.tree.root
        self.held: dict[int, tuple[Any, Any]] = {}
        self.sources: dict[int, Source] = {id(t): Given(i) for i, t in enumerate(given)}
        self._below = _Below(self)
        self._recording: _Recording | None = None
        self._names: dict[int, str] | None = None
        self._numbers: dict[tuple[int, Place], Any] | None = None
        self._failed: tuple[Any, Any, Any] | None = None
        self._preview: Values | None = None
        self._copies: dict[Source, Tensor] = {}
        self._generators: TorchRandomState | None = None
        self._random: Any = None  # the state of torch's generator, as the step knows it
        self._seed = 0
        self._layers: Any = None
        self._draws = False
        self._fewest: int | None = None
        self._just_told: Sequence[int] | None = None
        self.memory = Memory(self, follower.holders)
        self._own_calls: tuple[int, Values] | None = None
        self.needed = 0
        self._left_out: _LeftOut | None = None

    # ------------------------------------------------------------------ around the user's code
    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A context in which calls are followed."""
        if not self.memory.begin(self.follower.bound.values()):
            self.follower.forget_objects()
        self._layers = private.dispatch_layers()
        packed = PackedSequences(self)
        private.UNSEEN.begin(self, self.saved)
        private.replace_packing(packed)
        try:
            with self._below, self:
                yield
                self._watch_generator()
                self.memory.look()
                self.memory.sync()
        finally:
            private.replace_packing(None)
            private.UNSEEN.end()
            packed.end()
            self.is_apart = self.is_over = True
            self.stale.clear()

    @property
    def is_eager(self) -> bool:
        """Whether the step runs eagerly."""
        return self.reason is not None

    def apply(self, kind: type, *args: Any, **kwargs: Any) -> Any:
        """A call of a user's ``autograd.Function``."""
        if self.is_apart or self.is_eager or (self.has_transforms and private.in_transforms()):
            return private.applied(kind, args, kwargs)
        if kind is private.ReentrantCheckpoint:
            return self.saved.reentrant(*args)
        return self.functions.apply(kind, args, kwargs)

    def instead(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of a function that no mode sees."""
        if self.is_apart or self.is_eager:
            return original
        if original is private.reduced:
            return functools.partial(self._reduced, original)
        if name == "__copy__":
            return functools.partial(self._copied_shallow, original)
        if name in ("load", "_rebuild_tensor", "__new__"):
            return functools.partial(self._made_beside, name, original)
        if name in private.TRANSFORMS:  # what they compute is seen below them
            self.has_transforms = self.looks_closer = True
            return original
        if self.draws_as_eager and name in _OF_GENERATORS:
            return functools.partial(self._of_generator, name, original)
        self.eagerly(f"{name} in the step")
        return original

    def _reduced(self, original: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
        """A tensor is pickled, which reads its values."""
        with private.no_torch_functions():
            return self.read(original, (tensor, *args), {})

    def _made_beside(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Loading a file or making a parameter gives the user's own tensor, unless it is made of the step's results."""
        with private.no_torch_functions():
            if any(id(t) in self.sources for t in tensors_in((args, kwargs))):
                self.eagerly(
                    "a parameter of what the step has computed" if name == "__new__" else f"{name} in the step"
                )
                return original(*args, **kwargs)
            with self.beside():
                return original(*args, **kwargs)

    def _copied_shallow(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        """``copy.copy``, which shares the memory."""
        with private.no_torch_functions():
            if id(tensor) in self.sources and type(tensor) is Tensor and not self.asks(tensor):
                return self.called(Tensor.detach, (tensor,), {})
            self.eagerly("copy.copy of a tensor in the step")
            return original(tensor)

    def _look_at_generator(self) -> None:
        if self.draws_as_eager and self._draws:
            self._random, self._seed = private.host_random_state(), private.host_seed()

    def _watch_generator(self) -> bool:
        """Note changes of torch's generator by its own methods, which no mode sees. Returns whether there are any.

        The graph draws what it has drawn so far from the state before. Asked before new calls, when a call draws and
        torch has another seed or there are several ways to go on, where Python reads, and behind the step.
        """
        if self._random is None or self.is_eager or self.is_apart:
            return False
        known, now = self._random, private.host_random_state()
        if known == now:
            return False
        with private.no_torch_functions():
            with self.beside():
                state, before = (torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in (now, known))
                torch.default_generator.set_state(before)
            self._seed = private.host_seed()
            self.called(WRITE_STATE, (state,), {})
        return True

    def _of_generator(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Reading or setting the state of torch's generator is a noted call: the graph draws the numbers before it."""
        with private.no_torch_functions():
            values = (*args, *kwargs.values())
            if name == "get_rng_state":
                return self.called(READ_STATE, (), {})
            if name == "set_rng_state" and isinstance(values[0], Tensor) and values[0].device.type == "cpu":
                return self.called(WRITE_STATE, values, {})
            if name == "manual_seed" and type(values[0]) is int and 0 <= values[0] < 2**63:
                self.called(SEED, values, {})
                return torch.default_generator
        self.eagerly(f"{name} in the step")
        return original(*args, **kwargs)

    # ------------------------------------------------------------------ where tensors come from
    def source_of(self, tensor: Tensor) -> Source:
        """Where a tensor of this step comes from."""
        source = self.sources.get(id(tensor))
        if source is None:
            source = self.sources[id(tensor)] = Outside(len(self.outside))
            self.outside.append(tensor)
        return source

    def concerns(self, tensor: Tensor) -> bool:
        """Whether a call with this tensor belongs to the step, and not to computation beside it."""
        return id(tensor) in self.sources or tensor.requires_grad

    def tensor_of(self, source: Given | Outside) -> Tensor:
        """The tensor itself."""
        if type(source) is Given:
            return (self.follower.given if self.whole is None else self.whole())[source.position]
        return self.outside[source.number]  # type: ignore[union-attr]

    def live_of(self, source: Source) -> Tensor | None:
        """The live tensor that a graph works on; None for a stand-in."""
        if type(source) is Outside:
            return self.outside[source.number]
        is_given = type(source) is Given and self.whole is None and source.position not in self.stand_ins
        return self.follower.given[source.position] if is_given else None  # type: ignore[union-attr]

    def accepts(self, note: Note, tensor: Tensor, number: int) -> bool:
        """Whether a tensor from outside may be what a note has under this number."""
        kind = note.met.get(number)
        if kind is None:  # it was met before, and compared then
            return True
        if kind.type is not _class_of(tensor) or kind.trained is not tensor.requires_grad:
            return False
        if tensor.grad_fn is not None and kind.type is not placeholders.WithoutHistory:
            return False
        if kind.spec != TensorSpec.of(tensor) or kind.shares != self._shares(tensor, number):
            return False
        return kind.name is None or self.follower.is_named(kind.name, tensor)

    def _shares(self, tensor: Tensor, number: int) -> int | None:
        if private.is_memory_its_own(tensor):
            return None
        storage = private.storage_of(tensor)
        for i, other in enumerate(self.outside[:number]):
            if private.storage_of(other) == storage and may_meet(*map(private.local_tensor, (tensor, other))):
                return i
        return None

    def _kind(self, tensor: Tensor, number: int) -> Kind:
        if tensor.layout is not torch.strided or private.is_wrapped(tensor) or tensor.is_meta:
            raise CannotBeFollowed(f"a tensor of another kind ({tensor.layout}, {type(tensor).__name__})")
        if tensor.grad_fn is not None and placeholders.place_of_gone(tensor) is None:
            raise CannotBeFollowed("a tensor with a history in autograd that is none of this step's")
        if self.by_hand is not None:
            self.by_hand.refuse_state(tensor)
        if self._names is None:
            self._names = self.follower.holders.names = self.follower.names()
        name = self._names.get(id(tensor))
        if name is None and isinstance(tensor, DTensor):
            raise CannotBeFollowed("a tensor in parts that is no parameter or buffer of the module")
        return Kind(name, _class_of(tensor), TensorSpec.of(tensor), tensor.requires_grad, self._shares(tensor, number))

    # ------------------------------------------------------------------ for manual optimization
    @property
    def next_notes(self) -> Sequence[Note]:
        """The calls that came next in other steps, the likeliest last."""
        return self.here.children

    def tensor_now(self, source: Source) -> Tensor:
        """The tensor of a source in this step."""
        return self.notes[source.depth].handed[source.index] if type(source) is Made else self.tensor_of(source)  # type: ignore[arg-type]

    def tensor_in_hand(self, source: Source) -> Tensor:
        """The tensor of a source as Python holds it: on several ranks a batch's stand-in, not the gathered batch."""
        return self.follower.given[source.position] if type(source) is Given else self.tensor_now(source)

    def is_leaf(self, tensor: Tensor) -> bool:
        """Whether autograd puts gradients into the tensor."""
        source = self.sources.get(id(tensor))
        return (self.fake_of(source) if type(source) is Made else tensor).is_leaf

    def recorded_tensors(self) -> list[Tensor]:
        """The results of the calls so far, on fake tensors."""
        return [] if self._recording is None else list(self._recording.values.made.values())

    def recorded_leaves(
        self, roots: Sequence[Any], leaves_of: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor] | None:
        """The leaves of autograd's graph; None if some are unknown to the step.

        Args:
            roots: where the others come from.
            leaves_of: gives them, on fake tensors.

        Raises:
            CannotBeFollowed: what was called so far cannot be recorded again.
        """
        recording = self._recorded_so_far()
        if recording is None:
            return None
        sources = {
            id(fake): source for known in (recording.outside, recording.values.made) for source, fake in known.items()
        }
        found = [sources.get(id(leaf)) for leaf in leaves_of([recording.values.of(root) for root in roots])]
        return None if None in found else [self.tensor_in_hand(source) for source in found if source is not None]

    # ------------------------------------------------------------------ calls
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.reason is not None or self.is_apart:
            if self.memory.is_apart and not self.is_apart:
                return self.for_good(func, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.looks_closer:
            if self.memory.is_shared:
                if self.memory.look((args, kwargs or {})):
                    return self.for_good(func, args, kwargs or {})
                if self.follower.kinds.get(func) == "call":  # what writes is compared there
                    return self.called(func, args, kwargs or {})
            if self.has_transforms and private.in_transforms():
                return func(*args, **kwargs) if kwargs else func(*args)
            if self._is_under_hooks(func):
                return self.called(func, args, kwargs or {})
        for note in reversed(children := self.here.children):
            if note.func is func and note.take is not None and (note.at is self._at or moved(note, self._at)):
                found = note.take(self, args, kwargs)
                if found is not MISSED:
                    if children[-1] is not note and self.here is note:
                        children.remove(note)
                        children.append(note)
                    return found
        kind = self.follower.kinds.get(func)
        if kind is None:
            kind = self._kind_of(func)
        if kind == "gradient" and self.by_hand is not None:  # asked often
            return self.by_hand.gradient(args[0])
        if kind == "about":  # no operator runs
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        return self.called(func, args, kwargs) if kind == "call" else self._otherwise(kind, func, args, kwargs)

    def _as_python(self, value: Any) -> Any:
        """Numbers of NumPy as Python's; an object that stands in for a tensor as the tensor."""
        if hasattr(type(value), "is_tree_leaf"):
            with self:  # what a metric computes are calls of the step, too
                return known(value)
        return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value

    def _is_under_hooks(self, func: Any) -> bool:
        """Whether the user's saved-tensor hooks apply to a call."""
        return bool(self.saved.hooks and self.follower.kinds.get(func) == "call" and not isinstance(func, EngineCall))

    def beside(self) -> _Beside:
        """A context in which calls are not the user's."""
        return _Beside(self)

    def _kind_of(self, func: Any) -> str:
        """How to treat calls of a function, found at its first call."""
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if self.by_hand is not None and self.by_hand.handles(name, owner):
            kind = "gradient" if (owner, name) == ("grad", "__get__") else "by hand"
        elif private.is_of_profiler(func):  # ``record_function``, which all optimizers call
            kind = "about"
        elif func in _READS:
            kind = "read"
        elif func in _DATA:
            kind = "data"
        elif func is Tensor.__deepcopy__:
            kind = "copy"
        elif func in _MEMORY:
            kind = "set"
        elif func in _VIEWED_IN_PLACE:
            kind = "in place"
        elif name == "__get__" and owner in _PROPERTIES or name in _SIZES or name == "_set_grad_enabled":
            kind = "about"
        elif name == "__set__" or name in ("requires_grad_", "register_hook", "retain_grad", "backward", "grad"):
            kind = "set"
        elif name == "__get__" and owner in ("T", "mT", "H", "mH", "data", "real", "imag"):
            kind = "call"
        elif name == "__get__" or name in _STRIDES:
            kind = "history"
        else:
            return "unknown"
        self.follower.kinds[func] = kind
        return kind

    def _otherwise(self, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        if kind == "read":
            return self.read(func, args, kwargs)
        if kind == "data":
            return self._data(func, args, kwargs)
        if kind == "history":
            return self._about_history(func, args, kwargs)
        if kind == "copy":
            return self._deepcopy(func, args, kwargs)
        if kind == "in place":
            return self.viewed_in_place(func, args, kwargs)
        if kind == "checks":  # operator by operator: one of them is a read
            with private.no_torch_functions():
                return func(*args, **kwargs)
        if kind == "by hand" and self.by_hand is not None:
            return self.by_hand.called(func, args, kwargs)
        return self._set(func, args, kwargs) if kind == "set" else self.called(func, args, kwargs)

    # ------------------------------------------------------------------ following and recording
    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow or record a call."""
        if func in _INDEXING:
            args = (args[0], self._index(args[1]), *args[2:])
            if self.is_eager:
                return self.for_good(func, args, kwargs)
        args, kwargs = mapped(self._as_python, args), mapped(self._as_python, kwargs)
        if self.is_eager:  # a metric's value lets the step
            return self.for_good(func, args, kwargs)
        if func in self.follower.numbers:
            args, kwargs = self._with_numbers(func, args, kwargs)
            if self.is_eager:
                return self.for_good(func, args, kwargs)
        if (out := kwargs.get("out")) is not None and self._takes_the_size_of(out, args, kwargs):
            return self._made_as(out, func, args, kwargs)
        if self.memory.look((args, kwargs)):
            return self.for_good(func, args, kwargs)
        if any(isinstance(v, torch.Generator) for _, v in leaves_by_place((args, kwargs))):
            if kwargs.get("generator") is not torch.default_generator:
                return self._with_generator(func, args, kwargs)
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        if self.saved.hooks and not isinstance(func, EngineCall) and torch.is_grad_enabled():
            return self.saved.call(func, args, kwargs)
        around = around_now()
        known = len(self.outside)
        for note in reversed(self.here.children):
            if note.func != func or note.around != around or note.reads or not self.is_pinned(note):
                continue
            if not (note.at is self._at or moved(note, self._at)):
                continue
            found = numbers_that_differ(note, args, kwargs, self)
            if found is not None and (not found or self._is_as_large(note, args, kwargs)):
                if found and not found.keys() <= note.free:
                    note.free |= found.keys()
                    note.take = None
                elif note.take is not None and not found:  # of other objects each time: none are kept to compare with
                    note.take = never if note.anew else None
                    note.anew = True
                return self.take(note, args, kwargs)
            self._unmet(known)
        if self._watch_generator():
            return self.called(func, args, kwargs)
        if self._knows_too_many() and not self.must_be_graph:
            self.eagerly(f"{getattr(func, '__name__', func)} is called with other arguments in every step")
            return self.for_good(func, args, kwargs)
        places = len(self.follower.numbers.get(func, ()))
        try:
            note = self._record(func, args, kwargs, around)
        except CannotBeFollowed as error:
            self._failed = func, args, kwargs
            self.eagerly(str(error))
            return self.for_good(func, args, kwargs)
        except _Checks:
            self._unmet(known)
            self.follower.kinds[func] = "checks"
            return self._otherwise("checks", func, args, kwargs)
        except private.DataDependentOutputException:
            self._unmet(known)
            if len(self.follower.numbers.get(func, ())) > places:
                return self.called(func, args, kwargs)
            if isinstance(func, FunctionType):  # torch's own Python, which reads one of its operators' results
                self.follower.kinds[func] = "checks"
                return self._otherwise("checks", func, args, kwargs)
            return self._asks_for_values(func, args, kwargs)
        if note is None:
            return self._about_history(func, args, kwargs)
        return self.take(note, args, kwargs)

    def viewed_in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A result becomes a view of itself (``transpose_``): a call makes the view, and the result is the view now."""
        tensor = args[0]
        before = self.sources.get(id(tensor))
        if type(before) is not Made:
            return self.called(func, args, kwargs)
        view = self.called(_VIEWED_IN_PLACE[func], args, kwargs)
        if self.is_eager:
            return func(*args, **kwargs)
        with self.beside(), private.disable_dispatch_modes(), private.no_torch_functions():
            func(*args, **kwargs)
        after: Any = self.sources.pop(id(view))
        note = self.notes[before.depth]
        note.handed[before.index] = note.moulds[before.index].detach()
        self.notes[after.depth].handed[after.index] = tensor
        self.sources[id(tensor)] = after
        return tensor

    def _takes_the_size_of(self, out: Any, args: Any, kwargs: Any) -> bool:
        """Whether ``out=`` of a call is an empty result of the step, which gets the size of the values."""
        if not isinstance(out, Tensor) or out.numel() or type(self.sources.get(id(out))) is not Made:
            return False
        return not any(self.asks(t) for t in tensors_in((args, kwargs)))  # with them it is an error

    def _made_as(self, out: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a call without ``out=``; the given tensor is its result from now on."""
        words = {name: value for name, value in kwargs.items() if name != "out"}
        if not tensors_in((args, words)):  # of functions that make tensors it says dtype and device as well
            words = {"dtype": out.dtype, "device": out.device, **words}
        made = self.called(func, args, words)
        if self.is_eager:
            return self.for_good(func, args, kwargs)
        if not isinstance(made, Tensor) or made.dtype != out.dtype:
            self.eagerly(f"{getattr(func, '__name__', func)} with out= of another dtype")
            return self.for_good(func, args, kwargs)
        self._becomes(out, made)
        return out

    def _index(self, index: Any) -> Any:
        """An index as torch takes it: one number as Python's, lists of them as a tensor, and not one number each."""
        if type(index) is tuple:
            return tuple(map(self._index, index))
        if isinstance(index, Tensor) and index.ndim == 0 and index.dtype in _POSITIONS:
            return self.read(Tensor.item, (index,), {})
        numbers = type(index) is list and index and all(type(i) in (int, bool) for i in index)
        if numbers or type(index).__module__ == "numpy" and getattr(index, "ndim", 0):
            return torch.as_tensor(index)
        return index

    def _with_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The arguments; tensors that torch takes as numbers are read."""
        places = self.follower.numbers[func]
        found = [(p, v) for p, v in leaves_by_place((args, kwargs)) if p in places and isinstance(v, Tensor)]
        return with_numbers((args, kwargs), {p: self.read(Tensor.item, (v,), {}) for p, v in found})

    def _unmet(self, known: int) -> None:
        """Take back a call that failed: keep this many outside tensors."""
        for number in range(known, len(self.outside)):
            del self.sources[id(self.outside[number])]
            if self._recording is not None:
                self._recording.unmet(Outside(number))
        del self.outside[known:]

    def for_good(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of a step that runs eagerly."""
        self.memory.sync()
        try:
            if self._live is None or not isinstance(func, EngineCall):
                return func(*args, **kwargs)
            with self.beside():
                return self._live.call(func, args, kwargs)
        finally:
            self.memory.sync()

    def asks(self, tensor: Tensor) -> bool:
        """Whether a tensor requires gradients."""
        source = self.sources.get(id(tensor))
        if type(source) is not Made:
            return tensor.requires_grad
        written = self._recording is not None or source.index in self.notes[source.depth].written
        return self.fake_now(source).requires_grad if written else self._is_trained(source)

    def of_engine(self, func: Any, args: Any, kwargs: Any, *, create: bool) -> Any:
        """A call of autograd's engine."""
        if self.functions.are_there:
            return self.functions.through_engine(func, args, kwargs, create=create)
        return self.called(func, args, kwargs)

    def _knows_too_many(self) -> bool:
        """Whether too many different calls are known to follow here for more to be of use."""
        known = self.here.children
        return len(known) >= MOST_NEXT and sum(n.for_all is not None or n.at is self._at for n in known) >= MOST_NEXT

    def _is_as_large(self, note: Note, args: Any, kwargs: Any) -> bool:
        """Whether the results of a call with other numbers have the noted sizes."""
        if keeps_shapes(note.func):
            return True
        recording = _Recording(self)

        def fake(value: Any) -> Any:
            source = self.sources.get(id(value)) if isinstance(value, Tensor) else None
            if type(source) is Made:
                seen = self.notes[source.depth].specs[source.index]
                with recording.active(), torch.no_grad():
                    return torch.empty_strided(seen.shape, seen.stride, dtype=seen.dtype, device=seen.device)
            return recording.values.of(source) if source is not None else value

        try:
            with self.beside():
                given = mapped(fake, (args, kwargs))
                with recording.active(), torch.no_grad():
                    out = note.func(*given[0], **given[1])
            made = new_tensors(out, given)
        except Exception:  # then the call itself will say so
            return False
        return [TensorSpec.of(t) for t in made] == note.specs

    def _is_trained(self, source: Made) -> bool:
        """Whether a result requires gradients."""
        note = self.notes[source.depth]
        own = note.fakes_at is note.at
        return note.fakes[source.index].requires_grad if own else note.trained[source.index]

    def _recorded_so_far(self) -> _Recording | None:
        """The path so far on fake tensors, made again where a step leaves a known path: calls may write in place."""
        recording = _Recording(self) if self._recording is None else self._recording
        try:
            with self.beside():
                for note in self.notes[recording.values.done :]:
                    recording.below.sized.begin(_told(note, self.counts))
                    with recording.active():
                        recording.values.run(note, self._numbers_of(note))
        except Exception as error:
            name = self.notes[recording.values.done].name
            raise CannotBeFollowed(f"{name} cannot be recorded again ({_first_line(error)})") from error
        self._recording = recording
        return self._recording

    def fits(self, given: Sequence[Tensor]) -> bool:
        """Whether a batch of other sizes fits the calls so far, and one that could not be recorded.

        Args:
            given: the batch's tensors.
        """
        recording = _Recording(self, given)

        def fake(value: Any) -> Any:
            return recording.values.of(self.source_of(value)) if isinstance(value, Tensor) else value

        try:
            with self.beside():
                for note in self.notes:
                    with recording.active():
                        recording.values.run(note, self._numbers_of(note))
                if self._failed is not None:
                    func, args, kwargs = self._failed
                    args, kwargs = mapped(fake, args), mapped(fake, kwargs)
                    with recording.active():
                        func(*args, **kwargs)
        except Exception:
            return False
        return True

    def fake_of(self, source: Made) -> Tensor:
        """A result as recorded, with its autograd history. For other sizes of the batch all are recorded again."""
        note = self.notes[source.depth]
        if note.fakes_at is not note.at:
            recording = self._recorded_so_far()
            for other in self.notes if recording is not None else ():
                other.fakes = [recording.values.made[made] for made in other.made]  # type: ignore[union-attr]
                other.fakes_at = other.at
        return note.fakes[source.index]

    def fake_now(self, source: Made) -> Tensor:
        """A result with its autograd history after the calls so far, which may have written into it."""
        if self._recording is None and source.index not in self.notes[source.depth].written:
            return self.fake_of(source)
        recording = self._recorded_so_far()
        return self.fake_of(source) if recording is None else recording.values.made[source]

    def fake_made(self, placeholder: Tensor) -> Tensor:
        """A result as recorded, if no call writes into it."""
        return self.fake_of(self.sources[id(placeholder)])  # type: ignore[arg-type]

    def live_node(self, token: Tensor) -> Any:
        """The node of autograd's graph behind a token, in a step that runs eagerly."""
        if self._live is None:
            raise RuntimeError("the step does not run for good")
        return self._live.engine.nodes[id(token)][1]

    def _as_fake(self, value: Any) -> Any:
        recording = self._recording
        if not isinstance(value, Tensor) or recording is None:
            return value
        source = self.source_of(value)
        return recording.values.of(source)

    def _record(self, func: Any, args: Any, kwargs: Any, around: Any) -> Note | None:
        """Record a new call after the path so far; None for a question that computes nothing."""
        recording = self._recorded_so_far()
        if recording is None:
            raise CannotBeFollowed("nothing is recorded")
        known = len(self.outside)
        note = Note(len(self.notes), func, mapped(self._noted, args), mapped(self._noted, kwargs), around)
        self._complete(note, known)
        given = mapped(self._as_fake, args), mapped(self._as_fake, kwargs)
        operands, draws, checks = tensors_in(given), recording.below.draws, recording.below.checks
        before, count, known_kind = (
            [TensorSpec.of(t) for t in operands],
            recording.below.count,
            func in self.follower.kinds or isinstance(func, EngineCall),
        )
        versions = list(map(_version_of, operands))
        told: Told = {}
        recording.below.asked = None
        recording.below.written.clear()
        try:
            recording.below.sized.begin(told)
            try:
                with self.beside(), recording.active():
                    out = recording.values.call(func, *given)
            except CountsWanted:
                told = self._counts_first(note, args, kwargs)
                recording.below.sized.begin(told)
                with self.beside(), recording.active():
                    out = recording.values.call(func, *given)
            if recording.below.checks != checks and not isinstance(func, EngineCall):
                raise _Checks
        except (CannotBeFollowed, _Checks):
            raise
        except private.DataDependentOutputException:
            numbers = [p for p, v in leaves_by_place(given) if v is recording.below.asked and v.ndim == 0]
            if numbers:
                self.follower.numbers.setdefault(func, set()).update(numbers)
            if numbers or not known_kind:
                raise
            raise CannotBeFollowed(f"{note.name} reads the values of a tensor") from None
        except private.DynamicOutputShapeException as error:
            raise CannotBeFollowed(f"what {note.name} returns is as large as the data say") from error
        except Exception as error:  # the user's own mistake shows when it runs for good
            raise CannotBeFollowed(f"{note.name} could not be recorded ({_first_line(error)})") from error
        if before != [TensorSpec.of(t) for t in operands]:
            raise CannotBeFollowed(f"{note.name} changes the size of a tensor in place")
        if isinstance(out, torch.nn.utils.rnn.PackedSequence) or any(
            t.layout is not torch.strided or not isinstance(t, private.FakeTensor) for t in new_tensors(out, given)
        ):
            raise CannotBeFollowed(f"{note.name} makes a tensor of another kind")
        of_engine = isinstance(func, EngineCall)
        is_empty = out is None or (type(out) is tuple and not out)
        if not (of_engine or tensors_in(out) or is_empty or recording.below.count == count):  # Python reads numbers
            raise private.DataDependentOutputException(func)
        if not known_kind:
            is_question = not tensors_in(out) and recording.below.count == count
            self.follower.kinds[func] = "history" if is_question else "call"
            if is_question:
                return None
        if asked := recording.below.sized.asked:
            if len(asked) > 1:
                raise CannotBeFollowed(f"{note.name} makes several things that are as large as the data say")
            note.slot, number = asked[0]
            note.counts = range(len(self.counts), len(self.counts) + number)
        recording.values.keep(note.depth, out, given)
        changed = [t for t, version in zip(operands, versions, strict=True) if _version_of(t) != version]
        written = {private.storage_of(t) for t in (*changed, *recording.below.written)}
        note.writes = frozenset([root[0] for storage in written if (root := recording.root_of(storage)) is not None])
        note.draws = recording.below.draws != draws
        note.fakes = new_tensors(out, given)
        note.results = structure_of(out, given)
        note.moulds = self._apart(lambda: placeholders.moulds_of(note.fakes))
        note.specs, note.trained = [TensorSpec.of(t) for t in note.fakes], [t.requires_grad for t in note.fakes]
        note.versions = list(map(_version_of, note.fakes))
        note.fakes_at = self._at
        note.made = [Made(note.depth, index) for index in range(len(note.fakes))]
        for fake, made in zip(note.fakes, note.made, strict=True):
            root, first_fake = recording.root_of(private.storage_of(fake)) or (made, fake)
            note.roots.append((root, int(fake.storage_offset()) - int(first_fake.storage_offset())))
        if not self.memory.is_shared:  # what is written into arrays nobody sees
            note.same = same_before(note, self.notes, self.here.children, recording.root_of_source)
            with self.beside():
                recording.values.tell_same(note)
        note.marked(self.here)
        self.here.children.append(note)
        self.follower.recorded += 1
        if note.counts:
            self._just_told = told[note.slot]
        return note

    def _complete(self, note: Note, known: int) -> None:
        """Complete the note of a new call.

        Args:
            note: the call.
            known: so many tensors from outside had been met before it.
        """
        for number in range(known, len(self.outside)):
            note.met[number] = self._kind(self.outside[number], number)
        note.module, note.source, note.at = self.module_path(), user_location() or "", self._at
        for source in sources_in((note.args, note.kwargs)):
            if type(source) is Given:
                self.on_given(source.position)

    def above_autograd(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which calls have an autograd history, although the dispatcher is below autograd."""
        return private.layers_as(self._layers) if self.is_below else contextlib.nullcontext()

    def fresh(self, out: Any) -> Any:
        """Placeholders for the dispatcher. Autograd above may make views of them, once."""
        note = self.notes[-1]
        replaced: dict[int, Tensor] = {}
        for index, mould in enumerate(note.moulds):
            was = note.handed[index]
            replaced[id(was)] = note.handed[index] = made = mould.detach()
            self.sources[id(made)] = self.sources.pop(id(was))
        return mapped(lambda leaf: replaced.get(id(leaf), leaf), out)

    # ------------------------------------------------------------------ results as large as the data say
    def is_pinned(self, note: Note) -> bool:
        """Whether this step has the counts that a call requires."""
        return not note.pins or all(self.counts[i] == count for i, count in note.pins.items())

    def _counts_first(self, note: Note, args: Any, kwargs: Any) -> Told:
        """The counts of a call that is not noted yet."""
        if isinstance(note.func, EngineCall):
            raise CannotBeFollowed("something as large as the data say is made in a backward pass")
        before = self.here
        note.marked(before)
        self.notes.append(note)
        self.held[note.depth] = args, kwargs
        self.here = note
        try:
            with self.beside():
                given = self.on_read()
        finally:
            self.notes.pop()
            del self.held[note.depth]
            self.here = before
        return self._counted(note, args, kwargs, given)

    def _counted(self, note: Note, args: Any, kwargs: Any, given: Sequence[Any] | None) -> Told:
        """The numbers that a call behind the path so far asks for; ``given`` as ``on_read`` gives it."""
        self.was_told_draws = self.was_told_draws or any(n.draws for n in self.notes)
        args, kwargs = self._with_values((args, kwargs), given, writable=True)
        with self.beside(), surroundings(note.around):
            return counted(note.func, args, kwargs)

    def _count(self, note: Note, args: Any, kwargs: Any) -> None:
        """Give Python the data-dependent sizes of the results of a known call, now the last of the path."""
        told, self._just_told = self._just_told, None
        if told is None:
            with self.beside():
                given = self.on_read()
            if given is not None and all(type(v) is int for v in given):
                told = given
            else:
                self.notes.pop()
                try:
                    told = self._counted(note, args, kwargs, given).get(note.slot, ())
                finally:
                    self.notes.append(note)
        if len(told) != len(note.counts):
            raise CannotBeFollowed(f"{note.name} makes other things than before")
        self.counts += told
        self._fewest = None

    @property
    def fewest(self) -> int:
        """The smallest of the counts that may differ in other steps."""
        if self._fewest is None:
            pins = self.pins
            self._fewest = min((count for i, count in enumerate(self.counts) if i not in pins), default=1 << 62)
        return self._fewest

    def _fit(self, note: Note) -> None:
        """Fit a known call to the counts of this step, and size its results.

        Raises:
            CannotBeFollowed: it is not.
        """
        if note.pins:
            self._fewest = None
        if note.apart is not None:
            raise CannotBeFollowed(note.apart)
        if note.least and self.fewest < note.least:
            raise CannotBeFollowed(f"{note.name} treats {self.fewest} rows or elements in another way")
        if note.sizes is not None and tuple([self.counts[i] for i in note.needs]) != note.sized_for:
            self.resize(note)

    def resize(self, note: Note) -> None:
        """Size the results of a known call for this step."""
        if note.sizes is None:
            raise ValueError("results whose sizes do not depend on counts")
        wanted = tuple([self.counts[i] for i in note.needs])
        if len(note.spare) < _SPARE:
            note.spare[note.sized_for] = note.moulds, list(note.handed)
        note.sized_for = wanted
        if (known := note.spare.pop(wanted, None)) is not None:  # nobody but the note has what is spare
            note.moulds, note.handed[:] = known
            return
        with self.beside(), private.BelowDispatchModes(), private.no_torch_functions():
            shapes = [shape for shape, _ in note.sizes(self.counts)]
            note.moulds = list(map(sized, note.moulds, shapes))
            note.handed[:] = [mould.detach() for mould in note.moulds]

    def _find_sizes(self) -> None:
        """Formulas for the sizes of all results, from the counts that they depend on.

        A call that has no form for other counts (it makes a tensor for each of so many rows) is one for these alone.
        """
        begin = first((depth for depth, note in enumerate(self.notes) if note.least is None), "new call")
        while begin < len(self.notes):
            number, samples = len(self.counts), self.samples
            rows = [self._specs_with(sample) for sample in samples]
            few = [self._specs_with(self._with_pins([count] * number)) for count in (0, 1)]
            fits = CountFits(Counts(number), samples)
            for depth, note in enumerate(self.notes[begin:], begin):
                reason = self._find_sizes_of(note, rows, few, fits)
                if reason is not None:
                    operands = [self.notes[s.depth] for s in sources_in((note.args, note.kwargs)) if type(s) is Made]
                    counts = set[int]().union(*(operand.needs for operand in operands)) - self.pins.keys()
                    if not counts:
                        for later in self.notes[depth:]:
                            later.apart, later.least = reason, 0
                        return
                    note.pins, note.take = {i: self.counts[i] for i in sorted(counts)}, None
                    self._fewest = None
                    begin = depth
                    break
            else:
                return

    def _find_sizes_of(self, note: Note, rows: Sequence[Any], few: Sequence[Any], fits: CountFits) -> str | None:
        """Find formulas for the results of one call. Returns why there are none, or None.

        Args:
            note: the call.
            rows: what the calls of the path make for each sample, and why not all do.
            few: the same for no and for one element.
            fits: finds formulas of samples.
        """
        depth = note.depth
        if failed := next((reason for found, reason in rows if depth >= len(found)), None):
            return failed
        try:
            found = specs_for(note, [specs[depth] for specs, _ in rows], fits)
        except Apart as error:
            return f"what {note.name} gives is as large as the data say in a way of its own ({error})"
        if found is not None:
            note.sizes, note.needs = compiled_specs(found), tuple(sorted(counts_in(found)))
            note.sized_for, note.spare = tuple([self.counts[i] for i in note.needs]), {}
        note.least = 0
        for count, (specs, _) in reversed(list(enumerate(few))):
            wanted = [spec.shape for spec in rows[0][0][depth]]
            if note.sizes is not None:
                wanted = [shape for shape, _ in note.sizes(self._with_pins([count] * len(self.counts)))]
            if depth >= len(specs) or [spec.shape for spec in specs[depth]] != wanted:
                note.least = count + 1
                break
        return None

    @property
    def pins(self) -> dict[int, int]:
        """The counts that must be equal in other steps on the path."""
        return {i: count for note in self.notes for i, count in note.pins.items()}

    def _with_pins(self, counts: Sequence[int]) -> list[int]:
        pins = self.pins
        return [pins.get(i, count) for i, count in enumerate(counts)]

    @property
    def samples(self) -> list[tuple[int, ...]]:
        """The sample counts for graphs of the path."""
        number = len(self.counts)
        return [tuple(self._with_pins(sample)) for sample in samples_of(number, range(number))]

    def _specs_with(self, counts: Sequence[int]) -> tuple[list[list[TensorSpec]], str | None]:
        """The specs of results on the path with other counts, up to a call that fails, and why it fails."""
        recording, found = _Recording(self), list[list[TensorSpec]]()
        try:
            with self.beside():
                for note in self.notes:
                    recording.below.sized.begin(_told(note, counts))
                    with recording.active():
                        recording.values.run(note, self._numbers_of(note))
                    found.append([TensorSpec.of(recording.values.made[source]) for source in note.made])
        except Exception as error:
            note = self.notes[len(found)]
            return found, f"{note.name} is not made for any number of rows or elements ({_first_line(error)})"
        finally:
            recording.values.engine.close()
        return found, None

    def _apart(self, function: Callable[[], Any]) -> Any:
        with self.beside():
            return function()

    def _noted(self, value: Any) -> Any:
        return self.source_of(value) if isinstance(value, Tensor) else value

    def may_draw(self) -> bool:
        """Whether a known call that draws comes next; the state of the generator is noted before it."""
        if self._draws and self._random is not None:
            may_differ = private.host_seed() != self._seed or len(self.here.children) > 1
            return not (may_differ and self._watch_generator())
        self._draws = True
        self._look_at_generator()
        return True

    def takes(self, note: Note, tensor: Any, number: int) -> bool:
        """Whether an object that is new in each step may be the note's operand of this number."""
        is_new = isinstance(tensor, Tensor) and id(tensor) not in self.sources and not is_foreign(tensor)
        return is_new and self.accepts(note, tensor, number)

    def hand_out(self, note: Note) -> None:
        """Make new placeholders for results whose placeholder is missing or still referenced."""
        with self.beside():
            placeholders.handed_out(note)

    def take(self, note: Note, args: Any, kwargs: Any) -> Any:
        """Take a call for this note. A note's compiled function does the same."""
        if self.memory.refuses(note):
            self.eagerly(f"{note.name} writes into memory that may be an array's as well")
            return self.for_good(note.func, args, kwargs)
        if note.draws and not self.may_draw():
            return self.called(note.func, args, kwargs)
        if note.counts and self.memory.look():
            return self.for_good(note.func, args, kwargs)
        if note.met and note.last_met >= len(self.outside):
            for tensor in tensors_in((args, kwargs)):
                self.source_of(tensor)
        self.notes.append(note)
        self.held[note.depth] = args, kwargs
        if note.counts or self.counts:
            before, self.here, known_counts = self.here, note, len(self.counts)
            try:
                if note.counts:
                    self._count(note, args, kwargs)
                self._fit(note)
            except CannotBeFollowed as error:
                self.notes.pop()
                del self.held[note.depth]
                del self.counts[known_counts:]
                self._fewest = None
                self.here = before
                self.eagerly(str(error))
                return note.func(*args, **kwargs)
            self.here = before
        self.hand_out(note)
        for placeholder, source in zip(note.handed, note.made, strict=True):
            self.sources[id(placeholder)] = source
        siblings = self.here.children
        if siblings[-1] is not note:
            siblings.remove(note)
            siblings.append(note)
        self.here = note
        return self.results(note, args, kwargs)

    def results(self, note: Note, args: Any, kwargs: Any) -> Any:
        """The results of a call."""
        handed = note.handed
        operands: list[Tensor] | None = None

        def leaf(value: Any) -> Any:
            nonlocal operands
            if type(value) is Fresh:
                return handed[value.index]
            if type(value) is Operand:
                operands = tensors_in((args, kwargs)) if operands is None else operands
                return operands[value.index]
            return value

        return mapped(leaf, note.results)

    def numbers_between(self, begin: int, end: int) -> dict[tuple[int, Place], Any]:
        """The numbers between two depths that differ in other steps, so far."""
        return {(n.depth, p): v for n in self.notes[begin:end] if n.free for p, v in self._numbers_of(n).items()}

    def _numbers_of(self, note: Note) -> dict[Place, Any]:
        """The numbers of a call in this step that differ in other steps."""
        if not note.free:
            return {}
        if self._numbers is not None:
            return {place: value for (depth, place), value in self._numbers.items() if depth == note.depth}
        args, kwargs = self.held[note.depth]
        return {place: value for place, value in leaves_by_place((args, kwargs)) if place in note.free}

    # ------------------------------------------------------------------ other things than calls
    def _about_history(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A question about a tensor's autograd history, answered by the recorded tensor: a placeholder has none."""
        source = self.sources.get(id(args[0])) if args else None
        of = getattr(getattr(func, "__self__", None), "__name__", "")
        if of == "requires_grad" and type(source) is Made:
            return self.asks(args[0])
        subject = self.fake_now(source) if type(source) is Made else None
        if of == "grad_fn" and subject is not None:
            return self.functions.node(args[0], subject)
        sizes = self.notes[source.depth].sizes if type(source) is Made else None
        if type(source) is Made and sizes is not None and getattr(func, "__name__", "") in _STRIDES:
            with self.beside():
                subject = torch.empty_strided(*sizes(self.counts)[source.index], device="meta")
        with self.beside():
            if subject is None:
                return func(*args, **kwargs)
            found = func(subject, *args[1:], **kwargs)
        if not _is_plain(found):  # what is done to it, or with it, would be lost
            self.eagerly(f"{of or getattr(func, '__name__', func)} of a tensor of the step")
            return func(*args, **kwargs)
        return found

    def _set(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Hooks, ``requires_grad_`` and the like: at once on the user's own tensors, else a noted call or eager."""
        name = getattr(func, "__name__", "")
        if name in ("grad",):
            return self.of_engine(func, args, kwargs, create=args[4] if len(args) > 4 else kwargs.get("create_graph"))
        if name in ("register_hook", "retain_grad") and type(self.sources.get(id(args[0]))) in (Made, Given):
            if not self.asks(args[0]):
                raise RuntimeError(f"cannot {name.replace('_', ' ')} of a tensor that doesn't require gradient")
            return self.functions.hook(*args, **kwargs) if name == "register_hook" else self.functions.retain(args[0])
        if name == "requires_grad_" and type(self.sources.get(id(args[0]))) is Made:
            return self.called(func, args, kwargs)
        mine = [t for t in tensors_in((args, kwargs)) if id(t) in self.sources]
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if (owner, name) == ("data", "__set__") and (args[0] is args[1] or self._is_all_of(args[0], args[1])):
            return None
        if (owner, name) == ("data", "__set__") and self._can_be_written(args[0], args[1]):
            return self._write_data(args[0], args[1])
        if mine or name in ("backward",):
            what = f"tensor.{owner} = ..." if name == "__set__" else f"{name} of {owner or 'a tensor'}"
            self.eagerly(f"{what} in the step")
        if func in _MEMORY and not self.is_eager:
            self.memory.hand_out(args[0])
        with self.beside():
            return func(*args, **kwargs)

    def _is_all_of(self, tensor: Tensor, value: Any) -> bool:
        """Whether ``tensor.data = value`` changes nothing, as at the end of ``tensor.data *= 2``: it is that memory."""
        own, source = self.sources.get(id(tensor)), self.sources.get(id(value))
        if self.is_eager or own is None or type(source) is not Made or value.shape != tensor.shape:
            return False
        note = self.notes[source.depth]
        place, spec = note.roots[source.index], note.specs[source.index]
        if note.sizes is not None or spec.dtype.is_complex:  # a conjugate has the same memory
            return False
        if type(own) is Made:
            other = self.notes[own.depth]
            return other.sizes is None and (other.roots[own.index], other.specs[own.index]) == (place, spec)
        return ((own, 0), TensorSpec.of(tensor)) == (place, spec)

    def _can_be_written(self, tensor: Tensor, value: Any) -> bool:
        """Whether ``tensor.data = value`` may be a write into the tensor: no one else sees its memory.

        Nothing else has the memory of either, and both are alike but for their values.
        """
        source = self.sources.get(id(value)) if isinstance(value, Tensor) else None
        if type(source) is not Made or self.asks(value) or self.memory.is_shared:
            return False
        if type(self.sources.get(id(tensor))) in (Made, Given) or not private.is_memory_its_own(tensor):
            return False
        note = self.notes[source.depth]
        if note.roots[source.index][0] != source or note.specs[source.index] != TensorSpec.of(tensor):
            return False
        known = self.sources.get(id(tensor))
        key = self.here, known, source
        if key not in self.follower.aliases:
            self.follower.aliases[key] = self._aliases(known, source)
        aliases = self.follower.aliases[key]
        return aliases is not None and not any(self._is_had(handed, index) for handed, index in aliases)

    def _aliases(self, tensor: Source | None, value: Made) -> list[tuple[list[Tensor], int]] | None:
        """Where placeholders are that share memory with one of the two; None if autograd may have saved the tensor."""

        def root_of(source: Source) -> Source:
            return self.notes[source.depth].roots[source.index][0] if type(source) is Made else source

        for note in self.notes:
            if any(note.trained) and any(root_of(s) == tensor for s in sources_in((note.args, note.kwargs))):
                return None
        return [
            (note.handed, index)
            for note in self.notes
            for index, (root, _) in enumerate(note.roots)
            if root in (tensor, value) and note.made[index] != value
        ]

    def _is_had(self, handed: list[Tensor], index: int) -> bool:
        """Whether Python references a placeholder, apart from calls that are still to be compiled."""
        others = sys.getrefcount(handed[index]) - placeholders.OURS
        return others > 0 and others > sum(t is handed[index] for held in self.held.values() for t in tensors_in(held))

    def _write_data(self, tensor: Tensor, value: Tensor) -> None:
        """The tensor gets the values of a result; the result has the tensor's memory from now on."""
        self.called(Tensor.copy_, (self.called(Tensor.detach, (tensor,), {}), value), {})
        alias = value if self.is_eager else self.called(Tensor.detach, (tensor,), {})
        if self.is_eager:
            tensor.data = value
            return
        self._becomes(value, alias)

    def _becomes(self, tensor: Tensor, other: Tensor) -> None:
        """A result becomes another one, which is new and not referenced elsewhere."""
        before: Any = self.sources[id(tensor)]
        after: Any = self.sources.pop(id(other))
        with self.beside(), private.disable_dispatch_modes(), private.no_torch_functions():
            private.exchange(tensor, other)
        note = self.notes[before.depth]
        note.handed[before.index] = note.moulds[before.index].detach()
        self.notes[after.depth].handed[after.index] = tensor
        self.sources[id(tensor)] = after

    def _data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Tensors made of Python's data are the user's own; made of a placeholder they are a call."""
        if args and isinstance(args[0], Tensor):
            return self.called(func, args, kwargs)
        is_number = args and type(args[0]) in (int, float, bool)
        own = () if is_number else tensors_in((args, kwargs))
        if any(id(t) in self.sources for t in own):
            return self.read(func, args, kwargs)
        self.is_apart = True
        try:
            with contextlib.nullcontext() if own else private.BelowDispatchModes():
                return func(*args, **kwargs)
        finally:
            self.is_apart = False

    def _deepcopy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``copy.deepcopy``, which keeps copies in a dictionary. The copy of a result is a call."""
        tensor, memo = args
        if id(tensor) in memo:
            return memo[id(tensor)]
        source = self.sources.get(id(tensor))
        fake = self.fake_of(source) if type(source) is Made else tensor
        if source is None or fake.requires_grad or type(tensor) is not Tensor:
            if source is not None:
                self.eagerly("a deep copy of a tensor with a gradient")
            self.on_values()
            with self.beside():
                return func(*args, **kwargs)
        memo[id(tensor)] = self.called(torch.clone, (tensor,), {})
        return memo[id(tensor)]

    def _with_generator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A draw from a generator of the user's own happens when it is called."""
        used = [v for _, v in leaves_by_place((args, kwargs)) if isinstance(v, torch.Generator)]
        if any(id(t) in self.sources for t in tensors_in((args, kwargs))) or private.are_torchs_own(used):
            self.eagerly(f"{getattr(func, '__name__', func)} draws with a generator, and into a tensor of the step")
        with self.beside():
            return func(*args, **kwargs)

    def read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Python reads values: run the calls so far, by a graph that goes on later, or on copies."""
        mine = tensors_in((args, kwargs))
        if self.memory.look():
            return self.for_good(func, args, kwargs)
        is_array = func in ARRAYS and (kwargs.get("force") or not self.asks(args[0]))
        if is_array and (array := self.memory.array(args[0], args[1:], kwargs)) is not None:
            return array[0]
        if self.is_eager:
            return self.for_good(func, args, kwargs)
        if not any(id(t) in self.sources or isinstance(t, DTensor) for t in mine):
            self.on_values()
            if any(self._shares(t, len(self.outside)) is not None for t in mine if t.layout is torch.strided):
                self.eagerly(
                    f"{getattr(func, '__name__', func)} of a tensor that shares memory with others of the step"
                )
            with self.beside():
                return func(*args, **kwargs)
        if (reason := self.refuses_read(func, mine)) is not None:
            self.eagerly(reason)
        source = self.sources.get(id(args[0])) if args else None
        fake = self.fake_of(source) if type(source) is Made and func in _TEXTS else None
        history = None if fake is None or fake.grad_fn is None else type(fake.grad_fn).__name__
        try:
            self.take(self._read_note(func, args, kwargs), args, kwargs)
            args, kwargs = self._true((args, kwargs), writable=func is private.reduced or is_array)  # memory is kept
        except CannotBeFollowed as error:
            self.eagerly(str(error))
        is_alone = self._take_out()
        if is_array and not (is_alone or self.is_eager or args[0].is_complex()):
            return self.memory.array_of_copy(source, args[0], args[1:], kwargs)
        with self.beside():
            found = func(*args, **kwargs)
        if func in _TEXTS and history is not None and not self.is_eager:
            found = found.replace("requires_grad=True", f"grad_fn=<{history}>")
        return found

    def leaves_path(self, calls: int, told: Mapping[Source, Tensor]) -> Sequence[Tensor]:
        """Python reads results of calls that are only for itself; they leave the step. Returns the values.

        Args:
            calls: so many calls of the step are before that.
            told: values of what these gave.
        """
        values = Values(lambda source: told[source] if source in told else self.tensor_of(source))
        values.made.update({source: value for source, value in told.items() if type(source) is Made})
        *own, read = self.notes[calls:]
        with self.beside(), private.disable_dispatch_modes(), torch.no_grad():
            for note in own:
                values.run(note, self._numbers_of(note))
        self._own_calls = calls, values
        return [values.of(source) for source in sources_in((read.args, read.kwargs))]

    def _take_out(self) -> bool:
        """Take calls that Python made for itself out of the path; their results become plain tensors."""
        if self._own_calls is None:
            return False
        (calls, values), self._own_calls = self._own_calls, None
        own = self.notes[calls:]
        del self.notes[calls:]
        root = self.follower.root() if self.tree is None else self.tree.root
        self.here = self.notes[-1] if calls else root
        with self.beside(), torch.no_grad():
            for note in own:
                self.held.pop(note.depth, None)
                for index, placeholder in enumerate(note.handed):
                    del self.sources[id(placeholder)]
                    private.exchange(placeholder, values.made[Made(note.depth, index)].detach())
                note.handed.clear()
        met = min((number for note in own for number in note.met), default=len(self.outside))
        for tensor in self.outside[met:]:
            del self.sources[id(tensor)]
        del self.outside[met:]
        self._recording = None
        return True

    def _read_note(self, func: Any, args: Any, kwargs: Any) -> Note:
        for note in reversed(self.here.children):
            if not (note.at is self._at or moved(note, self._at)):
                continue
            if note.func == func and note.reads and numbers_that_differ(note, args, kwargs, self) == {}:
                return note
        if self._knows_too_many() and not self.must_be_graph:
            raise CannotBeFollowed(f"{getattr(func, '__name__', func)} reads something else in every step")
        known = len(self.outside)
        note = Note(len(self.notes), func, mapped(self._noted, args), mapped(self._noted, kwargs), reads=True)
        self._complete(note, known)
        note.marked(self.here)
        self.here.children.append(note)
        return note

    def _asks_for_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that reads values, and may compute beside."""
        found = self.read(func, args, kwargs)
        if self.is_eager or not tensors_in(found):
            return found
        self.eagerly(f"{getattr(func, '__name__', func)} reads the values of a tensor")
        return func(*args, **kwargs)

    def current(self, value: Any) -> Any:
        """The tensor behind a placeholder, in a step that runs eagerly."""
        found = self.stale.get(id(value))
        return value if found is None else found[1]

    def value_now(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor that no call of the step has met."""
        self.on_values()
        with self.beside(), torch.no_grad():
            return tensor.detach().clone()

    def _true(self, value: Any, *, writable: bool = False) -> Any:
        """A structure with the values of tensors in place of placeholders."""
        self._watch_generator()
        with self.beside():
            given = self.on_read()
        self.was_told_draws = self.was_told_draws or any(note.draws for note in self.notes)
        return self._with_values(value, given, writable=writable)

    def _with_values(self, value: Any, given: Sequence[Any] | None, *, writable: bool = False) -> Any:
        """A structure with the values of tensors in place of placeholders, those that ``on_read`` gave or of copies."""
        told = None if given is None else iter(given)
        values = self._values_so_far() if told is None else None
        self._look_at_generator()

        def leaf(item: Any) -> Any:
            source = self.sources.get(id(item)) if isinstance(item, Tensor) else None
            if source is None:
                return item
            found = (first(told, "value") if values is None else values.of(source)).detach()  # type: ignore[arg-type]
            if writable or (values is None and found.numel() > 1):  # the graph goes on with its own
                found = found.clone()
            trained = self._is_trained(source) if type(source) is Made else item.requires_grad
            found = found.requires_grad_() if trained else found
            return found.clone() if trained and writable else found

        with self.beside():
            return mapped(leaf, value)

    def _values_so_far(self) -> Values:
        if self.draws_elsewhere and any(note.draws for note in self.notes):
            raise CannotBeFollowed("a value is read behind random numbers, of which each rank draws its part")
        self.on_values()
        if self._preview is None:
            with self.beside(), private.disable_dispatch_modes():
                self._preview, self._generators = Values(self._copied), TorchRandomState()
            self._preview.engine.scaled = self.scaled
            if self.by_hand is not None:
                self._preview.world = self.by_hand.on_copies(self._preview)
        values = self._preview
        try:
            with self.beside(), private.disable_dispatch_modes():
                for note in self.notes[values.done :]:
                    values.run(note, self._numbers_of(note))
        except Exception as error:
            name = self.notes[values.done].name
            raise CannotBeFollowed(f"{name} cannot be run for its value ({_first_line(error)})") from error
        numbers = {
            n for note in self.notes for met, k in note.met.items() if k.shares is not None for n in (met, k.shares)
        }
        one_memory = {int(name) for pair in shared((str(n), self.outside[n]) for n in numbers) for name, _ in pair}
        copies = [self._copies[source] for source in map(Outside, one_memory) if source in self._copies]
        if any(private.version_of(copy) > 0 for copy in copies):
            raise CannotBeFollowed("a value is read behind a write into memory that two tensors share")
        return values

    def _copied(self, source: Given | Outside) -> Tensor:
        if source not in self._copies:
            live = self.tensor_of(source)
            with torch.no_grad():
                copy = live.detach().clone()
            trained = live.requires_grad if self.by_hand is None else self.by_hand.trained_at_first(live)
            place = placeholders.place_of_gone(live)
            copy = copy.requires_grad_(trained) if place is None else placeholders.without_history(copy, place)
            self._copies[source] = copy
        return self._copies[source]

    # ------------------------------------------------------------------ the other end: for good, as eager training
    def eagerly(self, why: str, place: str | None = None) -> None:
        """Run the calls so far eagerly, and continue the step eagerly.

        Args:
            why: for the user.
            place: ``file:line`` of it, if not of what is called now.
        """
        self.reason = why, place or user_location()
        self._put_back()
        self.before_eager()
        # a transform holds placeholders, and what autograd has saved of them, out of reach
        if self.has_transforms and (self.is_below or private.in_transforms()):
            raise Abandoned(f"{why} within a transform of torch.func ({self.reason[1]})")
        self._forget()
        if self._generators is not None:
            self._generators.restore()
        self.on_values()
        self._given_becomes_real()
        values = self._live = Values(self.tensor_of)
        values.engine.inline, values.engine.scaled = self.functions.inline, self.scaled
        values.engine.parameters = self.parameters
        if self.by_hand is not None:
            values.world = self.by_hand.live()
        wanted, then = set(self.wanted()), dict[tuple[Source, int], Tensor]()
        with self.above_autograd(), private.disable_dispatch_modes():
            with self.memory.as_it_was():
                for note in self.notes:
                    for source, after in wanted - then.keys():
                        if after <= note.depth and self._may_write(note, source):
                            then[source, after] = values.of(source).clone()
                    values.run(note, self._numbers_of(note))
            for note in self.notes:
                for index, placeholder in enumerate(note.handed):
                    private.exchange(placeholder, values.made[Made(note.depth, index)])
        self.memory.for_good()
        handed = [list(note.handed) for note in self.notes]
        for note in self.notes:
            for index, real in enumerate(note.handed):
                was = values.made[Made(note.depth, index)]
                self.stale[id(was)] = was, real
                values.engine.becomes(was, real)
        for note in self.notes:
            note.handed.clear()
        self.held.clear()
        values.made.clear()
        self.saved.for_good()
        self.settle()

        def told(source: Source, after: int) -> Tensor:
            if (found := then.get((source, after))) is not None:
                return found
            return handed[source.depth][source.index] if type(source) is Made else self.tensor_of(source)  # type: ignore[arg-type]

        self.on_eager(told)

    def _may_write(self, note: Note, source: Source) -> bool:
        """Whether a call may write into the memory of a tensor."""
        root = self.notes[source.depth].roots[source.index][0] if type(source) is Made else source
        is_engines = isinstance(note.func, (EngineCall, CallByHand))  # they write into what comes from outside
        return root in note.writes or (is_engines and type(root) is not Made)

    def _forget(self) -> None:
        """Release recordings and copies."""
        made = {} if self._recording is None else self._recording.values.made
        for source, fake in made.items():
            note = self.notes[source.depth] if source.depth < len(self.notes) else None  # the user's code raised
            if note is not None and _version_of(fake) != note.versions[source.index]:
                note.written.add(source.index)
        for values in (self._preview, None if self._recording is None else self._recording.values):
            if values is not None:
                values.engine.close()
        self._preview, self._recording = None, None
        self._copies.clear()

    @property
    def gradients(self) -> list[tuple[Tensor, Tensor]] | None:
        """The gradients of an eager step's loss, if they have been computed. They are given once."""
        found = None if self._live is None else self._live.engine.gradients
        for parameter in () if found is None else self.parameters():
            if parameter.grad is not None:
                found.append((parameter, parameter.grad))  # type: ignore[union-attr]
                parameter.grad = None
        return found

    def of_loss(self, loss: Tensor, divisor: int) -> None:
        """Run the user's Python in the backward pass of the loss."""
        if self.by_hand is not None:
            self.by_hand.zero()
        self.functions.of_loss(loss, divisor)
        if self.by_hand is not None and not self.is_eager:
            pairs = [(self.sources.get(id(t)), self.sources.get(id(g))) for t, g in self.by_hand.added()]
            self.added = [(of, added) for of, added in pairs if of is not None and added is not None]

    def settle(self) -> None:
        """Write the step's gradients into ``.grad``."""
        if self.by_hand is not None:
            self.by_hand.settle()
        self.functions.settle()

    def _given_becomes_real(self) -> None:
        if self.whole is None:
            return
        whole, self.whole = self.whole(), None
        for given, real in zip(self.follower.given, whole, strict=True):
            if given is not real:
                private.exchange(given, real)
                self.stale[id(real)] = real, given

    # ------------------------------------------------------------------ what one rank of several keeps alone
    def is_open_for(self, note: Note) -> bool:
        """Whether a call holds for all sizes of its path."""
        return self.tree is None or note.for_all is not None

    def leave_out(self, calls: int) -> None:
        """Leave out the calls after the first ones of this number; they run after the step."""
        own, before = self.notes[calls:], self.path
        if not own:
            return
        met = {number: kind for note in own for number, kind in note.met.items()}
        known, numbers = min(met, default=len(self.outside)), self.numbers
        with self.beside(), torch.no_grad():  # the step changes parameters and buffers
            now = {n: self.outside[n].detach().clone() for n, kind in met.items() if kind.name is not None}
        self._left_out = _LeftOut(own, self.outside[known:], numbers, now)
        self.notes, self.outside = self.notes[:calls], self.outside[:known]
        self._numbers = {key: value for key, value in numbers.items() if key[0] < calls}
        root = self.follower.root() if self.tree is None else self.tree.root
        self.here = self.notes[-1] if calls else root
        if self.tree is not None:
            self.tree.shortened(self.path, before)

    def left_out(self, told: Mapping[Source, Tensor]) -> dict[Made, Tensor]:
        """Perform the calls that were left out, and put them back into the step. Returns their results.

        Args:
            told: values of what the step gave.
        """
        own = self._left_out
        if own is None:
            return {}
        self._put_back()

        def of_outside(source: Source) -> Tensor:
            if source in told:
                return told[source]
            number = source.number if type(source) is Outside else -1
            return own.now[number] if number in own.now else self.tensor_of(source).detach()  # type: ignore[arg-type]

        values = Values(of_outside)
        values.made.update({source: value for source, value in told.items() if type(source) is Made})
        with self.beside(), private.disable_dispatch_modes(), torch.no_grad():
            for note in own.notes:
                values.run(note, self._numbers_of(note))
        return values.made

    def _put_back(self) -> None:
        """Put calls that were left out back into the step."""
        own, self._left_out = self._left_out, None
        if own is not None:
            self.notes, self.outside = [*self.notes, *own.notes], [*self.outside, *own.outside]
            self._numbers, self.here = own.numbers, own.notes[-1]

    # ------------------------------------------------------------------ the end
    @property
    def numbers(self) -> dict[tuple[int, Place], Any]:
        """The numbers of calls that differ in other steps, once Python is done."""
        return self._numbers or {}

    def end(self) -> None:
        """End the step: its calls are compiled, so that the next step follows fast."""
        if self._preview is not None and self._generators is not None:
            self._generators.restore()
        self._forget()
        if self.is_eager:
            if self._live is not None:  # graphs that it has are autograd's to let go
                self._live.engine.nodes.clear()
            self.memory.let_go()
            return
        if self.tree is not None and self._at is not None:
            places = self.tree.sizes.places
            others = functools.partial(self.follower.others, places)
            recording = functools.partial(_Recording, self, None)
            open_now = self.tree.end(self.notes, self.path, self._at, others, recording, self._numbers_of)
            if not open_now and self.notes and self.notes[0].for_all is None:
                self.follower.closed(self.tree, self.notes[0])
        free = [self.notes[depth] for depth in self.held if self.notes[depth].free]
        self._numbers = {(n.depth, p): v for n in free for p, v in self._numbers_of(n).items()}
        if self.counts and any(note.least is None and note.apart is None for note in self.notes):
            self._find_sizes()
        for depth, (args, kwargs) in self.held.items():
            note = self.notes[depth]
            if note.take is None and not note.reads:
                is_call = self.follower.kinds.get(note.func) == "call"  # what is not has more to do where it is called
                arguments = args, kwargs, self.sources, self.notes, self.follower.given
                met = {number: self.outside[number] for number in note.met}
                is_bound = is_call and not self.memory.has(list(met.values()))
                note.take = compiled(note, *arguments) if is_bound else never
                if is_bound and not note.anew:
                    self.follower.bound |= {(note.number, n): t for n, t in met.items() if is_plain(t)}
        self.memory.let_go()

    def source_if_known(self, tensor: Tensor) -> Source | None:
        """The source of a tensor of the step; None for other tensors."""
        return self.sources.get(id(tensor))

    @property
    def apart(self) -> str | None:
        """Why the path is for the counts of this step alone, or not even for them; None if it is for all."""
        reason = next((note.apart for note in self.notes if note.apart is not None), None)
        least = max((note.least or 0 for note in self.notes), default=0)
        if reason is None and self.counts and self.fewest < least:
            return f"a call treats {self.fewest} rows or elements in another way"
        return reason

    @property
    def path(self) -> int:
        """The number of the path that the step took."""
        return self.here.number

    @property
    def mark(self) -> int:
        """A hash of the path so far, and of its numbers that differ in other steps."""
        numbers = self.numbers_between(0, len(self.notes)) if self._numbers is None else self._numbers
        return stable_hash((self.here.mark, sorted(numbers.items(), key=repr))) if numbers else self.here.mark

    @property
    def is_first(self) -> bool:
        """Whether no path is known yet."""
        return not self.here.children

    def kept(self) -> list[Made | Given]:
        """The results that are still referenced, and on several ranks the stand-ins of batch tensors."""
        self.held.clear()
        self.functions.forget()
        retained = self._retained()
        if self.by_hand is not None:
            self.by_hand.let_go(self.sources)
        self.sources.clear()
        given = [Given(i) for i in placeholders.kept(self.follower.given) if i in self.stand_ins]
        made = placeholders.still_had(self.notes)
        for of, gradient in retained:
            if isinstance(of, Given) or of in made:
                self.functions.keep(self.tensor_now(of), self.tensor_now(gradient))
                made.append(gradient)
        return given + list(dict.fromkeys(made))

    def _retained(self) -> list[tuple[Made | Given, Made]]:
        """The retained gradients with their tensors."""
        pairs = [(self.sources.get(id(t)), self.sources.get(id(g))) for t, g in self.functions.retained.values()]
        self.functions.retained.clear()
        return [(of, g) for of, g in pairs if isinstance(of, (Made, Given)) and isinstance(g, Made)]

    def fill(self, source: Made | Given, value: Tensor) -> None:
        """Give a kept result, or the stand-in of a batch tensor, its value."""
        if isinstance(source, Given):
            given = self.follower.given[source.position]
            placeholders.fill(given, value, trained=given.requires_grad)
            return
        note = self.notes[source.depth]
        placeholder, fake = note.handed[source.index], note.fakes[source.index]
        is_retained = id(placeholder) in self.functions.retained  # its gradient is asked of a leaf
        made_at = None if fake.is_leaf or is_retained else note.source or note.name
        value = self.memory.of_kept(source, value)
        placeholders.fill(placeholder, value, trained=self._is_trained(source), made_at=made_at)
        del placeholder
        note.handed[source.index] = note.moulds[source.index].detach()


class _LeftOut(NamedTuple):
    """Calls of one rank that do not belong to its step.

    Args:
        notes: they.
        outside: the tensors that the step did not make and they alone met.
        numbers: of all calls of the step that are others in other steps.
        now: the parameters and buffers among these tensors, by number, as they were when Python was done.
    """

    notes: list[Note]
    outside: list[Tensor]
    numbers: dict[tuple[int, Place], Any]
    now: dict[int, Tensor]


def _told(note: Note, counts: Sequence[int]) -> Told:
    """The counts of a call, given those of its path."""
    return {note.slot: [counts[i] for i in note.counts]} if note.counts else {}


class Abandoned(BaseException):
    """Control flow: a step cannot go on eagerly within a transform, so its Python must run again from the start."""


def _class_of(tensor: Tensor) -> type:
    """The class of an outside tensor, sharded or not."""
    if isinstance(tensor, DTensor):
        return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
    return placeholders.WithoutHistory if placeholders.place_of_gone(tensor) is not None else type(tensor)


_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _version_of(tensor: Tensor) -> int:
    with private.no_torch_functions():
        return private.version_of(tensor)


def _is_plain(value: Any) -> bool:
    """Whether an answer is a plain value that cannot change and through which nothing can be changed."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _first_line(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
