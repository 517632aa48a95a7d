"""precision="16-mixed": loss scaling, skipped steps and the scale itself are in the graph, and are those of one device.

On the CPU Lightning has it by its plugin alone. Some batches hold a number that is infinite in float16: their steps are
skipped, the first one among them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_spmd.strategy.notices import builds
from tests.helpers.modules import OPTIMIZERS, build_optimizer
from tests.helpers.training import InOrder, Result, assert_bitwise, fit
from tests.strategy.small import ROWS, Quiet, rows

SKIPPED = (0, 4, 5, 11)
BATCHES = 12
ZERO = {"data_parallel": "zero3"}


class Half(Quiet):
    """Logs the scale as it is between two steps."""

    def __init__(self, optimizer: Callable[[Any], Any] | str = "sgd") -> None:
        super().__init__()
        self.kind = optimizer

    def configure_optimizers(self) -> Any:
        made = (
            build_optimizer(self.kind, self.parameters())
            if isinstance(self.kind, str)
            else self.kind(self.parameters())
        )
        return {
            "optimizer": made,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(made, 2, 0.9), "interval": "step"},
        }


class Scales(L.Callback):
    """What the scaler says after every batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        state = trainer.precision_plugin.state_dict()
        scale = trainer.precision_plugin.scaler.get_scale()
        assert state.get("scale", 1.0) == scale
        self.seen.append((scale, state.get("_growth_tracker", 0)))


def samples(overflowing: tuple[int, ...] = SKIPPED) -> list[tuple[Tensor, Tensor]]:
    found = rows(ROWS * BATCHES)
    for batch in overflowing:
        found[batch * ROWS + 1][0][2] = 1e30
    return found


def half(scaler: Any = None, **settings: Any) -> MixedPrecision:
    made = torch.amp.GradScaler("cpu", **{"init_scale": 256.0, "growth_interval": 2, **settings})
    return MixedPrecision("16-mixed", "cpu", made if scaler is None else scaler)


def scaled(
    strategy: Any = "spmd",
    devices: int = 1,
    optimizer: Any = "sgd",
    callbacks: tuple[L.Callback, ...] = (),
    make: Callable[[], L.LightningModule] | None = None,
    plugin: Callable[[], Any] = half,
    overflowing: tuple[int, ...] = SKIPPED,
    **flags: Any,
) -> tuple[Result, list[tuple[float, int]]]:
    """Twenty-four batches in two epochs."""
    L.seed_everything(5)
    scales = Scales()
    module = Half(optimizer) if make is None else make()
    flags = {"max_epochs": 2, "plugins": [plugin()], **flags}
    result, _ = fit(module, InOrder(samples(overflowing), ROWS), strategy, devices, [*callbacks, scales], **flags)
    return result, scales.seen


def assert_as_eager(mode: str = "compiled", **settings: Any) -> Result:
    theirs, ours = scaled("auto", **settings), scaled("spmd", **settings)
    assert ours[0].mode == mode, ours[0].warnings
    assert ours[1] == theirs[1]
    assert_bitwise(ours[0], theirs[0])
    return ours[0]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rprop"])
def test_losses_scale_and_weights_are_those_of_one_device(optimizer: str) -> None:
    assert_as_eager(optimizer=optimizer)


@pytest.mark.parametrize(
    "flags",
    [
        {"gradient_clip_val": 0.3},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 3},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
    ],
    ids=str,
)
def test_clipping_and_accumulation_are_those_of_eager(flags: dict[str, Any]) -> None:
    """Gradients are unscaled before they are clipped, and accumulated before they are unscaled."""
    assert_as_eager(optimizer="adamw", **flags)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"sgd_fused"}))
def test_every_optimizer_skips_as_eager_does(optimizer: str) -> None:
    assert_as_eager("split" if optimizer == "lion" else "compiled", optimizer=optimizer)


@pytest.mark.parametrize(("optimizer", "told"), [("adamw", 1), ("adamw_fused", 0), ("lion", 0)])
def test_the_price_of_a_step_that_may_be_skipped_is_told_once(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, told: int
) -> None:
    said: list[str] = []
    monkeypatch.setattr(builds, "tell", said.append)
    scaled(optimizer=optimizer, max_epochs=1)
    assert sum("with fused=True the optimizer skips it itself" in text for text in said) == told


def test_fused_optimizers_unscale_and_skip_themselves() -> None:
    """Torch's fused SGD is left out: eager's momentum stays uninitialised after a first step that was skipped."""
    for name in ("adamw_fused", "adagrad_fused"):
        assert_as_eager(optimizer=name)
    assert_as_eager(optimizer="sgd_fused", overflowing=(2, 3, 8))


