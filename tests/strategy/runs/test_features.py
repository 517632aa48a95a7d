"""Rows of the support matrix (``docs/support_matrix.md``): as eager, or rejected with the fix."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.strategy.support.detectors import Context
from lightning_spmd.strategy.support.feature import Mode
from lightning_spmd.strategy.support.matrix import FEATURES, classify
from tests.helpers.modules import ConvNet, samples
from tests.helpers.ranks import RankPool
from tests.helpers.training import (
    InOrder,
    Result,
    TrainingCase,
    assert_compiled,
    assert_equals_one_device,
    fit,
    one_device,
    train,
    train_on,
)
from tests.strategy.hooks.test_gradient_hooks import OwnClipping
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, loader_of, rows, run


# ---------------------------------------------------------------------- compiled
@pytest.mark.parametrize("scheduling", [{0: 1, 1: 3, 2: 2}, {0: 4}])
def test_gradient_accumulation_scheduler_equals_eager(scheduling: dict[int, int]) -> None:
    """Six batches an epoch: with 4, the last two of an epoch are applied early."""
    assert_as_eager(Net, callbacks=lambda: [GradientAccumulationScheduler(scheduling)])


class OneCycle(Net):
    """OneCycleLR changes the momentum of SGD and the betas of Adam besides lr."""

    kind: Any = torch.optim.SGD

    def configure_optimizers(self) -> Any:
        settings = {"momentum": 0.9} if self.kind is torch.optim.SGD else {}
        optimizer = self.kind(self.parameters(), lr=0.1, **settings)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=18)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OneCycleAdam(OneCycle):
    kind = torch.optim.AdamW


@pytest.mark.parametrize("make", [OneCycle, OneCycleAdam])
def test_one_cycle_never_recaptures(make: type[OneCycle]) -> None:
    ours = assert_as_eager(make, callbacks=lambda: [LearningRateMonitor("step", log_momentum=True)])
    assert ours.captures == (2 if make is OneCycle else 1)  # SGD's momentum begins as the first gradient
    assert not [w for w in ours.warnings if "lr_scheduler.step()" in w]


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss_epoch"}}


def test_reduce_on_plateau_equals_eager() -> None:
    assert_as_eager(Plateau, max_epochs=5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("model", ["gpt", "mlp"])
def test_precision_equals_eager(model: str, precision: str) -> None:
    case = TrainingCase(model, "adamw", batches=5, precision=precision)
    ours, theirs = train(case, "spmd"), one_device(case)
    assert_compiled(ours)
    assert ours.losses == theirs.losses
    assert all(torch.equal(ours.weights[k], v) and ours.weights[k].dtype == v.dtype for k, v in theirs.weights.items())


@pytest.mark.parametrize(
    "flags",
    [
        {"max_steps": 7, "max_epochs": None},
        {"max_epochs": 2, "limit_train_batches": 4},
        {"max_epochs": 2, "limit_train_batches": 0.5},
        {"fast_dev_run": 2},
        {"overfit_batches": 2},
        {"max_steps": 5, "accumulate_grad_batches": 4, "max_epochs": -1},
        {"max_epochs": 2, "val_check_interval": 2, "limit_val_batches": 1},
        {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
        {"deterministic": True},
        {"max_time": "00:01:00:00"},
        {"min_steps": 4},
        {"profiler": "simple"},
        {"max_epochs": 0},
    ],
    ids=str,
)
def test_trainer_flags_equal_eager(flags: dict[str, Any]) -> None:
    theirs, ours = run(Net, "auto", **flags), run(Net, "spmd", **flags)
    assert (ours.losses, ours.logged, ours.final) == (theirs.losses, theirs.logged, theirs.final)


# ---------------------------------------------------------------------- eager
class OwnBackward(Quiet):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.5).backward()


class WatchedGradients(Quiet):
    """As ``wandb.watch`` does it."""

    def on_fit_start(self) -> None:
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)


class NoOptimizer(Quiet):
    def configure_optimizers(self) -> None:
        return None


class OwnIterator(Quiet):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


EAGER: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "backward overridden": (OwnBackward, {}),
    "autograd hooks": (WatchedGradients, {}),
    "no optimizer": (NoOptimizer, {}),
    "dataloader_iter": (OwnIterator, {}),
    "detect_anomaly": (Quiet, {"detect_anomaly": True}),
}


@pytest.mark.parametrize("name", EAGER)
def test_eager_features_train(name: str) -> None:
    make, flags = EAGER[name]
    assert_as_eager(make, mode="eager", **flags)


def _eager_run(name: str, strategy: str) -> Result:
    make, flags = EAGER[name]
    return run(make, strategy, 2, **flags)


@pytest.mark.parametrize("name", [n for n in EAGER if n not in ("no optimizer", "dataloader_iter")])
def test_eager_features_train_as_ddp_on_two_ranks(two_ranks: RankPool, name: str) -> None:
    ours, theirs = two_ranks.run(_eager_run, name, "spmd"), two_ranks.run(_eager_run, name, "ddp")
    means = [sum(losses) / 2 for losses in zip(*(side.losses for side in theirs), strict=True)]
    for a in ours:
        assert a.losses == pytest.approx(means, rel=1e-5)  # outputs["loss"] is the mean of the ranks
        assert all(torch.equal(a.weights[k], v) for k, v in ours[0].weights.items())


# ---------------------------------------------------------------------- rejected
class OwnPrecision(Precision):
    pass


def test_foreign_precision_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match=r"precision plugin OwnPrecision: use 32-true"):
        run(Net, plugins=[OwnPrecision()])


def test_foreign_accelerator_is_rejected() -> None:
    trainer = L.Trainer(strategy="spmd", accelerator="cpu", devices=1, logger=False)
    trainer.strategy.parallel_devices = [torch.device("xpu")]
    module = Net()
    mode, findings = classify(Context(trainer, module, [module.configure_optimizers()]))
    assert mode is Mode.REJECTED
    assert "accelerator 'xpu': use accelerator='cpu' or 'gpu'" in str(findings[0])


def test_pruning_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match=r"ModelPruning.*prune before or after"):
        run(Net, callbacks=lambda: [ModelPruning("l1_unstructured", amount=0.5)])


# ---------------------------------------------------------------------- compiled, with care
class WritesWeights(L.Callback):
    """Weight surgery between batches."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            pl_module.first.weight.mul_(0.99)
            pl_module.last.bias.data = pl_module.last.bias.data.clamp(-0.1, 0.1)


