"""State of the first step as an input: the same graph as one that is captured once the state is there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_spmd.ir.same_step import first_difference
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import CapturedStep, Variant
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.once import FollowedOnce
from lightning_spmd.stages.capture.optimizer.optimizer_swap import is_torchs_own
from lightning_spmd.stages.capture.request import CaptureRequest, UpdateRequest

BIRTHS = {"adam", "adamw", "adamax", "adadelta", "nadam", "radam", "rmsprop"}
"""At least these create state that depends on no value."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"foreach": True},
    {"fused": True},
    {"maximize": True, "weight_decay": 0.1},
    {"amsgrad": True},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.5, "centered": True},
    {"decoupled_weight_decay": True, "weight_decay": 0.1},
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"bf16_updates": "stochastic"},
    {"scaler": functools.cache(lambda: torch.amp.GradScaler("cpu", init_scale=256.0))},
]


class Module(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False, dtype=dtype)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().sum()


@pytest.mark.parametrize("setting", SETTINGS, ids=["plain", "bf16", "scaled"])
@pytest.mark.parametrize("name", [n for n, kind in vars(torch.optim).items() if isinstance(kind, type)])
def test_as_captured_with_state(name: str, setting: dict[str, Any]) -> None:
    compared = 0
    for options in OPTIONS:
        module = Module(torch.bfloat16 if "bf16_updates" in setting else torch.float32)
        try:
            optimizer = getattr(torch.optim, name)(module.parameters(), **options)
        except (TypeError, ValueError, RuntimeError):
            continue  # it has no such option
        lists = {"foreach", "fused"} & options.keys()  # some refuse bfloat16 there, in eager as well
        if is_torchs_own(optimizer) and not (lists and "bf16_updates" in setting):
            compared += _compared(module, optimizer, setting)
    assert compared or name.lower() not in BIRTHS


def test_the_first_step_of_a_users_optimizer_keeps_its_graph() -> None:
    module = Module(torch.float32)
    assert not _compared(module, Warm(module.parameters()), {})


class Warm(torch.optim.AdamW):
    """Takes a smaller first step."""

    def step(self, closure: Any = None) -> Any:
        rate = 1e-5 if not self.state else 1e-3
        for group in self.param_groups:
            group["lr"] = rate
        return super().step(closure)


def _compared(module: Module, optimizer: torch.optim.Optimizer, setting: dict[str, Any]) -> bool:
    batch = Batch(torch.ones(2, 4, dtype=module.layer.weight.dtype))
    request = CaptureRequest(
        module, UpdateRequest(optimizer, **setting), SimpleNamespace(callbacks=[]), Variant(), batch, {"batch_idx": 0},
        None, contextlib.nullcontext,
    )  # fmt: skip
    parameters, made = dict(module.named_parameters()), False

    def make(state: Mapping[tuple[str, str], Tensor]) -> None:
        nonlocal made
        made = True
        for (owner, key), value in state.items():
            optimizer.state[parameters[owner]][key] = value

    step = FollowedOnce(request)
    born = step.captured(request, make)
    if not made:
        return False
    again = step.captured(request)
    assert (first_difference(born, again), first_difference(again, born)) == (None, None)
    assert _inputs(born) == _inputs(again)
    assert [str(g.expected) for g in born.guards.values] == [str(g.expected) for g in again.guards.values]
    one, other = (None if g is None else g.expected for g in (born.guards.predicate, again.guards.predicate))
    assert one == other
    return True


def _inputs(step: CapturedStep) -> list[Any]:
    entries = (entry for entry in step.signature.inputs if entry.role is not InputRole.CONSTANT)
    return [(entry.role, entry.key, entry.value, entry.mutated) for entry in entries]
