"""How a GPU is asked to record, and what is put right where CUDA breaks that off: the calls alone, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_spmd import _private_api as private
from lightning_spmd.stages.runtime.cuda_graphs.cuda_graphs import CudaRecorder


class _Graph:
    """A CUDA graph whose end fails if it is told so."""

    log: list[Any] = []
    breaks = False

    def capture_begin(self, **options: Any) -> None:
        self.log.append(("begin", options))

    def capture_end(self) -> None:
        self.log.append("end")
        if self.breaks:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.log.append("replay")


@pytest.fixture
def cuda() -> Iterator[Any]:
    """``torch.cuda`` without a GPU behind it."""
    _Graph.log, _Graph.breaks = [], False
    stand_ins = {
        "graph_pool_handle": mock.Mock(return_value=(0, 1)),
        "Stream": mock.Mock(),
        "stream": mock.MagicMock(),
        "current_stream": mock.Mock(),
        "current_device": mock.Mock(return_value=0),
        "CUDAGraph": _Graph,
        "default_generators": (mock.Mock(),),
    }
    with mock.patch.multiple(torch.cuda, **stand_ins), mock.patch.object(private, "leave_pool") as leave:
        stand_ins["leave_pool"] = leave
        yield stand_ins


def _work() -> None:
    _Graph.log.append("work")


def test_recordings_share_a_pool_that_is_never_without_a_graph(cuda: Any) -> None:
    recorder = CudaRecorder(torch.device("cpu"))
    first, second = recorder.record(_work), recorder.record(_work)
    options = {"pool": (0, 1), "capture_error_mode": "thread_local"}
    assert _Graph.log == [("begin", options), "end", *[("begin", options), "work", "end"] * 2]
    first()
    second()
    assert _Graph.log[-2:] == ["replay", "replay"]
    assert recorder.generation == 0


def test_an_error_in_python_ends_the_recording_and_nothing_else(cuda: Any) -> None:
    def fail() -> None:
        raise RuntimeError("no such kernel")

    recorder = CudaRecorder(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="no such kernel"):
        recorder.record(fail)
    assert _Graph.log[-1] == "end"
    assert recorder.generation == 0
    cuda["leave_pool"].assert_not_called()


def test_a_recording_that_cuda_breaks_off_is_put_right(cuda: Any) -> None:
    def fail() -> None:
        _Graph.breaks = True
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder = CudaRecorder(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(fail)
    cuda["leave_pool"].assert_called_once_with(0, (0, 1))
    (generator,) = cuda["default_generators"]
    ((fresh,), _) = generator.graphsafe_set_state.call_args
    assert torch.equal(fresh.get_state(), torch.get_rng_state())  # of the device, here the host
    assert recorder.generation == 1
