"""Optimization by hand: the learning rate behind ``scheduler.step()`` is logged, printed and kept as eager has it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from tests.helpers.training import assert_bitwise
from tests.strategy.small import Quiet, run


class Logs(Quiet):
    """Two groups; the rate from the scheduler and from the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rates: list[Any] = []
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        schedule: Any = self.lr_schedulers()
        if batch_idx % 2:
            schedule.step()
        self.log("rate", schedule.get_last_lr()[0])
        self.log_dict({"first": optimizer.param_groups[0]["lr"], "second": optimizer.param_groups[1]["lr"]})
        self.rates.append(schedule.get_last_lr()[1])
        self.seen["rate"] = optimizer.param_groups[0]["lr"]
        print(f"rate {schedule.get_last_lr()[0]:.4f}")

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.first.parameters()}, {"params": self.last.parameters(), "lr": 0.3}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def test_the_new_rate_is_logged_printed_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Was eager: 'reads what scheduler.step() changes'."""
    modules: list[Any] = []

    def made() -> L.LightningModule:
        modules.append(Logs())
        return modules[-1]

    theirs, told = run(made, "auto", max_epochs=2), capsys.readouterr().out
    ours, ours_told = run(made, max_epochs=2), capsys.readouterr().out
    assert ours.mode == "compiled", ours.warnings
    assert_bitwise(ours, theirs)
    assert [line for line in ours_told.splitlines() if "rate" in line] == told.splitlines()
    assert modules[0].rates == modules[1].rates
    assert modules[0].seen == modules[1].seen
    assert {type(rate) for rate in (*modules[1].rates, *modules[1].seen.values())} == {float}
