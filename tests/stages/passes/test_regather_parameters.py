"""Sharded parameters are gathered for the forward pass and again for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.node_info import NodeInfo, Section, info_of, spec_of
from lightning_spmd.ir.placement import Shard
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import collectives
from lightning_spmd.stages.passes import PASSES, PassState, regather_parameters, run_passes
from lightning_spmd.stages.passes.contract import GraphPass
from tests.helpers.simulate import expand_all, run_ranks
from tests.stages.expand.test_sharded_state import STAGES, UPDATES, captured_net
from tests.stages.passes.local_programs import BATCH, PARAMETER, R, functional, write
from tests.stages.passes.with_passes import apply, assert_same_bits

PASS = regather_parameters.PASS
CLEAN_UP = PASSES[: PASSES.index(PASS)]
aten = torch.ops.aten
FORWARD, BACKWARD = NodeInfo(Section.FORWARD), NodeInfo(Section.BACKWARD)


def gathers(step: ShardedStep) -> list[fx.Node]:
    return [n for n in collectives(step.graph_module.graph) if "all_gather" in str(n.target)]


def nodes(step: ShardedStep) -> list[str]:
    return [str(n) for n in step.graph_module.graph.nodes]


def cleaned(captured: Any, split: tuple[int, ...]) -> list[ShardedStep]:
    return [run_passes(s, CLEAN_UP, PassState()) for s in expand_all(captured, split, STAGES["zero3"])]


# ---------------------------------------------------------------- by hand
Derive = Callable[[Any, fx.Node], fx.Node]


def transposed(p: Any, weight: fx.Node) -> fx.Node:
    return p.call(aten.t.default, weight)


def layers(*, derive: Derive = transposed, backward: bool = True, update_first: bool = False) -> Any:
    """Matrix products with gathered weights, and back through the same ones."""

    def body(p: Any, x: fx.Node, *weights: fx.Node) -> Any:
        p.info = FORWARD
        used = []
        for weight in weights:
            used.append(derive(p, p.gather(weight)))
            x = p.call(aten.mm.default, x, used[-1])
        p.info = BACKWARD
        if update_first:
            p.update(weights[0], p.call(aten.mul.Tensor, weights[0], 0.5))
        for weight in reversed(used) if backward else ():
            x = p.call(aten.mm.default, x, p.call(aten.t.default, weight))
        return [(x, R)]

    return body


def inputs(count: int = 3, role: InputRole = PARAMETER) -> list[tuple[Tensor, Any, InputRole]]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(8, 8, generator=generator) for _ in range(count + 1)]
    return [(tensors[0], R, BATCH), *((t, Shard(0), role) for t in tensors[1:])]


def both(body: Any, given: Sequence[Any]) -> tuple[ShardedStep, ShardedStep, PassState]:
    """Rank 0 before and after the pass; the bits are the same."""
    before, after = write(body, given), write(body, given)
    state = apply(PASS, after)
    assert_same_bits(before, after, [tensor for tensor, *_ in given])
    return before[0], after[0], state


def test_all_but_the_last_layer_are_gathered_twice_each_where_it_is_read() -> None:
    _, after, state = both(layers(), inputs())
    gathered = [n.all_input_nodes[0].name for n in gathers(after)]
    assert gathered == ["input_1", "input_2", "input_3", "input_2", "input_1"]
    assert state.notes == {"regather_parameters": "2 of 3 parameters are gathered again"}
    short = {functional.all_gather_into_tensor.default: "gather", aten.mm.default: "use"}
    found = [short[n.target] for n in after.graph_module.graph.nodes if n.target in short]
    assert " ".join(found) == "gather use gather use gather use use gather use gather use"


def cast(p: Any, weight: fx.Node) -> fx.Node:
    return transposed(p, p.call(aten._to_copy.default, p.call(aten._to_copy.default, weight, dtype=torch.float64),
                                dtype=torch.float32))  # fmt: skip


@pytest.mark.parametrize("derive", [transposed, cast])
def test_what_is_computed_from_the_parameter_alone_is_computed_again_as_backward_work(derive: Derive) -> None:
    before, after, _ = both(layers(derive=derive), inputs())
    extra = [n for n in after.graph_module.graph.nodes if str(n) not in nodes(before)]
    steps = 1 if derive is transposed else 3
    assert len(extra) == 2 * (2 + steps)
    assert {info_of(n).section for n in extra} == {Section.COMMUNICATION, Section.BACKWARD}
    for first in gathers(after)[:2]:
        todo, readers = [first], set[Section]()
        while todo:
            todo += (users := [u for u in todo.pop().users if u.target is not aten.mm.default])
            readers |= {info_of(u).section for u in users}
        assert readers == {Section.COMMUNICATION, Section.FORWARD}, "the first gather lives on"


def test_padding_is_repeated_too() -> None:
    captured, _ = captured_net(6, UPDATES["lists"])
    for step in cleaned(captured, (3, 3)):
        before = len(gathers(step))
        run_passes(step, [PASS], PassState())
        again = len(gathers(step)) - before
        # the frozen, hidden and back weights and batch norm's; the tied embedding is the last layer
        assert (before, again) == (9, 4)
        for gather in gathers(step):
            assert len(gather.all_input_nodes[0].users) == 1 or gather.all_input_nodes[0].op == "placeholder"


CONDITIONS: dict[str, tuple[Any, Any]] = {
    "one pass alone reads": (layers(backward=False), inputs()),
    "nothing in between": (layers(), inputs(1)),
    "no parameters": (layers(), inputs(role=BATCH)),
    "updated before the backward pass reads": (layers(update_first=True), inputs(2)),
}


@pytest.mark.parametrize("case", CONDITIONS)
def test_nothing_is_gathered_again_where(case: str) -> None:
    before, after, state = both(*CONDITIONS[case])
    assert nodes(before) == nodes(after)
    assert state.notes == {}


@pytest.mark.parametrize("stage", ["replicated", "zero2"])
def test_whole_parameters_are_left_alone(stage: str) -> None:
    captured, _ = captured_net(6, UPDATES["lists"])
    (step, *_) = expand_all(captured, (3, 3), STAGES.get(stage))
    before = nodes(step)
    run_passes(step, [PASS], PassState())
    assert nodes(step) == before


# ---------------------------------------------------------------- training
def train(steps: Sequence[ShardedStep], live: Sequence[Any], count: int = 6) -> list[Any]:
    """Losses of ``count`` updates, then all inputs."""
    found = []
    for _ in range(count):
        outputs, live = run_ranks(steps, live)
        found += outputs
    return [*found, *live]


def assert_equal(got: Sequence[Any], wanted: Sequence[Any]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("split", [pytest.param((3, 3), marks=pytest.mark.long), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("update", UPDATES)
def test_many_steps_are_bitwise_the_same(update: str, split: tuple[int, ...]) -> None:
    captured, live = captured_net(sum(split), UPDATES[update])
    plain, ours = (cleaned(captured, split) for _ in range(2))
    state = apply(PASS, ours)
    assert state.notes, "the pass had nothing to do"
    assert_equal(train(ours, live), train(plain, live))


@pytest.mark.parametrize(
    ("split", "size"),
    [
        ((3, 3), 1e-4),
        ((1, 3, 2), 1.0),
        pytest.param((3, 3), 1.0, marks=pytest.mark.long),
        pytest.param((1, 3, 2), 1e-4, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_some_steps_through_all_passes_are_bitwise_the_same(split: tuple[int, ...], size: float) -> None:
    captured, live = captured_net(sum(split), UPDATES["one by one"])
    without = [p for p in PASSES if p is not PASS]
    runs = []
    for passes in (PASSES, without, ()):
        steps = expand_all(captured, split, STAGES["zero3"])
        runs.append(train([run_passes(s, passes, PassState(bucket_size_mb=size)) for s in steps], live))
    assert_equal(runs[0], runs[1])
    assert_equal(runs[0], runs[2])


# ---------------------------------------------------------------- broken on purpose
def _forgets_the_wait(step: ShardedStep, state: PassState) -> None:
    regather_parameters.regather_parameters(step, state)
    second = gathers(step)[-1]
    (wait,) = second.users
    wait.replace_all_uses_with(second)
    step.graph_module.graph.erase_node(wait)


def _ignores_writes(step: ShardedStep, state: PassState) -> None:
    """Gathers what the update has written already."""
    graph = step.graph_module.graph
    position = {node: i for i, node in enumerate(graph.nodes)}
    chain = regather_parameters._chain(graph, gathers(step)[0], position)
    regather_parameters._again(graph, chain, position)


def _comes_too_late(step: ShardedStep, state: PassState) -> None:
    regather_parameters.regather_parameters(step, state)
    second = gathers(step)[-1]
    (wait,) = second.users
    next(iter(wait.users)).append(wait)


@pytest.mark.parametrize("broken", [_forgets_the_wait, _ignores_writes, _comes_too_late])
def test_the_verifier_catches_a_pass_that(broken: Any) -> None:
    (step, _) = write(layers(update_first=broken is _ignores_writes), inputs())
    assert spec_of(gathers(step)[0]).shape == (8, 8)
    with pytest.raises(VerificationError, match="'broken' broke the graph"):
        run_passes(step, [GraphPass("broken", broken)], PassState())
