"""Errors name the user's own line, not that of the library in which they came up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_spmd import errors
from lightning_spmd.errors import own_line
from lightning_spmd.stages.runtime.agreement.lost_ranks import Peers, Process


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise KeyError(f"row {index} is not in my table")


RAISING = {
    "a shape that a layer does not take": lambda: nn.Linear(4, 3)(torch.zeros(3, 7)),
    "a file that is not there": lambda: Path("/nowhere/x").read_text(),
    "text that is no JSON": lambda: json.loads("{"),
    "a worker of a loader": lambda: next(iter(DataLoader(Rows(), num_workers=1)), None),
}


def _raised(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("what", RAISING)
def test_the_other_ranks_and_the_command_name_the_users_line(what: str) -> None:
    error = _raised(RAISING[what])
    assert (own_line(error) or "").startswith(f"{__file__}:")
    processes = [Process.this(), Process("another machine", 1234)]
    store = dist.HashStore()
    Peers(store, 1, 1, processes).note(error)
    assert f"(at {__file__}:" in str(Peers(store, 1, 0, processes).news())


def test_a_script_did_not_raise_what_came_up_in_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = ModuleType("lightning")
    trainer.__file__ = str(tmp_path / "lightning" / "__init__.py")
    code = "def fit(hook):\n    hook()\n    raise ValueError('Trainer')\n"
    exec(compile(code, str(tmp_path / "lightning" / "trainer.py"), "exec"), vars(trainer))
    monkeypatch.setitem(sys.modules, "lightning", trainer)
    assert own_line(_raised(lambda: trainer.fit(lambda: None))) is None
    hook = errors.own_line(_raised(lambda: trainer.fit(lambda: 1 / 0)))
    assert hook is not None
    assert hook.startswith(f"{__file__}:")


def test_an_error_without_words_has_no_colon() -> None:
    store, processes = dist.HashStore(), [Process.this(), Process("another machine", 1234)]
    Peers(store, 1, 1, processes).note(KeyboardInterrupt())
    assert Peers(store, 1, 0, processes).news() == "rank 1 failed with KeyboardInterrupt"
