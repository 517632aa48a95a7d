"""Iterations that overlap: nobody can tell, except by the clock."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_spmd.stages.runtime.executor import Executable
from tests.helpers.modules import samples
from tests.helpers.ranks import RankPool
from tests.helpers.training import (
    InOrder,
    Result,
    TrainingCase,
    assert_bitwise,
    assert_compiled,
    fit,
    train_on,
)
from tests.strategy.checkpoints.test_checkpoint import StatefulLoader, _assert_continues

SMALL = 0.01
"""MiB: several buckets also in small models."""
OPTIMIZERS = ("sgd", "adamw_amsgrad_foreach", "rmsprop", "radam")
_SHORT = ("adamw_amsgrad_foreach", "radam")


def deferring(trainer: L.Trainer) -> int:
    """How many of a run's graphs leave work to the next iteration."""
    iteration = trainer.strategy._training.iteration  # type: ignore[attr-defined]
    return sum(e.graphs.cleanup is not None for e in iteration.table.executables)


# ---------------------------------------------------------------- same bits
@pytest.mark.parametrize(
    ("model", "optimizer", "option"),
    [pytest.param("mlp", n, "plain", marks=() if n in _SHORT else pytest.mark.long) for n in OPTIMIZERS]
    + [
        ("mlp", "adamw_fused", "accumulate_clip"),
        ("conv", "sgd", "accumulate"),
        pytest.param("gpt", "adamw_fused", "accumulate_clip", marks=pytest.mark.long),
        pytest.param("gpt", "adamw_fused", "plain", marks=pytest.mark.long),
        pytest.param("gpt", "adamw_fused", "clip_value", marks=pytest.mark.long),
        pytest.param("conv", "adamw", "plain", marks=pytest.mark.long),
    ],
)
def test_overlap_changes_no_bit(two_ranks: RankPool, model: str, optimizer: str, option: str) -> None:
    scheduler = None if optimizer == "adagrad" else "one_cycle"  # which wants a momentum to change
    case = TrainingCase(model, optimizer, option, batches=12, scheduler=scheduler)
    plain = train_on(two_ranks, case, {"overlap_iterations": False, "bucket_size_mb": SMALL})
    ours = train_on(two_ranks, case, {"overlap_iterations": True, "bucket_size_mb": SMALL})
    assert_compiled(*plain, *ours)
    for a, b in zip(ours, plain, strict=True):
        assert_bitwise(a, b)


