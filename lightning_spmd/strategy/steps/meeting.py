"""Several ranks run the Python of one step on the global batch: when and where they meet.

They meet where Python reads a value, where a step goes on eagerly, and where Python is done. Each says which path it is
on, so no rank begins work that needs the others while they do something else. A rank that reads alone is helped
(``alone.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.errors import BatchError, CaptureError, RankDisagreementError
from lightning_spmd.ir.first import first
from lightning_spmd.ir.random_states import python_random_states, set_python_random_states
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.ir.tree import leaves, map_leaves
from lightning_spmd.messages import the_step, warn
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.follow.eager_run import Abandoned
from lightning_spmd.stages.capture.follow.memory import array_of
from lightning_spmd.stages.capture.follow.placeholders import Moulds
from lightning_spmd.stages.capture.follow.step import Step
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed
from lightning_spmd.stages.capture.follow.tripwires import Tripwires
from lightning_spmd.stages.capture.record.inputs import global_spec
from lightning_spmd.stages.runtime.agreement.control import ControlPlane, Place
from lightning_spmd.strategy.graphs.graph_table import Found
from lightning_spmd.strategy.graphs.run_context import RunContext, StepRequest
from lightning_spmd.strategy.steps.alone import MOST_KNOWN, Alone, KeptAlone, helped, kept_alone, told_by
from lightning_spmd.strategy.steps.batch_changes import BatchChanges
from lightning_spmd.strategy.steps.replay import log_global
from lightning_spmd.strategy.steps.shared_leaves import find_shared

_READS, DONE, _EAGER = 1, 2, 3
"""Why a rank meets the others."""
_LARGE = 2**16
"""Bytes; more are not read in every step."""
_MOST_KNOWN = 1024


class Meeting:
    """One step.

    Args:
        context: of the run.
        control: messages among the ranks.
        request: the step; its batch is this rank's.
        split: rows of the global batch by data rank.
        place: the place in the run.
        is_first: whether no step of this kind came before in the run.
        is_new: whether no batch of this kind came before in the run.

    Attributes:
        rows: of all ranks.
        split: by data rank.
        is_new: whether no batch of this kind came before in the run.
        is_eager: the ranks have agreed to go on eagerly.
        reason: the reason, of the first rank that has one.
        runs_again: some rank's step cannot continue: it has read a value computed from random numbers, of which each
            rank has drawn its part, and they cannot be drawn again; or code that nobody sees has placeholders.
        wires: detect that Python looks at lists or counts of one rank.
        looked: some rank's Python has looked, and at what.
        shared: paths of batch tensors that turned out to be the same for every sample: Python must run again.
        is_apart: the ranks have met at different places of the step, and one of them needs help.
        streams: a context that restores torch's generators, whatever a step that went on eagerly drew.
    """

    is_own = False
    """Each rank has a batch of its own."""

    def __init__(
        self,
        context: RunContext,
        control: ControlPlane,
        request: StepRequest,
        split: tuple[int, ...],
        place: Place,
        *,
        is_first: bool,
        is_new: bool = False,
    ) -> None:
        if request.batch is None:
            raise ValueError("a step without a batch has no Python that runs")
        self.is_eager, self._is_first = False, is_first
        self.reason = ""
        self._step: Step | None = None
        self._calls: Callable[[], list[Call]] = list
        self.metrics: Callable[[], tuple[tuple[str, str], ...]] = tuple
        """Gives the step's calls of metrics in which ranks wait for each other, by metric and method."""
        self._helps = False
        self.runs_again, self.looked, self.shared = False, "", set[str]()
        self.is_apart, self._reads = False, False
        self.is_new = self._searches = is_new
        self._raised = False
        self.wires = Tripwires(self._looks)
        self.rows, self.split = sum(split), split
        self._context, self._control = context, control
        self._place = dataclasses.replace(place, what=f"the step of {place.what}")
        self._whole: list[Tensor] | None = None
        self.streams = contextlib.ExitStack()
        self._batch = request.batch
        self._changes: BatchChanges | None = None

    def follow(self, step: Step, calls: Callable[[], list[Call]], *, helps: bool) -> None:
        """Begin the Python of the step.

        Args:
            step: the step as this rank follows it.
            calls: returns its calls so far, for messages.
            helps: whether ranks that read or keep alone are helped by the others (``alone.py``).
        """
        self._step, self._calls, self._helps = step, calls, helps
        step.draws_elsewhere, step.stand_ins, step.on_given = True, self.stand_ins, self.look_at
        step.whole = None if self.is_own else self.whole

    def _beside(self) -> contextlib.AbstractContextManager[None]:
        """A context for calls that are not the user's."""
        return contextlib.nullcontext() if self._step is None else self._step.beside()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Python inside sees the batch of all ranks."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._context.settings.ranks.followed(self.split))
            if self._is_first:
                stack.enter_context(_as_on_rank_zero(self._control))
            yield

    # ------------------------------------------------------------------ the batch
    @property
    def stand_ins(self) -> frozenset[int]:
        """Positions of the tensors of the batch of which this rank has a part of the rows."""
        batch = self._batch
        return frozenset(i for i, index in enumerate(batch.tensors) if not batch.is_shared(index))

    def taken(self, moulds: Moulds) -> tuple[Any, list[Tensor]]:
        """The batch with placeholders that have the rows of all ranks; and its tensors.

        Args:
            moulds: of placeholders.

        Raises:
            BatchError: an object in it takes no tensors of another size.
        """
        try:
            tree, given = for_all_ranks(self._batch, self.rows, self.wires, moulds)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise BatchError(f"the batch cannot have the rows of all ranks ({text})", is_ragged=True) from error
        self._changes = BatchChanges(self._batch.tree, tree)
        return tree, given

    def give_back(self) -> None:
        """Python is done: what it has put into the batch is there for hooks, too."""
        if self._changes is not None:
            self._changes.take_over()

    def look_at(self, position: int) -> None:
        """A call takes a tensor of the batch that no call of its kind took before."""
        index = self._batch.tensors[position]
        value = self._batch.values[index]
        if self._batch.is_shared(index) and self._batch.counts_rows(value):
            self.wires.look(self._batch.refusal(self._batch.paths[index], value) or "")

    def whole(self) -> list[Tensor]:
        """The tensors of the batch with the rows of all ranks, who all ask for them."""
        if self._whole is None:
            batch, tensors = self._batch, self._batch.tensor_values
            shared = [batch.is_shared(index) for index in batch.tensors]
            whole = [is_shared or t.shape[0] == self.rows for is_shared, t in zip(shared, tensors, strict=True)]
            own = [None if w else t.detach().cpu() for w, t in zip(whole, tensors, strict=True)]
            parts = dict(reversed(self._control.gather((self._batch_rank, own))))
            in_order = [parts[rank] for rank in sorted(parts)]
            found = [
                t if w else torch.cat([part[i] for part in in_order]).to(t.device)
                for i, (w, t) in enumerate(zip(whole, tensors, strict=True))
            ]
            self._whole = [t if is_shared else t.clone() for t, is_shared in zip(found, shared, strict=True)]
        return self._whole

    @property
    def rank(self) -> int:
        """This one."""
        return self._control.rank

    @property
    def _batch_rank(self) -> int:
        """Which rows of the batch this rank has."""
        return 0 if self._context.mesh is None else self._context.mesh.batch_rank

    def find_shared(self) -> set[str]:
        """Which tensors of a new kind of batch are the same for every sample; all ranks together."""
        if not self._searches:
            return set()
        self._searches = False

        def tried(shared: Collection[str]) -> None:
            if self._raised and not shared:
                raise CaptureError("the user's code raises an error")
            batch = Batch(self._batch.tree, {*self._batch.shared, *shared}, part=True)
            given = for_all_ranks(batch, self.rows, self.wires, Moulds())[1]
            if self._step is not None and not self._step.recorder.fits(given):
                raise CaptureError("the step does not fit")

        return find_shared(self._control, self._batch, tried)

    def raised(self, error: Exception) -> None:
        """The user's code raised an error. With a new kind of batch the cause may be a tensor that was taken for rows.

        Raises:
            Abandoned: on all ranks, if it was.
        """
        if not self._searches or self.is_eager or isinstance(error, StopIteration):
            return
        self._raised = True
        with self._beside():
            self.goes_eagerly(type(error).__name__)
        if self.shared:
            raise Abandoned(self.reason) from None

    def part(self, value: Any) -> Any:
        """This rank's rows of a tensor with the rows of all ranks; other values unchanged."""
        if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != self.rows:
            return value
        rank = self._batch_rank
        begin = sum(self.split[:rank])
        return value[begin : begin + self.split[rank]]

    @property
    def log_now(self) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        """Makes a call of ``log`` in the step, given the module and the arguments."""
        return functools.partial(log_global, rows=self.rows)

    def weighed(self, returned: Any, rows: Any) -> tuple[Any, float]:
        """The result of a step that ran eagerly, with the loss of all ranks. Its gradients average to theirs.

        Also the factor for gradients that exist already.

        Args:
            returned: by the step.
            rows: the size of its batch, as the step says.
        """
        return returned, 1.0

    # ------------------------------------------------------------------ where the ranks meet
    def reads(self, mark: int, graph: int | None) -> bool:
        """Python reads a value. Returns whether all ranks have one graph that provides it.

        Args:
            mark: of the path so far.
            graph: the graph that would provide it on this rank.

        Raises:
            CannotBeFollowed: the ranks go on eagerly.
        """
        if self.is_eager:
            return False
        self._reads = True
        return self.met(self.cast(_READS, mark, graph))

    def goes_eagerly(self, reason: str) -> None:
        """Tell the others that this step goes on eagerly, if they do not know."""
        if not self.is_eager:
            self.cast(_EAGER, 0, None)
            self._meet_eagerly(reason)

    def _looks(self, what: str, place: str | None) -> NoReturn:
        """Python looks at what is this rank's own.

        Raises:
            LookedAtRows: always.
        """
        what = what if place is None else f"{what}\n  at {place}"
        with self._beside():
            self.cast(_EAGER, 0, None)
            self._meet_eagerly(None, what)
        raise LookedAtRows(self.looked)

    def done(self, mark: int, found: Found) -> Done:
        """Python is done: begin to ask whether the others are, on the same path.

        Args:
            mark: of the path.
            found: the graph that this rank would run.
        """
        self._reads = False
        return Done(found, self.cast(DONE, mark, found.index), self.met)

    def cast(self, why: int, mark: int, graph: int | None) -> Callable[[], Any]:
        """Begin to say why this rank is here."""
        if why == DONE:
            mark ^= self._context.update_numbers.hash()
            mark ^= stable_hash(metrics) if (metrics := self.metrics()) else 0
        return self._control.cast(self._place, graph, why, mark)

    def met(self, count: Callable[[], Any]) -> bool:
        """All ranks are here. Returns whether they have the same graph. If they came apart, see :attr:`is_apart`.

        Args:
            count: returns their votes.

        Raises:
            CannotBeFollowed: on all ranks, which go on eagerly.
            RankDisagreementError: on all ranks, if they would update weights otherwise.
        """
        vote = count()
        fewest, most = vote.rows
        if fewest == most == DONE and vote.shape[0] != vote.shape[1]:
            self._context.update_numbers.check(self._control)
            self._check_metrics()
        self.is_apart = fewest != most or vote.shape[0] != vote.shape[1]
        if most == _EAGER or (self.is_apart and not self._helps):
            raise self._ended()
        return not self.is_apart and not vote.missing and vote.graph[0] == vote.graph[1]

    def _check_metrics(self) -> None:
        """All ranks call the same metrics, or they would wait for each other.

        Raises:
            RankDisagreementError: on all ranks; they do not.
        """
        sides = self._control.gather(self.metrics())
        for rank, side in enumerate(sides):
            for mine, its in itertools.zip_longest(sides[0], side):
                if mine != its:
                    name, method = mine or its or ("", "")
                    one, other = (f"calls {c[0]}.{c[1]}" if c else "does not" for c in (mine, its))
                    raise RankDisagreementError(
                        f"metric {name!r}: rank 0 {one}, rank {rank} {other}. What {method!r} gives is of all ranks' "
                        "rows, so training_step must call it on all ranks, in the same order; use the value on one "
                        "of them (`update` alone may be called on any)"
                    )

    def alone(self, known: dict[Any, Alone | KeptAlone | None]) -> Alone | KeptAlone:
        """The ranks have come apart: decide which rank is helped. No rank keeps alone as long as one reads.

        Args:
            known: results of such meetings before, equal on all ranks.

        Raises:
            CannotBeFollowed: on all ranks, because their steps are different.
        """
        step = self._step
        if step is None or not self._helps:
            raise ValueError("no rank reads alone")
        places = tuple(self._control.gather((self._reads, (step.here.mark, step.needed))))
        if places not in known:
            while len(known) >= MOST_KNOWN:
                del known[first(known, "meeting")]
            its = self._control.gather(told_by(step))
            if any(reads for reads, _ in places):
                known[places] = helped([(reads, side) for (reads, _), side in zip(places, its, strict=True)])
            else:
                known[places] = kept_alone([(needed, side) for (_, (_, needed)), side in zip(places, its, strict=True)])
        self.is_apart, found = False, known[places]
        if found is None:
            raise self._ended()
        return found

    def _ended(self) -> CannotBeFollowed:
        told = self._meet_eagerly(None)
        return CannotBeFollowed(told or self._difference())

    def _meet_eagerly(self, reason: str | None, looked: str = "") -> str:
        """All ranks are here and learn why one of them cannot be followed."""
        self.is_eager = True
        again = self._step is not None and (self._step.was_told_draws or self._step.runs_again)
        mine = reason, zlib.crc32(private.host_random_state()), again, looked
        sides = self._control.gather(mine)
        self.runs_again = any(again for _, _, again, _ in sides)
        self.looked = max(looked for _, _, _, looked in sides)
        if self.looked:
            return self.looked
        self.shared = self.find_shared()
        if self.shared:
            self.runs_again = True
            self.reason = f"batch{', batch'.join(sorted(self.shared))} is no tensor of rows"
            return self.reason
        if (
            len({state for _, state, _, _ in sides}) > 1 and self._context.streams is not None
        ):  # all ranks draw the same
            self.streams.enter_context(self._context.streams.active())
            self._context.streams.select((), 0)
        self.reason = next((told for told, _, _, _ in sides if told is not None), "")
        return self.reason

    def _difference(self) -> str:
        """What the ranks' steps do not have in common, in words.

        Raises:
            RankDisagreementError: on every rank; it is a number of one and the same call.
        """
        sides = self._control.gather(self._calls())
        for rank, side in enumerate(sides):
            for mine, its in itertools.zip_longest(sides[0], side):
                if mine == its:
                    continue
                if mine is None or its is None or mine.what != its.what:
                    if mine is not None and its is not None and _told(mine) == _told(its):
                        return f"the ranks call different things: each {_told(mine)} with numbers or objects of its own"
                    return f"the ranks call different things: rank 0 {_told(mine)}, rank {rank} {_told(its)}"
                raise RankDisagreementError(
                    f"{mine.name} at {mine.place} is given {mine.numbers} on rank 0 and {its.numbers} on rank {rank}: "
                    "numbers and tensors that training_step makes must be the same on all ranks, which train one model "
                    "(compute them from tensors of the batch, from what is logged, or from self.all_gather)"
                )
        return "the ranks' steps differ in tensors that they made themselves"


