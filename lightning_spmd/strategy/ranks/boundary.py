"""Exceptions at the package's boundary: Lightning must not swallow them, and they name a lost rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import SPMDError
from lightning_spmd.stages.capture.user_code import location_of
from lightning_spmd.stages.runtime.agreement.control import ControlPlane
from lightning_spmd.stages.runtime.agreement.lost_ranks import is_communication_failure

F = TypeVar("F", bound=Callable[..., Any])


def ends_no_loop(method: F) -> F:
    """Turn a StopIteration, which Lightning's loops take for the end of the data, into a visible error.

    This wraps code that runs in place of the user's step. A step that runs as written may raise StopIteration to end
    its epoch.
    """

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except StopIteration as error:
            where = location_of(error)
            raise SPMDError(
                "a StopIteration was raised while a graph was built or run, or its metrics updated; Lightning would "
                f"take it for the end of the data{'' if where is None else f' at {where}'}"
            ) from error

    return guarded  # type: ignore[return-value]


def names_lost_ranks(method: F) -> F:
    """Decorate a strategy's method: if a collective breaks off, the error names the lost rank."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lost_ranks_named(lambda: self._ranks.control):
            return method(self, *args, **kwargs)

    return guarded  # type: ignore[return-value]


@contextlib.contextmanager
def lost_ranks_named(control: Callable[[], ControlPlane | None]) -> Iterator[None]:
    """A context in which a broken collective raises an error that names the lost rank.

    Args:
        control: gives the ranks' control plane; None on one device.

    Raises:
        RankLostError: in place of torch's error about a socket.
    """
    try:
        yield
    except RuntimeError as error:
        plane = control()
        if plane is None or isinstance(error, SPMDError) or not is_communication_failure(error):
            raise
        raise plane.peers.explain(error, str(plane.place)) from None


class Launcher(private.SubprocessScriptLauncher):
    """Starts the other processes. What a broken collective raises anywhere in a run names the lost rank.

    Not in steps alone: in evaluation Lightning adds up logged values itself, and metrics gather their states.

    Args:
        control: gives the ranks' control plane.
        args: as for Lightning's.
    """

    def __init__(self, control: Callable[[], ControlPlane | None], *args: Any) -> None:
        super().__init__(*args)
        self._control = control

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with lost_ranks_named(self._control):
                return function(*args, **kwargs)

        return super().launch(run, *args, trainer=trainer, **kwargs)
