"""What leaves torch in a followed step: pointers, memory of NumPy, scripted and compiled functions; none is silent."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.training import assert_compiled, deviation
from tests.strategy.following.test_followed_backward import STEPS, Noted, _run, assert_same, note
from tests.strategy.small import Quiet, run


class Pointers(Noted):
    """Memory is read by its address."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0]).detach().contiguous()
        note(ctypes.c_float.from_address(h.data_ptr()).value)
        return self.loss(*batch)


class Exchanged(Noted):
    """DLPack hands memory to NumPy and back, where it is written."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0]).detach()
        array = np.from_dlpack(h)
        other = torch.from_dlpack(h)
        other.mul_(2)
        note((float(array.sum()), h.sum().item()))
        return self.loss(*batch) + 0.1 * (self.hidden(batch[0]) * h).mean()


class ThroughNumpy(Noted):
    """An array of a tensor becomes a tensor again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        back = torch.from_numpy(h.detach().numpy())
        note(back.sum().item())
        return self.loss_of(h, batch[1]) + 0.1 * (h * back).mean()


@torch.jit.script
def scripted(x: Tensor, factor: float) -> Tensor:
    """Runs without Python."""
    if factor > 2.0:
        return x.sigmoid() * factor
    return x.tanh() * factor


class Scripted(Noted):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(scripted(self.body(batch[0]), float(batch_idx)), batch[1])  # type: ignore[arg-type]


@torch.compile(backend="eager")
def compiled(x: Tensor, factor: float) -> Tensor:
    """Would be compiled for placeholders, but for the mode around it."""
    note("python")
    return x.tanh() * factor


class Compiled(Noted):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(compiled(self.body(batch[0]), 1.0 + batch_idx), batch[1])


@pytest.mark.parametrize("kind", [Pointers, Exchanged])
def test_memory_that_is_handed_out_makes_a_step_eager(kind: type[Noted]) -> None:
    assert_same(kind, None)


def test_what_only_reads_is_followed() -> None:
    assert_same(ThroughNumpy)


def test_scripted_functions_are_followed_operator_by_operator() -> None:
    """TorchScript has derivatives of its own, which round otherwise."""
    theirs, _, _ = _run(Scripted, "auto")
    ours, _, graphs = _run(Scripted, "spmd")
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert all(torch.allclose(ours.weights[name], w, rtol=1e-6, atol=1e-7) for name, w in theirs.weights.items())
    assert graphs == STEPS


def test_compiled_functions_run_as_written() -> None:
    """Dynamo runs their Python when it compiles, a followed step in each step."""
    theirs, _, _ = _run(Compiled, "auto")
    ours, notes, graphs = _run(Compiled, "spmd")
    assert ours.losses == theirs.losses
    assert notes == ["python"] * STEPS
    assert graphs == STEPS


@torch.jit.script
def weighted(x: Tensor, weight: Tensor) -> Tensor:
    """Has a history of its own once it is optimized, which is from the second call on."""
    return x * weight + 1


@torch.jit.script
def in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """The same, of more operators."""
    first, second = x.chunk(2, 1)
    made: list[Tensor] = []
    for factor in range(3):
        made.append(first * weight[: first.shape[1]] + second.exp() * factor)
    return torch.cat(made, 1)


@torch.jit.script
def by_its_sizes(x: Tensor, weight: Tensor) -> Tensor:
    """``torch.tensor`` of a list writes into what ``empty`` gives, past the dispatcher."""
    return x / torch.tensor([x.shape[1], 2, x.shape[0]]).sum() * weight


@pytest.mark.parametrize("function", [weighted, in_parts, by_its_sizes], ids=["weighted", "in parts", "by its sizes"])
def test_gradients_come_through_scripted_functions_that_are_optimized(function: Any) -> None:
    class Module(Quiet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) + function(self.first(batch[0]), self.first.bias).square().mean()

    ours, theirs = run(Module, "spmd"), run(Module, "auto")
    assert_compiled(ours)
    assert deviation(ours, theirs).weights < 1e-6
