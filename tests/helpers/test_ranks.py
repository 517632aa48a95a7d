"""The pool itself: answers by rank, failures with their traceback, no hang outlives its time."""

from __future__ import annotations

import os
import time

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
            pool.run(hangs_on_rank_one, timeout=15)
        with pytest.raises(RankError, match="died: the process ended with code 7"):
            pool.run(dies)
        assert pool.run(rank_and_world, factor=2) == [(0, "2"), (2, "2")]
    finally:
        pool.close()