@contextlib.contextmanager
def _as_on_rank_zero(control: ControlPlane) -> Iterator[None]:
    """Python inside draws what rank 0 does, all ranks together; if it does not draw, generators are as before."""
    mine = python_random_states()
    its = control.gather(mine)[0]
    differ = any(control.gather(repr(its) != repr(mine)))
    if differ:
        set_python_random_states(its)
    try:
        yield
    finally:
        if differ and repr(python_random_states()) == repr(its):
            set_python_random_states(mine)
        elif differ:
            warn(
                f"{the_step()} draws random numbers of Python or NumPy, whose states differ between the ranks; all "
                "ranks go on with rank 0's, so that they draw what one device would"
            )


class LookedAtRows(BaseException):
    """Control flow, on all ranks: Python looks at what is a rank's own. No ``except Exception`` swallows it."""


class Call(NamedTuple):
    """A call of a step as the other ranks may be told of it.

    Args:
        what: all that ranks must have in common but for the numbers.
        numbers: among its arguments, that are others in other steps; or what is the same of tensors with equal values.
        name: of the function.
        place: ``file:line``.
    """

    what: str
    numbers: str
    name: str
    place: str


def _told(call: Call | None) -> str:
    return "is done" if call is None else f"calls {call.name} at {call.place}"


