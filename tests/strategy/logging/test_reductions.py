"""What ``Strategy.reduce`` gives on a default process group that the user made."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_spmd import SPMDStrategy
from tests.helpers.ranks import RankPool, free_port


def _means_of_whole_numbers(*ports: int) -> tuple[str, int, float]:
    """Each new default group has a port of its own: in the store of an old one ranks find addresses that are gone."""
    here, afterwards = map(str, ports)
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = here
    init_device_mesh("cpu", (2,))
    strategy = SPMDStrategy()
    whole, part = torch.tensor([2, 6][dist.get_rank()]), torch.tensor([2.0, 5.0][dist.get_rank()])
    try:
        return dist.get_backend(), int(strategy.reduce(whole)), float(strategy.reduce(part))
    finally:
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = afterwards


def test_the_mean_of_whole_numbers_on_a_group_of_several_backends(two_ranks: RankPool) -> None:
    for backend, whole, part in two_ranks.run(_means_of_whole_numbers, free_port(), free_port()):
        assert backend != "gloo"
        assert (whole, part) == (4, 3.5)
