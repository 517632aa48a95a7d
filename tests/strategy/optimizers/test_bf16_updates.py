"""``bf16_updates``: bfloat16 weights that are updated in float32, with masters or with stochastic rounding."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.stages.capture.optimizer.bf16_updates import MASTER
from lightning_spmd.strategy.notices import builds
from tests.helpers.modules import OPTIMIZERS, build_optimizer
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_bitwise, fit
from tests.strategy.small import ROWS, Quiet, rows

MASTERS, STOCHASTIC = {"bf16_updates": "master"}, {"bf16_updates": "stochastic"}
ZERO2, ZERO3 = {"data_parallel": "zero2"}, {"data_parallel": "zero3"}


class Small(Quiet):
    """In bfloat16."""

    def __init__(self, optimizer: str, lr: float = 1e-3) -> None:
        super().__init__()
        self.kind, self.lr = optimizer, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss((batch[0].to(self.first.weight.dtype), batch[1]))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return build_optimizer(self.kind, self.parameters(), lr=self.lr)


def trained(
    strategy: Any, devices: int = 1, optimizer: str = "adamw", callbacks: Any = (), lr: float = 1e-3, **flags: Any
) -> Result:
    """Twelve batches."""
    L.seed_everything(5)
    module = Small(optimizer, lr)
    flags = {"max_epochs": 2, "precision": "bf16-true", **flags}
    return fit(module, InOrder(rows(), ROWS), strategy, devices, callbacks, **flags)[0]


def by_hand(optimizer: str, steps: int = 12, clip: float | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """The loop that masters stand for, as it is written by hand."""
    L.seed_everything(5)
    module = Small(optimizer).bfloat16()
    masters = [p.detach().float() for p in module.parameters()]
    made = build_optimizer(optimizer, masters, lr=1e-3)
    losses, data = [], rows()
    for step in range(steps):
        batch = data[step * ROWS % len(data) :][:ROWS]
        x, y = torch.stack([r[0] for r in batch]).bfloat16(), torch.stack([r[1] for r in batch])
        module.zero_grad()
        loss = module.loss((x, y))
        loss.backward()
        for master, p in zip(masters, module.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        made.step()
        with torch.no_grad():
            for master, p in zip(masters, module.parameters(), strict=True):
                p.copy_(master)
        losses.append(float(loss.detach()))
    return losses, {k: v.detach().clone() for k, v in module.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_fused", "rmsprop"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_masters_are_the_loop_written_by_hand(optimizer: str, clip: float | None) -> None:
    losses, weights = by_hand(optimizer, clip=clip)
    ours = trained(MASTERS, optimizer=optimizer, gradient_clip_val=clip)
    assert ours.mode == "compiled"
    assert ours.losses == losses
    assert all(torch.equal(ours.weights[k], v) for k, v in weights.items())
    assert all(v.dtype is torch.float32 for v in ours.optimizer_state.values() if isinstance(v, Tensor))
    assert sum(key.endswith(f"/{MASTER}") for key in ours.optimizer_state) == len(weights)


def test_accumulated_gradients_are_updated_once() -> None:
    ours = trained(MASTERS, accumulate_grad_batches=3)
    split = trained(MASTERS, accumulate_grad_batches=3, callbacks=(_Looks(),))
    assert split.mode == "split"
    assert_bitwise(split, ours)


class _Looks(L.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert all(p.grad.dtype is torch.bfloat16 for p in pl_module.parameters())


# ---------------------------------------------------------------------- tiny updates
def _progress(strategy: Any, precision: str, devices: int = 1) -> Tensor:
    """How far 200 steps take a weight, by SGD whose every update is a thousandth of it."""
    L.seed_everything(5)
    module = _Drifts()
    fit(module, InOrder([torch.ones(1)] * 800, 4), strategy, devices, max_epochs=1, precision=precision)
    weight = module.weight.detach()
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).float()


class _Drifts(L.LightningModule):
    """A loss whose gradient is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(512))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight.sum() * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_tiny_updates_are_lost_in_bfloat16_and_kept_otherwise() -> None:
    """200 updates of 0.001 from 1: bfloat16 below 1 knows steps of 0.004."""
    assert torch.equal(_progress("spmd", "bf16-true"), torch.ones(512))
    wanted = _progress("auto", "32-true")
    assert float(wanted[0]) == pytest.approx(0.8, abs=1e-4)
    assert (_progress(MASTERS, "bf16-true") - wanted).abs().max() <= 2**-9
    stochastic = _progress(STOCHASTIC, "bf16-true")
    assert float(stochastic.mean()) == pytest.approx(0.8, abs=3e-3)
    assert 0.005 < float(stochastic.std()) < 0.05  # each takes its own steps
    assert torch.equal(stochastic, _progress(STOCHASTIC, "bf16-true"))


