"""What is known of a step: its calls so far, and where its tensors come from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.layout import row_major
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.shared_memory import may_meet
from lightning_spmd.ir.sizes import Dimension
from lightning_spmd.stages.capture.batch.batch import is_trained
from lightning_spmd.stages.capture.follow import placeholders
from lightning_spmd.stages.capture.follow.counts import may_have
from lightning_spmd.stages.capture.follow.follower import Follower
from lightning_spmd.stages.capture.follow.functions import Functions
from lightning_spmd.stages.capture.follow.memory import Memory
from lightning_spmd.stages.capture.follow.notes import Given, Kind, Made, Note, Outside, Place, Source, leaf_at, sized
from lightning_spmd.stages.capture.follow.saved import Saved
from lightning_spmd.stages.capture.follow.values import Values
from lightning_spmd.stages.capture.follow.worlds import World
from lightning_spmd.stages.capture.user_code import class_in_words

MOST_NEXT = 32
"""A call behind which more than that many others have come next is one that no graph will know."""


class CannotBeFollowed(Exception):
    """Control flow: the step goes on eagerly."""


class _HandStep(Protocol):
    """The manual optimization of a step; implemented in ``by_hand.py``."""

    @property
    def has_gradients(self) -> bool: ...
    def handles(self, name: str, owner: str) -> bool: ...
    def called(self, func: Any, args: Any, kwargs: Any) -> Any: ...
    def gradient(self, tensor: Tensor) -> Tensor | None: ...
    def trained_at_first(self, tensor: Tensor) -> bool: ...
    def refuse_state(self, tensor: Tensor) -> None: ...
    def on_fakes(self, others: Callable[[], Any]) -> World: ...
    def on_copies(self, values: Values) -> World: ...
    def live(self) -> World: ...
    def let_go(self, sources: dict[int, Source]) -> None: ...
    def settle(self) -> None: ...
    def exchange(self) -> None: ...
    def zero(self) -> None: ...
    def added(self) -> Sequence[tuple[Tensor, Tensor]]: ...


class Beside:
    """A context in which calls are not the user's; entered for many calls, so it is no generator."""

    __slots__ = ("_before", "_step")

    def __init__(self, step: StepState) -> None:
        self._step = step

    def __enter__(self) -> None:
        self._before, self._step.is_apart = self._step.is_apart, True

    def __exit__(self, *error: object) -> None:
        self._step.is_apart = self._before


