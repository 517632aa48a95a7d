"""Calls of a known path are taken by what was compiled for them, and others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_spmd.stages.capture.follow.follower import Follower
from lightning_spmd.stages.capture.follow.step import Step


def _steps(function: Callable[[int, Tensor], Any], count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Calls that came the slow way in the last of so many steps, and calls that it recorded."""
    follower, slow, recorded = Follower(dict, lambda _, __: False), list[Any](), 0
    called = Step.called

    def watched(step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        slow.append(func)
        return called(step, func, args, kwargs)

    monkeypatch.setattr(Step, "called", watched)
    given = torch.randn(3)
    for index in range(count):
        slow.clear()
        recorded = follower.recorded
        step = Step(follower, [given])
        with step.active():
            result = function(index, given)
        step.end()
        del result
        step.kept()
        assert step.reason is None
    return len(slow), follower.recorded - recorded


def test_tensors_that_are_made_anew_are_compared_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _steps(lambda index, x: (x * torch.tensor(float(index))).sum(), 5, monkeypatch) == (0, 0)


def test_one_of_another_kind_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(index: int, x: Tensor) -> Tensor:
        return x * torch.tensor(float(index), dtype=torch.float64 if index == 4 else torch.float32)

    assert _steps(step, 5, monkeypatch) == (1, 1)


def test_one_that_was_met_before_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(index: int, x: Tensor) -> Tensor:
        one, other = torch.tensor(1.0), torch.tensor(2.0)
        return x * one + (one if index == 4 else other)

    assert _steps(step, 5, monkeypatch)[1] == 1


def test_results_of_any_structure_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = nn.Parameter(torch.randn(3))

    def step(_: int, x: Tensor) -> Tensor:
        values, indices = (x * kept).sort()
        first, *others = values.split(1)
        assert (values.shape, indices.dtype, len(others)) == (x.shape, torch.int64, 2)
        maximum = values.max(0)
        copy = x.clone()
        assert copy.add_(1) is copy
        return first + maximum.values + copy

    assert _steps(step, 4, monkeypatch) == (0, 0)


def test_a_call_under_other_switches_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(index: int, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(index != 4):
            return x + 1

    assert _steps(step, 5, monkeypatch) == (1, 1)


def test_a_call_under_hooks_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Tensor] = []
    weight = nn.Parameter(torch.randn(3))

    def step(index: int, x: Tensor) -> Tensor:
        if index != 4:
            return (x * weight).exp()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            return (x * weight).exp()

    _steps(step, 5, monkeypatch)
    assert packed
