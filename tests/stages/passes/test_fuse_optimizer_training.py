"""Every optimizer trains to the same bits with its update in list operators, and schedulers need no new graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spmd.ir.printer import readable
from tests.helpers.ranks import RankPool
from tests.helpers.training import Result, TrainingCase, assert_bitwise, assert_compiled, train
from tests.stages.passes.captured_training import assert_bits_stay

BEFORE = ["bucket_collectives", "split_optimizer"]
LOOPS = {
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "nadam_decoupled",
    "radam",
    "rmsprop_centered",
    "sgd",
    "sgd_dampening",
}
"""Optimizers that update one parameter after the other."""
LEFT_ALONE = {"adam_foreach", "adamw_amsgrad_fused", "lion", "sgd_maximize", "rprop"}
"""Lists already; Python of the user's own, in each step; gradients that are changed one by one before they are
reduced, which leaves no bucket."""


def run(case: TrainingCase, passes: list[str], folder: Path | None = None, **options: Any) -> Result:
    from lightning_spmd import SPMDStrategy

    strategy = SPMDStrategy(passes=passes, dump_dir=folder, bucket_size_mb=0.002, **options)
    return train(case, strategy, torch.distributed.get_world_size() if torch.distributed.is_initialized() else 2)


def assert_unchanged(pool: RankPool, case: TrainingCase, folder: Path, **options: Any) -> str:
    """The same bits with and without the pass; gives the text of the largest graph that it made, which updates."""
    with_pass = pool.run(run, case, [*BEFORE, "fuse_optimizer"], folder, **options)
    plain = pool.run(run, case, BEFORE)
    assert_compiled(*with_pass, *plain)
    for ours, theirs in zip(with_pass, plain, strict=True):
        assert_bitwise(ours, theirs)
        assert ours.captures == theirs.captures
    return max((f.read_text() for f in folder.glob("*_fuse_optimizer.py")), key=len)


@pytest.mark.parametrize("optimizer", sorted(LOOPS | LEFT_ALONE))
def test_the_bits_of_every_optimizer_stay(optimizer: str) -> None:
    case = TrainingCase("mlp", optimizer, batches=3, groups=True, dropout=0.0)
    graphs = [readable(step.graph_module, step.signature) for step in assert_bits_stay(case, BEFORE, "fuse_optimizer")]
    assert ("_foreach_" in graphs[-1]) or optimizer in LEFT_ALONE
    # in the first step counters are entries of a list; read as a whole, the writes to them would not be seen
    assert "each_item(_" not in graphs[0]


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=() if name == "radam" else pytest.mark.long)
        for name in sorted((LOOPS | LEFT_ALONE) - {"lion"})  # whose step is no part of a graph
    ],
)
def test_training_is_bitwise_the_same_for_every_optimizer(two_ranks: RankPool, optimizer: str, tmp_path: Path) -> None:
    case = TrainingCase("mlp", optimizer, batches=8, groups=True)
    graph = assert_unchanged(two_ranks, case, tmp_path)
    if optimizer in LOOPS:
        assert "_foreach_" in graph
    first = min(tmp_path.glob("*_fuse_optimizer.py")).read_text()
    # in the first step counters are entries of a list; read as a whole, the writes to them would not be seen
    assert "each_item(_" not in first


@pytest.mark.parametrize("option", [pytest.param("clip_norm", marks=pytest.mark.long), "clip_value", "accumulate_clip"])
def test_clipping_and_accumulation_are_bitwise_the_same(two_ranks: RankPool, option: str, tmp_path: Path) -> None:
    graph = assert_unchanged(two_ranks, TrainingCase("mlp", "adamw", option, batches=9), tmp_path)
    assert ("_foreach_norm" if "norm" in option or "accumulate" in option else "_foreach_clamp_min_") in graph


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.long), "nadam"])
def test_a_scheduler_changes_lr_without_a_new_graph(two_ranks: RankPool, optimizer: str, tmp_path: Path) -> None:
    case = TrainingCase("mlp", optimizer, batches=5, scheduler="one_cycle", groups=True, dropout=0.1)
    graph = assert_unchanged(two_ranks, case, tmp_path)
    assert "each_pow(hyper_parameter_group_0_betas_1_" in graph
    assert "(hyper_parameter_group_0_lr" in graph


def test_updates_in_lists_may_run_inside_the_next_iteration(two_ranks: RankPool, tmp_path: Path) -> None:
    case = TrainingCase("gpt", "adamw", batches=8, scheduler="cosine")
    assert_unchanged(two_ranks, case, tmp_path, overlap_iterations=True)
    deferred = max(tmp_path.glob("*_cleanup.py")).read_text()
    assert "_foreach_addcdiv_" in deferred
