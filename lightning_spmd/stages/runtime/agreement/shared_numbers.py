"""Small exchanges among ranks of one machine, through shared memory.

A message through a socket wakes a thread at each end, and each thread needs a core that is busy computing. Instead,
ranks of one machine write their numbers into a shared page of memory, and readers poll it. If all ranks have arrived
already, which is the usual case, that takes microseconds.

Each rank has a few slots, used in turn. A slot holds the number of the exchange, the values, and a hash of both. The
hash shows whether a slot is still being written, or is seen in a different order by another processor.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_spmd.errors import VerificationError

_SLOTS = 8
"""Exchanges that a rank may be ahead of another one."""
_TOKEN = 16
_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 2e-3
"""Between two looks, in seconds: as long as what was waited for so far, within these."""


class SharedNumbers:
    """Memory in which each rank of a machine publishes a few numbers.

    Args:
        path: a file of :meth:`size` zeros that all ranks open; it may be deleted after that.
        rank: this rank.
        ranks: number of ranks.
        count: numbers in an exchange.

    Raises:
        OSError: the file does not exist or cannot be mapped.
        ValueError: the file has another size.
    """

    def __init__(self, path: Path, rank: int, ranks: int, count: int) -> None:
        self._slot = struct.Struct(f"={2 + count}q")
        self._rank, self._ranks = rank, ranks
        self._begun = 0
        size = self.size(ranks, count)
        if path.stat().st_size != size:
            raise ValueError(f"{path} is of another size")
        # unlike Python's own maps it keeps no file open
        mapped: Any = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).numpy()
        self._memory = memoryview(mapped)

    @staticmethod
    def size(ranks: int, count: int) -> int:
        """Bytes that the memory takes."""
        return _TOKEN + ranks * _SLOTS * 8 * (2 + count)

    @property
    def token(self) -> bytes:
        """The first numbers of the file. By these ranks verify that they opened the same file."""
        return bytes(self._memory[:_TOKEN])

    def show(self, numbers: Sequence[int]) -> int:
        """Begin an exchange; its number, from 1 on."""
        self._begun += 1
        words = (self._begun, *map(int, numbers))
        self._slot.pack_into(self._memory, self._place(self._rank, self._begun), hash(words), *words)
        return self._begun

    def wait(self, exchange: int, look_around: Callable[[float], Any]) -> list[tuple[int, ...]]:
        """The numbers of all ranks, by rank.

        Args:
            exchange: which one.
            look_around: is called while others are waited for, with the seconds so far; may raise.
        """
        found: list[tuple[int, ...]] = []
        begun = time.monotonic()
        for rank in range(self._ranks):
            while (numbers := self._shown(rank, exchange)) is None:
                waited = time.monotonic() - begun
                look_around(waited)
                time.sleep(min(max(waited, _FIRST_PAUSE), _LONGEST_PAUSE))
            found.append(numbers)
        return found

    def _shown(self, rank: int, exchange: int) -> tuple[int, ...] | None:
        """What a rank shows in an exchange; None if it has not come yet."""
        check, *words = self._slot.unpack_from(self._memory, self._place(rank, exchange))
        if check != hash(tuple(words)) or words[0] < exchange:
            return None
        if words[0] > exchange:
            raise VerificationError(f"rank {rank} has begun exchange {words[0]}, this rank is at {exchange}")
        return tuple(words[1:])

    def _place(self, rank: int, exchange: int) -> int:
        return _TOKEN + (rank * _SLOTS + exchange % _SLOTS) * self._slot.size


def shared_numbers(rank: int, ranks: int, count: int, gather: Callable[[Any], list[Any]]) -> SharedNumbers | None:
    """Memory shared by all ranks; None if they are not on one machine.

    Args:
        rank: this rank.
        ranks: number of ranks.
        count: numbers in an exchange.
        gather: gathers a value of every rank; all ranks call this function at the same place.
    """
    offered: tuple[str, bytes] | None = None
    with contextlib.suppress(OSError):
        if rank == 0:
            offered = _new_file(ranks, count)
    place: tuple[str, bytes] | None = gather(offered)[0]
    found: SharedNumbers | None = None
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # torch's own errors are of the last kind
        if place is not None:
            found = SharedNumbers(Path(place[0]), rank, ranks, count)
    seen = gather(found is not None and place is not None and found.token == place[1] and _network())
    if offered is not None:
        Path(offered[0]).unlink(missing_ok=True)
    return found if all(one and one == seen[0] for one in seen) else None


def _new_file(ranks: int, count: int) -> tuple[str, bytes]:
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    descriptor, path = tempfile.mkstemp(prefix="lightning_spmd-", dir=folder)
    token = secrets.token_bytes(_TOKEN)
    zeros = bytes(SharedNumbers.size(ranks, count) - _TOKEN)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(
                token + zeros
            )  # where memory is full this fails, while a write into the map would end the process
    except OSError:
        Path(path).unlink()
        raise
    return path, token


def _network() -> str:
    """The network that a process is in: in another one it is as on another host, for whom several hosts are played."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/net")
    return "one"
