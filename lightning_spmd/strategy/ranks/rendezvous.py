"""Connects a rank to rank 0's port, where another program may listen and never answer.

torch's store client waits for an answer without limit once it is connected, whatever its timeout. Rank 0 names the
ranks that it waits for: with ``num_nodes=2`` started on one node it would wait silently.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_spmd.messages import mention

_distributed: Any = dist  # pyright does not know its stores
LONGEST = timedelta(minutes=30)
"""torch's own default limit."""
ANSWER = timedelta(minutes=5)
"""How long something that takes connections may leave them without an answer; a proxy may take them before rank 0."""
_LOOK = 5.0
"""Seconds between two looks whether anything takes connections."""
_CAME = "lightning_spmd/came/"
PATIENCE = 60.0
"""Seconds after which it says so; starting Python and torch takes a loaded machine long enough."""


class NoAnswerError(RuntimeError):
    """A program listens at the port, but it is not a torch store."""


def connected(address: str, port: int, timeout: timedelta, answer: timedelta = ANSWER) -> Any:
    """Connect to the first rank's store.

    Args:
        address: of the first rank's node.
        port: of the store.
        timeout: how long to wait until a program listens there.
        answer: how long to wait for its answer, if that is less.

    Raises:
        NoAnswerError: the program does not answer as a store.
    """
    found: list[Any] = []
    failed: list[Exception] = []

    def connect() -> None:
        try:
            found.append(_distributed.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False))
        except Exception as error:
            failed.append(error)

    # Left behind where there is no answer: it ends with the process.
    thread = threading.Thread(target=connect, daemon=True, name="rendezvous")
    thread.start()
    begun = time.monotonic()
    taken: float | None = None
    limit = begun + timeout.total_seconds() + 1.0  # torch's own comes first
    while thread.is_alive():
        thread.join(max(min(_LOOK, limit - time.monotonic()), 0.01))
        now = time.monotonic()
        if thread.is_alive() and taken is None and _takes_connections(address, port):
            taken = begun if now - begun < 2 * _LOOK else now  # at the first look: it was there from the start
            limit = taken + min(timeout, answer).total_seconds()
        if thread.is_alive() and now >= limit:
            what = "nothing listens there" if taken is None else "the listener there does not answer as rank 0 would"
            raise NoAnswerError(f"{what}, for {now - (taken or begun):.0f} s")
    if failed:
        error = failed[0]
        raise (NoAnswerError("the listener there answers, but not as rank 0 would") if _is_foreign(error) else error)
    return found[0]


def meet_first(address: str, port: int, rank: int, timeout: timedelta | None) -> None:
    """Check that rank 0 is there, and that no other process has connected as this rank.

    Args:
        address: of the first rank's node.
        port: of rank 0.
        rank: of this process.
        timeout: how long to wait for rank 0; None: 30 minutes.

    Raises:
        NoAnswerError: another program listens there, or rank 0 of another run.
    """
    if rank == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the agent's, which is there already
        return
    store = connected(address, port, timeout or LONGEST)
    this = f"process {os.getpid()} on {socket.gethostname()}"
    first = store.compare_set(f"{_CAME}{rank}", "", this).decode()
    if first != this:
        raise NoAnswerError(f"{first} has come as rank {rank} before {this}")


def not_come(address: str, port: int, count: int) -> list[int]:
    """Ranks that have not connected to rank 0 yet; none if that cannot be known.

    Args:
        address: of the first rank's node.
        port: of rank 0.
        count: of all ranks.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return []
    with contextlib.suppress(RuntimeError):
        store = connected(address, port, timedelta(seconds=10))
        return [rank for rank in range(1, count) if not store.check([f"{_CAME}{rank}"])]
    return []


@contextlib.contextmanager
def saying_whom(address: str, port: int, count: int, on_node: int, timeout: timedelta | None) -> Iterator[None]:
    """A context in which rank 0 waits for the others. After a while a message names missing ranks and the fix.

    Args:
        address: of the first rank's node.
        port: of rank 0.
        count: number of all ranks.
        on_node: ranks per node.
        timeout: how long it will wait; None: 30 minutes.
    """

    def say() -> None:
        ranks = not_come(address, port, count)
        if ranks and not over.is_set():
            waited = f"rank 0 has been waiting for {PATIENCE:.0f} s at {address}, port {port}"
            mention(f"{waited}, {_for_whom(ranks, count, on_node)}. It waits for {timeout or LONGEST} at most")

    over = threading.Event()
    timer = threading.Timer(PATIENCE, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        over.set()
        timer.cancel()


def _for_whom(ranks: list[int], count: int, on_node: int) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    whom = f"for rank{'s' if len(ranks) > 1 else ''} {names} of {count}"
    nodes = count // on_node
    if nodes == 1:
        return f"{whom}, which {'has' if len(ranks) == 1 else 'have'} not come so far"
    absent = " or ".join(map(str, sorted({rank // on_node for rank in ranks})[:8]))
    return (
        f"{whom} (num_nodes={nodes}, {on_node} each): start the same command on every node with the same MASTER_ADDR "
        f"and MASTER_PORT, and with NODE_RANK={absent} there, as torchrun and srun do"
    )


def _takes_connections(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1.0):
        return True
    return False


def _is_foreign(error: Exception) -> bool:
    return "Ping failed" in str(error) or "invalid nonce" in str(error)
