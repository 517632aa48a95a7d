"""What a rank says when another one is gone: which, and how it ended, not a line about a socket."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import lightning as L
import pytest

from lightning_spmd import SPMDStrategy
from lightning_spmd.stages.runtime.agreement import control, lost_ranks
from tests.helpers.ranks import RankPool, environment, free_port
from tests.helpers.training import QUIET
from tests.strategy.losing import Ends
from tests.strategy.small import Quiet, loader_of, rows

FOLDER = Path(__file__).parents[3]
LOSING = FOLDER / "tests" / "strategy" / "losing.py"
ALONE = {"computes": "metric.compute()", "sums a weight": "next(trainer.model.parameters()).full_tensor()"}


def _lose(how: str) -> list[str]:
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.strategy.losing", how],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=FOLDER,
            env={**os.environ, **environment(rank, 2, port)},
        )
        for rank in range(2)
    ]  # fmt: skip
    return [process.communicate(timeout=120)[0] for process in processes]


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "survivor", "words"),
    [
        ("killed", 0, ["RankLostError: rank 1 is gone: its process", "has ended"]),
        ("first killed", 1, ["RankLostError: rank 0 is gone: its process"]),
        ("exits", 0, ["RankLostError: rank 1 is gone: its process"]),
        ("validates", 0, ["RankLostError: rank 1 is gone: its process"]),
        ("raises", 0, ["RankLostError: rank 1 failed with ValueError: a hook of rank 1 failed (at ", "losing.py:"]),
    ],
)  # fmt: skip
def test_the_rank_that_is_gone_is_named(how: str, survivor: int, words: list[str]) -> None:
    output = _lose(how)[survivor]
    for word in [*words, "This rank was "]:
        assert word in output, output


@pytest.mark.parametrize(
    ("how", "collective"), [("computes", "barrier"), ("sums a weight", "gathering of a sharded tensor")]
)
def test_a_collective_on_one_rank_alone_ends_with_its_line(how: str, collective: str) -> None:
    first, second = _lose(how)
    line = next(n for n, text in enumerate(LOSING.read_text().splitlines(), 1) if f"print(float({ALONE[how]}" in text)
    says = (
        f"rank 0 waits for the others in torch.distributed's {collective}, at {LOSING}:{line}, and rank 1 waits for it"
    )
    assert f"RankDisagreementError: {says} at training batch 2 of epoch 0: one rank alone calls" in second, second
    assert f"rank 1 failed with RankDisagreementError: {says}" in first, first


@pytest.mark.long
def test_sharded_state_that_one_rank_alone_saves_is_no_wait() -> None:
    for output in _lose("saves"):
        assert "RankDisagreementError: the ranks are not at the same batch" in output, output
        assert "rank 0: the state of the module, which all ranks gather for a checkpoint" in output, output


def _raising(how: str) -> tuple[str, str]:
    """Rank 1 raises and its process goes on, so that no connection breaks."""
    strategy = SPMDStrategy()
    trainer = L.Trainer(strategy=strategy, devices=2, max_epochs=1, limit_val_batches=0, callbacks=[Ends(how)], **QUIET)
    looks = mock.patch.object(control, "LOOK_AROUND", timedelta(seconds=0.2))
    with looks, mock.patch.object(lost_ranks, "PATIENCE", 0.3):
        try:
            trainer.fit(Quiet(), loader_of(rows(64), 4))
        except Exception as error:
            return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "", ""


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raises", "ValueError", "a hook of rank 1 failed"),
        ("storage", "RuntimeError", "connection reset by the storage"),  # as torch says of a rank that is gone
    ],
)
def test_a_rank_that_waits_learns_what_another_one_raised(two_ranks: RankPool, how: str, kind: str, words: str) -> None:
    first, second = two_ranks.run(_raising, how)
    assert second == (kind, words)
    assert first[0] == "RankLostError"
    assert f"rank 1 failed with {kind}: {words} (at " in first[1]
    assert "training batch 2 of epoch 0" in first[1]
