"""The GPU script itself, without a GPU: what it does with parts that fail, what it takes for equal, its toy run."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.gpu import table
from tests.gpu.correctness import Run, judged
from tests.gpu.parts import PARTS, Part, chosen
from tests.gpu.running import FAILED, NOT_RUN, PASSED, ROOT, Outcome, run_parts

_WRITE = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({}))"
_PROGRAMS = {
    "good": _WRITE.format("{'passed': True, 'rows': []}"),
    "wrong": _WRITE.format("{'passed': False, 'reason': 'losses differ'}") + "; sys.exit(1)",
    "crash": "import os; print('last words', flush=True); os.abort()",
    "half": _WRITE.format("{'passed': True, 'rows': [1]}") + "; import time; time.sleep(60)",
    "missing": _WRITE.format("{'not_run': 'no such library'}"),
}


def _command(part: Part, result: Path) -> list[str]:
    return [sys.executable, "-S", "-c", _PROGRAMS[part.function], str(result)]


def _run(folder: Path, *programs: str, kind: str = "correctness", seconds: float = 60.0) -> list[Outcome]:
    parts = [Part(str(i), kind, program, limit=2.0, least=1.0) for i, program in enumerate(programs)]
    return run_parts(parts, _command, folder, seconds, jobs=2)


def test_a_part_that_fails_costs_itself_alone(tmp_path: Path) -> None:
    found = _run(tmp_path, "good", "wrong", "crash", "missing", "good")
    assert [o.status for o in found] == [PASSED, FAILED, FAILED, NOT_RUN, PASSED]
    assert [o.exit_code for o in found] == [0, 1, -6, 0, 0]
    assert found[1].reason == "losses differ"
    assert found[2].reason.splitlines()[:3] == ["signal SIGABRT", "last words", "Fatal Python error: Aborted"]
    assert found[3].reason == "no such library"


def test_a_part_that_takes_too_long_is_ended_and_what_it_wrote_is_kept(tmp_path: Path) -> None:
    (found,) = _run(tmp_path, "half", kind="benchmark")
    assert (found.status, found.reason, found.data["rows"]) == (FAILED, "no end after 2 s", [1])
    assert found.seconds < 20


def test_what_no_longer_fits_is_not_run(tmp_path: Path) -> None:
    found = _run(tmp_path, "good", "good", seconds=0.5)
    assert [o.status for o in found] == [NOT_RUN, NOT_RUN]
    assert "of the time are left" in found[0].reason


def test_parts_are_chosen_by_name_or_kind() -> None:
    assert chosen(None) == list(PARTS)
    assert {p.kind for p in chosen("correctness")} == {"correctness"}
    assert [p.name for p in chosen("conv,peak")] == ["peak", "conv"]
    with pytest.raises(ValueError, match="'nothing': known are peak"):
        chosen("nothing")


def test_all_parts_fit_into_the_time_if_none_takes_unusually_long() -> None:
    assert sum(part.least for part in PARTS if part.kind != "correctness") < 8 * 60


def _trained(weight: float = 1.0, loss: float = 1.0, **changes: Any) -> Run:
    state = {"w": torch.tensor([weight], dtype=torch.float64)}
    kept = {"mode": "compiled", "captures": 1} | changes
    return Run([2.0, loss], {"w": torch.zeros(1, dtype=torch.float64)}, state, **kept)


@pytest.mark.parametrize(
    ("run", "passes"),
    [
        (_trained(), True),
        (_trained(loss=1.00001), True),
        (_trained(loss=1.001), False),
        (_trained(weight=1.01), False),
        (_trained(loss=math.nan), False),
        (_trained(captures=0), False),
        (_trained(mode="eager"), False),
        (_trained(complaints=["strategy='spmd' trains eagerly from here on"]), False),
    ],
)
def test_equal_means_in_graphs_with_losses_and_weights_alike(run: Run, passes: bool) -> None:
    assert judged(run, [_trained(), _trained()], 1e-4)["passed"] is passes


def test_a_wider_band_of_eager_runs_allows_more() -> None:
    eager = [_trained(), _trained(loss=1.001)]
    assert judged(_trained(loss=1.0025), eager, 1e-4)["passed"]
    assert not judged(_trained(loss=1.01), eager, 1e-4)["passed"]


def test_tables_show_what_was_measured_and_what_was_wanted() -> None:
    sides = {"lightning, compiled": 100.0, "hand-written, compiled": 120.0, "spmd": 118.0}
    rows = [
        {"side": name, "tokens_per_second": speed, "median_step_seconds": 0.1, "first_step_seconds": 1.0}
        | {"peak_bytes": 2**20, "reserved_bytes": None, "loss": 4.0, "trace": None}
        for name, speed in sides.items()
    ]
    rows.append({"side": "lightning", "error": "OutOfMemoryError: [GPU 0]"})
    case = {"layers": 2, "width": 8, "rows": 1, "length": 4, "flops_per_token": 10.0}
    big = Outcome(chosen("gpt2_350m")[0], PASSED, data={"kind": "benchmark", "case": case, "rows": rows})
    peak = Outcome(chosen("peak")[0], PASSED, data={"peak_flops": 2000.0})
    table.with_shares([peak, big])
    assert [t["met"] for t in table.targets([peak, big])] == [True, False, True, True, True]
    console = Console(width=180, record=True, file=io.StringIO())
    table.print_all([peak, big], console)
    text = console.export_text()
    assert "59.0 %" in text
    assert "OutOfMemoryError: [GPU 0]" in text


def _script(folder: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    start = [sys.executable, "-m", "tests.gpu", "--toy", "--out", str(folder), *arguments]
    done = subprocess.run(
        start, check=False, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())


def test_it_trains_where_jsonargparse_is_missing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['jsonargparse'] = None\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    look = [sys.executable, "-c", "import jsonargparse"]
    assert subprocess.run(look, check=False, capture_output=True, env={**os.environ, "PYTHONPATH": paths}).returncode
    found = _script(tmp_path / "out", "--parts", "conv", PYTHONPATH=paths)
    (part,) = found["parts"]
    assert part["status"] == PASSED
    assert {row["precision"] for row in part["found"]["rows"]} == {"32-true", "bf16-mixed"}
    assert all(row["difference"] == 0.0 for row in part["found"]["rows"])
    assert {row["model"]: row["replays"] > 0 for row in part["found"]["rows"]} == {
        "conv": False,
        "conv, CUDA graphs": True,
    }


@pytest.mark.long
def test_parts_of_every_kind_pass_at_toy_size(tmp_path: Path) -> None:
    names = ["peak", "main_job", "two_ranks", "small"]
    found = _script(tmp_path / "out", "--parts", ",".join(names))
    assert {p["part"]: p["status"] for p in found["parts"]} == dict.fromkeys(names, PASSED)
    (measured,) = (p["found"] for p in found["parts"] if p["kind"] == "benchmark")
    assert all((tmp_path / "out" / row["trace"]).stat().st_size for row in measured["rows"])
    assert all(0 < row["mfu"] < 1 for row in measured["rows"])
    losses = [row["loss"] for row in measured["rows"]]
    assert max(losses) - min(losses) < 2e-2 * max(losses)