class _Gradients(L.Callback):
    """Keeps what hooks see in ``p.grad``."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_after_backward(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._see(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._see(pl_module)

    def _see(self, module: L.LightningModule) -> None:
        self.seen += [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_fused"])
def test_hooks_see_gradients_as_lightning_gives_them(optimizer: str) -> None:
    """Scaled after backward; unscaled before the step, unless the optimizer does that itself."""
    seen = {}
    for strategy in ("auto", "spmd"):
        hook = _Gradients()
        seen[strategy] = *scaled(strategy, optimizer=optimizer, callbacks=(hook,)), hook.seen
    (theirs, scales, gradients), (ours, our_scales, our_gradients) = seen["auto"], seen["spmd"]
    assert ours.mode == "split"
    assert our_scales == scales
    assert len(gradients) == len(our_gradients)
    assert all(
        torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(gradients, our_gradients, strict=True)
    )
    assert_bitwise(ours, theirs)


class _StepHooks(L.Callback):
    """Counts real steps of the optimizer."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps = 0
        trainer.optimizers[0].register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.steps += 1


def test_hooks_of_the_optimizers_step_run_when_a_step_counts() -> None:
    theirs, ours = _StepHooks(), _StepHooks()
    eager, split = scaled("auto", callbacks=(theirs,)), scaled("spmd", callbacks=(ours,))
    assert split[0].mode == "split"
    assert ours.steps == theirs.steps == 2 * (BATCHES - len(SKIPPED))
    assert eager[1] == split[1]
    assert_bitwise(split[0], eager[0])


class _ClipsItself(Half):
    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


def test_clipping_of_the_users_own_sees_unscaled_gradients() -> None:
    assert_as_eager("split", make=_ClipsItself)


@pytest.mark.parametrize("strategy", ["auto", "spmd"])
def test_clipping_for_a_fused_optimizer_is_lightnings_error(strategy: str) -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        scaled(strategy, optimizer="adamw_fused", gradient_clip_val=0.1)


class _UnscalesItself(L.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        trainer.precision_plugin.scaler.unscale_(optimizer)


@pytest.mark.parametrize("strategy", ["auto", "spmd"])
def test_unscaling_twice_is_the_error_that_it_is_in_eager(strategy: str) -> None:
    with pytest.raises(RuntimeError, match="already been called"):
        scaled(strategy, callbacks=(_UnscalesItself(),))


class _ChangesTheScaler(L.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        scaler = trainer.precision_plugin.scaler
        if trainer.global_step == 8:
            scaler.set_growth_interval(1)
            scaler.set_growth_factor(4.0)
        if trainer.global_step == 14:
            scaler.set_backoff_factor(0.25)
            scaler.update(32.0)


def test_a_scaler_that_is_changed_in_mid_run() -> None:
    found = assert_as_eager(callbacks=(_ChangesTheScaler(),))
    assert found.captures == 4  # the first step's, and one each time that factors change


def test_a_disabled_scaler_scales_nothing() -> None:
    assert_as_eager(plugin=lambda: half(torch.amp.GradScaler("cpu", enabled=False)), overflowing=())


class _Own(torch.amp.GradScaler):
    pass


def test_a_scaler_of_the_users_own_runs_eagerly() -> None:
    assert_as_eager("eager", plugin=lambda: half(_Own("cpu", init_scale=256.0)))


class _StepsMomentum(torch.optim.SGD):
    """Puts a new tensor, and a new number of a group, in place of the old ones in every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["sum"] = self.state[p].get("sum", 0.0) + p.grad / group["steps"]
                    p.sub_(group["lr"] * self.state[p]["sum"])


def test_state_that_is_replaced_stays_when_a_step_is_skipped() -> None:
    assert_as_eager("split", optimizer=lambda parameters: _StepsMomentum(parameters, lr=0.05))


def test_a_number_that_a_step_puts_into_its_group_stays() -> None:
    """Unscaled: it was lost, and every step went on with its first value."""
    seen = []
    for strategy in ("auto", "spmd"):
        L.seed_everything(5)
        module = Half(lambda parameters: _StepsMomentum(parameters, lr=0.05))
        seen.append(fit(module, InOrder(samples(()), ROWS), strategy, max_epochs=1)[0])
    assert_bitwise(*seen)


class _Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(0.01 * p.grad + 1e-4 * torch.randn_like(p))


def test_a_step_that_is_skipped_draws_nothing() -> None:
    assert_as_eager("split", optimizer=lambda parameters: _Noisy(parameters, lr=0.05))


# ---------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("first", ["auto", "spmd"])
@pytest.mark.parametrize("second", ["auto", "spmd"])
def test_resume_is_exact_from_and_to_eager(tmp_path: Path, first: str, second: str) -> None:
    whole, scales = scaled("auto", max_epochs=3)
    saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    begun, before = scaled(first, callbacks=(saver,), max_epochs=1, enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["MixedPrecision"]
    assert (saved["scale"], saved["_growth_tracker"]) == before[-1]
    resumed, after = scaled(second, max_epochs=3, ckpt_path=tmp_path / "last.ckpt", plugin=lambda: half(init_scale=7.0))
    assert before + after == scales
    assert repr(begun.losses + resumed.losses) == repr(whole.losses)
    assert all(torch.equal(resumed.weights[k], v) for k, v in whole.weights.items())
