"""A run that is interleaved with the user's Python: it hands over values that Python reads, then goes on.

It begins with the work that the iteration before deferred, which is done when Python reads first: no matter whether
Python then takes another path, nothing is left of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.random_states import TorchRandomState
from lightning_spmd.ir.source import ErrorsNamePlaces
from lightning_spmd.stages.runtime.executor import Executable, Pending
from lightning_spmd.stages.runtime.switches import GraphSwitches
from lightning_spmd.stages.runtime.undo import wait_for_tensors_of


class Conversation:
    """One run of a graph that hands values to Python. Until the last of them it has changed nothing that lasts.

    Args:
        executable: the graph; it :attr:`~Executable.can_talk`.
        batch: tensor leaves of the batch, in order.
        pending: work of the iteration before, if the graph :meth:`~Executable.can_follow` it.
    """

    def __init__(self, executable: Executable, batch: Sequence[Tensor], pending: Pending | None = None) -> None:
        self.executable = executable
        streams = executable.state.streams
        self._streams = streams
        self._random = TorchRandomState() if executable.draws and streams is None else None
        self._stack = contextlib.ExitStack()
        if streams is not None:  # from here to the end torch's generators are the run's
            self._stack.enter_context(streams.active(draws=executable.draws))
        self._run: Generator[Sequence[Sequence[Tensor]], Any, Sequence[Any]] = executable.talk(batch, pending)
        self._outputs: Sequence[Any] | None = None
        self._ready: list[Sequence[Tensor]] = []  # handed over with those before, the next one last

    def values(self, numbers: Sequence[Any] | None) -> Sequence[Tensor]:
        """The values that Python reads next.

        Args:
            numbers: numbers that Python has computed since its last read; None at the beginning.

        Raises:
            VerificationError: the graph has no further read.
        """
        if not self._ready:
            found = self._go_on(None if numbers is None else tuple(numbers))
            if found is None:
                raise VerificationError("a graph ended where Python reads a value")
            self._ready = list(reversed(found))
        return self._ready.pop()

    def end(self, numbers: Sequence[Any]) -> tuple[Sequence[Any], Pending | None]:
        """Run to the end. Parameters, buffers and state are updated.

        Returns the outputs of the captured graph and the deferred work.

        Args:
            numbers: numbers that Python has computed since its last read.
        """
        if self._ready or self._go_on(tuple(numbers)) is not None or self._outputs is None:
            raise VerificationError("a graph waits for Python to read, and Python is done")
        self._stack.close()
        return self.executable.ended(self._outputs)

    def drop(self) -> None:
        """Abandon the run and restore the random states."""
        frame = getattr(self._run, "gi_frame", None)
        if frame is not None and self._streams is not None:  # what ranks began together all of them wait for
            wait_for_tensors_of(frame)
        self._run.close()
        self._stack.close()
        if self._streams is not None:
            self._streams.tick -= 1
        if self._random is not None:
            self._random.restore()

    def _go_on(self, sent: Any) -> Sequence[Sequence[Tensor]] | None:
        with (
            GraphSwitches(),
            private.disable_dispatch_modes(),
            ErrorsNamePlaces(),
        ):
            try:
                if self.executable.sizes is not None:
                    self.executable.sizes.hear()
                return self._run.send(sent)
            except StopIteration as end:
                self._outputs = end.value
                return None
