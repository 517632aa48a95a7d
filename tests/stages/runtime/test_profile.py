"""Operators are timed on the device that runs them, and a GPU is waited for once a run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.stages.runtime.trial_runs.profile import DeviceClock, HostClock, Profile, Whole, clock_of


def _doubled(device: str) -> fx.GraphModule:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(5):
        value = graph.call_function(torch.ops.aten.mul.Tensor, (value, 2.0))
        value.meta["val"] = TensorSpec((2,), (1,), torch.float32, torch.device(device))
    graph.output((value,))
    return fx.GraphModule(torch.nn.Module(), graph)


class Event:
    """An event of a GPU on which every kernel takes as many milliseconds as came before it."""

    recorded = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.recorded
        Event.recorded += 1

    def elapsed_time(self, other: Event) -> float:
        return float(other.at - self.at)


def test_a_gpu_is_waited_for_once_a_run() -> None:
    with (
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "synchronize") as synchronize,
    ):
        profile = Profile(_doubled("cuda:0"))
        profile.run(torch.ones(2))
        profile.run(torch.ones(2))
    assert synchronize.call_count == profile.runs == 2
    assert len(profile.seconds) == 5
    assert set(profile.seconds.values()) == {1e-3}


@pytest.mark.parametrize(("device", "clock"), [("cpu", HostClock), ("cuda:3", DeviceClock)])
def test_the_clock_is_that_of_the_values(device: str, clock: type[Any]) -> None:
    assert isinstance(clock_of(_doubled(device).graph), clock)


def test_on_the_host_the_shortest_time_of_the_runs_counts() -> None:
    profile = Profile(_doubled("cpu"))
    times = [0, 9, 10, 11, 12, 13, 14, 15, 16, 17, 20, 23, 24, 24, 30, 35, 36, 37, 38, 39]
    with mock.patch.object(HostClock, "mark", side_effect=map(float, times)):
        profile.run(torch.ones(2))
        profile.run(torch.ones(2))
    assert list(profile.seconds.values()) == [3.0, 0.0, 1.0, 1.0, 1.0]


def test_a_run_is_timed_as_a_whole() -> None:
    whole = Whole(_doubled("cpu"))
    with mock.patch.object(HostClock, "mark", side_effect=[10.0, 14.0]):
        assert torch.equal(whole.run(torch.ones(2))[0], torch.full((2,), 32.0))
    assert whole.seconds == 4.0
