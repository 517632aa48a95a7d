"""The cost model says what the formulas say."""

from __future__ import annotations

import pytest
import torch

from lightning_spmd.cost.collectives import LINKS, link_of, seconds, wire_bytes

ETHERNET = LINKS["cpu"]


def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather_of_the_pieces() -> None:
    for ranks in (2, 3, 8, 1024):
        size = 1024 * 3 * 1000
        both = wire_bytes("reduce_scatter", size, ranks) + wire_bytes("all_gather", size // ranks, ranks)
        assert wire_bytes("all_reduce", size, ranks) == pytest.approx(both, rel=1e-9)


def test_one_rank_needs_no_time() -> None:
    assert seconds("all_reduce", 1 << 30, 1, ETHERNET) == 0.0


def test_a_megabyte_over_gigabit_ethernet_takes_eight_milliseconds() -> None:
    assert seconds("all_reduce", 10**6, 2, ETHERNET) == pytest.approx(8e-3 + ETHERNET.latency)


def test_a_link_is_chosen_by_device() -> None:
    assert link_of(torch.device("cpu")) is LINKS["cpu"]
    assert link_of(torch.device("cuda", 3)) is LINKS["cuda"]
    assert link_of(torch.device("meta")) is LINKS["cuda"]
