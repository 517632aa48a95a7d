"""The graphs of a real training, captured on one device once, as programs of simulated ranks.

For passes that must leave the bits of every optimizer alone: training on real ranks, with and without the pass, costs
five times as much and shows no more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_spmd import SPMDStrategy
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.passes import PASSES, PassState, run_passes, select
from tests.helpers.modules import samples
from tests.helpers.simulate import expand_all
from tests.helpers.training import InOrder, TrainingCase, fit
from tests.stages.passes.with_passes import assert_same_bits

ROWS = (8, 8)


class _KeepInputs(L.Callback):
    """The values that each graph reads, as they are after its first run."""

    def __init__(self) -> None:
        self.inputs: dict[int, list[Any]] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for index, executable in enumerate(trainer.strategy._training.iteration.table.executables):
            if index not in self.inputs:
                values = executable.inputs(Batch(batch).tensor_values)
                self.inputs[index] = [v.detach().clone() if isinstance(v, Tensor) else v for v in values]


@functools.cache
def captured_training(case: TrainingCase) -> list[tuple[CapturedStep, list[Any]]]:
    """(graph, values of its inputs) of every graph that three steps on one device need."""
    keeps, strategy = _KeepInputs(), SPMDStrategy()
    data = InOrder(samples(case.model, case.count, case.seed), case.rows)
    fit(case.module(), data, strategy, callbacks=[keeps], **{**case.flags(), "max_steps": 3})
    assert strategy._training.iteration is not None
    executables = strategy._training.iteration.table.executables
    return [(executable.captured, keeps.inputs[index]) for index, executable in enumerate(executables)]


def passed(captured: CapturedStep, names: Sequence[str]) -> list[ShardedStep]:
    """Two ranks' programs after these passes, in small buckets."""
    steps = expand_all(captured, ROWS)
    for step in steps:
        run_passes(step, select(list(names), PASSES), PassState(bucket_size_mb=0.002))
    return steps


def assert_bits_stay(case: TrainingCase, before: Sequence[str], name: str) -> list[ShardedStep]:
    """A pass changes no bit of any graph of a training; gives the first rank's programs after it."""
    found = []
    for captured, live in captured_training(case):
        torch.manual_seed(5)
        steps = passed(captured, [*before, name])
        assert_same_bits(passed(captured, before), steps, live)
        found.append(steps[0])
    return found
