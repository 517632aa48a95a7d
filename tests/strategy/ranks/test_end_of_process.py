"""Gloo's threads free tensors while Python ends, and Python ends them with the whole process."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from unittest import mock

import lightning as L

from lightning_spmd.strategy.ranks import processes
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET
from tests.strategy.small import Quiet, loader_of, rows


def _seconds_at_the_end() -> list[float]:
    """For which a process sleeps at its end, after two trainings."""
    handlers: list[Callable[[], None]] = []
    slept: list[float] = []
    with (
        mock.patch.object(atexit, "register", handlers.append),
        mock.patch.object(atexit, "unregister", lambda f: f in handlers and handlers.remove(f)),
    ):
        for _ in range(2):
            L.Trainer(strategy="spmd", devices=2, max_steps=2, **QUIET).fit(Quiet(), loader_of(rows(16)))
    with mock.patch.object(processes.time, "sleep", slept.append):
        for handler in handlers:
            if handler.__module__ == processes.__name__:
                handler()
    return slept


def test_they_are_given_time(two_ranks: RankPool) -> None:
    """Seen: a benchmark that was done ended with "terminate called", in the free of its last collective's tensor."""
    first, second = two_ranks.run(_seconds_at_the_end)
    assert first == second == [processes.SECONDS_TO_FINISH]
    assert processes.SECONDS_TO_FINISH > 0
