"""Exchanges through memory that ranks of one machine share."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from lightning_spmd.errors import RankLostError, VerificationError
from lightning_spmd.stages.runtime.agreement import shared_numbers as shared
from lightning_spmd.stages.runtime.agreement.control import NUMBERS, ControlPlane, Place
from lightning_spmd.stages.runtime.agreement.shared_numbers import SharedNumbers, shared_numbers


def nobody_waits(_seconds: float) -> None:
    raise AssertionError("somebody had to wait")


def all_of(path: Path, ranks: int, count: int = 3) -> list[SharedNumbers]:
    path.write_bytes(bytes(SharedNumbers.size(ranks, count)))
    return [SharedNumbers(path, rank, ranks, count) for rank in range(ranks)]


def test_everybody_has_everybodys_numbers(tmp_path: Path) -> None:
    ranks = all_of(tmp_path / "page", 3)
    for step in range(20):  # more than there are slots
        exchanges = [memory.show([step, -rank, 2**62 + rank]) for rank, memory in enumerate(ranks)]
        expected = [(step, -rank, 2**62 + rank) for rank in range(3)]
        assert [memory.wait(n, nobody_waits) for memory, n in zip(ranks, exchanges, strict=True)] == [expected] * 3


def test_whoever_comes_late_is_waited_for(tmp_path: Path) -> None:
    first, second = all_of(tmp_path / "page", 2)
    first.show([1, 2, 3])
    looks: list[float] = []
    late = threading.Timer(0.2, second.show, ([4, 5, 6],))
    late.start()
    assert first.wait(1, looks.append) == [(1, 2, 3), (4, 5, 6)]
    late.join()
    assert looks == sorted(looks)
    assert looks[-1] < 5.0


def test_the_wait_ends_when_looking_around_raises(tmp_path: Path) -> None:
    first, _ = all_of(tmp_path / "page", 2)
    first.show([1, 2, 3])

    def gone(seconds: float) -> None:
        if seconds > 0.05:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        first.wait(1, gone)


def test_a_rank_may_be_one_exchange_ahead(tmp_path: Path) -> None:
    first, second = all_of(tmp_path / "page", 2)
    second.show([1, 1, 1])
    second.show([2, 2, 2])
    first.show([0, 0, 0])
    assert first.wait(1, nobody_waits)[1] == (1, 1, 1)


def test_a_slot_that_is_half_written_does_not_count(tmp_path: Path) -> None:
    first, second = all_of(tmp_path / "page", 2)
    first.show([1, 2, 3])
    second.show([4, 5, 6])
    content = bytearray((tmp_path / "page").read_bytes())
    place = content.index(struct.pack("=3q", 4, 5, 6))
    right = bytes(content[place : place + 8])
    for wrong in (b"\0" * 8, struct.pack("=q", 7)):
        with (tmp_path / "page").open("r+b") as file:
            file.seek(place)
            file.write(wrong)
        with pytest.raises(AssertionError, match="had to wait"):
            first.wait(1, nobody_waits)
    with (tmp_path / "page").open("r+b") as file:
        file.seek(place)
        file.write(right)
    assert first.wait(1, nobody_waits)[1] == (4, 5, 6)


def test_a_rank_that_is_rounds_ahead_is_an_error(tmp_path: Path) -> None:
    first, second = all_of(tmp_path / "page", 2)
    first.show([0, 0, 0])
    for number in range(1 + shared._SLOTS):
        second.show([number] * 3)
    with pytest.raises(VerificationError, match="rank 1 has begun exchange 9"):
        first.wait(1, nobody_waits)


class Full:
    """A file on a device without space."""

    def __init__(self, descriptor: int, _mode: str) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, _content: bytes) -> int:
        raise OSError(28, "No space left on device")


def together(ranks: int, between: Callable[[int, list[Any]], list[Any]]) -> list[SharedNumbers | None]:
    """What ``shared_numbers`` gives on some ranks, which are threads; ``between`` changes what is gathered."""
    barrier, said = threading.Barrier(ranks), dict[int, Any]()
    found: list[SharedNumbers | None] = [None] * ranks

    def one(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            said[rank] = value
            barrier.wait()
            everyone = [said[r] for r in range(ranks)]
            barrier.wait()
            return between(rank, everyone)

        found[rank] = shared_numbers(rank, ranks, 3, gather)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(
    ("what", "share"),
    [
        ("one machine", True),
        ("another file of that name", False),
        ("no such file", False),
        ("a smaller file", False),
        ("no memory", False),
    ],
)
def test_only_ranks_of_one_machine_share(what: str, share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def between(rank: int, values: list[Any]) -> list[Any]:
        if isinstance(values[0], tuple) and rank == 1:
            path, token = values[0]
            if what == "a smaller file":
                os.truncate(path, 16)
            changed = {"another file of that name": (path, bytes(16)), "no such file": (path + "x", token)}
            return [changed.get(what, values[0]), *values[1:]]
        return values

    if what == "no memory":
        monkeypatch.setattr(shared.os, "fdopen", Full)
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set[str]()
    found = together(2, between)
    assert [one is not None for one in found] == [share] * 2
    if os.path.isdir("/dev/shm"):

        def left() -> list[str]:
            return [n for n in set(os.listdir("/dev/shm")) - before if n.startswith("lightning_spmd-")]

        end = time.monotonic() + 10  # those of other tests' processes exist for a moment, too
        while left() and time.monotonic() < end:
            time.sleep(0.05)
        assert not left()


def test_ranks_in_networks_of_their_own_are_as_on_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = iter(["one", "another"])
    monkeypatch.setattr(shared, "_network", lambda: next(networks))
    assert together(2, lambda _, values: values) == [None, None]


def test_a_wait_takes_little_of_a_core(tmp_path: Path) -> None:
    first, second = all_of(tmp_path / "page", 2)
    first.show([1, 2, 3])
    late = threading.Timer(0.5, second.show, ([4, 5, 6],))
    late.start()
    looks = 0

    def look(_seconds: float) -> None:
        nonlocal looks
        looks += 1

    begun = time.monotonic()
    first.wait(1, look)
    late.join()
    assert looks < 100 + (time.monotonic() - begun) / shared._LONGEST_PAUSE


class NoNews:
    """Peers of whom nothing is heard."""

    def news(self) -> None:
        return None

    def explain(self, error: BaseException, place: str) -> RankLostError:
        return RankLostError(f"{error} at {place}")


def test_a_wait_ends_when_its_time_is_over(tmp_path: Path) -> None:
    """As that of a collective does: a rank that never comes is not waited for in all eternity."""
    plane = ControlPlane.__new__(ControlPlane)
    plane._memory, _ = all_of(tmp_path / "page", 2, NUMBERS)
    plane._timeout, plane.world_size, plane.peers = timedelta(seconds=0.1), 2, cast("Any", NoNews())
    with pytest.raises(RankLostError, match="Timed out waiting 100ms .* at training batch 3 of epoch 1"):
        plane.vote(Place("training", epoch=1, batch=3), 0, 1, 2)
