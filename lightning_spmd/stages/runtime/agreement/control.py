"""Exchanges in which ranks decide together: place in the run, graph, whether to build, whether to stop.

All messages use a process group of their own on the host, so they never wait behind bulk collectives. (A broadcast on
the default group returned after 149 ms with 20 MB in flight, on its own group after 1.2 ms.) If all ranks are on one
machine, the exchange before each step goes through shared memory (``shared_numbers.py``).

Every exchange contains the rank's place in the run. Ranks at different places get an error that says so, instead of a
collective that never ends.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.errors import RankDisagreementError
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.messages import warn
from lightning_spmd.stages.runtime.agreement.lost_ranks import Peers, Process, lost
from lightning_spmd.stages.runtime.agreement.shared_numbers import SharedNumbers, shared_numbers

# How long to wait for the others before looking whether they are still there, and before saying so.
LOOK_AROUND = timedelta(seconds=5)
SAY_SO = 60.0
NUMBERS = 12
"""That ranks exchange before each step."""
_NEWS, _NEWS_OF_ONE = 0.5, 0.02
"""Seconds after which one looks whether others failed, where nothing else tells of it: at least, and for each rank."""


THE_END = "the end"
"""How places begin that come after the last batch."""


@dataclass(frozen=True)
class Place:
    """A place in the run, equal on all ranks that do the same.

    Args:
        what: the activity there.
        epoch: of training.
        batch: index in its epoch or dataloader; None if it is not a batch.
        loader: which dataloader.
        remark: added to the message of this rank if the others are elsewhere.
    """

    what: str
    epoch: int | None = None
    batch: int | None = None
    loader: int = 0
    remark: str = field(default="", compare=False)

    def __str__(self) -> str:
        parts = [self.what]
        parts += [] if self.batch is None else [f"batch {self.batch}"]
        parts += [f"of dataloader {self.loader}"] if self.loader else []
        parts += [] if self.epoch is None else [f"of epoch {self.epoch}"]
        return " ".join(parts)

    def number(self) -> int:
        """A hash of it."""
        return stable_hash((self.what, self.epoch, self.batch, self.loader))


@dataclass(frozen=True)
class StepVote:
    """The result of the vote before a step: extremes over the ranks of a few numbers.

    Args:
        missing: whether some rank has no graph for its batch.
        graph: (smallest, largest) index of the graph that the ranks would run.
        rows: (smallest, largest) number of rows in a rank's batch.
        shape: (smallest, largest) hash of everything else about the batch.
        ends: whether (all ranks, some rank) have no batch after this one.
        told: the largest request that a rank received from outside (``strategy/ranks/requeue.py``); 0 is none.
    """

    missing: bool
    graph: tuple[int, int]
    rows: tuple[int, int]
    shape: tuple[int, int]
    ends: tuple[bool, bool]
    told: int


_SENT = deque[Any](maxlen=4)
"""Tensors of the last votes. If Gloo's thread had the last reference to one, it would ask for the interpreter's lock to
free it, and where the process ends meanwhile Python ends the thread, and with it the process ("terminate called")."""
_last_run = [0]
"""Number of this process' last run on several ranks; notes are kept by it."""