class Done:
    """The choice of a graph for a step whose Python is done, begun.

    Args:
        found: what this rank would run.
        count: waits for the others.
        met: says whether they would run the same.

    Attributes:
        found: as above.
    """

    def __init__(self, found: Found, count: Callable[[], Any], met: Callable[[Callable[[], Any]], bool]) -> None:
        self.found = found
        self._count, self._met = count, met
        self._answer: Found | None = None

    def result(self) -> Found:
        """What all ranks run; no graph if they would not run the same.

        Raises:
            CannotBeFollowed: the ranks go on eagerly.
        """
        if self._answer is None:
            same = self._met(self._count)
            self._answer = self.found if same else dataclasses.replace(self.found, index=None)
        return self._answer


def for_all_ranks(batch: Batch, rows: int, wires: Tripwires, moulds: Moulds) -> tuple[Any, list[Tensor]]:
    """A batch with what stands for its tensors, and for what is a rank's own; and the former.

    Args:
        batch: of this rank.
        rows: of all ranks.
        wires: what stands for what is a rank's own.
        moulds: of placeholders.
    """
    stand_ins: dict[int, Tensor] = {}
    for index in batch.tensors:
        live = batch.values[index]
        if batch.is_shared(index):
            stand_ins[index] = live
            continue
        stand_in = moulds.of(global_spec(live, rows))
        stand_ins[index] = stand_in.requires_grad_() if live.requires_grad else stand_in
    count = 0

    def leaf(path: str, value: Any) -> Any:
        nonlocal count
        position = count
        count += len(leaves(value)) if batch.is_list_of_rows(value) else 1
        if position in stand_ins:
            return stand_ins[position]
        refusal = batch.refusal(path, value)
        return value if refusal is None else wires.stand_in(path, value, position, refusal)

    tree = map_leaves(leaf, batch.tree, ends_at=batch.is_list_of_rows)
    return tree, [stand_ins[index] for index in batch.tensors]


class Fingerprints:
    """What is the same of tensors with the same numbers: of those that the user's code makes on each rank itself."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    def of(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        """Of these tensors; numbers that were looked at before are not looked at again, nor large ones that changed."""
        return tuple([self._of(tensor) for tensor in tensors])

    def _of(self, tensor: Tensor) -> int:
        reference, version, found = self._known.get(id(tensor), (None, -1, 0))
        is_known, now = reference is not None and reference() is tensor, private.version_of(tensor)
        if is_known and (0 <= now == version or tensor.nbytes > _LARGE):
            return found
        found = zlib.crc32(array_of(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)))
        self._known[id(tensor)] = weakref.ref(tensor), now, found
        if len(self._known) > _MOST_KNOWN:
            self._known = {k: v for k, v in self._known.items() if v[0]() is not None}
        return found
