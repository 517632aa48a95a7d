"""Random numbers that a step draws from Python and NumPy are the same on all ranks, as on one device."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from lightning_spmd.ir.steps import CapturedStep, Generator
from lightning_spmd.messages import the_step, warn
from lightning_spmd.stages.runtime.control import ControlPlane
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.strategy.run_context import StepRequest

P = ParamSpec("P")
T = TypeVar("T", bound="Builds")


class SameDraws:
    """Sees to that.

    Args:
        control: messages among the ranks; None on one device.
    """

    def __init__(self, control: ControlPlane | None) -> None:
        self._control = control
        self._sources: dict[str, Generator] = {}
        self._told = False

    def states(self) -> dict[str, str]:
        """What must be the same on all ranks: the state of each generator from which graphs draw."""
        return {
            f"the state of {name}, from which {the_step()} draws,": f"{zlib.crc32(repr(source.save()[0]).encode()):08x}"
            for name, source in self._sources.items()
        }

    @contextlib.contextmanager
    def tried(self, request: StepRequest) -> Iterator[Callable[[CapturedStep], None]]:
        """Build a graph inside; on all ranks together. Generators are as rank 0 has them, for good if it draws.

        Yields:
            told of the graph.
        """
        control = self._control
        if control is None or request.variant.own_batch:
            yield lambda _captured: None
            return
        mine = _states()
        sides = control.gather(mine)
        differ = any(repr(side) != repr(mine) for side in sides)
        if differ:
            _set_states(sides[0])
        drawn = False

        def built(captured: CapturedStep) -> None:
            nonlocal drawn
            sources = [] if captured.drawn is None else list(captured.drawn.sources())
            drawn = bool(sources)
            new = [source for source in sources if source.name not in self._sources]
            if new:
                self._settle(control, new, differ)

        try:
            yield built
        finally:
            if differ and not drawn:
                _set_states(mine)

    def _settle(self, control: ControlPlane, sources: list[Generator], differ: bool) -> None:
        states = [source.save() for source in sources]
        first = control.gather(states)[0]
        differ = any(control.gather(differ or any(a[0] != b[0] for a, b in zip(states, first, strict=True))))
        for source, state in zip(sources, first, strict=True):
            source.restore(state)
            self._sources[source.name] = source
        if differ and not self._told:
            self._told = True
            warn(
                f"{the_step()} draws from {', '.join(s.name for s in sources)}, whose states differ between the ranks; "
                "all ranks go on with rank 0's, so that they draw what one device would"
            )


class Builds(Protocol):
    """What builds graphs."""

    same_draws: SameDraws


def with_same_draws(
    build: Callable[Concatenate[T, StepRequest, P], Executable],
) -> Callable[Concatenate[T, StepRequest, P], Executable]:
    """Let a method that builds graphs do so with generators that are the same on all ranks."""

    @functools.wraps(build)
    def together(self: T, request: StepRequest, *args: P.args, **kwargs: P.kwargs) -> Executable:
        with self.same_draws.tried(request) as built:
            executable = build(self, request, *args, **kwargs)
            built(executable.captured)
        return executable

    return together


@contextlib.contextmanager
def as_on_rank_zero(control: ControlPlane) -> Iterator[None]:
    """Python inside draws what rank 0 does; if it does not draw, generators are each rank's own again.

    Args:
        control: messages among the ranks, which are all here.
    """
    mine = _states()
    first = control.gather(mine)[0]
    differ = any(control.gather(repr(first) != repr(mine)))
    if differ:
        _set_states(first)
    try:
        yield
    finally:
        if differ and repr(_states()) == repr(first):
            _set_states(mine)
        elif differ:
            warn(
                f"{the_step()} draws random numbers of Python or NumPy, whose states differ between the ranks; all "
                "ranks go on with rank 0's, so that they draw what one device would"
            )


def _states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    legacy = None if numpy is None else numpy.random.get_state()
    return random.getstate(), None if legacy is None else (legacy[0], legacy[1].tolist(), *legacy[2:])


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    numpy = sys.modules.get("numpy")
    if numpy is not None and states[1] is not None:
        numpy.random.set_state(states[1])
