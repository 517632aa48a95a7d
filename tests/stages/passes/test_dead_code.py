"""What nobody reads goes; what somebody notices stays."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.node_info import NodeInfo, Section
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes import GraphPass, PassState, dead_code, run_passes
from lightning_spmd.stages.runtime.random_streams import RandomStreams
from tests.helpers.ranks import RankPool
from tests.helpers.simulate import expand_all
from tests.helpers.training import TrainingCase
from tests.stages.expand.test_models import captured_model, clipped, sgd
from tests.stages.passes.local_programs import BATCH, PARAMETER, R, Writer, write
from tests.stages.passes.with_passes import apply, assert_same_bits, assert_training_is_unchanged, targets

aten = torch.ops.aten
X = torch.linspace(-1, 1, 6).reshape(2, 3)


def program(body: Any) -> list[ShardedStep]:
    return write(body, [(X, R, BATCH), (X + 2, R, PARAMETER)])


def test_what_nobody_reads_goes_with_all_that_only_it_read() -> None:
    def body(w: Writer, x: fx.Node, _: fx.Node) -> Any:
        a = w.call(aten.mul.Tensor, x, x)
        w.call(aten.add.Tensor, a, x)
        parts = w.call(aten.split.Tensor, x, 1)
        w.call(operator.getitem, parts, 1)
        return [(w.call(aten.neg.default, x), R)]

    steps = program(body)
    state = apply(dead_code.PASS, steps)
    assert targets(steps[0]) == ["neg.default"]
    assert state.notes == {"dead_code": "nodes removed: 4"}
    assert_same_bits(program(body), steps, [X, X + 2])


def test_a_chain_of_writes_into_a_fresh_tensor_that_nobody_reads_goes() -> None:
    def body(w: Writer, x: fx.Node, _: fx.Node) -> Any:
        e = w.call(aten.empty_like.default, x)
        view = w.call(aten.view.default, e, [6])
        w.call(aten.copy_.default, e, x)
        w.call(aten.mul_.Tensor, view, 2.0)
        return [(w.call(aten.neg.default, x), R)]

    steps = program(body)
    apply(dead_code.PASS, steps)
    assert targets(steps[0]) == ["neg.default"]


def test_a_write_stays_if_its_storage_is_read_through_another_view_later() -> None:
    def body(w: Writer, x: fx.Node, _: fx.Node) -> Any:
        e = w.call(aten.clone.default, x)
        before = w.call(aten.view.default, e, [6])
        w.call(aten.mul_.Tensor, e, 2.0)
        return [(w.call(aten.neg.default, before), R)]

    steps = program(body)
    apply(dead_code.PASS, steps)
    assert targets(steps[0]) == ["clone.default", "view.default", "mul_.Tensor", "neg.default"]
    assert_same_bits(program(body), steps, [X, X + 2])


@pytest.mark.parametrize("through_view", [False, True])
def test_a_write_into_an_input_stays(through_view: bool) -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.update(w.call(aten.view.default, p, [2, 3]) if through_view else p, x)
        return [(w.call(aten.neg.default, x), R)]

    steps = program(body)
    before = targets(steps[0])
    state = apply(dead_code.PASS, steps)
    assert targets(steps[0]) == before
    assert state.notes == {}
    assert_same_bits(program(body), steps, [X, X + 2])


def test_a_write_into_what_leaves_the_graph_stays() -> None:
    def body(w: Writer, x: fx.Node, _: fx.Node) -> Any:
        e = w.call(aten.clone.default, x)
        w.call(aten.mul_.Tensor, e, 2.0)
        return [(e, R)]

    steps = program(body)
    apply(dead_code.PASS, steps)
    assert targets(steps[0]) == ["clone.default", "mul_.Tensor"]


def test_draws_streams_collectives_assertions_and_foreign_operators_stay() -> None:
    def body(w: Writer, x: fx.Node, _: fx.Node) -> Any:
        w.call(aten.bernoulli_.float, w.call(aten.empty_like.default, x), 0.5)
        w.call(aten.rand_like.default, x)
        w.reduce(x)
        w.call(aten._assert_async.msg, w.call(aten.all.default, x), "x")
        switch = w.graph.call_function(RandomStreams.select, (None, ("data_parallel",), 0))
        switch.meta.update(val=None, info=NodeInfo(Section.FORWARD), random="sharded")
        return [(w.call(aten.neg.default, x), R)]

    steps = program(body)
    before = targets(steps[0])
    graph = steps[0].graph_module.graph
    source = next(iter(graph.nodes))
    library = torch.library.Library("spmd_tests", "FRAGMENT")
    library.define("count_calls(Tensor x) -> Tensor")
    with graph.inserting_after(source):
        node = graph.call_function(torch.ops.spmd_tests.count_calls.default, (source,))
    node.meta.update(val=source.meta["val"], info=NodeInfo(Section.FORWARD))
    run_passes(steps[0], [dead_code.PASS], PassState())
    assert sorted(targets(steps[0])) == sorted([*before, "count_calls.default"])


def test_unused_arithmetic_on_learning_rates_goes() -> None:
    def body(w: Writer, x: fx.Node, _: fx.Node) -> Any:
        rate = w.number(aten._local_scalar_dense.default, [w.call(aten.sum.default, x)], 0.5)
        w.call(operator.mul, rate, 2.0)
        return [(w.call(aten.neg.default, x), R)]

    steps = program(body)
    apply(dead_code.PASS, steps)
    assert targets(steps[0]) == ["neg.default"]


@pytest.mark.parametrize("update", [sgd, clipped])
def test_a_model_loses_nodes_and_keeps_its_bits(update: Any) -> None:
    captured, live = captured_model("convnet", update)
    steps = expand_all(captured, (3, 3))
    before = len(targets(steps[0]))
    apply(dead_code.PASS, steps)
    assert len(targets(steps[0])) <= before - 6
    assert_same_bits(expand_all(captured, (3, 3)), steps, live)


def test_the_verifier_catches_the_removal_of_a_write_that_is_read() -> None:
    def body(w: Writer, x: fx.Node, _: fx.Node) -> Any:
        e = w.call(aten.clone.default, x)
        w.call(aten.mul_.Tensor, e, 2.0)
        return [(w.call(aten.neg.default, e), R)]

    def forget_readers(step: ShardedStep, _: PassState) -> None:
        for node in list(step.graph_module.graph.nodes):
            if node.op == "call_function" and not node.users:
                step.graph_module.graph.erase_node(node)

    with pytest.raises(VerificationError, match="'broken' broke the graph"):
        run_passes(program(body)[0], [GraphPass("broken", forget_readers)], PassState())


def test_training_on_two_ranks_is_bitwise_unchanged(two_ranks: RankPool, tmp_path: Path) -> None:
    case = TrainingCase("conv", "adamw_fused", batches=6)
    assert_training_is_unchanged(two_ranks, case, "dead_code", tmp_path)
