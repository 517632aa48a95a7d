"""Hooks of callbacks and of the module fire in Lightning's order, with Lightning's arguments."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.strategy.small import Net, assert_as_eager, loader_of, rows, run

CALLS: list[str] = []
GRADIENT_HOOKS = {"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"}
SILENT = {"on_save_checkpoint", "on_load_checkpoint"}


def _noting(owner: str, name: str, original: Any) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(f"{owner}.{name}")
        return original(self, *args, **kwargs)

    return hook


def _notes_all(base: type, owner: str, names: list[str]) -> Any:
    body = {name: _noting(owner, name, getattr(base, name)) for name in names}
    return type(f"Noting{base.__name__}", (base,), {**body, "__module__": __name__})


CALLBACK_HOOKS = [n for n in vars(L.Callback) if n.startswith("on_") and n not in GRADIENT_HOOKS | SILENT]
MODULE_HOOKS = [
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end",
    "on_validation_model_eval", "on_validation_model_train",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "setup", "teardown", "configure_model", "configure_callbacks", "prepare_data", "optimizer_step",
    "lr_scheduler_step", "configure_optimizers",
]  # fmt: skip


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def _order(strategy: str, gradient_hooks: bool, **flags: Any) -> tuple[list[str], str]:
    CALLS.clear()
    more = sorted(GRADIENT_HOOKS) if gradient_hooks else []
    module_more = [*more, "configure_gradient_clipping", "optimizer_zero_grad"] if gradient_hooks else []
    make = _notes_all(Scheduled, "module", [*MODULE_HOOKS, *module_more])
    callback = _notes_all(L.Callback, "callback", [*CALLBACK_HOOKS, *more])
    result = run(make, strategy, callbacks=lambda: [callback()], limit_val_batches=2, max_epochs=2, **flags)
    return list(CALLS), result.mode


@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 4}, {"val_check_interval": 2}], ids=str)
@pytest.mark.parametrize(("gradient_hooks", "mode"), [(False, "compiled"), (True, "split")])
def test_hooks_fire_in_lightnings_order(gradient_hooks: bool, mode: str, flags: dict[str, Any]) -> None:
    theirs, _ = _order("auto", gradient_hooks, **flags)
    ours, found = _order("spmd", gradient_hooks, **flags)
    assert found == mode
    assert ours == theirs
    assert "module.on_train_batch_end" in ours


class Transforms(Net):
    """Batch-transfer hooks that change the batch."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 2, batch[1]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] - 1, batch[1]


class SkipsBatches(Net):
    """Returning -1 skips the rest of the epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


class ManySteps(Net):
    """on_train_batch_end sees the outputs, and trainer.callback_metrics this batch's values."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen", outputs["loss"] * 2)
        self.log("metric", self.trainer.callback_metrics["loss_step"])


@pytest.mark.parametrize("make", [Transforms, SkipsBatches, ManySteps])
def test_what_hooks_do_equals_eager(make: type[Net]) -> None:
    theirs, ours = run(make, "auto"), run(make, "spmd")
    assert (ours.mode, ours.captures) == ("compiled", 2)
    assert (ours.losses, ours.logged, ours.final) == (theirs.losses, theirs.logged, theirs.final)


class StopsEarly(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4:
            trainer.should_stop = True


def test_a_callback_may_stop_training() -> None:
    theirs = run(Net, "auto", callbacks=lambda: [StopsEarly()])
    ours = run(Net, "spmd", callbacks=lambda: [StopsEarly()])
    assert ours.losses == theirs.losses
    assert len(ours.losses) == 4


def test_an_exception_in_a_hook_leaves_module_and_optimizer_as_they_were() -> None:
    """Capture swaps parameters and optimizer state for twins; whatever happens, the live ones come back."""

    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.loss(batch)
            raise KeyError("mine")

    module = Fails()
    before = dict(module.named_parameters())
    trainer = L.Trainer(
        strategy="spmd", accelerator="cpu", devices=1, max_steps=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(module, loader_of(rows()))
    assert all(before[k] is v and type(v) is torch.nn.Parameter for k, v in module.named_parameters())
    assert type(module) is Fails
    assert isinstance(module.trainer, L.Trainer)


class HalvesABuffer(Net):
    """Puts another tensor in a buffer's place between epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.scale

    def on_train_epoch_start(self) -> None:
        self.scale = self.scale * 0.5


def test_a_tensor_that_takes_a_buffers_place_is_read() -> None:
    assert_as_eager(HalvesABuffer)


class LeavesAnEpoch(Net):
    """Ends each epoch in the middle of an accumulation: Lightning drops what was collected."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


def test_gradients_of_an_accumulation_that_ended_early_are_dropped() -> None:
    assert_as_eager(LeavesAnEpoch, accumulate_grad_batches=4)