class ControlPlane:
    """Small host messages among all ranks.

    Args:
        group: a gloo process group of all ranks.
        timeout: how long an exchange may wait for the others, as the group's collectives do.
    """

    def __init__(self, group: Any, timeout: timedelta | None = None) -> None:
        self._timeout = private.default_process_group_timeout if timeout is None else timeout
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.group = group
        self.place = Place("the start of the run")
        sides: list[Any] = [None] * self.world_size
        dist.all_gather_object(sides, (Process.this(), _last_run[0]), group=group)
        _last_run[0] = 1 + max(run for _, run in sides)  # ranks that failed early have seen fewer
        self.peers = Peers(private.default_store(), _last_run[0], self.rank, [process for process, _ in sides])
        self._told = False
        self._memory = shared_numbers(self.rank, self.world_size, NUMBERS, self.gather)

    def vote(
        self, place: Place, graph: int | None, rows: int, shape: int, *, ends: bool = False, told: int = 0
    ) -> StepVote:
        """Exchange what this rank would do: one all-gather of twelve numbers.

        Raises:
            RankDisagreementError: on every rank, if they are at different places.
            RankLostError: a rank is gone.
        """
        return self.cast(place, graph, rows, shape, ends=ends, told=told)()

    def cast(
        self, place: Place, graph: int | None, rows: int, shape: int, *, ends: bool = False, told: int = 0
    ) -> Callable[[], StepVote]:
        """Begin a :meth:`vote`. The returned function waits for the other ranks and raises what ``vote`` raises."""
        self.place = place
        index, where = -1 if graph is None else graph, place.number()
        numbers = [graph is None, index, -index, rows, -rows, shape, -shape, where, -where, ends, not ends, told]
        memory = self._memory
        largest = self._through_messages(numbers) if memory is None else self._through_memory(memory, numbers)

        def count() -> StepVote:
            missing, high, low, most, fewest, up, down, last, first, some, not_all, heard = largest()
            if last != -first:
                self._disagree(place)
            ended = (not not_all, bool(some))
            return StepVote(bool(missing), (-low, high), (-fewest, most), (-down, up), ended, heard)

        return count

    def meet(self, place: Place) -> None:
        """Make sure that all ranks are here.

        Raises:
            RankDisagreementError: on every rank; they are not.
            RankLostError: one of them is gone.
        """
        self.vote(place, None, 0, 0)

    def gather(self, value: Any, place: Place | None = None) -> list[Any]:
        """Gather a picklable value of every rank, by rank.

        Args:
            value: this rank's value.
            place: where the ranks meet first; None if they have already met for this purpose.
        """
        if place is not None:
            self.meet(place)
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(own)
        self._wait(dist.all_reduce(sizes, group=self.group, async_op=True))
        lengths: list[int] = sizes.tolist()
        padded = torch.cat([own, own.new_zeros(max(lengths) - len(own))])
        parts = [torch.empty_like(padded) for _ in lengths]
        self._wait(dist.all_gather(parts, padded, group=self.group, async_op=True))
        return [_unpickled(part, length) for part, length in zip(parts, lengths, strict=True)]

    # ------------------------------------------------------------------ pieces
    def _through_messages(self, numbers: Sequence[int]) -> Callable[[], Sequence[int]]:
        """The largest of all ranks' numbers, one by one: an all-gather, begun; what is returned waits for it.

        Gloo's all-reduce sends twice as many messages one after the other.
        """
        message = torch.tensor(numbers, dtype=torch.int64)
        everyone = message.new_empty(self.world_size, len(numbers))
        parts = list(everyone.unbind())
        _SENT.append((message, parts))
        # dist.all_gather looks at its arguments for as long as such a message travels
        work = self.group.allgather([parts], [message])

        def largest() -> Sequence[int]:
            self._wait(work)
            return everyone.amax(0).tolist()

        return largest

    def _through_memory(self, memory: SharedNumbers, numbers: Sequence[int]) -> Callable[[], Sequence[int]]:
        """The same where all ranks are on one machine."""
        exchange = memory.show(numbers)

        def largest() -> Sequence[int]:
            numbers = [max(column) for column in zip(*memory.wait(exchange, self._glances()), strict=True)]
            self._wait_no_more()
            return numbers

        return largest

    def _glances(self) -> Callable[[float], None]:
        """Is called in a wait with the seconds so far, and looks around now and then."""
        begun, looked = time.monotonic(), LOOK_AROUND.total_seconds()
        each = news = max(_NEWS, _NEWS_OF_ONE * self.world_size)  # it asks the store about each of them

        def glance(waited: float) -> None:
            nonlocal news, looked
            if waited >= (longest := self._timeout.total_seconds()):
                error = RuntimeError(f"Timed out waiting {1000 * longest:.0f}ms for a message of another rank")
                raise self.peers.explain(error, str(self.place))
            if waited >= looked:
                looked += LOOK_AROUND.total_seconds()
                self._look_around(begun)
            elif waited >= news:
                news += each
                self._stop_if_lost()

        return glance

    def _wait(self, work: Any) -> None:
        begun = time.monotonic()
        while True:
            try:
                work.wait(LOOK_AROUND)
            except RuntimeError as error:
                if "Operation timed out" not in str(error):  # this wait's end, not the collective's
                    raise self.peers.explain(error, str(self.place)) from None
                self._look_around(begun)
            else:
                self._wait_no_more()
                return

    def _wait_no_more(self) -> None:
        if self._told:
            self._told = False
            self.peers.wait_at("")

    def _look_around(self, begun: float) -> None:
        self.peers.wait_at(str(self.place))
        self._told = True
        self._stop_if_lost()
        waited = time.monotonic() - begun
        if waited >= min(SAY_SO, self._timeout.total_seconds() / 2):
            self._stop_if_apart()
        if SAY_SO <= waited < SAY_SO + LOOK_AROUND.total_seconds():
            here = {self.rank: str(self.place), **self.peers.waiting()}
            missing = [rank for rank in range(self.world_size) if rank not in here]
            if self.rank == min(here):
                places = ", ".join(f"rank {rank} at {place}" for rank, place in sorted(here.items()))
                known = "".join(f"; rank {rank} has been {there}" for rank, there in self.peers.staying().items())
                warn(
                    f"strategy='spmd' has been waiting for {waited:.0f} s: {places}; ranks {missing} do not wait: they "
                    f"are busy, or stuck somewhere else{known}",
                    everywhere=True,
                )

    def _stop_if_apart(self) -> None:
        """End where a rank waits for this one in a collective of its own: neither could ever go on.

        Raises:
            RankDisagreementError: naming the line on that rank.
        """
        staying = self.peers.staying()
        absent = set(range(self.world_size)) - {self.rank} - set(self.peers.waiting())
        stuck = all(rank in staying and staying[rank].collective for rank in absent)
        for rank, there in staying.items():
            if there.needs(self.rank) or (there.collective and stuck):
                raise RankDisagreementError(
                    f"rank {rank} waits for the others {there}, and rank {self.rank} waits for it at {self.place}: one "
                    "rank alone calls what all ranks have to (compute() of a metric, self.all_gather, a weight of "
                    "which each rank holds a part). Call it on all ranks, and let one of them print or write the result"
                )

    def _stop_if_lost(self) -> None:
        if (news := self.peers.news()) is not None:
            raise lost(news, f"This rank was waiting for it at {self.place}")

    def _disagree(self, place: Place) -> None:
        places: list[Place] = self.gather(place)
        texts = [f"  rank {rank}: {p}" + (f" ({p.remark})" if p.remark else "") for rank, p in enumerate(places)]
        raise RankDisagreementError("\n".join([_what_differs(places), *texts]))


def _what_differs(places: Sequence[Place]) -> str:
    if any(p.batch is not None or p.what.startswith(THE_END) for p in places):
        return (
            "the ranks are not at the same batch. Either they have different numbers of batches: give all of them the "
            "same number (Lightning's own sampler does, an IterableDataset must see to it itself, limit_train_batches "
            "leaves out the rest). Or one rank alone stopped or skipped something (trainer.should_stop, -1 from "
            "on_train_batch_start, a StopIteration): decide it on all ranks, for instance with "
            "trainer.strategy.reduce_boolean_decision"
        )
    return "the ranks are at different places of the run; a hook or callback does something on one rank alone"


def _unpickled(part: Tensor, length: int) -> Any:
    return pickle.loads(bytes(part[:length].numpy()))
