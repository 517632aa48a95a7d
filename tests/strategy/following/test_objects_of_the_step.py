"""Objects that libraries make for a step and that are gone when it ends: the step may change them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import types
from typing import Any

import pytest
from torch import Tensor

from tests.strategy.small import Net, assert_as_eager


@dataclasses.dataclass
class _Setting:
    factor: float = 1.0
    names: list[str] = dataclasses.field(default_factory=list)


class _Base(Net):
    def __init__(self) -> None:
        super().__init__()
        self.setting = _Setting(2.0, ["a"])


class _Bound(_Base):
    """As Hugging Face's multimodal models bind arguments, in the step in which hooks are put in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not getattr(self, "_hooks_installed", False):
            self.first.register_forward_hook(lambda _module, _args, output: 2 * output)
            setattr(self, "_hooks_installed", True)  # noqa: B010 - a name that the code does not show
        bound = inspect.signature(self.scaled).bind(self.loss(batch))
        bound.apply_defaults()
        return self.scaled(*bound.args, **bound.kwargs)

    def scaled(self, loss: Tensor, factor: float = 3.0) -> Tensor:
        return loss * factor


class _Copied(_Base):
    """A copy of a setting, changed for this step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        setting = copy.deepcopy(self.setting)
        setting.factor = 0.5
        setting.names.append("b")
        other = dataclasses.replace(self.setting, factor=3.0)
        other.factor += len(setting.names)
        return self.loss(batch) * setting.factor * other.factor


class _Filled(_Base):
    """A namespace that a step fills."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        space = copy.copy(types.SimpleNamespace(loss=None))
        space.loss = self.loss(batch)
        return space.loss


class _Kept(_Base):
    """A copy of which the module keeps hold: what the step does to it is the module's state."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        setting = copy.copy(self.setting)
        setting.factor = self.setting.factor * 0.9
        self.setting = setting
        return self.loss(batch) * setting.factor


_REGISTERED: list[Any] = []


class _Registered(_Base):
    """The same, in a list that the code of the step does not name."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        setting = copy.copy(self.setting)
        _register(setting)
        setting.factor = 0.5 * len(setting.names)
        return self.loss(batch) * setting.factor


def _register(thing: Any) -> None:
    globals()["_REGI" + "STERED"].append(thing)


@pytest.mark.parametrize("make", [_Bound, _Copied, _Filled])
def test_a_step_may_change_what_is_gone_when_it_ends(make: type[Net]) -> None:
    assert_as_eager(make)


def test_what_stays_is_state() -> None:
    assert_as_eager(_Kept)


def test_what_somebody_else_keeps_is_there_once_for_each_step() -> None:
    _REGISTERED.clear()
    assert_as_eager(_Registered)
    theirs, ours = _REGISTERED[:18], _REGISTERED[18:]
    assert ours == theirs
