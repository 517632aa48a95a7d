"""Every stage is a file to read, and every pass a diff."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_spmd.ir.node_info import spec_of
from lightning_spmd.ir.printer import totals, write_stage
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import collectives
from lightning_spmd.stages.passes import PASSES, PassState, identity_views, run_passes
from tests.helpers.ranks import RankPool
from tests.helpers.simulate import expand_all
from tests.helpers.training import TrainingCase
from tests.stages.expand.test_models import captured_model, sgd
from tests.stages.passes.with_passes import train_with


@pytest.fixture
def step() -> ShardedStep:
    return expand_all(captured_model("gpt", sgd)[0], (3, 3))[0]


def test_the_first_lines_add_up_operators_inputs_and_collectives(step: ShardedStep) -> None:
    operators, inputs, moved = totals(step.graph_module.graph, step.signature)
    count = sum(1 for n in step.graph_module.graph.nodes if n.op == "call_function")
    assert operators.startswith(f"# {count} operators: ")
    assert sum(int(part.split()[0]) for part in operators.split(": ")[1].split(", ")) == count
    parameters = [e.value.bytes for e in step.signature.inputs if e.role == "parameter"]
    assert f"{len(parameters)} parameter {sum(parameters):,} B" in inputs
    starts = list(collectives(step.graph_module.graph))
    sizes = sum(spec_of(n.all_input_nodes[0]).bytes for n in starts)
    assert moved == f"# collectives: {len(starts)} all_reduce {sizes:,} B"


def test_a_graph_without_collectives_says_so() -> None:
    captured, _ = captured_model("mlp", sgd)
    assert totals(captured.graph_module.graph, captured.signature)[-1] == "# collectives: none"


def test_a_stage_is_python_and_its_diff_tells_what_a_pass_did(step: ShardedStep, tmp_path: Path) -> None:
    before = write_stage(tmp_path, "00_expanded", step.graph_module, step.signature)
    run_passes(step, [identity_views.PASS], PassState())
    after = write_stage(tmp_path, "00_identity_views", step.graph_module, step.signature, before)
    for path in (before, after):
        compile(path.read_text(), str(path), "exec")
    assert not before.with_suffix(".diff").exists()
    lines = after.with_suffix(".diff").read_text().splitlines()
    assert lines[:2] == ["--- 00_expanded.py", "+++ 00_identity_views.py"]
    gone = [line for line in lines[2:] if line.startswith("-") and " = " in line]
    come = [line for line in lines[2:] if line.startswith("+") and " = " in line]
    removed = len(before.read_text().splitlines()) - len(after.read_text().splitlines())
    assert len(gone) - len(come) == removed == 20


def test_a_pass_that_does_nothing_leaves_an_empty_diff(step: ShardedStep, tmp_path: Path) -> None:
    before = write_stage(tmp_path, "00_a", step.graph_module, step.signature)
    write_stage(tmp_path, "00_b", step.graph_module, step.signature, before)
    assert (tmp_path / "00_b.diff").read_text() == ""


def test_training_writes_each_stage_of_each_graph_with_its_diff(two_ranks: RankPool, tmp_path: Path) -> None:
    """The graph of the first step, in which momentum begins as the gradient, and that of all later ones."""
    names = [p.name for p in PASSES]
    case = TrainingCase("mlp", "sgd", batches=3)
    two_ranks.run(train_with, case, two_ranks.size, names, tmp_path)
    for number in ("00", "01"):
        assert (tmp_path / f"{number}_captured.py").exists()
        assert not (tmp_path / f"{number}_captured.diff").exists(), "another build's last stage is not its previous one"
        previous = "captured"
        for name in ["expanded", *names]:
            assert (tmp_path / f"{number}_{name}.py").exists()
            diff = (tmp_path / f"{number}_{name}.diff").read_text()
            assert not diff or diff.startswith(f"--- {number}_{previous}.py\n+++ {number}_{name}.py\n")
            previous = name
