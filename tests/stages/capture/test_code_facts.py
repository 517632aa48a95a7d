"""What code can look at, read from the code."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch
from torch import nn

from lightning_spmd.stages.capture.code_facts import facts_of
from tests.helpers.modules import MLP, samples
from tests.helpers.training import InOrder, assert_bitwise, fit


def _switches(module: Any) -> Any:
    module.net.eval()
    return module.locals, module.dir()


def _evaluates(module: Any) -> Any:
    return eval("module.net")


def _evaluates_by_module(module: Any) -> Any:
    return builtins.eval("module.net")


def _inside(module: Any) -> Any:
    return [vars(part) for part in module]


@pytest.mark.parametrize(
    ("function", "everything"),
    [(_switches, False), (_evaluates, True), (_evaluates_by_module, True), (_inside, True)],
)
def test_functions_of_python_that_read_everything(function: Any, everything: bool) -> None:
    assert facts_of(function.__code__).everything is everything


class Switches(MLP):
    """A part of the step runs in evaluation mode; a hook keeps a list that the step does not look at."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = nn.Dropout(0.5)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.dropped.eval()
        loss = self.dropped(super().training_step(batch, batch_idx))
        self.dropped.train()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(1.0)


def test_modes_that_are_switched_in_the_step_build_no_graph_for_each_batch() -> None:
    theirs, ours = (_trained(strategy) for strategy in ("auto", "spmd"))
    assert ours.captures <= 2
    assert_bitwise(ours, theirs)


def _trained(strategy: str) -> Any:
    torch.manual_seed(1)
    return fit(Switches(), InOrder(samples("mlp", 48), 8), strategy, max_epochs=1)[0]