class Snapshots(L.Callback):
    """Weights as hooks that run outside of batches see them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, dict[str, Tensor]]] = []

    def keep(self, hook: str, trainer: Any, module: Any) -> None:
        weights = {k: v.detach().clone() for k, v in module.named_parameters()}
        self.seen.append((hook, trainer.global_step, weights))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.keep("train_epoch_start", trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.keep("train_epoch_end", trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.keep("validation_start", trainer, pl_module)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.keep("validation_batch_end", trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.keep("exception", trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.keep("train_end", trainer, pl_module)


def snapshots(overlap: Any, folder: Path, **flags: Any) -> tuple[list[Any], dict[str, Any], int]:
    """What hooks saw and checkpoints hold, and how many graphs deferred."""
    case = TrainingCase("gpt", "adamw", scheduler="one_cycle")
    watcher = Snapshots()
    callbacks: list[L.Callback] = [watcher, LearningRateMonitor()]
    if flags.pop("save", False):
        weights = {"save_weights_only": True, "every_n_train_steps": 1}
        for name, settings in (("weights{step}", weights), ("{step}", {"every_n_train_steps": 3})):
            callbacks.append(ModelCheckpoint(folder, filename=name, save_top_k=-1, **settings))  # type: ignore[arg-type]
    data = InOrder(samples("gpt", 16 * 6), 16)
    strategy = {"overlap_iterations": overlap, "bucket_size_mb": SMALL}
    settings = {"max_epochs": 2, "limit_val_batches": 2, **flags}
    _, trainer = fit(case.module(), data, strategy, 2, callbacks, **settings)
    saved = {f.name: torch.load(f, weights_only=True) for f in sorted(folder.glob("*.ckpt"))}
    return watcher.seen, saved, deferring(trainer)


@pytest.mark.parametrize(
    "flags",
    [
        {"val_check_interval": 3, "max_steps": 8},
        {"save": True, "enable_checkpointing": True, "limit_train_batches": 6, "accumulate_grad_batches": 2},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"val_check_interval": 3}, marks=pytest.mark.long),
        pytest.param({"max_steps": 11}, marks=pytest.mark.long),
        pytest.param({"limit_train_batches": 6, "accumulate_grad_batches": 2}, marks=pytest.mark.long),
        pytest.param({"save": True, "enable_checkpointing": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_hooks_and_checkpoints_see_the_same_bits(two_ranks: RankPool, tmp_path: Path, flags: dict[str, Any]) -> None:
    plain = two_ranks.run(snapshots, False, tmp_path / "plain", **flags)
    ours = two_ranks.run(snapshots, True, tmp_path / "ours", **flags)
    for (seen, saved, deferred), (wanted, wanted_saved, undeferred) in zip(ours, plain, strict=True):
        assert (deferred > 0, undeferred) == (True, 0)
        assert [s[:2] for s in seen] == [s[:2] for s in wanted]
        for (hook, step, weights), (_, _, expected) in zip(seen, wanted, strict=True):
            assert all(torch.equal(weights[k], v) for k, v in expected.items()), (hook, step)
        assert saved.keys() == wanted_saved.keys()
        assert ("save" in flags) == bool(saved)
        for name, checkpoint in saved.items():
            expected = wanted_saved[name]
            assert all(torch.equal(checkpoint["state_dict"][k], v) for k, v in expected["state_dict"].items()), name
            assert str(checkpoint.get("optimizer_states")) == str(expected.get("optimizer_states")), name


class Fails(L.LightningModule):
    """Raises in a hook in mid-epoch, on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(L.Callback):
    """Raises before the eighth batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8:
            raise ValueError("the disk is full")


def broken_run(overlap: bool) -> dict[str, Tensor]:
    L.seed_everything(2)
    watcher, data = Snapshots(), DataLoader(torch.randn(128, 32), batch_size=4)  # type: ignore[arg-type]
    strategy = {"overlap_iterations": overlap, "bucket_size_mb": SMALL}
    with pytest.raises(ValueError, match="disk is full"):
        fit(Fails(), data, strategy, 2, [watcher, Stop()], max_epochs=1)
    return next(weights for hook, _, weights in watcher.seen if hook == "exception")


def test_an_exceptions_handlers_see_the_same_bits(two_ranks: RankPool) -> None:
    for ours, plain in zip(two_ranks.run(broken_run, True), two_ranks.run(broken_run, False), strict=True):
        assert all(torch.equal(ours[k], v) for k, v in plain.items())


def resumed(folder: Path, resume: Path | None) -> Result:
    case = TrainingCase("gpt", "adamw", count=16 * 4, scheduler="one_cycle")
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=3)
    loader = StatefulLoader(samples("gpt", case.count), 8)
    strategy = {"overlap_iterations": True, "bucket_size_mb": SMALL}
    flags = {"max_epochs": 2, "enable_checkpointing": True, "use_distributed_sampler": False}
    return fit(case.module(), loader, strategy, 2, [saver], resume, **flags)[0]


def test_resume_in_mid_epoch_is_bitwise(two_ranks: RankPool, tmp_path: Path) -> None:
    whole = two_ranks.run(resumed, tmp_path, None)
    again = two_ranks.run(resumed, tmp_path / "again", tmp_path / "step=9.ckpt")
    for ours, wanted in zip(again, whole, strict=True):
        _assert_continues(ours, wanted)


class Tuned(Fails):
    """Its learning rate is looked for."""

    lr = 0.1


def behind_a_tuner(overlap: bool, folder: Path) -> tuple[dict[str, Tensor], int]:
    """Weights of a training behind another one, whose weights a checkpoint undid."""
    L.seed_everything(2)
    data = DataLoader(torch.randn(64, 32), batch_size=4)  # type: ignore[arg-type]
    strategy, tuner = {"overlap_iterations": overlap, "bucket_size_mb": SMALL}, LearningRateFinder(num_training_steps=6)
    result, trainer = fit(Tuned(), data, strategy, 2, [tuner], max_epochs=1, default_root_dir=folder)
    return result.weights, deferring(trainer)


def test_what_a_tuner_leaves_changes_no_restored_weight(two_ranks: RankPool, tmp_path: Path) -> None:
    ours, plain = (two_ranks.run(behind_a_tuner, overlap, tmp_path) for overlap in (True, False))
    for (weights, deferred), (expected, _) in zip(ours, plain, strict=True):
        assert deferred > 0
        assert all(torch.equal(weights[k], v) for k, v in expected.items())


class Ragged(L.LightningDataModule):
    """Batches of two sizes in turn."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        batches = [torch.randn(4 if i % 3 else 2, 32, generator=generator) for i in range(24)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def ragged(overlap: bool) -> tuple[dict[str, Tensor], int]:
    L.seed_everything(2)
    strategy = {"overlap_iterations": overlap, "bucket_size_mb": SMALL}
    flags = {"max_epochs": 2, "use_distributed_sampler": False}
    result, trainer = fit(Fails(), Ragged(), strategy, 2, **flags)
    assert result.mode == "compiled"
    return result.weights, deferring(trainer)


