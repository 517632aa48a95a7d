"""``lightning-spmd plan`` from the recipes, and what it answers to mistakes: one line each, never a traceback."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_spmd.cli import measured
from lightning_spmd.planning import calibration
from lightning_spmd.report.measure import Amount

from .conftest import Run
from .recipe import RECIPE, tiny

pytest.importorskip("jsonargparse")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_bytes(bytes(range(32, 127)) * 40)
    return folder


def test_the_main_recipe_is_planned_for_1024_devices(run: Run, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = tiny(text, tmp_path / "runs", "--devices", "8", "--num-nodes=128", "--json", str(out))
    status, printed, error = run("plan", *arguments)
    assert status == 0, error
    for word in ("1024 × h100", "Memory of a rank", "Collectives of an iteration", "MFU", "infiniband-ndr"):
        assert word in printed
    facts = json.loads(out.read_text())
    assert facts["run"]["mesh"]["data_parallel"] == 1024
    assert facts["run"]["global_rows"] == 2 * 1024
    assert facts["time"]["step"] > 0
    assert not (tmp_path / "runs").exists(), "a plan writes no logs"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "0"], ["--devices 0", "at least 1"]),
        (["--devices", "x"], ["devices: x", "a whole number"]),
        (["--devises", "8"], ["--devises", "Did you mean --devices?"]),
        (["--trainer.devices", "auto"], ["trainer.devices", "--devices NUMBER"]),
        (["--device_type", "h300"], ["--device-type", "'h300'", "Did you mean 'h200'?"]),
        (["--between", "wifi"], ["--between", "'wifi'", "infiniband-ndr"]),
        (["--calibrate", "--device_type", "h100"], ["--device-type h100", "--device-type cpu"]),
        (["--measured", "--num_nodes", "2"], ["--num_nodes 2", "one machine"]),
        (["--measured", "--device_type", "h100"], ["--device-type h100", "trains on 1", "0 GPUs", "--device-type cpu"]),
        (["--measured", "--search"], ["--search with --measured", "Leave one out"]),
        (["--search", "--search-seconds", "-1", "--model.layers", "1"], ["--search_seconds -1", "above 0"]),
        (["--hardware", "/nowhere.yaml"], ["--hardware /nowhere.yaml"]),
        (["--trainer.strategy.tensor_parallel_size", "2"], ["tensor_parallel_size=2", "tensor_parallel_plan"]),
        (["--trainer.strategy.context_parallel_size", "3"], ["context_parallel_size", "1 devices"]),
        (["--trainer.strategy.data_parallel", "zero4"], ["'zero4' is not what it takes: replicate, zero2, zero3"]),
        (["--model.widht", "4"], ["model.init_args.widht:", "no 'widht'", "Did you mean 'width'?"]),
        (["--model.width", "wide"], ["model.init_args.width:", "a whole number"]),
        (["--trainer.precision", "7"], ["trainer.precision: 7", "bf16-mixed"]),
        (["--config", "/nowhere.yaml"], ["config", "/nowhere.yaml"]),
        (["--model.width", "15"], ["model: ValueError: GPTBytes(width=15", "heads must divide width"]),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_allowed(run: Run, arguments: list[str], words: list[str]) -> None:
    status, _, error = run("plan", "--config", RECIPE, *arguments)
    assert status in (1, 2), error
    assert len(error.strip().splitlines()) == 1, error
    for word in words:
        assert word in error, error


def test_a_plan_is_compared_with_the_training_here(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "AMOUNT", Amount(steps=3, warmup=6, rounds=1))
    monkeypatch.setattr(measured, "LINES", Amount(steps=3, warmup=6, rounds=1))
    monkeypatch.setattr(calibration, "LEAST_SECONDS", 0.0)
    out = tmp_path / "plan.json"
    status, printed, error = run("plan", *tiny(text, tmp_path / "runs", "--measured", "--json", str(out)))
    assert status == 0, error
    assert "Predicted and measured here, " in printed
    facts = json.loads(out.read_text())
    assert "measured here" in facts["run"]["device"]["source"]
    found = facts["measured"]
    assert found["step"]["measured"] > 0
    assert found["step"]["predicted"] == facts["time"]["step"]
    assert (len(found["ranks"]), found["waits"], found["communicating"]["measured"]) == (1, [], 0)


def test_two_processes_tell_where_they_wait(text: Path, tmp_path: Path) -> None:
    """As a command, which starts the other process."""
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    files = ("--json", str(out), "--html", str(page))
    arguments = tiny(text, tmp_path / "runs", "--trainer.devices", "2", "--measured", *files)
    command = [sys.executable, "-m", "lightning_spmd.cli.main", "plan", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("largest waits of an iteration") == 1
    found = json.loads(out.read_text())["measured"]
    assert [phase["name"] for rank in found["ranks"] for phase in rank["phases"]] == ["rank 0", "rank 1"]
    for name in ("step", "computing", "communicating", "exposed", "between"):
        assert found[name]["measured"] > 0, name
    assert {wait["side"] for wait in found["waits"]} == {"predicted", "measured"}
    assert any("gpt_bytes.py:" in wait["of"] for wait in found["waits"] if wait["side"] == "measured")
    assert 'id="measured-1"' in page.read_text()
    assert not (tmp_path / "runs").exists()


def test_a_model_of_any_size_is_planned_without_memory(run: Run, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = tiny(text, tmp_path / "runs", "--devices", "8", "--json", str(out), "--model.width", str(1 << 14))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, _, error = run("plan", *arguments)
    assert status == 0, error
    assert json.loads(out.read_text())["memory"]["parameters"] > 3e9, "12 GiB of weights"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024
