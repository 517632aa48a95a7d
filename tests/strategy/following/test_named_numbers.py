"""Numbers of equal value among the arguments of one operator: each is put back where it belongs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategy.small import Net, Quiet, assert_as_eager, run

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "Adam": {},
    "AdamW": {"weight_decay": 0.0},
    "Adagrad": {},
}
"""Fused; weight decay is 0, as the learning rate is in the first step of the warm-up."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_warm_up_from_zero_is_no_weight_decay(name: str) -> None:
    """C++ evaluates the last argument first: by value and order, the learning rate went into the weight decay."""

    class WarmUp(Net):
        def configure_optimizers(self) -> Any:
            optimizer = getattr(torch.optim, name)(self.parameters(), lr=0.1, fused=True, **OPTIMIZERS[name])
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    assert assert_as_eager(WarmUp).captures == 1


@pytest.mark.parametrize(("name", "key"), [("SGD", "weight_decay"), ("SGD", "dampening"), ("Adagrad", "lr_decay")])
def test_one_of_two_equal_settings_changes(name: str, key: str) -> None:
    """Both were 0 when the step was captured."""

    class Changes(Quiet):
        def configure_optimizers(self) -> Any:
            settings = {"momentum": 0.9} if name == "SGD" else {}
            return getattr(torch.optim, name)(self.parameters(), lr=0.1, fused=True, **settings)

        def on_train_epoch_start(self) -> None:
            for group in self.optimizers().param_groups:  # type: ignore[union-attr]
                group[key] = 0.2 * self.current_epoch

    assert_as_eager(Changes)


class EqualTwice(Net):
    """Composite operators hand numbers on under other names: two equal ones are frozen, and one of them changes."""

    def loss(self, batch: Any) -> Tensor:
        x = torch.group_norm(batch[0], 2, None, None, self.current_epoch + 2)  # groups and epsilon
        return super().loss((x, batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_number_that_nothing_tells_from_another_is_guarded() -> None:
    ours, theirs = run(EqualTwice), run(EqualTwice, "auto")
    assert ours.losses == theirs.losses
    assert (ours.mode, ours.captures) == ("compiled", 2)
