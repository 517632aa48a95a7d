"""How precisely float32 is multiplied is torch's to say, by either interface, and may change in mid-run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.training import Result, assert_bitwise
from tests.strategy.small import Quiet, run

matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def older(value: str) -> None:
    torch.set_float32_matmul_precision(value)


def newer(value: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if value == "medium" else "ieee"
    matmul.fp32_precision = "bf16" if value == "medium" else "ieee"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    newer("highest")
    older("highest")


class Switches(L.Callback):
    def __init__(self, switch: Callable[[str], None]) -> None:
        self.switch = switch

    def on_train_start(self, *_: Any) -> None:
        self.switch("highest")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in (5, 11):
            self.switch("medium" if trainer.global_step == 5 else "highest")


@pytest.mark.parametrize("lowering", ["none", "inductor"])
@pytest.mark.parametrize("switch", [older, newer])
def test_a_change_in_mid_run_is_noticed(switch: Callable[[str], None], lowering: str) -> None:
    """The newer interface makes torch's older functions raise, which ended training in its first step."""

    def trained(strategy: Any, *, switching: bool) -> Result:
        return run(Quiet, strategy, callbacks=lambda: [Switches(switch)] if switching else [])

    ours, theirs = trained({"lowering": lowering}, switching=True), trained("auto", switching=True)
    assert ours.mode == "compiled"
    plain = trained({"lowering": lowering}, switching=False)
    assert ours.captures == plain.captures + 1  # back at the first precision the first graph is used again
    if lowering == "none":
        assert_bitwise(ours, theirs)
    else:
        assert max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)) < 1e-4


class Attends(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)[None, None]
        return self.last(torch.tanh(F.scaled_dot_product_attention(h, h, h)[0, 0]))


class NoFlash(L.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.backends.cuda.enable_flash_sdp(trainer.global_step != 5)


def test_another_kernel_for_attention_is_noticed() -> None:
    """The name is that of GPUs; the kernel for CPUs has the same switch."""
    try:
        ours, theirs = (run(Attends, strategy, callbacks=lambda: [NoFlash()]) for strategy in ("spmd", "auto"))
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert ours.mode == "compiled"
    assert_bitwise(ours, theirs)
    assert ours.captures == run(Attends).captures + 1
