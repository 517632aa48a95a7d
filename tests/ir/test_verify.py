"""What the verifier refuses, each in a small program that was right before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.node_info import NodeInfo, Section, TensorSpec
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import (
    collectives,
    forget_writes,
    is_wait,
    stamp_writes,
    verify_captured,
    verify_sharded,
)
from tests.helpers.activations import activation_collectives
from tests.helpers.tiny_capture import capture_function
from tests.stages.passes.local_programs import BATCH, PARAMETER, R, Writer, functional, write

aten = torch.ops.aten


def step() -> ShardedStep:
    """``weight -= 0.1 * all_reduce(batch * 2)``; the weight is returned doubled, as it was before."""

    def body(writer: Writer, weight: fx.Node, batch: fx.Node) -> Any:
        before = writer.call(aten.mul.Tensor, weight, 2)
        reduced = writer.reduce(writer.call(aten.mul.Tensor, batch, 2))
        writer.update(weight, reduced)
        return [(before, R), (reduced, R)]

    weight, batch = torch.randn(4, 3), torch.randn(4, 3)
    return write(body, [(weight, R, PARAMETER), (batch, R, BATCH)])[0]


def node(found: ShardedStep, name: str) -> fx.Node:
    return next(n for n in found.graph_module.graph.nodes if name in n.name)


def appended(found: ShardedStep, target: Any, *args: Any) -> fx.Node:
    new = found.graph_module.graph.call_function(target, args)
    new.meta.update(val=TensorSpec.of(torch.randn(4, 3)), info=NodeInfo(Section.BACKWARD))
    return new


def test_the_program_is_right_before() -> None:
    verify_sharded(step())


def reads_what_comes_later(found: ShardedStep) -> None:
    node(found, "mul_tensor_1").append(node(found, "input_1"))


def has_no_facts(found: ShardedStep) -> None:
    del node(found, "mul_tensor").meta["val"]


def has_no_section(found: ShardedStep) -> None:
    del node(found, "mul_tensor").meta["info"]


def has_an_input_more(found: ShardedStep) -> None:
    graph = found.graph_module.graph
    with graph.inserting_after(node(found, "input_1")):
        graph.placeholder("another").meta["val"] = None


def has_another_input(found: ShardedStep) -> None:
    node(found, "input_0").meta["val"] = TensorSpec.of(torch.randn(3, 4))


def has_an_output_more(found: ShardedStep) -> None:
    output = node(found, "output")
    output.args = ((*output.args[0], node(found, "input_0")),)  # type: ignore[misc]


def has_a_nested_output(found: ShardedStep) -> None:
    node(found, "output").args = (node(found, "input_0"),)


def has_no_output(found: ShardedStep) -> None:
    found.graph_module.graph.erase_node(node(found, "output"))


def has_placements_of_two_axes(found: ShardedStep) -> None:
    first, *rest = found.signature.inputs
    first = dataclasses.replace(first, placements=(R, R))
    found.signature = dataclasses.replace(found.signature, inputs=(first, *rest))


def waits_for_nothing(found: ShardedStep) -> None:
    waited = node(found, "wait_tensor")
    waited.replace_all_uses_with(node(found, "all_reduce"))
    found.graph_module.graph.erase_node(waited)


def waits_twice(found: ShardedStep) -> None:
    with found.graph_module.graph.inserting_before(node(found, "output")):
        appended(found, functional.wait_tensor.default, node(found, "all_reduce"))


def reads_what_is_under_way(found: ShardedStep) -> None:
    with found.graph_module.graph.inserting_before(node(found, "output")):
        appended(found, aten.mul.Tensor, node(found, "all_reduce"), 2)


def touches_what_a_collective_works_in(found: ShardedStep) -> None:
    start = node(found, "all_reduce")
    start.target = functional.all_reduce_.default
    with found.graph_module.graph.inserting_after(start):
        appended(found, aten.mul.Tensor, start.all_input_nodes[0], 2)


def writes_what_a_collective_reads(found: ShardedStep) -> None:
    start = node(found, "all_reduce")
    start.target, start.args = functional.broadcast.default, (start.args[0], 0, start.args[2])
    with found.graph_module.graph.inserting_after(start):
        appended(found, aten.add_.Tensor, start.all_input_nodes[0], 2)


def reads_on_the_other_side_of_a_write(found: ShardedStep) -> None:
    node(found, "add__tensor").append(node(found, "mul_tensor"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (reads_what_comes_later, "mul_tensor_1 reads input_1, which comes later"),
        (has_no_facts, r"mul_tensor \(aten.mul.Tensor\) lacks meta\['val'\]"),
        (has_no_section, r"mul_tensor \(aten.mul.Tensor\) lacks meta\['val'\] or meta\['info'\]"),
        (has_an_input_more, "3 placeholders for 2 inputs"),
        (has_another_input, r"input input 0 is float32\[4, 3\], its placeholder float32\[3, 4\]"),
        (has_an_output_more, "3 outputs, 2 in the signature"),
        (has_a_nested_output, "does not end in a flat tuple"),
        (has_no_output, "does not end in a flat tuple"),
        (has_placements_of_two_axes, "input 0 has 2 placements on 1 mesh axes"),
        (waits_for_nothing, "all_reduce_default must be waited for exactly once"),
        (waits_twice, "all_reduce_default must be waited for exactly once"),
        (reads_what_is_under_way, "have no other reader; its users: wait_tensor_default, mul_tensor"),
        (touches_what_a_collective_works_in, "touches memory that all_reduce_default, not waited yet, works on"),
        (writes_what_a_collective_reads, "touches memory that all_reduce_default, not waited yet, works on"),
        (reads_on_the_other_side_of_a_write, "mul_tensor .* reads input_0 on the wrong side of a write"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_is_named(change: Callable[[ShardedStep], None], message: str) -> None:
    found = step()
    change(found)
    with pytest.raises(VerificationError, match=message):
        verify_sharded(found)


def test_what_is_handed_on_need_not_be_waited() -> None:
    found = step()
    start, waited = node(found, "all_reduce"), node(found, "wait_tensor")
    graph = found.graph_module.graph
    graph.erase_node(node(found, "add__tensor"))
    output = node(found, "output")
    output.args = ((output.args[0][0], start),)  # type: ignore[index]
    graph.erase_node(waited)
    with pytest.raises(VerificationError, match="must be waited for exactly once"):
        verify_sharded(found)
    first, last = found.signature.outputs
    last = dataclasses.replace(last, role=OutputRole.PENDING)
    found.signature = dataclasses.replace(found.signature, outputs=(first, last))
    verify_sharded(found)


def test_the_sides_of_writes_are_remembered_until_they_are_forgotten() -> None:
    found = step()
    moved = node(found, "mul_tensor")
    node(found, "add__tensor").append(moved)
    forget_writes(moved)
    verify_sharded(found, stamp=True)  # now this is its side
    node(found, "all_reduce").prepend(moved)
    with pytest.raises(VerificationError, match="on the wrong side of a write"):
        verify_sharded(found)
    stamp_writes(found.graph_module.graph)
    verify_sharded(found)


def test_a_captured_graph_has_no_collective() -> None:
    weight, batch = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    captured, _ = capture_function(lambda p, _, x: (p["weight"] * x).sum(), {"weight": weight}, {}, [batch])
    verify_captured(captured)
    graph = captured.graph_module.graph
    source = next(n for n in graph.nodes if n.op == "call_function")
    with graph.inserting_after(source):
        new = graph.call_function(functional.all_reduce.default, (source, "sum", "group"))
    new.meta.update(source.meta)
    with pytest.raises(VerificationError, match="a collective in a captured graph"):
        verify_captured(captured)


def test_collectives_on_activations_are_told_from_those_on_gradients() -> None:
    def body(writer: Writer, weight: fx.Node, batch: fx.Node) -> Any:
        gradient = writer.reduce(writer.call(aten.mul.Tensor, weight, 2))
        number = writer.reduce(writer.call(aten.sum.default, batch))
        activation = writer.reduce(writer.call(aten.mul.Tensor, batch, 2))
        rows = writer.gather(batch)
        return [(gradient, R), (number, R), (activation, R), (rows, R)]

    weight, batch = torch.randn(5, 3), torch.randn(4, 3)
    found = write(body, [(weight, R, PARAMETER), (batch, R, BATCH)])[0]
    assert sum(1 for _ in collectives(found.graph_module.graph)) == 4
    assert [n.name for n in activation_collectives(found)] == ["all_reduce_default_2", "all_gather_into_tensor_default"]
    assert sum(is_wait(n) for n in found.graph_module.graph.nodes) == 4
