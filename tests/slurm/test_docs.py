"""The scripts of docs/slurm.md, submitted as they stand, with a small model."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.slurm.conftest import Jobs
from tests.slurm.test_equality import TOY

pytestmark = pytest.mark.slurm

PAGE = Path(__file__).parents[2] / "docs/slurm.md"
SCRIPTS = [block for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL) if block.startswith("#!")]
SMALL = {**TOY, "data.batch_size": 4}


def _small(script: str, **options: object) -> str:
    given = " ".join(
        f"--{k}={v}" for k, v in {**SMALL, **{k.replace("__", "."): v for k, v in options.items()}}.items()
    )
    *above, command = script.strip().splitlines()
    assert "fit --config gpt_bytes " in command
    return "\n".join([*above[1:], f"{command} {given}"])


@pytest.fixture
def project(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, and the command in the PATH of jobs."""
    folder = jobs.folder / "project"
    folder.mkdir()
    (folder / "bin").mkdir()
    for name, module in (("lightning-spmd", "lightning_spmd.cli.main"), ("torchrun", "torch.distributed.run")):
        file = folder / "bin" / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        file.chmod(0o755)
    path = f"{folder / 'bin'}:{jobs.cluster.environment['PATH']}"
    monkeypatch.setitem(jobs.cluster.environment, "PATH", path)
    monkeypatch.setitem(jobs.cluster.environment, "PYTHONPATH", os.environ.get("PYTHONPATH", str(PAGE.parents[1])))
    return folder


def test_there_are_scripts() -> None:
    assert [("--requeue" in script, "torchrun" in script) for script in SCRIPTS] == [(True, False), (False, True)]


@pytest.mark.parametrize("index", range(len(SCRIPTS)))
def test_a_script_of_the_docs_runs(jobs: Jobs, project: Path, index: int) -> None:
    script = SCRIPTS[index]
    asks = "--requeue" in script
    options = ("--time=30", "--signal=USR1@60") if asks else ()
    longer = {"trainer__limit_train_batches": 400, "trainer__overfit_batches": 0} if asks else {}
    number = jobs.submit(_small(script, **longer), f"--chdir={project}", *options)
    if asks:
        jobs.wait_for(lambda: any(file.stat().st_size > 500 for file in project.rglob("metrics.csv")))
        jobs.cluster.tell(number)
    job = jobs.wait(number)
    assert (job.state, job.restarts) == ("COMPLETED", int(asks)), jobs.said("job")
    assert "`Trainer.fit` stopped: `max_epochs=2` reached" in jobs.said("job")
