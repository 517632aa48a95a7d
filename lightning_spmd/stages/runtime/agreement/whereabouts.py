"""Where a rank stays that does not come: the line of the user's code, and the collective that it called there alone.

A callback on one rank alone calls ``metric.compute()``: that rank waits for the others in a collective of
``torch.distributed``, the others wait for it at the next exchange, and neither ends before the timeout. The thread that
waits cannot speak. A second one looks now and then where it is, and tells the others if that is where it was before::

    rank 0, main thread       dist.barrier()                         waits for rank 1
            second thread     note: f.py:30, barrier, of ranks 0, 1
    rank 1                    control.vote(next batch)               waits for rank 0, reads the note: neither can go on

"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from lightning_spmd import _private_api as private
from lightning_spmd.errors import is_of_trainer, is_own_file

_COLLECTIVES = os.path.join(os.path.dirname(dist.__file__), "distributed_c10d.py")
_OF_SHARDED_TENSORS = os.path.join(os.path.dirname(dist.__file__), "_functional_collectives.py")


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank has been for a while.

    Args:
        line: ``file:line`` of the user's code, the innermost inside of the Trainer; empty if there is none.
        collective: name of the function of ``torch.distributed`` in which it waits; empty if it is in none.
        ranks: who takes part in it; None if that is not known.
    """

    line: str
    collective: str = ""
    ranks: tuple[int, ...] | None = None

    def __str__(self) -> str:
        at = f"at {self.line}" if self.line else ""
        inside = f"in torch.distributed's {self.collective}" if self.collective else ""
        return ", ".join(filter(None, [inside, at]))

    def needs(self, rank: int) -> bool:
        """Whether it waits for this rank."""
        return bool(self.collective) and self.ranks is not None and rank in self.ranks

    def as_text(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Whereabouts:
        """The same again."""
        found = json.loads(text)
        return cls(found["line"], found["collective"], None if found["ranks"] is None else tuple(found["ranks"]))


def whereabouts_of(thread: int) -> Whereabouts | None:
    """Where a thread is; None if it is neither in the user's code inside of the Trainer nor in a collective."""
    frames = list(_outwards(private.frames_of_threads().get(thread)))
    own = next((number for number, frame in enumerate(frames) if is_own_file(frame.f_code.co_filename)), None)
    if own is not None and not any(is_of_trainer(frame.f_code.co_filename) for frame in frames[own:]):
        own = None  # the script's line with trainer.fit
    line = "" if own is None else f"{frames[own].f_code.co_filename}:{frames[own].f_lineno}"
    called = [frame for frame in frames[:own] if frame.f_code.co_filename == _COLLECTIVES]
    if called:
        return Whereabouts(line, called[-1].f_code.co_name, _ranks_of(called[-1].f_locals.get("group")))
    if any(frame.f_code.co_filename == _OF_SHARDED_TENSORS for frame in frames[:own]):
        return Whereabouts(line, "gathering of a sharded tensor")
    return Whereabouts(line) if line else None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _ranks_of(group: object) -> tuple[int, ...] | None:
    if group is None or group is dist.group.WORLD:
        return tuple(range(dist.get_world_size())) if dist.is_initialized() else None
    return tuple(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else None


class Lookout:
    """A thread that looks where another one is, and tells if it stays there.

    Args:
        tell: is given where the thread was in two looks, and None when it is there no more.
        interval: time between two looks.
    """

    def __init__(self, tell: Callable[[Whereabouts | None], None], interval: timedelta) -> None:
        self._tell = tell
        self._seconds = interval.total_seconds()
        self._watched = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lightning_spmd lookout", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join(timeout=1.0)

    def _look(self) -> None:
        last: Whereabouts | None = None
        told = False
        while not self._over.wait(self._seconds):
            here = whereabouts_of(self._watched)
            if here is not None and here == last and not told:
                self._tell(here)
                told = True
            elif here != last and told:
                self._tell(None)
                told = False
            last = here
