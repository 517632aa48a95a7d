"""Which nodes come into a region, where regions end, and that a graph with regions is the same graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from lightning_spmd import _private_api as private
from lightning_spmd.cost.memory import liveness
from lightning_spmd.ir.node_info import NodeInfo, Section, TensorSpec
from lightning_spmd.ir.signature import Signature
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.runtime.regions.choice import fitting_regions
from lightning_spmd.stages.runtime.regions.eligible import may_be_lowered
from lightning_spmd.stages.runtime.regions.partition import LONG, computing, runs
from lightning_spmd.stages.runtime.regions.region import Region, lowered_graph
from tests.stages.runtime.regions.cases import capture, chain

_aten = torch.ops.aten


def regions_of(graph: fx.Graph) -> dict[int, Region]:
    return {number: Region.of(run) for number, run in enumerate(runs(graph))}


def with_regions(step: ShardedStep) -> tuple[fx.GraphModule, dict[int, Region]]:
    """The graph with every region as a function that runs its operators."""
    regions = regions_of(step.graph_module.graph)

    def function(region: Region) -> Callable[..., Any]:
        return lambda *inputs: region.function(*inputs)

    graph = lowered_graph(step.graph_module.graph, regions, {n: function(r) for n, r in regions.items()})
    module = private.GraphModule(step.graph_module, graph)
    module.recompile()
    return module, regions


def targets(regions: dict[int, Region]) -> list[list[Any]]:
    return [
        [node.target for node in region.nodes if isinstance(node.target, private.OpOverload)]
        for region in regions.values()
    ]


def views(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """Views of fresh values and of inputs leave, also of a tuple's items and of views; in-place results too."""
    h = torch.tanh(x) * 2
    h.mul_(3.0)
    first, second = torch.sigmoid(h).split(8, dim=1)
    window = first[2:6].t()
    window.add_(1.0)
    turned = x.t()
    return (h.square().mean() + (p["w"] * 2).sum(), h, h.view(4, 64), second, window, turned, torch.exp(turned))


@pytest.mark.parametrize("case", [views], ids=lambda f: f.__name__)
def test_a_graph_with_regions_gives_the_same_bits_and_the_same_aliases(case: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    step, live = capture(case, torch.randn(16, 16))
    module, regions = with_regions(step)
    assert regions
    with torch.no_grad():
        expected = step.graph_module.forward(*live)
        got = module.forward(*live)

    def sharing(values: list[Tensor]) -> list[list[int]]:
        places = [value.untyped_storage().data_ptr() for value in [*live, *values]]
        return [[i for i, other in enumerate(places) if other == place] for place in places]

    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(expected, got, strict=True))
    assert sharing(list(got)) == sharing(list(expected))


def test_a_region_gives_fresh_values_alone() -> None:
    step, _ = capture(views, torch.randn(16, 16))
    for region in regions_of(step.graph_module.graph).values():
        assert not [n for n in region.outputs if n.target in (_aten.view.default, _aten.t.default)]
        assert region.inputs


def test_products_draws_and_writes_into_inputs_stay_outside() -> None:
    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = F.dropout(torch.tanh(x) * 2 + 1, 0.5) * 3
        with torch.no_grad():
            x.mul_(0.5)
        return (torch.tanh(h) @ p["w"]).square().mean()

    step, _ = capture(loss, torch.randn(16, 16))
    found = [target for region in targets(regions_of(step.graph_module.graph)) for target in region]
    graph = step.graph_module.graph
    outside = {n.target for n in graph.nodes if n.op == "call_function"} - set(found)
    assert {_aten.mm.default, _aten.mul_.Tensor} <= outside
    assert any("dropout" in str(target) or "bernoulli" in str(target) for target in outside)
    assert _aten.tanh.default in found


def _with_values(target: Any, *values: Any) -> fx.Node:
    graph = fx.Graph()
    nodes = [graph.placeholder("x") for _ in values[:-1]]
    node = graph.call_function(target, tuple(nodes))
    for made, value in zip([*nodes, node], values, strict=True):
        made.meta["val"] = value
    return node


def _spec(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4,), device: str = "cpu") -> TensorSpec:
    return TensorSpec(shape, (1,) * len(shape), dtype, torch.device(device))