def test_batches_of_other_shapes_take_over_pending_work(two_ranks: RankPool) -> None:
    for (ours, deferred), (plain, _) in zip(two_ranks.run(ragged, True), two_ranks.run(ragged, False), strict=True):
        assert deferred == 2
        assert all(torch.equal(ours[k], v) for k, v in plain.items())


class Reads(Fails):
    """Keeps or uses values that it reads.

    Args:
        kind: what it does.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.seen = kind, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        state = self.trainer.optimizers[0].state
        if self.kind == "cleared" and batch_idx % 7 == 5:
            state.clear()
            return super().training_step(batch, batch_idx)
        for each in state.values() if self.kind == "damped" else ():
            each["momentum_buffer"].mul_(0.8)
        if self.kind == "swapped" and batch_idx == 11:
            self.net[2].weight = torch.nn.Parameter(self.net[2].weight.detach() * 0.5)
        if self.kind == "early":
            hidden = self.net[:2](batch)
            self.seen.append(hidden.abs().mean().item())
            return (self.net[2:](hidden / (1 + self.seen[-1])) - batch).square().mean()
        if self.kind == "rows" or (self.kind == "late" and batch_idx > 9):
            first = batch[:, 0]
            batch = batch[(first > 0.3) | (first == first.max())]  # never none: their mean would be NaN
            self.seen.append(len(batch))
        loss = super().training_step(batch, batch_idx)
        if (self.kind == "alone" and (self.trainer.global_rank or batch_idx % 3)) or self.kind == "late":
            return loss
        self.seen.append(loss.item())
        if self.kind == "branch" and self.seen[-1] > 1.0:
            return loss * 0.5
        return loss * (1 + self.seen[-1]) if self.kind == "number" else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def reading(kind: str, overlap: bool, **flags: Any) -> tuple[Result, list[float], int, int]:
    """Result, what was read, graphs that defer, and how often a run that was read from began with deferred work."""
    L.seed_everything(2)
    began, talk = list[bool](), Executable.talk

    def watched(self: Executable, batch: Any, pending: Any = None) -> Any:
        began.append(pending is not None)
        return talk(self, batch, pending)

    module = Reads(kind)
    strategy = {"overlap_iterations": overlap, "bucket_size_mb": SMALL, **flags.pop("plan", {})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executable, "talk", watched)
        data = DataLoader(torch.randn(160, 32), batch_size=4)  # type: ignore[arg-type]
        result, trainer = fit(
            module, data, strategy, 2, [ReadsWeights()] * flags.pop("looks", 0), max_epochs=2, **flags
        )
    return result, module.seen, deferring(trainer), sum(began)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("branch", {"plan": {"rematerialize": 0.5}}),
        ("late", {}),
        ("cleared", {}),
        ("number", {"looks": 1}),
        *[
            pytest.param(kind, flags, marks=pytest.mark.long)
            for kind, flags in (
                ("kept", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
                ("branch", {"accumulate_grad_batches": 2}),
                ("branch", {"plan": {"data_parallel": "zero3"}}),
                *[(kind, {}) for kind in ("early", "rows", "damped", "swapped", "alone")],
            )
        ],
    ],
)
def test_steps_that_read_overlap_as_others_do(two_ranks: RankPool, kind: str, flags: dict[str, Any]) -> None:
    ours, plain = (two_ranks.run(reading, kind, overlap, **flags) for overlap in (True, False))
    for (result, seen, deferred, began), (wanted, expected, _, never) in zip(ours, plain, strict=True):
        assert_compiled(result, wanted)
        assert_bitwise(result, wanted)
        assert seen == pytest.approx(expected, rel=1e-5)  # by another graph until the step's graphs are final
        assert never == 0
        assert deferred > 0
        assert began >= (0 if kind == "alone" or "looks" in flags else 9), began


class Forgets(L.Callback):
    """Clears the optimizer's state between two batches, and counts what has some."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:  # type: ignore[override]
        self.sizes.append(len(trainer.optimizers[0].state))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:  # type: ignore[override]
        if trainer.global_step % 5 == 4:
            trainer.optimizers[0].state.clear()


