"""A first rank whose others do not come says whom it waits for, and what to do."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_spmd import SPMDStrategy
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.strategy.ranks import rendezvous as awaited
from lightning_spmd.strategy.ranks.rendezvous import meet_first, not_come, saying_whom
from tests.helpers.ranks import free_port

HERE, SOON = "127.0.0.1", timedelta(seconds=1)
stores: Any = dist


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(awaited, "mention", texts.append)
    monkeypatch.setattr(awaited, "PATIENCE", 0.05)
    return texts


def _until_said(said: list[str]) -> None:
    until = time.monotonic() + 20
    while not said and time.monotonic() < until:
        time.sleep(0.02)


def test_it_names_the_ranks_and_the_nodes_that_did_not_come(said: list[str]) -> None:
    port = free_port()
    first = stores.TCPStore(HERE, port, is_master=True, wait_for_workers=False)
    meet_first(HERE, port, 1, SOON)
    with saying_whom(HERE, port, 4, 2, None):
        _until_said(said)
    (text,) = said
    assert f"at {HERE}, port {port}, for ranks 2, 3 of 4 (num_nodes=2, 2 each): start the same command" in text
    assert "and with NODE_RANK=1 there" in text
    assert text.endswith("It waits for 0:30:00 at most")
    del first


def test_of_one_node_it_names_the_rank(said: list[str]) -> None:
    port = free_port()
    first = stores.TCPStore(HERE, port, is_master=True, wait_for_workers=False)
    with saying_whom(HERE, port, 2, 2, timedelta(seconds=90)):
        _until_said(said)
    assert "for rank 1 of 2, which has not come so far" in said[0]
    assert said[0].endswith("It waits for 0:01:30 at most")
    meet_first(HERE, port, 1, SOON)
    assert not_come(HERE, port, 2) == []
    del first


def test_where_all_come_in_time_nothing_is_said(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "PATIENCE", 60.0)
    before = threading.active_count()
    with saying_whom(HERE, free_port(), 2, 2, None):
        assert threading.active_count() == before + 1
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert (said, threading.active_count()) == ([], before)


def test_a_first_rank_that_waited_in_vain_does_not_doubt_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    strategy = SPMDStrategy(parallel_devices=[torch.device("cpu")] * 2, cluster_environment=LightningEnvironment())
    late = "Timed out after 21 seconds waiting for clients. 1/2 clients joined."
    said = (
        f"rank 0 has waited for the other ranks at {HERE}, port {port}, in vain .{late}.: one was not started, or has"
    )
    with pytest.raises(ConfigurationError, match=said), strategy._meeting(LightningEnvironment()):
        raise stores.DistStoreError(late)
