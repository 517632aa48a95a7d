"""What a recording may hold, and how a graph is cut."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from lightning_spmd.ir.node_info import NodeInfo, Section, TensorSpec
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole, Signature
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.runtime.cuda_graphs import recorded_pieces
from lightning_spmd.stages.runtime.cuda_graphs.recordable import cut, why_not
from lightning_spmd.stages.runtime.cuda_graphs.recorded_pieces import Gap, copied_out

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional


def _spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.of(torch.empty(shape, dtype=dtype))


def _input(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def _call(graph: fx.Graph, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    node.meta.update(val=_spec(4) if value is None else value, info=NodeInfo(Section.FORWARD))
    return node


def _reason(target: Any, *args: Any, value: Any = None, **kwargs: Any) -> str | None:
    return why_not(_call(args[0].graph, target, *args, value=value, **kwargs), lambda spec: spec.device.type == "cpu")


def test_what_waits_for_the_device_is_not_recorded() -> None:
    graph = fx.Graph()
    x, mask = _input(graph, "x", _spec(4)), _input(graph, "mask", _spec(4, dtype=torch.bool))
    rows, number = _input(graph, "rows", _spec(2, dtype=torch.int64)), _input(graph, "number", 0.5)
    assert _reason(_aten.add.Tensor, x, x) is None
    assert _reason(_aten.index.Tensor, x, [rows]) is None
    assert _reason(_aten.index.Tensor, x, [mask]) == "waits for the device to count a mask"
    assert _reason(_aten.index_put_.default, x, [mask], x) == "waits for the device to count a mask"
    assert _reason(_aten.nonzero.default, x) == "waits for the device"
    assert _reason(_aten.add.Scalar, x, number) == "takes a number of this step"
    assert _reason(_c10d.wait_tensor.default, x) == "is a collective"
    assert _reason(torch.add, x, x) == "works on the host"


@pytest.mark.parametrize("kind", ["flash", "cudnn"])
def test_attention_is_recorded_only_without_dropout(kind: str) -> None:
    graph = fx.Graph()
    q = _input(graph, "q", _spec(1, 2, 8, 4))
    operator: Any = getattr(_aten, f"_scaled_dot_product_{kind}_attention").default
    bias = () if kind == "flash" else (None, True)
    assert _reason(operator, q, q, q, *bias, 0.0, True) is None
    assert _reason(operator, q, q, q, *bias, 0.1, True) == "draws on the host for its dropout"
    assert _reason(operator, q, q, q, *bias) is None  # the default is 0


def _bucket_handed_on() -> ShardedStep:
    """Four kernels make a bucket, whose reduction the next iteration waits for."""
    graph = fx.Graph()
    x = _input(graph, "x", _spec(4))
    value = x
    for _ in range(4):
        value = _call(graph, _aten.mul.Tensor, value, x)
    bucket = _call(graph, _c10d.all_reduce_.default, value, "sum", "group")
    graph.output((bucket,))
    signature = Signature(
        (GraphInput(InputRole.BATCH, (0,), "x", _spec(4)),),
        (GraphOutput(OutputRole.PENDING, (0, True), "bucket", _spec(4)),),
    )
    return ShardedStep(fx.GraphModule({}, graph), signature, ())


def test_what_is_under_way_at_the_end_works_on_a_copy() -> None:
    plan = cut(_bucket_handed_on(), lambda _spec: True)
    recorded, gap = plan.pieces
    assert (recorded.recorded, gap.recorded) == (True, False)
    (collective,) = plan.going
    graphs: list[fx.Graph] = []
    with mock.patch.object(recorded_pieces, "function_of", lambda module: graphs.append(module.graph)):
        Gap(plan, gap)
    calls = [n.target for n in graphs[0].nodes if n.op == "call_function"]
    assert calls == [_aten.clone.default, _c10d.all_reduce_.default]
    under_way = torch.zeros(4)
    assert copied_out(plan, {collective: under_way})[0] is under_way


def test_an_output_of_a_recording_is_copied_as_it_lies() -> None:
    step = _bucket_handed_on()
    graph = step.graph_module.graph
    (collective,) = (n for n in graph.nodes if n.target is _c10d.all_reduce_.default)
    collective.replace_all_uses_with(collective.args[0])  # type: ignore[arg-type]
    graph.erase_node(collective)
    plan = cut(step, lambda _spec: True)
    (value,) = plan.outputs
    for there in (torch.arange(4.0), torch.arange(1.0).expand(4), torch.arange(12.0).view(3, 4).T, torch.empty(0, 3)):
        (found,) = copied_out(plan, {value: there})
        assert (found.stride(), found.tolist()) == (there.stride(), there.tolist())
        assert there.numel() == 0 or found.data_ptr() != there.data_ptr()


def test_a_view_as_another_type_of_what_is_copied_in_is_not_recorded() -> None:
    graph = fx.Graph()
    x = _input(graph, "x", _spec(4))
    bits = _call(graph, _aten.view.dtype, x, torch.int32, value=_spec(4, dtype=torch.int32))
    value = bits
    for _ in range(6):
        value = _call(graph, _aten.add.Tensor, value, bits, value=_spec(4, dtype=torch.int32))
    graph.output((value,))
    entries = (GraphInput(InputRole.BATCH, (0,), "x", _spec(4)),)
    outputs = (GraphOutput(OutputRole.STEP_OUTPUT, (0,), "y", _spec(4)),)
    plan = cut(ShardedStep(fx.GraphModule({}, graph), Signature(entries, outputs), ()), lambda _spec: True)
    assert plan.left_out[bits] == "reads a value as another type"
    assert all(bits not in node.all_input_nodes for piece in plan.pieces if piece.recorded for node in piece.nodes)
