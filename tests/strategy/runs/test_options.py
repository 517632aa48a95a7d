"""Options of the strategy that it cannot have: refused when it is made, by their names."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning as L
import numpy as np
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_spmd import SPMDStrategy
from lightning_spmd.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("timeout", 30, "a datetime.timedelta above 0"),
        ("timeout", timedelta(), "a datetime.timedelta above 0"),
        ("process_group_backend", "mpi2", "one of fake, gloo, mpi, nccl"),
        ("process_group_backend", "cpu:gloo,cuda:nccl2", "one for each kind of device"),
        ("process_group_backend", 1, "one of fake, gloo"),
        ("sequence_parallel", "yes", "True or False"),
        ("save_distributed_checkpoint", 1, "True or False"),
        ("bucket_size_mb", float("inf"), "a number of MiB above 0, or 'auto'"),
        ("bucket_size_mb", None, "a number of MiB above 0, or 'auto'"),
        ("bucket_size_mb", True, "a number of MiB above 0, or 'auto'"),
        ("rematerialize", "9" * 400 + "MiB", "a number above 0 and at most 1"),
        ("cuda_graphs", np.array([1, 2]), "True or False"),
        ("cuda_graphs", 1, "True or False"),
        ("overlap_iterations", np.array([1, 2]), "True, False or 'auto'"),
        ("passes", 5, r"a list of names, such as \['"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: Any, allowed: str) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigurationError, match=f"{name}=.*give.*{allowed}"):
        SPMDStrategy(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"process_group_backend": "cpu:gloo,cuda:nccl"},
        {"timeout": timedelta(seconds=3)},
        {"timeout": None},
        {"rematerialize": np.float32(0.5)},
        {"bucket_size_mb": np.int64(3)},
    ],
    ids=str,
)
def test_a_value_that_can_be_is_taken(options: dict[str, Any]) -> None:
    SPMDStrategy(**options)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"laier": "colwise"}, "no module matches 'laier'; near: 'layer'"),
        ({"layer": "colwize"}, "did you mean 'colwise'"),
        ({"layer": {"style": "colwise", "parts": 5}}, "are not 5 equal parts"),
    ],
    ids=["pattern", "style", "parts"],
)
@pytest.mark.filterwarnings("ignore:tensor_parallel_plan is not used")
def test_a_plan_that_one_device_does_not_use_is_read_all_the_same(plan: dict[str, Any], said: str) -> None:
    trainer = L.Trainer(
        strategy=SPMDStrategy(tensor_parallel_plan=plan), accelerator="cpu", devices=1, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match=said):
        trainer.fit(BoringModel())


@pytest.mark.parametrize("options", [{"tensor_parallel_plan": "auto"}, {"sequence_parallel": True}], ids=str)
def test_an_option_of_shared_layers_without_any_is_said(options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=f"{next(iter(options))} is not used: tensor_parallel_size is 1"):
        SPMDStrategy(**options)
