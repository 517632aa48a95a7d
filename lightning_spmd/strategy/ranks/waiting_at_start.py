"""Rank 0 names the ranks that it waits for. With ``num_nodes=2`` started on one node it would wait silently."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta

from lightning_spmd.messages import mention
from lightning_spmd.strategy.ranks.rendezvous import LONGEST, not_come

PATIENCE = 60.0
"""Seconds after which it says so; starting Python and torch takes a loaded machine long enough."""


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