@pytest.mark.parametrize(
    "node",
    [
        _with_values(_aten.mul.Tensor, 2.0, _spec(), _spec()),
        _with_values(_aten.mul.Tensor, _spec(torch.complex64), _spec(), _spec(torch.complex64)),
        _with_values(_aten.mul.Tensor, _spec(shape=(0,)), _spec(shape=(0,)), _spec(shape=(0,))),
        _with_values(_aten.mul.Tensor, _spec(device="cuda"), _spec(shape=()), _spec(device="cuda")),
        _with_values(_aten.add.out, _spec(), _spec(), _spec()),
        _with_values(_aten._foreach_add.List, _spec(), _spec(), _spec()),
        _with_values(_aten.rand_like.default, _spec(), _spec()),
        _with_values(torch.ops._c10d_functional.wait_tensor.default, _spec(), _spec()),
        _with_values(_aten.native_batch_norm.default, _spec(), _spec()),
        _with_values(_aten.embedding.default, _spec(), _spec(), _spec()),
    ],
    ids=["number", "complex", "empty", "two devices", "out", "lists", "draw", "wait", "statistics", "index"],
)  # fmt: skip
def test_what_no_compiler_takes(node: fx.Node) -> None:
    assert not may_be_lowered(node)


def _long_chain(layers: int) -> fx.Graph:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = _spec()
    for layer in range(layers):
        for part in ("norm", "act", "act", ""):
            node = graph.call_function(_aten.tanh.default, (node,))
            path = f"layers.{layer}.{part}".rstrip(".")
            node.meta.update({"val": _spec(), "info": NodeInfo(Section.FORWARD, path)})
    graph.output((node,))
    return graph


def test_a_long_chain_is_cut_where_layers_end_and_equal_layers_are_one_kind() -> None:
    short = regions_of(_long_chain(LONG // 4))
    assert len(short) == 1
    long = regions_of(_long_chain(LONG // 4 + 1))
    assert len(long) == LONG // 4 + 1
    assert len({region.key for region in long.values()}) == 1
    assert long[1].tag == f"{long[1].name} forward layers.1.norm, layers.1.act, layers.1"


def test_forward_and_backward_are_no_common_region() -> None:
    step, _ = chain()
    for region in regions_of(step.graph_module.graph).values():
        assert len({node.meta["info"].section for node in region.nodes}) == 1


def test_what_differs_in_an_argument_a_shape_or_a_stride_is_another_kind() -> None:
    keys = set()
    for scale, shape in ((2.0, (16, 16)), (2.5, (16, 16)), (2.0, (8, 16))):
        step, _ = capture(lambda p, x, s=scale: (torch.tanh(x) * s + 1).sum() + (p["w"] * 0).sum(), torch.randn(*shape))
        keys.add(regions_of(step.graph_module.graph)[0].key)
    turned, _ = capture(lambda p, x: (torch.tanh(x) * 2.0 + 1).sum() + (p["w"] * 0).sum(), torch.randn(16, 16).t())
    keys.add(regions_of(turned.graph_module.graph)[0].key)
    assert len(keys) == 4


def test_regions_do_not_raise_the_peak() -> None:
    """Of a region that reads a large value early and makes another late, both would be there at once."""
    graph = fx.Graph()
    large, small = _spec(shape=(1 << 16,)), _spec(shape=())
    node = x = graph.placeholder("x")
    x.meta["val"] = small
    for _ in range(4):
        for target, spec, arguments in (
            (_aten.expand.default, large, (node, [1 << 16])),
            (_aten.exp.default, large, None),
            (_aten.tanh.default, large, None),
            (_aten.sum.default, small, None),
        ):
            node = graph.call_function(target, (node,) if arguments is None else arguments)
            node.meta["val"] = spec
    graph.output((node,))
    step = ShardedStep(fx.GraphModule(torch.nn.Module(), graph), Signature(), ())
    most = liveness(graph).peak
    regions = fitting_regions(step)
    assert sum(computing(region.nodes) for region in regions.values()) >= 2
    lowered = lowered_graph(graph, regions, dict.fromkeys(regions, torch.relu))
    assert liveness(lowered).peak <= most


def test_a_cast_there_and_back_keeps_its_rounding() -> None:
    """In one region the compiler would leave out both casts."""

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        rounded = (torch.tanh(x) * 2).bfloat16().view(256).float().view(16, 16)
        return ((torch.sigmoid(rounded) + 1) * p["w"]).mean()

    step, _ = capture(loss, torch.randn(16, 16))
    cast = _aten._to_copy.default
    for region in regions_of(step.graph_module.graph).values():
        assert sum(node.target is cast for node in region.nodes) < 2
    casts = [node for node in step.graph_module.graph.nodes if node.target is cast]
    assert [may_be_lowered(node) for node in casts][:2] == [True, False]