class StepState:
    """What is known of a step. :class:`~lightning_spmd.stages.capture.follow.step.Step` sees its calls.

    Args:
        follower: the known paths of such steps.
        given: the tensors of the batch.
        vary: the sizes of tensors of the batch that differ from step to step.
        batch: the user's own, where ``given`` stands in for them.

    Attributes:
        notes: the path so far.
        here: its last call.
        sources: where tensors come from, by ``id``.
        held: arguments of calls that are to be compiled or have numbers that differ in other steps, by depth.
        outside: tensors that the step did not make, in the order in which it met them.
        known_numbers: the numbers of calls that differ from step to step, by depth and place, once Python is done.
        loss: what Python returned for a backward pass in which none of its own runs.
        counts: the sizes of the batch that vary, and the data-dependent sizes of results in the order in which Python
            got them.
        opened: how many of them are sizes of the batch.
        reason: why the step went on eagerly, with ``file:line``; None if it did not.
        is_apart: whether calls now come from other code than the user's.
        stand_ins: positions of batch tensors that are stand-ins without values.
        was_told_draws: whether Python has read a value that depends on random numbers.
        is_over: whether Python is done.
        wanted: sources of queued values, and the number of calls behind which each is wanted.
        leaves: results that are kept, and have a gradient of their own in eager training.
        on_zeroed: told of parameters whose gradients the step zeroes or replaces.
        on_eager: the step goes on eagerly; given what tells the tensor that was wanted there.
        has_transforms: whether the step has used transforms of torch.func.
        block: the number of the block of autocast, in which a weight may be cast once for all calls.
        random_before: states of torch's generators before the step, if it may have to run again.
        looks_closer: whether compiled comparisons are not enough: there are transforms, saved-tensor hooks or arrays.
        reads_gradients: ``file:line`` that reads the gradient of a parameter, which is that of the batch before.
        is_below: whether the current call is one inside another, which the dispatcher alone sees.
        autocast: device types with autocast around a call in which the dispatcher hides it, with its dtype.
        layers: torch's dispatch layers as the user's code finds them.
        functions: the user's Python in backward passes.
        saved: saved-tensor hooks and checkpointed parts.
        memory: memory that tensors share with others and with arrays.
        scaled: gives the scaled loss, with which its backward pass begins.
        draws_as_eager: whether graphs draw eager training's numbers, from torch's own generators.
        parameters: gives those of the module and its optimizer as they are now.
        whole: gives the whole tensors of the batch on several ranks, where Python gets stand-ins.
        gathered: gives the whole of a tensor in parts that is none of the module's, on all ranks together.
        owns: whether a tensor in parts, no parameter, was the module's when the step began, or is a gradient.
        must_be_graph: whether the step must not run eagerly.
        applied: functions with Python in their backward passes that the call under way has applied below torch's own.
        knows_many_paths: whether a new path is of use only if another step takes it.
        may_run_again: whether what the step changes in Python could be put back.
        runs_again: the step cannot go on eagerly from where it is.
        draws_elsewhere: whether graphs draw other numbers than torch's generator, as on several ranks.
    """

    functions: Functions
    saved: Saved
    memory: Memory

    def __init__(
        self,
        follower: Follower,
        given: Sequence[Tensor],
        vary: Sequence[Dimension] = (),
        batch: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.follower = follower
        follower.given[:] = given
        self._batch = follower.given if batch is None else batch  # another list would count as a reference
        follower.shared = shared_among(self._batch)
        self.notes: list[Note] = []
        self.outside: list[Tensor] = []
        self.counts = follower.counts.told = list[int]()
        self.reason: tuple[str, str | None] | None = None
        self.is_apart = self.is_over = self.was_told_draws = self.must_be_graph = self.draws_elsewhere = False
        self.wrapped = follower.wrapped
        self.wrapped.new_step()
        self.looks_closer = self.wrapped.are_noted
        self.knows_many_paths = False
        self.has_transforms = self.is_below = self.runs_again = self.may_run_again = False
        self.random_before: Any = None
        self.block = 0
        self.autocast: tuple[tuple[str, torch.dtype], ...] = ()
        self.applied = set[type]()
        self.reads_gradients: str | None = None
        self.scaled: Callable[[Tensor], Tensor] = lambda loss: loss
        self.parameters: Callable[[], Iterable[Tensor]] = tuple
        self.draws_as_eager = True
        self.whole: Callable[[], Sequence[Tensor]] | None = None
        self.gathered: Callable[[DTensor], Tensor] | None = None
        self.owns: Callable[[DTensor], bool] = lambda _: False
        self.stand_ins: Collection[int] = ()
        self.module_path: Callable[[], str] = lambda: ""
        self.on_zeroed: Callable[[Iterable[Tensor]], None] = lambda _: None
        self.on_eager: Callable[[Callable[[Source, int], Tensor]], None] = lambda _: None
        self.wanted: Callable[[], Iterable[tuple[Source, int]]] = tuple
        self.before_eager: Callable[[], None] = lambda: None
        self.on_values: Callable[[], None] = lambda: None
        self.leaves: list[Tensor] = []
        self.on_given: Callable[[int], None] = lambda _: None
        self.on_read: Callable[[], Sequence[Any] | None] = lambda: None
        self.refuses_read: Callable[[Any, Sequence[Tensor]], str | None] = lambda _, __: None
        self.by_hand: _HandStep | None = None
        self.tree = follower.tree(vary)
        if self.tree is not None:
            self.counts += self.tree.begin(given)
        self.opened = len(self.counts)
        self.here = self.root
        self.held: dict[int, tuple[Any, Any]] = {}
        # a parameter that a hook has put into the batch is none of the batch's
        self.sources: dict[int, Source] = {id(t): Given(i) for i, t in enumerate(given) if not is_trained(t)}
        self.known_numbers: dict[tuple[int, Place], Any] | None = None
        self.loss: Source | None = None
        self.layers: Any = None
        self._names: dict[int, str] | None = None

    # ------------------------------------------------------------------ the path
    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow or record a call."""
        raise NotImplementedError

    def take(self, note: Note, args: Any, kwargs: Any) -> Any:
        """Take a call for this note. A note's compiled function does the same."""
        raise NotImplementedError

    def eagerly(self, why: str, place: str | None = None, *, again: bool = False) -> None:
        """Run the calls so far eagerly, and continue the step eagerly.

        Args:
            why: for the user.
            place: ``file:line`` of it, if not of what is called now.
            again: code that nobody sees holds what became of placeholders: the step's Python must run once more.
        """
        raise NotImplementedError

    def for_good(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of a step that runs eagerly."""
        raise NotImplementedError

    @property
    def root(self) -> Note:
        """Where paths of such steps begin."""
        return self.follower.root() if self.tree is None else self.tree.root

    @property
    def path(self) -> int:
        """The number of the path that the step took."""
        return self.here.number

    def cut(self, calls: int) -> list[Note]:
        """Keep this many first calls of the path. Returns the others."""
        rest, self.notes = self.notes[calls:], self.notes[:calls]
        self.here = self.notes[-1] if calls else self.root
        return rest

    def knows_too_many(self) -> bool:
        """Whether too many different calls are known to follow here for more to be of use."""
        known = self.here.children
        return len(known) >= MOST_NEXT and sum(may_have(self.counts, n.pins, n.conditions) for n in known) >= MOST_NEXT

    @property
    def is_eager(self) -> bool:
        """Whether the step runs eagerly."""
        return self.reason is not None

    # ------------------------------------------------------------------ where tensors come from
    def source_of(self, tensor: Tensor) -> Source:
        """Where a tensor of this step comes from."""
        source = self.sources.get(id(tensor))
        if source is None:
            source = self.sources[id(tensor)] = Outside(len(self.outside))
            self.outside.append(tensor)
        return source

    def source_if_known(self, tensor: Tensor) -> Source | None:
        """The source of a tensor of the step; None for other tensors."""
        return self.sources.get(id(tensor))

    def concerns(self, tensor: Tensor) -> bool:
        """Whether a call with this tensor belongs to the step, and not to computation beside it."""
        return id(tensor) in self.sources or tensor.requires_grad

    def tensor_of(self, source: Given | Outside) -> Tensor:
        """The tensor itself."""
        if type(source) is Given:
            return (self.follower.given if self.whole is None else self.whole())[source.position]
        return self.outside[source.number]  # type: ignore[union-attr]

    def tensor_now(self, source: Source) -> Tensor:
        """The tensor of a source in this step."""
        return self.notes[source.depth].handed[source.index] if type(source) is Made else self.tensor_of(source)  # type: ignore[arg-type]

    def root_of(self, source: Source) -> Source:
        """The source whose memory a source has."""
        return self.notes[source.depth].roots[source.index][0] if type(source) is Made else source

    def tensor_in_hand(self, source: Source) -> Tensor:
        """The tensor of a source as Python holds it: on several ranks a batch's stand-in, not the gathered batch."""
        return self.follower.given[source.position] if type(source) is Given else self.tensor_now(source)

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
        if private.history_of(tensor) is not None and kind.type is not placeholders.WithoutHistory:
            return False
        if note.func is sized:
            if kind != kind._replace(spec=TensorSpec.of(tensor)).of_any_size() or not _is_plain(tensor):
                return False
        elif kind.spec != TensorSpec.of(tensor):
            return False
        if kind.lazy != (tensor.is_conj(), tensor.is_neg()):
            return False
        if kind.shares != self.shares(tensor, number) or self._is_of_batch(tensor):
            return False
        return kind.name is None or self.follower.is_named(kind.name, tensor)

    def may_be_sized(self, value: Any) -> bool:
        """Whether it is a plain tensor from outside, that the step has not met, and may have another size in others."""
        if type(value) is not Tensor or id(value) in self.sources or value.requires_grad or not value.ndim:
            return False
        if not _is_plain(value) or placeholders.place_of_gone(value) is not None or self._name_of(value) is not None:
            return False
        return self.shares(value, len(self.outside)) is None and not self._is_of_batch(value)

    def shares(self, tensor: Tensor, number: int) -> int | None:
        """Which of this many outside tensors has memory in common with a tensor."""
        if private.is_memory_its_own(tensor):
            return None
        return next((i for i, other in enumerate(self.outside[:number]) if _share(tensor, other)), None)

    def _is_of_batch(self, tensor: Tensor) -> bool:
        """Whether a tensor from outside has memory in common with the batch."""
        return not private.is_memory_its_own(tensor) and any(_share(tensor, one) for one in self._batch)

    def kind(self, tensor: Tensor, number: int) -> Kind:
        """What steps on the same path must have as their outside tensor of this number.

        Raises:
            CannotBeFollowed: it is no tensor of which that can be said.
        """
        if tensor.layout is not torch.strided or private.is_wrapped(tensor) or tensor.is_meta:
            raise CannotBeFollowed(f"a tensor of another kind ({tensor.layout}, {type(tensor).__name__})")
        if private.is_another_class(type(tensor)):
            raise CannotBeFollowed(class_in_words(type(tensor)))
        if self._is_of_batch(tensor):
            raise CannotBeFollowed("a tensor from outside that shares memory with the batch")
        if private.history_of(tensor) is not None and placeholders.place_of_gone(tensor) is None:
            raise CannotBeFollowed("a tensor with a history in autograd that is none of this step's")
        if self.by_hand is not None:
            self.by_hand.refuse_state(tensor)
        name = self._name_of(tensor)
        if name is None and isinstance(tensor, DTensor):
            fix = (
                "keep a detached one, or call requires_grad_(False)"
                if tensor.requires_grad
                else "keep its .full_tensor(), or write its values into a buffer that __init__ made"
            )
            raise CannotBeFollowed(f"a tensor in parts that is no parameter or buffer of the module: {fix}")
        shares, lazy = self.shares(tensor, number), (tensor.is_conj(), tensor.is_neg())
        return Kind(name, _class_of(tensor), TensorSpec.of(tensor), tensor.requires_grad, shares, lazy)

    def _name_of(self, tensor: Tensor) -> str | None:
        """The name of a parameter or buffer."""
        if self._names is None:
            self._names = self.follower.holders.names = self.follower.names()
        return self._names.get(id(tensor))

    def noted(self, value: Any) -> Any:
        """An argument as a note has it."""
        return self.source_of(value) if isinstance(value, Tensor) else value

    # ------------------------------------------------------------------ numbers that differ
    @property
    def has_counts(self) -> bool:
        """Whether sizes of the batch vary, or Python has got data-dependent ones."""
        return len(self.counts) > 0

    @property
    def has_data_counts(self) -> bool:
        """Whether Python has got data-dependent sizes."""
        return len(self.counts) > self.opened

    def numbers_between(self, begin: int, end: int) -> dict[tuple[int, Place], Any]:
        """The numbers between two depths that differ in other steps, so far."""
        return {(n.depth, p): v for n in self.notes[begin:end] if n.free for p, v in self.numbers_of(n).items()}

    def numbers_of(self, note: Note) -> dict[Place, Any]:
        """The numbers of a call in this step that differ in other steps."""
        if not note.free:
            return {}
        if self.known_numbers is not None:
            return {place: value for (depth, place), value in self.known_numbers.items() if depth == note.depth}
        held = self.held.get(note.depth, (note.args, note.kwargs))  # called before others had others
        return {place: leaf_at(held, place) for place in sorted(note.free, key=repr)}  # on all ranks alike

    def settle(self) -> None:
        """Write the step's gradients into ``.grad``."""
        if self.by_hand is not None:
            self.by_hand.settle()
        self.functions.settle()

    # ------------------------------------------------------------------ contexts
    def beside(self) -> Beside:
        """A context in which calls are not the user's."""
        return Beside(self)

    def above_autograd(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which calls have an autograd history, although the dispatcher is below autograd."""
        return private.layers_as(self.layers) if self.is_below else contextlib.nullcontext()


def shared_among(tensors: Sequence[Tensor]) -> tuple[int | None, ...]:
    """For each tensor the first one before it with which it has memory in common."""
    return tuple(
        [
            None
            if private.is_memory_its_own(tensor)
            else next((i for i, other in enumerate(tensors[:index]) if _share(tensor, other)), None)
            for index, tensor in enumerate(tensors)
        ]
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether its shape and dtype say all of it. Kernels look at strides of dimensions of size one, too."""
    if tensor.layout is not torch.strided or tensor.is_meta or private.is_wrapped(tensor):
        return False
    is_row_major = tensor.stride() == row_major(tensor.shape)
    return is_row_major and not (tensor.is_conj() or tensor.is_neg())


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have memory in common."""
    return private.storage_of(one) == private.storage_of(other) and may_meet(*map(private.local_tensor, (one, other)))


def _class_of(tensor: Tensor) -> type:
    """The class of an outside tensor, sharded or not."""
    if isinstance(tensor, DTensor):
        return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
    return placeholders.WithoutHistory if placeholders.place_of_gone(tensor) is not None else type(tensor)
