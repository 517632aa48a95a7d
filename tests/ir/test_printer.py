"""Graphs and signatures as text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_spmd.ir.node_info import NodeInfo, Section, TensorSpec, info_of, spec_of
from lightning_spmd.ir.printer import readable, totals, write_stage
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole, Signature
from lightning_spmd.ir.steps import ShardedStep, Variant
from tests.ir.test_verify import node, step

FLOATS = TensorSpec.of(torch.zeros(4, 3))


def test_a_spec_knows_its_size() -> None:
    assert (FLOATS.numel, FLOATS.bytes, str(FLOATS)) == (12, 48, "float32[4, 3]")
    assert TensorSpec.of(torch.zeros(3, 4).t()).stride == (1, 4)
    assert TensorSpec.of(torch.zeros((), dtype=torch.int64)).bytes == 8


def test_a_signature_finds_by_role_and_prints_a_line_an_entry() -> None:
    signature = Signature(
        (
            GraphInput(InputRole.PARAMETER, ("a",), "a", FLOATS, mutated=True),
            GraphInput(InputRole.HYPER_PARAMETER, (0, "lr"), "lr", 0.1),
            GraphInput(InputRole.PARAMETER, ("b",), "b", FLOATS),
        ),
        (GraphOutput(OutputRole.LOSS, (), "loss", FLOATS),),
    )
    assert [i for i, _ in signature.inputs_of(InputRole.PARAMETER)] == [0, 2]
    assert [e.name for _, e in signature.inputs_of(InputRole.HYPER_PARAMETER, InputRole.BATCH)] == ["lr"]
    assert list(signature.outputs_of(OutputRole.GRADIENT)) == []
    lines = [" ".join(line.split()) for line in str(signature).splitlines()]
    assert lines == [
        "in 0 parameter a float32[4, 3] mutated",
        "in 1 hyper_parameter lr float",
        "in 2 parameter b float32[4, 3]",
        "out 0 loss loss float32[4, 3]",
    ]


def text_of(found: ShardedStep) -> str:
    return readable(found.graph_module, found.signature)


def test_a_graph_reads_as_python_with_its_facts() -> None:
    found = step()
    info = NodeInfo(Section.FORWARD, "net.0", "/home/me/module.py:7")
    node(found, "mul_tensor").meta["info"] = info
    lines = [" ".join(line.split()) for line in text_of(found).splitlines()]
    assert "input_0, # parameter input 0 float32[4, 3] R" in lines
    assert "# ---- forward: net.0" in lines
    assert "mul_tensor = aten.mul.Tensor(input_0, 2) # float32[4, 3] 48 B module.py:7" in lines
    assert "# ---- optimizer: (top)" in lines
    assert "wait_tensor_default, # step_output output 1 float32[4, 3] R" in lines
    compile(text_of(found), "graph", "exec")  # it is Python


def test_totals_count_operators_inputs_and_bytes_moved() -> None:
    found = step()
    assert totals(found.graph_module.graph, found.signature) == [
        "# 5 operators: 2 backward, 2 communication, 1 optimizer",
        "# inputs: 1 parameter 48 B; 1 batch 48 B",
        "# collectives: 1 all_reduce 48 B",
    ]


def test_a_stage_is_written_with_what_it_changed(tmp_path: Path) -> None:
    found = step()
    first = write_stage(tmp_path / "new", "00_a", found.graph_module, found.signature)
    second = write_stage(tmp_path / "new", "00_b", found.graph_module, found.signature, first)
    assert first.read_text() == second.read_text()
    assert second.with_suffix(".diff").read_text() == ""
    node(found, "mul_tensor").args = (node(found, "input_0"), 3)
    third = write_stage(tmp_path / "new", "00_c", found.graph_module, found.signature, second)
    changed = [line for line in third.with_suffix(".diff").read_text().splitlines() if line.startswith("+ ")]
    assert len(changed) == 1
    assert "aten.mul.Tensor(input_0, 3)" in changed[0]
    assert not first.with_suffix(".diff").exists()


def test_a_node_without_facts_has_empty_ones() -> None:
    found = step()
    assert info_of(node(found, "input_0")) == NodeInfo(Section.FORWARD)
    assert spec_of(node(found, "mul_tensor")) == FLOATS
    with pytest.raises(TypeError, match="node output produces NoneType, not one tensor"):
        spec_of(node(found, "output"))


def test_variants_say_what_is_in_them() -> None:
    assert str(Variant()) == "forward+apply"
    assert str(Variant(accumulated=True, apply=False)) == "forward+accumulate"
    assert str(Variant(forward=False, accumulated=True, expose_gradients=True)) == "accumulate+apply (split)"
    assert str(Variant.evaluation("test_step")) == "test_step"
