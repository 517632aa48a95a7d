"""Ranks that look for the first one where something else listens."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.strategy.ranks.rendezvous import NoAnswerError, connected, meet_first
from lightning_spmd.strategy.ranks.slurm import meet
from tests.helpers.ranks import free_port

HERE, SOON = "127.0.0.1", timedelta(seconds=1)
stores: Any = dist


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """No thread of a test is there in the next one, to be given its signals."""
    yield
    for thread in threading.enumerate():
        if thread.name == "rendezvous":
            thread.join(10.0)


@pytest.fixture
def silent() -> Iterator[int]:
    """A port at which a program takes connections and says nothing."""
    with socket.socket() as program:
        program.bind((HERE, 0))
        program.listen()
        yield program.getsockname()[1]


def test_a_program_that_never_answers(silent: int) -> None:
    with pytest.raises(NoAnswerError, match="the listener there does not answer as rank 0 would"):
        connected(HERE, silent, SOON)


def test_a_program_that_never_answers_a_task_of_slurm(silent: int) -> None:
    with pytest.raises(ConfigurationError, match=f"rank 1 of step 17.0 does not find rank 0 at {HERE}:{silent}"):
        meet(HERE, silent, 1, "17.0", SOON)


def test_a_program_that_answers_something_else() -> None:
    with socket.socket() as program:
        program.bind((HERE, 0))
        program.listen()

        program.settimeout(0.1)

        def serve() -> None:
            while True:
                try:
                    other, _ = program.accept()
                except TimeoutError:
                    continue
                except OSError:  # closed
                    return
                with other:
                    other.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    other.recv(1)

        threading.Thread(target=serve, daemon=True, name="rendezvous").start()
        with pytest.raises((NoAnswerError, dist.DistNetworkError, dist.DistStoreError)):
            connected(HERE, program.getsockname()[1], SOON)


def test_the_first_rank_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    first = stores.TCPStore(HERE, port, is_master=True, wait_for_workers=False)
    meet_first(HERE, port, 1, SOON)
    meet_first(HERE, port, 1, SOON)  # a process may join again
    meet_first(HERE, port, 2, SOON)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(NoAnswerError, match="has come as rank 1 before process 1 on"):
        meet_first(HERE, port, 1, SOON)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # where a process may be started again
    meet_first(HERE, port, 1, SOON)
    del first
