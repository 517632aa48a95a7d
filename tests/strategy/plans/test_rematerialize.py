"""``SPMDStrategy(rematerialize=...)``: the same bits of training, what it says, and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from lightning_spmd import ConfigurationError, SPMDStrategy, messages
from lightning_spmd.cli import main as cli
from tests.cli.recipe import RECIPE
from tests.helpers.ranks import RankPool
from tests.helpers.training import TrainingCase, assert_bitwise, assert_compiled, one_device, train

ONE: dict[str, TrainingCase] = {
    "dropout": TrainingCase("gpt", "adamw", batches=6),
    "accumulated": TrainingCase("gpt", "adamw", "accumulate_clip", batches=7),
    "bf16": TrainingCase("gpt_llama", "sgd", batches=5, precision="bf16-mixed"),
    "batch norm": TrainingCase("conv", "sgd", batches=6),
}


@pytest.mark.parametrize("name", ONE)
def test_training_on_one_device_keeps_its_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(messages, "rank_zero_info", said.append)
    result = train(ONE[name], SPMDStrategy(rematerialize=0.9))
    assert_compiled(result)
    assert_bitwise(result, one_device(ONE[name]))
    (line,) = [text for text in said if "rematerialize" in text]
    assert line.startswith("strategy='spmd', rematerialize: activations take ")
    assert "of the forward pass is done twice" in line


def _both(case: TrainingCase, devices: int, options: dict[str, Any]) -> tuple[Any, Any]:
    return tuple(train(case, SPMDStrategy(**options, **more), devices) for more in ({}, {"rematerialize": 0.9}))  # type: ignore[return-value]


@pytest.mark.parametrize("plan", ["replicate", "zero3"])
def test_training_on_two_ranks_keeps_its_bits(two_ranks: RankPool, plan: str) -> None:
    case = TrainingCase("gpt", "adamw", "accumulate" if plan == "zero3" else "plain", batches=7)
    for plain, ours in two_ranks.run(_both, case, 2, {"data_parallel": plan, "overlap_iterations": True}):
        assert_compiled(plain, ours)
        assert_bitwise(ours, plain)


def test_training_with_shared_layers_keeps_its_bits(two_ranks: RankPool) -> None:
    options = {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"}
    for plain, ours in two_ranks.run(_both, TrainingCase("gpt", "sgd", batches=4), 2, options):
        assert_compiled(plain, ours)
        assert_bitwise(ours, plain)


@pytest.mark.parametrize("value", [0, -0.5, 1.5, True, "half", "512", "0MiB", "512 MB", "-1GiB", [0.5]])
def test_what_it_takes_is_said(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"rematerialize=.*number above 0 and at most 1.*'512MiB'.*or None"):
        SPMDStrategy(rematerialize=value)


@pytest.mark.parametrize(
    ("value", "meant"), [(None, None), (0.5, 0.5), (1, 1.0), ("512MiB", 512 * 2**20), (" 1.5 GiB ", 3 * 2**29)]
)
def test_shares_and_bytes(value: Any, meant: Any) -> None:
    found = SPMDStrategy(rematerialize=value).build_options.rematerialize
    assert (type(found), found) == (type(meant), meant)


def test_a_list_of_passes_without_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"rematerialize=0.5 needs the pass 'rematerialize'"):
        SPMDStrategy(rematerialize=0.5, passes=["dead_code"])
    SPMDStrategy(rematerialize=0.5, passes=["dead_code", "rematerialize"])


def test_a_recipe_takes_it_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jsonargparse")
    for value, meant in (("0.5", 0.5), ("512MiB", "512MiB")):
        with pytest.raises(SystemExit) as stop:
            cli.main(
                ["fit", "--config", RECIPE, "--trainer.strategy", "spmd", "--print_config"]
                + ["--trainer.strategy.rematerialize", value]
            )
        assert stop.value.code == 0
        assert yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]["init_args"]["rematerialize"] == meant
