"""Hooks on the backward passes of modules, which torch puts on functions and on nodes: they run once in each step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import Tensor, nn

from tests.strategy.following.test_followed_backward import Noted, assert_same, note


class ModuleHooks(Noted):
    """A hook that looks, one that changes, one before; one that comes in mid-run, and goes again."""

    def __init__(self) -> None:
        super().__init__()
        self.body.register_full_backward_hook(lambda part, given, came: note(round(came[0].norm().item(), 9)))
        self.head.register_full_backward_hook(lambda part, given, came: (given[0] * 2,))
        self.head.register_full_backward_pre_hook(lambda part, came: (came[0].clamp(-0.02, 0.02),))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            self.late = self.head.register_full_backward_hook(lambda part, given, came: note("late"))
        if batch_idx == 5:
            self.late.remove()
        return self.loss_of(self.hidden(batch[0]), batch[1])


class OlderHooks(Noted):
    """The older kind, which torch puts on the last node of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.act.register_backward_hook(lambda part, given, came: (given[0] * 3,))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.loss_of(self.act(self.body(batch[0])), batch[1])


@pytest.mark.parametrize("kind", [ModuleHooks, OlderHooks])
def test_hooks_on_backward_passes_of_modules_are_in_graphs(kind: type[Noted]) -> None:
    assert_same(kind)


def test_hooks_of_modules_may_accumulate() -> None:
    assert_same(ModuleHooks, accumulate_grad_batches=2)
