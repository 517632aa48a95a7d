"""The pool itself: answers by rank, failures with their traceback, no hang outlives its time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.ranks import RankError, RankPool


def rank_and_world(factor: int) -> tuple[int, str]:
    return int(os.environ["RANK"]) * factor, os.environ["WORLD_SIZE"]


def fails_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        raise LookupError("rank one's mistake")


def hangs_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(600)


def dies() -> None:
    os._exit(7)


def crashes_at_first(mark: Path) -> str:
    """A signal, as a crash in native code sends it."""
    if os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGABRT)
    return os.environ["RANK"]


def always_crashes() -> None:
    os.kill(os.getpid(), signal.SIGABRT)


def test_a_crash_is_given_one_more_chance(tmp_path: Path) -> None:
    pool = RankPool(2)
    try:
        with pytest.warns(UserWarning, match="a signal ended a rank; once more. rank 1"):
            assert pool.run(crashes_at_first, tmp_path / "mark") == ["0", "1"]
        with (
            pytest.warns(UserWarning, match="once more"),
            pytest.raises(RankError, match="died: the process ended with code -6"),
        ):
            pool.run(always_crashes)
    finally:
        pool.close()


def test_a_pool_answers_fails_and_starts_anew() -> None:
    pool = RankPool(2)
    try:
        assert pool.run(rank_and_world, 10) == [(0, "2"), (10, "2")]
        with pytest.raises(
            RankError, match=r"rank 0: finished\nrank 1: LookupError: [\s\S]*rank one's mistake"
        ) as error:
            pool.run(fails_on_rank_one)
        assert error.value.type_names == [None, "LookupError"]
        with pytest.raises(RankError, match=r"rank 1: hung: no answer in time[\s\S]*hangs_on_rank_one"):
            pool.run(hangs_on_rank_one, timeout=4)
        with pytest.raises(RankError, match="died: the process ended with code 7"):
            pool.run(dies)
        assert pool.run(rank_and_world, factor=2) == [(0, "2"), (2, "2")]
    finally:
        pool.close()