class WritesWeightsItself(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.first.weight.clamp_(-0.3, 0.3)


CALLBACKS = {
    "SWA": lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)],
    "EMA": lambda: [EMAWeightAveraging(decay=0.9)],
    "surgery": lambda: [WritesWeights()],
}


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("make", [Net, WritesWeightsItself])
def test_weight_callbacks_equal_eager(name: str, make: type[Net]) -> None:
    assert_as_eager(make, callbacks=CALLBACKS[name], max_epochs=4)


class DropsGradients(L.Callback):
    """Lightning's batch-norm epoch of SWA ends in an optimizer step with the gradients that the epoch before left."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.zero_grad()


def test_averaging_with_batch_norm_equals_eager() -> None:
    case = TrainingCase("conv", "sgd", count=16 * 5)
    flags = {"max_epochs": 4, "max_steps": -1}
    theirs = train(case, callbacks=[DropsGradients(), *CALLBACKS["SWA"]()], **flags)
    ours = train(case, "spmd", callbacks=[DropsGradients(), *CALLBACKS["SWA"]()], **flags)
    assert_compiled(ours)
    assert ours.losses == theirs.losses
    assert all(torch.equal(ours.weights[k], v) for k, v in theirs.weights.items())


class Backbone(Net):
    """A backbone as BackboneFinetuning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [10])]