def forgetting(overlap: bool) -> tuple[dict[str, Tensor], list[int], int]:
    L.seed_everything(2)
    callback, data = Forgets(), DataLoader(torch.randn(96, 32), batch_size=4)  # type: ignore[arg-type]
    strategy = {"overlap_iterations": overlap, "bucket_size_mb": SMALL}
    result, trainer = fit(Reads("plain"), data, strategy, 2, [callback], max_epochs=1)
    return result.weights, callback.sizes, deferring(trainer)


def test_a_hook_may_clear_the_optimizers_state(two_ranks: RankPool) -> None:
    ours, plain = (two_ranks.run(forgetting, overlap) for overlap in (True, False))
    for (weights, sizes, deferred), (expected, wanted, _) in zip(ours, plain, strict=True):
        assert deferred > 0
        assert sizes == wanted
        assert 0 in sizes[1:]
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


# ---------------------------------------------------------------- when it is on
class ReadsWeights(L.Callback):
    """Looks at weights between batches."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.norms.append(sum(p.square().sum().item() for p in pl_module.parameters()))


class StepsItself(Fails):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(optimizer_closure)


class KeepsText(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def announced(
    overlap: Any, callbacks: list[L.Callback], make: type[L.LightningModule] | None = None
) -> tuple[str, int, list[float]]:
    """(what was said, graphs that defer, what a reader saw) of a run without the tests' own recorder."""
    L.seed_everything(2)
    from lightning_spmd import SPMDStrategy

    said = KeepsText()
    logger = logging.getLogger("lightning_utilities.core.rank_zero")
    loggers = [logger, logging.getLogger("lightning.pytorch.utilities.rank_zero")]
    for each in loggers:
        each.addHandler(said)
        each.setLevel(logging.INFO)
    saving = any(isinstance(c, ModelCheckpoint) for c in callbacks)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=SPMDStrategy(overlap_iterations=overlap, bucket_size_mb=SMALL),
        max_epochs=1, callbacks=callbacks, logger=False, enable_checkpointing=saving, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit((make or Fails)(), DataLoader(torch.randn(96, 32), batch_size=4))  # type: ignore[arg-type]
    for each in loggers:
        each.removeHandler(said)
    return said.text, deferring(trainer), [n for c in callbacks for n in getattr(c, "norms", [])]


def test_auto_trusts_lightnings_own_callbacks_and_decides_by_measurement(two_ranks: RankPool, tmp_path: Path) -> None:
    callbacks = [Timer(), ModelCheckpoint(tmp_path, every_n_train_steps=7), GradientAccumulationScheduler({5: 2})]
    text, deferred, _ = two_ranks.run(announced, "auto", callbacks)[0]
    assert "is off" not in text
    assert (
        f"overlaps iterations: {'the updates of' if deferred else 'nothing moves, the network is fast enough'}" in text
    )


def test_a_callback_that_looks_sees_what_it_would_without_overlap(two_ranks: RankPool) -> None:
    ours, plain = (two_ranks.run(announced, overlap, [ReadsWeights()]) for overlap in (True, False))
    for (text, deferred, seen), (_, _, expected) in zip(ours, plain, strict=True):
        assert deferred == 1
        assert seen == expected
        assert len(seen) == 12
        assert "ReadsWeights" not in text


def test_who_overrides_the_step_itself_is_named(two_ranks: RankPool) -> None:
    auto, insisting = (two_ranks.run(announced, overlap, [], StepsItself) for overlap in ("auto", True))
    assert [deferred for _, deferred, _ in (*auto, *insisting)] == [0, 0, 1, 1]
    assert "overlap_iterations='auto' is off: StepsItself.optimizer_step may look at weights" in auto[0][0]
    assert "overlap_iterations=True: StepsItself.optimizer_step may see weights without" in insisting[0][0]
