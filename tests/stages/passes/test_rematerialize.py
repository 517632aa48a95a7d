"""Activations that are made again: how many bytes that frees, that no bit changes, and what is left alone."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.node_info import NodeInfo, Section, info_of
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.ir.verify import collectives
from lightning_spmd.parallel.parallel_plan import ShardedStatePlan
from lightning_spmd.stages import BuildOptions, build
from lightning_spmd.stages.passes import PASSES, GraphPass, PassState, rematerialize, run_passes
from lightning_spmd.stages.passes.remat import plan as plans
from lightning_spmd.stages.passes.remat.choice import choose
from lightning_spmd.stages.passes.remat.plan import Planner
from lightning_spmd.stages.passes.remat.values import Values
from lightning_spmd.stages.runtime.agreement.same_graphs import describe
from tests.helpers.models import GPT, Block, ConvNet
from tests.helpers.simulate import expand_all, run_ranks
from tests.helpers.tiny_capture import capture_function, capture_module
from tests.helpers.transformers_like import Llama
from tests.stages.expand.test_sharded_state import UPDATES
from tests.stages.expand.test_tensor_parallel import MEGATRON, tensor_plan

aten = torch.ops.aten
Captured = tuple[CapturedStep, list[Tensor]]


def classify(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x).flatten(0, -2), y.flatten())


@functools.cache
def gpt(layers: int = 2, rows: int = 4, length: int = 32, dropout: float = 0.0) -> Captured:
    torch.manual_seed(0)
    batch = [torch.randint(256, (rows, length)) for _ in range(2)]
    return capture_module(GPT(layers, dropout=dropout), classify, batch, update=UPDATES["lists"])


class InPlace(nn.Module):
    """A residual net as torchvision writes it: activations and sums in place."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(4)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(4)])
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = F.relu(norm(conv(x)), inplace=True) if i % 2 else norm(conv(x))
            if i == 2:
                y += x
                y.relu_()
            x = y
        return self.head(x.mean((-2, -1)))


