"""Two runs want the same: a port, a folder."""

from __future__ import annotations

import socket

from tests.reliability.fault import LIMIT, Account, Case, Fault, says, start
from tests.reliability.job import note_the_fault, train


def _port_taken(case: Case) -> Account:
    """Somebody else listens on the port where the ranks are to meet."""
    account, job = Account(), case.job(timeout=10.0)
    job.folder.mkdir(exist_ok=True)
    taken = socket.socket()
    taken.bind(("0.0.0.0", 0))
    taken.listen()
    note_the_fault(job)
    port = taken.getsockname()[1]
    run = start(job, lambda j, _rank: train(j), port=port)
    found = run.wait(LIMIT)
    taken.close()
    account.outputs, account.codes = [e.output for e in found], tuple(e.code for e in found)
    account.seconds = max(e.at for e in found) - run.begun
    account.demand(all(e.code == 1 for e in found), f"ended with {account.codes}")
    for one in found:
        says(account, one, rf"rank {one.rank} cannot meet the others at \S+, port {port}", "in use", "MASTER_PORT=")
    return account


FAULTS = (
    Fault(
        "port taken",
        "somebody else listens on `MASTER_PORT`",
        "all ranks end; the message names the port and how to choose another",
        _port_taken,
    ),
)