class Freezing(Net):
    """Freezes a layer after the first epoch, adds a parameter group after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch != 1)
        if self.current_epoch == 2:
            self.optimizers().optimizer.add_param_group({"params": [self.extra], "lr": 0.01})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.first.parameters(), *self.last.parameters()], lr=0.1, momentum=0.9)


class FreezesInBetween(Net):
    """Freezes a layer that has gradients of one of two micro-batches: the update still takes them."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.first.weight.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 0.05}], ids=str)
def test_a_gradient_of_what_is_frozen_by_now_is_applied(flags: dict[str, Any]) -> None:
    assert_as_eager(FreezesInBetween, accumulate_grad_batches=2, **flags)


def test_unfreezing_recaptures() -> None:
    ours = assert_as_eager(Backbone, callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1)])
    assert ours.captures > 2
    ours = assert_as_eager(Freezing)
    assert ours.captures > 2


def test_sync_batchnorm_changes_nothing(two_ranks: RankPool) -> None:
    case = TrainingCase("conv", "sgd", batches=5, dropout=0.0)
    results = train_on(two_ranks, case, sync_batchnorm=True)
    assert_compiled(*results)
    assert_equals_one_device(results, one_device(case))


class Special(Quiet):
    """A frozen layer, a parameter nobody uses, a layer used twice, and an output tied to an input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decode = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.decode.weight = self.embed.weight
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(6, 6).requires_grad_(False)
        self.alias = self.embed
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.decode(torch.tanh(self.frozen(self.embed(x)))) * self.scale
        return super().forward(torch.tanh(self.alias(x)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)


def test_special_parameters_equal_eager() -> None:
    assert_as_eager(Special)
    assert_as_eager(Special, accumulate_grad_batches=2, gradient_clip_val=0.1)


def test_special_parameters_on_two_ranks_equal_one_device(two_ranks: RankPool) -> None:
    reference = run(Special, "auto", data=lambda: InOrder(rows(), ROWS))
    assert_equals_one_device(two_ranks.run(run, Special, "spmd", 2), reference)


@pytest.mark.parametrize("model", ["gpt", "conv", "mlp"])
def test_ragged_last_batch_equals_eager(model: str) -> None:
    case = TrainingCase(model, batches=8, count=16 * 3 + 6, shuffle=True)
    ours = train(case, "spmd")
    assert_compiled(ours)
    theirs = one_device(case)
    assert (ours.losses, ours.logged, ours.final) == (theirs.losses, theirs.logged, theirs.final)
    assert all(torch.equal(ours.weights[k], v) for k, v in theirs.weights.items())


@pytest.mark.parametrize("model", ["gpt_everything", "conv", "mlp"])
def test_ragged_last_batch_on_two_ranks_equals_one_device(two_ranks: RankPool, model: str) -> None:
    case = TrainingCase(model, batches=8, count=16 * 3 + 6, dropout=0.0)
    assert_equals_one_device(train_on(two_ranks, case), one_device(case))


class Uneven(L.LightningDataModule):
    """Rank 0 gets five rows of each batch of eight, rank 1 three; one device gets them in that order."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        starts = range(0, len(rows()), ROWS)
        if self.trainer.world_size == 1:
            return loader_of(rows())
        chosen = [(s, s + 5) if self.trainer.global_rank == 0 else (s + 5, s + 8) for s in starts]
        batches = [list(range(*c)) for c in chosen]
        return torch.utils.data.DataLoader(rows(), batch_sampler=batches)  # type: ignore[arg-type]