class Checkpointed(nn.Module):
    """The user's own checkpoints, one block of two."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.blocks = nn.ModuleList([Block(32, 4, 0.1) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i % 2 else block(x)
        return x


@functools.cache
def images(make: Callable[[], nn.Module]) -> Captured:
    torch.manual_seed(0)
    batch = [torch.randn(16, 3, 8, 8), torch.randint(10, (16,))]
    return capture_module(make(), lambda m, x, y: F.cross_entropy(m(x), y), batch, update=UPDATES["lists"])


@functools.cache
def checkpointed() -> Captured:
    torch.manual_seed(0)
    return capture_module(Checkpointed(), lambda m, x: m(x).square().mean(), [torch.randn(4, 16, 32)])


def on_one_device(captured: CapturedStep, wanted: float | int | None) -> ShardedStep:
    return build(captured, (), BuildOptions(rematerialize=wanted)).main


def activation_bytes(step: ShardedStep) -> int:
    """The most that are alive at once."""
    return Planner(Values(step)).plan(()).peak


def run(step: ShardedStep, live: list[Tensor]) -> list[Any]:
    """Outputs and inputs afterwards, draws from a fixed seed."""
    inputs = [v.clone() if isinstance(v, Tensor) else v for v in live]
    torch.manual_seed(7)
    with torch.no_grad():
        return [*fx.Interpreter(step.graph_module).run(*inputs), *inputs]


def assert_equal(got: list[Any], wanted: list[Any]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def counts(step: ShardedStep) -> Counter[Any]:
    return Counter(n.target for n in step.graph_module.graph.nodes if n.op == "call_function")


ONE_DEVICE: dict[str, Callable[[], Captured]] = {
    "gpt": gpt,
    "gpt, dropout": lambda: gpt(dropout=0.1),
    "batch norm": lambda: images(ConvNet),
    "in place": lambda: images(InPlace),
    "checkpoint": checkpointed,
}


# ---------------------------------------------------------------- one device
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("name", ONE_DEVICE)
def test_the_same_bits_with_fewer_bytes(name: str, share: float) -> None:
    captured, live = ONE_DEVICE[name]()
    text = str(captured.graph_module.graph)
    plain, ours = (on_one_device(captured, wanted) for wanted in (None, share))
    assert str(captured.graph_module.graph) == text, "the captured graph is looked at again later"
    assert activation_bytes(ours) < 0.95 * activation_bytes(plain)
    assert_equal(run(ours, live), run(plain, live))


def test_draws_and_statistics_happen_once() -> None:
    for name in ("gpt, dropout", "checkpoint"):
        captured, _ = ONE_DEVICE[name]()
        before, after = (counts(on_one_device(captured, wanted)) for wanted in (None, 1.0))
        assert after[aten.bernoulli_.float] == before[aten.bernoulli_.float]
    captured, _ = images(ConvNet)
    before, after = (on_one_device(captured, wanted) for wanted in (None, 1.0))
    norms = [n for n in after.graph_module.graph.nodes if n.target is aten.native_batch_norm.default]
    again = [n for n in norms if info_of(n).section is Section.BACKWARD]
    assert again
    assert len(norms) - len(again) == counts(before)[aten.native_batch_norm.default]
    assert all(n.args[3:5] == (None, None) for n in again)
    assert counts(after)[aten.add_.Tensor] == counts(before)[aten.add_.Tensor], "batches are counted once"


def test_a_dropout_mask_is_kept_as_booleans() -> None:
    captured, _ = gpt(dropout=0.1)
    step = on_one_device(captured, 1.0)
    values = Values(step)
    kept = {values.position[r]: r for r in values.late_readers if r.op == "call_function"}
    masks = [r for r in kept.values() if r.meta["val"].dtype is torch.bool]
    assert len(masks) == 2
    assert not [r for r in kept.values() if r.target is aten.empty_like.default]


def test_what_is_made_again_is_made_where_it_is_read_first_as_backward_work() -> None:
    captured, _ = gpt()
    step = on_one_device(captured, 0.5)
    nodes = list(step.graph_module.graph.nodes)
    old = {n.name for n in captured.graph_module.graph.nodes}
    new = [n for n in nodes if n.name not in old]
    assert new
    assert {info_of(n).section for n in new} == {Section.BACKWARD}
    assert {info_of(n).module for n in new} <= {info_of(n).module for n in captured.graph_module.graph.nodes}
    position = {n: i for i, n in enumerate(nodes)}
    for node in new:
        first = min(position[user] for user in node.users)
        assert all(n in new for n in nodes[position[node] : first]), f"{node} is made long before it is read"


def test_matrix_products_wait_for_what_is_cheaper_and_attention_for_them() -> None:
    captured, _ = gpt(4, 8, 64)
    before = counts(on_one_device(captured, None))
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    found = {share: counts(on_one_device(captured, share)) - before for share in (0.2, 0.5, 1.0)}
    assert found[0.2][aten.gelu.default] + found[0.2][aten.native_layer_norm.default] > 0
    assert found[0.2][aten.addmm.default] == 0
    assert found[0.5][aten.addmm.default] > 0
    assert found[0.5][attention] == 0


def test_a_budget_in_bytes_is_kept() -> None:
    captured, _ = gpt()
    whole = activation_bytes(on_one_device(captured, None))
    state = PassState(rematerialize=whole * 2 // 3)
    step = run_passes(ShardedStep(_copy(captured), captured.signature, ()), [rematerialize.PASS], state)
    assert 0.5 * whole < activation_bytes(step) <= whole * 2 // 3
    assert "cannot be reached" not in state.notes["rematerialize"]
    assert counts(on_one_device(captured, 2 * whole)) == counts(on_one_device(captured, None))


def test_what_cannot_be_reached_is_said() -> None:
    captured, _ = gpt()
    said = {
        wanted: build(captured, (), BuildOptions(rematerialize=wanted)).remarks for wanted in (0.5, 2**15, 0.95, 1.0)
    }
    for wanted, (remark,) in said.items():
        assert remark.startswith("rematerialize: activations take ")
        assert ("cannot be reached" in remark) == (wanted in (2**15, 0.95))
    assert said[2**15][0].endswith("done twice; 0.0 MiB, as asked for, cannot be reached")
    assert said[0.95][0].endswith("done twice; the share of 0.95, as asked for, cannot be reached")


def test_a_deep_network_goes_as_low_as_it_can() -> None:
    """Giving up everything is as bad as nothing: all is made again at once. A fifth is reached before that."""
    torch.manual_seed(0)
    batch = [torch.randint(256, (4, 32)) for _ in range(2)]
    captured, _ = capture_module(Llama(layers=8), classify, batch)
    values = Values(on_one_device(captured, None))
    planner = Planner(values)
    whole = planner.plan(()).peak
    everything = [root for root in values.late_readers if root in values.repeatable]
    assert planner.plan(everything).peak > 0.9 * whole
    assert choose(values, planner, whole // 5).peak <= whole // 5


def test_ones_own_checkpoints_stay() -> None:
    captured, live = checkpointed()
    before, after = (on_one_device(captured, wanted) for wanted in (None, 0.3))
    theirs = {n.name for n in before.graph_module.graph.nodes if info_of(n).section is Section.BACKWARD}
    assert theirs <= {n.name for n in after.graph_module.graph.nodes}


# ---------------------------------------------------------------- several ranks
ZERO_3 = ShardedStatePlan(parameters=True)


def megatron(*, sequence: bool) -> Any:
    return tensor_plan(GPT(), MEGATRON, 2, sequence=sequence)


SEVERAL: dict[str, tuple[Callable[[], Captured], Any, Callable[[], Any]]] = {
    "replicate": (gpt, (2, 2), lambda: None),
    "uneven": (gpt, (1, 3), lambda: None),
    "zero3": (gpt, (2, 2), lambda: ZERO_3),
    "zero3, uneven": (lambda: images(InPlace), (10, 6), lambda: ZERO_3),
    "batch norm": (lambda: images(ConvNet), (8, 8), lambda: None),
    "tp2": (gpt, {"tensor_parallel": (1, 1)}, lambda: megatron(sequence=False)),
    "tp2, sequence": (gpt, {"tensor_parallel": (1, 1)}, lambda: megatron(sequence=True)),
}


def _all_ranks(captured: CapturedStep, split: Any, plan: Any, wanted: float | None) -> list[ShardedStep]:
    steps = expand_all(captured, split, plan)
    for step in steps:
        run_passes(step, PASSES, PassState(bucket_size_mb=0.05, rematerialize=wanted))
    lines = [describe(step) for step in steps]
    assert all(line == lines[0] for line in lines), "the ranks took different decisions"
    return steps


def kinds(step: ShardedStep) -> Counter[str]:
    return Counter(str(n.target).split(".")[1] for n in collectives(step.graph_module.graph))


@pytest.mark.parametrize("name", SEVERAL)
def test_several_ranks_give_the_same_bits_and_move_no_activation_more(name: str) -> None:
    make, split, plan = SEVERAL[name]
    captured, live = make()
    plain, ours = (_all_ranks(captured, split, plan(), wanted) for wanted in (None, 0.6))
    assert len(list(ours[0].graph_module.graph.nodes)) != len(list(plain[0].graph_module.graph.nodes))
    more = kinds(ours[0]) - kinds(plain[0])
    assert set(more) <= ({"all_gather_into_tensor"} if plan() is ZERO_3 else set())
    for a, b in zip(run_ranks(ours, live), run_ranks(plain, live), strict=True):
        assert_equal(a, b)


def test_a_product_that_runs_again_reads_a_parameter_that_is_gathered_again() -> None:
    captured, _ = gpt(4)
    (step, *_) = _all_ranks(captured, (2, 2), ZERO_3, 0.75)
    values = Values(step)
    again = [n for n in values.order[values.border :] if n.target is aten.addmm.default]
    gathered = [gather_of(product.args[2]) for product in again]
    assert len(again) > 4
    early = {gather for gather in gathered if values.position[gather] < values.border}
    assert len(early) <= 1, "only the bucket of the last layer may live on"


def gather_of(value: Any) -> fx.Node:
    """The gather that a transposed parameter comes from."""
    while "all_gather" not in str(value.target):
        value = value.all_input_nodes[0]
    return value


def test_nothing_is_made_again_where_a_rank_has_no_row() -> None:
    captured, _ = gpt()
    plain, ours = (_all_ranks(captured, (0, 4), None, wanted) for wanted in (None, 0.6))
    assert [describe(s) for s in plain] == [describe(s) for s in ours]


# ---------------------------------------------------------------- what is left alone
def _written_later(p: Any, _: Any, x: Tensor) -> Tensor:
    h = x @ p["w"]
    y = h.exp()  # from a value that is gone when the backward pass runs
    h.mul_(2.0)
    return y.sum() + (h * h).sum()


def _not_known_to_repeat(p: Any, _: Any, x: Tensor) -> Tensor:
    y = torch.cumsum(x @ p["w"], 0)  # on a GPU not the same bits twice
    return (y * y).sum()


def _only_moved(p: Any, _: Any, x: Tensor) -> Tensor:
    return (x @ p["w"]).sum()  # keeps nothing


@pytest.mark.parametrize("function", [_written_later, _not_known_to_repeat, _only_moved])
def test_it_leaves_alone(function: Any) -> None:
    torch.manual_seed(0)
    parameters = {"w": torch.randn(32, 32, requires_grad=True)}
    captured, live = capture_function(function, parameters, {}, [torch.randn(64, 32)])
    plain, step = (on_one_device(captured, wanted) for wanted in (None, 1.0))
    assert_equal(run(step, live), run(plain, live))
    for operator in (aten.exp.default, aten.cumsum.default, aten.mm.default):
        assert counts(step)[operator] == counts(plain)[operator]


def test_a_graph_without_backward_pass_stays_as_it_is() -> None:
    captured, _ = gpt()
    step = ShardedStep(_copy(captured), captured.signature, ())
    for node in step.graph_module.graph.nodes:
        if node.op == "call_function":
            node.meta["info"] = NodeInfo(Section.FORWARD)
    state = PassState(rematerialize=1.0)
    run_passes(step, [rematerialize.PASS], state)
    assert state.notes == {}
    assert counts(step) == counts(ShardedStep(captured.graph_module, captured.signature, ()))


# ---------------------------------------------------------------- broken on purpose
def _copy(captured: CapturedStep) -> Any:
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph_module.graph, {}))
    return fx.GraphModule(captured.graph_module, graph)


def test_the_verifier_catches_reads_of_what_was_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Values, "_is_lasting", lambda self, node, own: True)
    torch.manual_seed(0)
    parameters = {"w": torch.randn(32, 32, requires_grad=True)}
    captured, _ = capture_function(_written_later, parameters, {}, [torch.randn(64, 32)])
    with pytest.raises(VerificationError, match="'rematerialize' broke the graph: .* wrong side of a write"):
        on_one_device(captured, 1.0)


def test_the_verifier_catches_what_is_made_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(plans.Planner):
        def _places(self, dropped: Any, again: Any) -> dict[fx.Node, int]:
            return {node: place + 1 for node, place in super()._places(dropped, again).items()}

    monkeypatch.setattr(rematerialize, "Planner", Late)
    with pytest.raises(VerificationError, match="'rematerialize' broke the graph: .* comes later"):
        on_one_device(gpt()[0], 0.5)


def test_the_pass_comes_after_those_that_would_undo_it() -> None:
    names = [p.name for p in PASSES]
    assert rematerialize.PASS.after <= set(names[: names.index("rematerialize")])
    assert isinstance(rematerialize.PASS, GraphPass)
    assert names.index("rematerialize") < names.index("regather_parameters")
