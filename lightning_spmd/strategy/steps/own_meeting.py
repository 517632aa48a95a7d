"""Several ranks run the Python of one step on local batches: where they meet, and what they share.

Each rank follows its own Python and has graphs of its own. What Python reads is of this rank's batch, so nobody else
need know; the ranks meet where a step goes on eagerly, and where Python is done.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_spmd.ir.first import first
from lightning_spmd.ir.steps import OutputRef, RecordedCall
from lightning_spmd.ir.tree import map_leaves
from lightning_spmd.stages.capture.batch.own_batch import operation_of, said_in
from lightning_spmd.stages.capture.follow.placeholders import Moulds
from lightning_spmd.stages.capture.follow.program import Live, Log, Want
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed
from lightning_spmd.strategy.steps.meeting import DONE, Meeting
from lightning_spmd.strategy.steps.replay import log_of_rank


class OwnMeeting(Meeting):
    """One step; the arguments are those of a step on the batch of all ranks, of whose rows it has no split."""

    is_own = True

    @override
    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield

    @property
    @override
    def stand_ins(self) -> frozenset[int]:
        return frozenset()

    @override
    def taken(self, moulds: Moulds) -> tuple[Any, list[Tensor]]:
        return self._batch.tree, self._batch.tensor_values

    @override
    def part(self, value: Any) -> Any:
        return value

    @property
    @override
    def log_now(self) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        batches = 1 if self._context.mesh is None else self._context.mesh.batch_size
        return functools.partial(log_of_rank, rows=self._size, batches=batches)

    @property
    def _size(self) -> int:
        """Of this rank's batch, where nothing says it."""
        tensors = self._batch.tensor_values
        return 1 if not tensors or tensors[0].ndim == 0 else tensors[0].shape[0]

    @override
    def reads(self, mark: int, graph: int | None) -> bool:
        return graph is not None

    @override
    def weighed(self, returned: Any, rows: Any) -> tuple[Any, float]:
        mine = self._size if rows is None else float(rows)
        loss = returned.get("loss") if isinstance(returned, dict) else returned
        everyone = self._control.gather((mine, float(loss.detach()) if isinstance(loss, Tensor) else 0.0))
        total = sum(size for size, _ in everyone)
        if not isinstance(loss, Tensor) or not total:
            return returned, 1.0
        weight = mine * len(everyone) / total
        own, shown = loss * weight, sum(size / total * value for size, value in everyone)
        shared = own + (shown - own.detach())
        return map_leaves(lambda _, leaf: shared if leaf is loss else leaf, returned), weight

    @override
    def met(self, count: Callable[[], Any]) -> bool:
        vote = count()
        if vote.rows != (DONE, DONE):
            raise CannotBeFollowed(self._meet_eagerly(None))
        if vote.shape[0] != vote.shape[1]:
            self._context.update_numbers.check(self._control)
        return not vote.missing and vote.graph[0] == vote.graph[1]

    @override
    def _meet_eagerly(self, reason: str | None, looked: str = "") -> str:
        """All ranks are here and learn why one of them cannot be followed; what they drew is their own."""
        self.is_eager = True
        reasons = [told for told in self._control.gather(reason) if told is not None]
        return reasons[0] if reasons else ""


def logs_of(calls: Sequence[RecordedCall], wants: Sequence[Want], live: Live) -> tuple[Log, ...]:
    """What the ranks' own values become all ranks' by.

    Args:
        calls: of ``self.log`` and metrics, queued.
        wants: the results that they have.
        live: is given the numbers among them.
    """
    live.logged.clear()
    found: list[Log] = []

    def source(what: str, value: Any) -> Want | bool | None:
        if type(value) is OutputRef:
            return wants[value.position]
        if type(value) in (int, float):
            live.logged[what, len(found)] = value
            return True
        return None

    for call in calls:
        if said := said_in(call):
            value, rows = source("value", said["value"]), source("rows", said.get("batch_size"))
            found.append(Log(str(said["name"]), value, rows, operation_of(said), call.source))
    return tuple(found)


def of_all_ranks(calls: Sequence[RecordedCall], logged: Sequence[tuple[Any, Any]]) -> list[RecordedCall]:
    """Queued calls with the values of all ranks.

    Args:
        calls: the calls.
        logged: value and rows of all ranks, of each ``self.log``.
    """
    values = iter(logged)
    return [
        _of_all_ranks(call, said, *first(values, "logged value")) if (said := said_in(call)) else call for call in calls
    ]


def _of_all_ranks(call: RecordedCall, said: dict[str, Any], value: Any, rows: Any) -> RecordedCall:
    if not isinstance(value, Tensor):
        return call
    more = {"batch_size": rows} if isinstance(rows, Tensor) else {}
    return RecordedCall(call.target, call.method, (), {**said, "value": value, **more}, call.source)