class MeanOfRows(Quiet):
    """Divides by the number of rows, which the graph knows; cross-entropy's own mean counts targets as it runs."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none").mean()


@pytest.mark.parametrize("make", [Quiet, MeanOfRows])
def test_ranks_with_different_numbers_of_rows_equal_one_device(two_ranks: RankPool, make: type[Net]) -> None:
    reference = run(make, "auto", data=Uneven)
    results = two_ranks.run(run, make, "spmd", 2, data=Uneven, use_distributed_sampler=False)
    assert_compiled(*results)
    assert_equals_one_device(results, reference)


class Checkpointed(Net):
    """Recomputes a part with dropout in it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda v: self.dropout(torch.tanh(self.first(v))), x, use_reentrant=False)
        return self.last(hidden)


def test_activation_checkpointing_equals_eager() -> None:
    assert_as_eager(Checkpointed)


class Gathers(Quiet):
    """Contrastive losses gather the other ranks' features; logs what it sees."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        gathered = self.all_gather(logits, sync_grads=True).reshape(-1, 3)
        self.log("rows", float(gathered.shape[0]))
        self.log("reduced", self.trainer.strategy.reduce(logits.mean(), reduce_op="mean"))
        return F.cross_entropy(logits, batch[1]) + gathered.square().mean()


def test_all_gather_in_training_step(two_ranks: RankPool) -> None:
    assert_as_eager(Gathers)
    reference = run(Gathers, "auto", data=lambda: InOrder(rows(), ROWS))
    results = two_ranks.run(run, Gathers, "spmd", 2)
    assert_compiled(*results)
    assert results[0].final["rows"] == ROWS
    assert_equals_one_device(results, reference)


# ---------------------------------------------------------------------- evaluation
def _evaluate(strategy: str, devices: int) -> tuple[Result, dict[str, float], dict[str, float], list[Tensor]]:
    L.seed_everything(11)
    module = ConvNet(dropout=0.0)
    case = TrainingCase("conv", dropout=0.0, count=64)
    data = InOrder(samples("conv", 64), case.rows)
    result, trainer = fit(module, data, strategy, devices, max_epochs=2, limit_val_batches=1.0)
    validated = trainer.validate(module, data, verbose=False)[0]
    tested = trainer.test(module, data, verbose=False)[0]
    predicted = trainer.predict(module, data) or []
    return result, dict(validated), dict(tested), list(predicted)


def test_evaluation_equals_eager() -> None:
    ours, theirs = _evaluate("spmd", 1), _evaluate("auto", 1)
    assert_compiled(ours[0])
    assert ours[0].final == theirs[0].final
    assert ours[1:3] == theirs[1:3]
    assert all(torch.equal(a, b) for a, b in zip(ours[3], theirs[3], strict=True))


def test_evaluation_on_two_ranks_shares_the_data(two_ranks: RankPool) -> None:
    reference = _evaluate("auto", 1)
    results = two_ranks.run(_evaluate, "spmd", 2)
    assert sum(len(p) for _, _, _, predicted in results for p in predicted) == sum(map(len, reference[3]))
    assert results[0][0].losses == pytest.approx(reference[0].losses, rel=1e-5)


def test_every_rejection_names_its_fix() -> None:
    """The note of a rejected row is what the user reads: it says what to do."""
    for feature in FEATURES:
        if feature.mode is Mode.REJECTED:
            assert re.search(r"\b(use|prune|remove|pass|set)\b", feature.note), feature.name


@pytest.mark.parametrize("mode", ["compiled", "split"])
def test_training_twice_with_one_trainer_and_module(mode: str) -> None:
    def twice(strategy: str) -> tuple[list[float], list[Tensor]]:
        L.seed_everything(11)
        module = Net() if mode == "compiled" else OwnClipping()
        losses = []
        _, trainer = fit(module, loader_of(rows()), strategy, max_epochs=1)
        for epochs in (3, 4):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, loader_of(rows()))
            losses.append(float(trainer.callback_metrics["loss_epoch"]))
        again, _ = fit(module, loader_of(rows()), strategy, max_epochs=1)
        return losses + again.losses, [p.detach().clone() for p in module.parameters()]

    ours, theirs = twice("spmd"), twice("auto")
    assert ours[0] == theirs[0]
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
