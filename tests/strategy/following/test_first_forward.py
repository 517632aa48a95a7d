"""What modules do in their first forward and not again: hooks, flags, conversions; modules that are made in a step."""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategy.small import Net, assert_as_eager

_SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


@dataclasses.dataclass
class _Setting:
    width: int = 1


class _Hooked(Net):
    """Registers hooks in its first step, as Hugging Face's models do for hidden states."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not getattr(self, "_hooks_installed", False):
            self.first.register_forward_hook(lambda _module, _args, output: 2 * output)
            setattr(self, "_hooks_installed", True)  # noqa: B010 - a name that the code does not show
        return self.loss(batch)


class _HookedInVain(_Hooked):
    """The same in a step that looks at the clock: hooks of a step that ran twice would count twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        time.perf_counter()
        return loss


class _HookedAgain(Net):
    """One more hook a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.first.register_forward_hook(lambda _module, _args, output: 1.1 * output)
        return self.loss(batch)


class _HookedForAWhile(Net):
    """A hook that is gone when the step ends."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        seen: list[Tensor] = []
        handle = self.first.register_forward_hook(lambda _module, _args, output: seen.append(output))
        loss = self.loss(batch)
        handle.remove()
        return loss + seen[0].square().mean()


class _Converted(Net):
    """Tells a layer in each step what it is already."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.first = self.first.to(torch.float32).float()
        return self.loss(batch)


class _MadeAnew(Net):
    """Makes a module without parameters in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        class Scale(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.factor = 3.0

            def forward(self, loss: Tensor) -> Tensor:
                return loss * self.factor

        return Scale()(self.loss(batch))


class _Removed(Net):
    """Takes an attribute away in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        name = "fre" + "sh"
        if name in vars(self):
            delattr(self, name)
        return self.loss(batch)


@pytest.mark.parametrize("make", [_Hooked, _HookedForAWhile, _Converted, _MadeAnew, _Removed])
def test_what_a_first_forward_does_once_is_done_once(make: Callable[[], Net]) -> None:
    assert assert_as_eager(make).captures == 2  # of the first step with momentum, and of the others


@pytest.mark.parametrize("make", [_HookedInVain, _HookedAgain])
def test_hooks_that_stay_are_no_obstacle(make: Callable[[], Net]) -> None:
    assert_as_eager(make, max_epochs=1)


class _WithATokenAndASignature(Net):
    """What the standard library gives and nobody changes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        token = _SCALE.set(2.0)
        names = inspect.signature(self.loss).parameters
        fields = dataclasses.fields(_Setting)
        loss = self.loss(batch) * _SCALE.get() * len(names) * len(fields)
        _SCALE.reset(token)
        return loss


def test_what_cannot_change_is_not_said_to_be_missed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        assert_as_eager(_WithATokenAndASignature)
    assert "may miss" not in caplog.text