# ---------------------------------------------------------------------- who else writes weights
class _Changes(L.Callback):
    """Puts other numbers into some weights between two steps."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5:
            with torch.no_grad():
                pl_module.first.weight[:3] = 1.5


def test_weights_that_a_callback_changes_stay_changed() -> None:
    plain, changed = (trained(MASTERS, optimizer="sgd", callbacks=c) for c in ((), (_Changes(),)))
    assert changed.mode == "compiled"
    assert float((changed.weights["first.weight"][:3] - 1.5).abs().max()) < 0.1
    assert float((plain.weights["first.weight"][:3] - 1.5).abs().max()) > 0.5


# ---------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("strategy", [MASTERS, STOCHASTIC], ids=str)
def test_resume_is_exact(tmp_path: Path, strategy: Any) -> None:
    whole = trained(strategy, max_epochs=3)
    saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    begun = trained(strategy, callbacks=(saver,), max_epochs=1, enable_checkpointing=True)
    resumed = trained(strategy, max_epochs=3, ckpt_path=tmp_path / "last.ckpt")
    assert begun.losses + resumed.losses == whole.losses
    assert all(torch.equal(resumed.weights[k], v) for k, v in whole.weights.items())
    assert all(torch.equal(resumed.optimizer_state[k], v) for k, v in whole.optimizer_state.items() if MASTER in k)


@pytest.mark.parametrize("first", ["auto", MASTERS, STOCHASTIC], ids=str)
@pytest.mark.parametrize("second", ["auto", MASTERS, STOCHASTIC], ids=str)
def test_checkpoints_of_other_updates_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Any, second: Any
) -> None:
    saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    begun = trained(first, callbacks=(saver,), max_epochs=1, enable_checkpointing=True)
    told: list[str] = []
    monkeypatch.setattr(builds, "tell", told.append)
    resumed = trained(second, max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert len(begun.losses) + len(resumed.losses) == 12
    assert any("has no float32 masters" in text for text in told) == (second == MASTERS and first != MASTERS)
    reference = trained("auto", max_epochs=2)
    assert max(abs(a - b) for a, b in zip(resumed.losses, reference.losses[6:], strict=True)) < 0.05


# ---------------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("strategy", "flags", "words"),
    [
        ({"bf16_updates": "masters"}, {}, "give one of 'plain', 'master', 'stochastic'"),
        (MASTERS, {"precision": "32-true"}, "bf16_updates='master' is about weights in bfloat16"),
        (STOCHASTIC, {"precision": "bf16-mixed"}, "precision='bf16-mixed', so leave it out"),
        (MASTERS, {"precision": "16-true"}, "precision='16-true', so leave it out"),
        (MASTERS, {"detect_anomaly": True}, "needs updates in graphs, and this training runs them eagerly"),
    ],
    ids=str,
)
def test_what_cannot_be_is_an_error(strategy: Any, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trained(strategy, **flags)


class _Reads(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if math.fsum([loss]) > 0 else -loss


class _Seeds(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        torch.manual_seed(7)
        return loss


@pytest.mark.parametrize("make", [_Reads, _Seeds])
def test_updates_are_graphs_where_steps_are_none(make: type[Small]) -> None:
    """Seeding runs a step eagerly, and not its update."""
    theirs = trained(MASTERS, optimizer="sgd")
    L.seed_everything(5)
    ours = fit(make("sgd", 1e-3), InOrder(rows(), ROWS), MASTERS, precision="bf16-true", max_epochs=2)[0]
    assert ours.mode == "compiled"
    assert all(torch.equal(ours.weights[k], v) for k, v in theirs.weights.items())


# ---------------------------------------------------------------------- ranks
TENSOR = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise", "last": "rowwise"}}


@pytest.mark.parametrize("plan", [{}, ZERO2, ZERO3, TENSOR], ids=str)
def test_masters_on_two_ranks(two_ranks: RankPool, tmp_path: Path, plan: Any) -> None:
    """Masters lie as state does, and gradients travel in bfloat16."""
    reference = trained(MASTERS, optimizer="sgd")
    results = two_ranks.run(trained, {**MASTERS, **plan, "dump_dir": str(tmp_path)}, 2, "sgd")
    text = (tmp_path / "00_arranged.py").read_text()
    assert not re.search(r"_c10d_functional\.(all_reduce|reduce_scatter)\w*\.default\(.*# float32", text)
    for result in results:
        found = [v for key, v in result.optimizer_state.items() if key.endswith(f"/{MASTER}")]
        theirs = [v for key, v in reference.optimizer_state.items() if key.endswith(f"/{MASTER}")]
        assert max(float((a - b).abs().max()) for a, b in zip(found, theirs, strict=True)) < 2e-3
        assert all(v.dtype is torch.bfloat16 for v in result.weights.values())


@pytest.mark.parametrize("plan", [{}, ZERO2, ZERO3, TENSOR], ids=str)
def test_ranks_round_alike_what_they_both_hold(two_ranks: RankPool, plan: Any) -> None:
    one, other = two_ranks.run(trained, {**STOCHASTIC, **plan}, 2)
    assert all(torch.equal(other.weights[k], v) for k, v in one.weights.items())
    again, _ = two_ranks.run(trained, {**STOCHASTIC, **plan}, 2)
    assert all(torch.equal(again.weights[k], v) for k, v in one.weights.items())


@pytest.mark.parametrize("plan", [{}, ZERO3], ids=str)
def test_pieces_round_on_their_own(two_ranks: RankPool, plan: Any) -> None:
    """Chunks that draw the same numbers would go the same way: their halves would be equal here."""
    weight, same = two_ranks.run(_progress, {**STOCHASTIC, **plan}, "bf16-true", 2)
    assert torch.equal(weight, same)
    assert not torch.equal(weight[:256], weight[256:])
    assert float(weight.mean()) == pytest.approx(0.8, abs=3e-3)


def test_replicas_of_a_piece_round_alike(four_ranks: RankPool) -> None:
    """Hybrid sharding: a chunk lies on two ranks, which must draw the same numbers for it."""
    found = four_ranks.run(_progress, {**STOCHASTIC, **ZERO3, "data_parallel_shard_size": 2}, "bf16-true", 4)
    assert all(torch.equal(weight, found[0]) for weight in found)
    assert not torch.equal(found[0][:256], found[0][256:])


def test_overlap_changes_no_bit_of_masters(two_ranks: RankPool) -> None:
    plain, overlapped = (
        two_ranks.run(trained, {**MASTERS, "overlap_iterations": overlap, "bucket_size_mb": 1e-4}, 2)
        for overlap in (False, True)
    )
    assert_bitwise(overlapped[0], plain[0])


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_works_in_float32(optimizer: str) -> None:
    losses, weights = by_hand(optimizer)
    ours = trained(MASTERS, optimizer=optimizer)
    assert ours.losses == losses
    assert all(torch.equal(ours.weights[k], v) for k, v in weights.items())
    chance = trained(STOCHASTIC, optimizer=optimizer)
    assert max(abs(a - b) for a, b in zip(chance.losses, losses, strict=True)) < 0.02
