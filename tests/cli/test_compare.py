"""``lightning-spmd compare`` end to end, what it refuses, and what its measuring counts."""

import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_spmd.cli import compare
from lightning_spmd.report.compare_table import Comparison
from lightning_spmd.report.measure import Amount, SideResult, StepMarks, measure
from lightning_spmd.report.peak_memory import PeakMemory
from lightning_spmd.report.sides import Side, spmd_side

from .recipe import tiny

pytest.importorskip("jsonargparse")

AMOUNT = Amount(steps=4, warmup=2, rounds=2)
SHORT = ("--steps", "4", "--warmup", "3", "--rounds", "2")


@pytest.fixture(autouse=True, scope="module")
def collections_are_short() -> None:
    """Every turn collects garbage twice: what other tests hold need not be looked at each time."""
    gc.collect()
    gc.freeze()


class Line(L.LightningModule):
    """A line with dropout, so that a training that is not seeded anew has another loss."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.pause = pause

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.dropout(self.layer(batch[0]), 0.5).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self.pause)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def builder(batches: int = 50, pause: float = 0.0, seen: list[L.Trainer] | None = None) -> Any:
    """A ``Build`` of a small training in this process, on one device."""

    def build(strategy: Any, flags: dict[str, Any], callbacks: list[L.Callback]) -> tuple[Any, Any, Any]:
        L.seed_everything(1, verbose=False)
        trainer = L.Trainer(**flags, strategy=strategy, callbacks=callbacks, accelerator="cpu", devices=1)
        if seen is not None:
            seen.append(trainer)
        return trainer, Line(pause), DataLoader(TensorDataset(torch.randn(2 * batches, 3)), batch_size=2, shuffle=True)

    return build


def nothing(name: str, number: int) -> None:
    """Nobody is told whose turn it is."""


def eager(name: str = "eager") -> Side:
    return Side(name, lambda: SingleDeviceStrategy(torch.device("cpu")))


def run_compare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_spmd.cli.main", "compare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)


# ---------------------------------------------------------------------- the command
def test_two_processes_train_under_each_strategy_in_turn(text: Path, tmp_path: Path) -> None:
    variants = '{"spmd": {}, "no network": {"process_group_backend": "mpi"}}'
    file, results = tmp_path / "out" / "comparison.json", tmp_path / "results"
    done = run_compare(
        tmp_path,
        *tiny(text, results, "--trainer.devices", "2", "--against", "auto,ddp,ddp:1,fsdp2"),
        *("--variants", variants, "--output", str(file), *SHORT),
    )
    assert done.returncode == 0, done.stderr
    comparison = json.loads(file.read_text())
    sides = {side["name"]: side for side in comparison["sides"]}
    assert list(sides) == ["auto", "ddp", "ddp:1", "fsdp2", "spmd", "no network"]
    assert comparison["ranks"] == 2
    # failed on both ranks, before and after strategies that ran
    assert "mpi" in sides.pop("no network")["reason"].lower()
    for name, side in sides.items():
        assert "reason" not in side, side
        # batches of 2 on 2 ranks; an epoch of 4 batches ends in the middle of the 4 steps, and that step is left out
        assert len(side["seconds"]) == 2 * 3, name
        assert side["samples_per_second"] == pytest.approx(4 / side["median_seconds"])
        assert side["loss_difference"] < 1e-5
        assert name in done.stdout
    assert sides["auto"]["ratio_to_first"] == 1.0
    assert sides["spmd"]["ratio_to_spmd"] == 1.0
    # once, by rank 0; nothing of the recipe that prints or saves
    assert done.stdout.count("÷ spmd") == 1
    assert "sample 1 of 3" not in done.stdout
    assert not results.exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--against", "dpp"), ["'dpp'", "known are auto, ddp, ddp_compile, fsdp2, spmd", "Did you mean 'ddp'?"]),
        (("--against", "ddp:small"), ["'ddp:small'", "ddp:MB"]),
        (("--against", "ddp:0"), ["'ddp:0'", "above 0"]),
        (("--against", "ddp,ddp"), ["'ddp' twice"]),
        (("--against", "", "--variants", "{}"), ["nothing to compare"]),
        (("--variants", '{"a": {"overlap": true}}'), ["'a'", "'overlap'", "overlap_iterations"]),
        (("--variants", '{"a": {"bucket_size_mb": -1}}'), ["bucket_size_mb=-1"]),
        (("--steps", "1"), ["--steps 1", "at least 2"]),
        (("--stepps", "9"), ["stepps"]),
    ],
)
def test_a_wrong_argument_is_named(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: list[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        compare.main(tiny(text, tmp_path / "results", *arguments))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert all(part in error for part in named), error
    assert len(error.splitlines()) < 20


def test_the_recipes_own_options_of_the_strategy_are_every_variants(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = ("--trainer.strategy", "lightning_spmd.SPMDStrategy", "--trainer.strategy.init_args.bucket_size_mb", "3")
    monkeypatch.setattr(sys, "argv", ["lightning-spmd"])  # Lightning warns where both give arguments
    variants = ("--variants", '{"spmd": {}, "other": {"bucket_size_mb": 4, "overlap_iterations": false}}')
    recipe = compare.Recipe(args=tiny(text, tmp_path, *strategy, *variants), run=False, save_config_callback=None)
    made = {side.name: side.strategy() for side in recipe.sides()}
    assert made["spmd"].build_options.bucket_size_mb == 3
    assert made["spmd"].build_options.overlap_iterations == "auto"
    assert made["other"].build_options.bucket_size_mb == 4
    assert made["other"].build_options.overlap_iterations is False


def test_callbacks_of_the_training_stay_and_those_that_watch_it_go(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-spmd"])
    arguments = tiny(
        text, tmp_path / "results", "--trainer.callbacks+", "lightning.pytorch.callbacks.EMAWeightAveraging"
    )
    recipe = compare.Recipe(args=arguments, run=False, save_config_callback=None)
    trainer, _, _ = recipe.build("auto", {"enable_checkpointing": False, "logger": False}, [])
    callbacks: list[L.Callback] = vars(trainer)["callbacks"]
    kinds = {type(callback).__name__ for callback in callbacks}
    assert "EMAWeightAveraging" in kinds
    assert not kinds & {"SampleText", "LearningRateMonitor", "SPMDProgressBar", "ModelCheckpoint"}


# ---------------------------------------------------------------------- measuring
def test_every_turn_begins_alike() -> None:
    results = measure([eager("a"), eager("b"), spmd_side("c", {})], builder(), AMOUNT, nothing)
    losses = {loss for result in results for loss in result.losses}
    assert len(losses) == 1
    assert [len(r.losses) for r in results] == [2, 2, 2]


def test_sides_take_turns_in_alternating_order() -> None:
    turns: list[str] = []
    measure([eager("a"), eager("b")], builder(), AMOUNT, lambda name, number: turns.append(f"{name}{number}"))
    assert turns == ["a0", "b0", "b1", "a1"]


def test_a_failing_side_is_asked_once_and_the_others_go_on() -> None:
    def broken() -> Any:
        raise RuntimeError("\nno network\n  " + 600 * "x")

    turns: list[str] = []
    sides = [Side("broken", broken), eager()]
    results = measure(sides, builder(), AMOUNT, lambda name, number: turns.append(name))
    assert turns == ["broken", "eager", "eager"]
    assert results[0].reason == f"RuntimeError: no network {489 * 'x'} ..."
    assert results[1].reason is None
    table = Comparison(results, AMOUNT, 1).table_text()
    assert "broken: did not run: RuntimeError: no network" in table
    row = Comparison(results, AMOUNT, 1).as_json()["sides"][0]
    assert row == {"name": "broken", "reason": results[0].reason, "notes": []}


def test_what_happens_between_two_batches_belongs_to_the_step() -> None:
    (result,) = measure([eager()], builder(pause=0.02), AMOUNT, nothing)
    assert min(result.seconds) >= 0.02


def test_steps_that_an_epoch_ends_are_left_out_and_no_more_batches_run_than_planned() -> None:
    seen: list[L.Trainer] = []
    (result,) = measure([eager()], builder(batches=3, seen=seen), AMOUNT, nothing)
    # batches 0..6 in epochs of 3: steps 2 to 5 are measured, 2→3 and 5→6 cross an epoch
    assert len(result.seconds) == 2 * 2
    assert [trainer.global_step for trainer in seen] == [AMOUNT.batches] * 2


def test_epochs_of_one_batch_are_an_error() -> None:
    (result,) = measure([eager()], builder(batches=1), AMOUNT, nothing)
    assert result.reason == "RuntimeError: no step was measured: every epoch has one batch. Give it more data"


def test_a_training_that_ends_too_early_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended after 0 of 7 batches"):
        StepMarks(AMOUNT, PeakMemory()).seconds()


def test_what_the_strategy_says_is_kept() -> None:
    side = Side("spmd", spmd_side("spmd", {}).strategy, _with_gradient_hook)
    (result,) = measure([side], builder(), AMOUNT, nothing)
    assert result.reason is None
    assert any("runs this training" in note for note in result.notes), result.notes


def _with_gradient_hook(module: L.LightningModule) -> L.LightningModule:
    next(module.parameters()).register_hook(lambda gradient: 2 * gradient)
    return module


def test_peak_memory_sees_what_was_freed_and_not_what_came_before() -> None:
    megabytes = 64
    memory = PeakMemory()
    before = torch.ones(megabytes * 2**18)
    del before
    memory.begin(torch.device("cpu"))
    low = memory.peak()
    during = torch.ones(megabytes * 2**18)
    del during
    high = memory.peak()
    if not Path("/proc/self/clear_refs").exists():
        assert low is high is None
        return
    assert low is not None
    assert high is not None
    assert low < megabytes * 2**20 * 0.8
    assert high >= megabytes * 2**20 * 0.95


def test_bytes_sent_are_those_of_the_measured_steps() -> None:
    counts = iter([100, 140, 1000, 1080])  # read when warm-up ends and when the last step does, twice
    (result,) = measure([eager()], builder(), AMOUNT, nothing, lambda: next(counts))
    assert result.sent == [40 / 4, 80 / 4]
    assert "sent MiB" in Comparison([result], AMOUNT, 1).table_text()
    assert Comparison([result], AMOUNT, 1).row(result)["sent_bytes_per_step"] == 15


def test_ratios_and_spread_are_of_the_medians() -> None:
    slow = SideResult("slow", seconds=[0.1, 0.2, 0.3], rows=4, memory=[5, 9, 7], losses=[2.0, 2.0])
    fast = SideResult("fast", seconds=[0.1, 0.1, 0.1], rows=4, losses=[2.002])
    comparison = Comparison([slow, fast], AMOUNT, 2, ("fast",))
    first, second = (comparison.row(r) for r in comparison.results)
    assert (first["median_seconds"], first["ratio_to_spmd"], first["peak_memory_bytes"]) == (0.2, 2.0, 7)
    assert (first["p10_seconds"], first["p90_seconds"]) == (pytest.approx(0.12), pytest.approx(0.28))
    assert second["ratio_to_first"] == 0.5
    assert second["samples_per_second"] == 40
    assert second["peak_memory_bytes"] is None
    assert second["loss_difference"] == pytest.approx(1e-3)
    assert json.loads(comparison.json_text())["ranks"] == 2


def test_results_that_cannot_be_written_are_printed_and_the_reason_told(tmp_path: Path) -> None:
    printed = mock.Mock(spec=Comparison)
    printed.json_text.return_value = "{}"
    with pytest.raises(SystemExit, match=r"--output .*: .*directory"):
        compare._report(printed, str(tmp_path))
    printed.print_to.assert_called_once()
