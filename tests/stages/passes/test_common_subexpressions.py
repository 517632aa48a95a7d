"""Equal nodes become one, unless somebody could tell."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.node_info import NodeInfo, Section, info_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes import GraphPass, PassState, common_subexpressions, run_passes
from tests.helpers.ranks import RankPool
from tests.helpers.simulate import expand_all
from tests.helpers.tiny_capture import capture_module
from tests.helpers.training import TrainingCase
from tests.stages.expand.test_models import captured_model, clipped, images, sgd
from tests.stages.passes.local_programs import BATCH, PARAMETER, R, Writer, write
from tests.stages.passes.with_passes import apply, assert_same_bits, assert_training_is_unchanged, targets

aten = torch.ops.aten
X = torch.linspace(-1, 1, 12).reshape(4, 3)
LIVE = [X, X + 2]
FORWARD, BACKWARD = Section.FORWARD, Section.BACKWARD


def program(body: Any) -> list[ShardedStep]:
    return write(body, [(X, R, BATCH), (X + 2, R, PARAMETER)])


def merged(body: Any) -> list[str]:
    """What is left of a program, whose results stay the same bits."""
    steps = program(body)
    apply(common_subexpressions.PASS, steps)
    assert_same_bits(program(body), steps, LIVE)
    return targets(steps[0])


def test_equal_nodes_and_what_is_computed_from_them_become_one() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.info = NodeInfo(FORWARD)
        chains = [w.call(aten.exp.default, w.call(aten.mul.Tensor, x, p)) for _ in range(3)]
        return [(w.call(aten.stack.default, chains), R)]

    assert merged(body) == ["mul.Tensor", "exp.default", "stack.default"]


def test_outputs_of_equal_operators_are_matched_by_index() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.info = NodeInfo(FORWARD)
        first, second = (w.call(aten.var_mean.correction, x, [0]) for _ in range(2))
        a, b = w.call(operator.getitem, first, 0), w.call(operator.getitem, first, 1)
        c, d = w.call(operator.getitem, second, 1), w.call(operator.getitem, second, 0)
        return [(w.call(aten.stack.default, [a, b, c, d]), R)]

    assert merged(body) == ["var_mean.correction", "getitem", "getitem", "stack.default"]


def test_arguments_that_python_calls_equal_are_told_apart() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.info = NodeInfo(FORWARD)
        values = [w.call(aten.full.default, [2], value) for value in (0.0, -0.0)]
        ones = [w.call(aten.full.default, [2], value) for value in (1, 1.0, True)]
        several = [w.call(aten.div.Tensor, x, 2.0), *[w.call(aten.sum.default, n) for n in (*values, *ones)]]
        return [(n, R) for n in several]

    assert merged(body).count("full.default") == 5


def test_a_write_in_between_keeps_readers_apart() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.info = NodeInfo(FORWARD)
        before = w.call(aten.mul.Tensor, x, p)
        view = w.call(aten.view.default, p, [12])
        w.call(aten.add_.Tensor, view, 1.0)
        return [(w.call(aten.sub.Tensor, before, w.call(aten.mul.Tensor, x, p)), R)]

    assert merged(body).count("mul.Tensor") == 2


@pytest.mark.parametrize("which", [0, 1])
def test_a_result_that_is_written_into_is_not_shared(which: int) -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.info = NodeInfo(FORWARD)
        pair = [w.call(aten.zeros.default, [3]) for _ in range(2)]
        w.call(aten.add_.Tensor, w.call(aten.view.default, pair[which], [3]), 1.0)
        return [(w.call(aten.stack.default, pair), R)]

    assert merged(body).count("zeros.default") == 2


def test_the_pieces_of_a_result_that_are_written_into_are_not_shared() -> None:
    """Gates of an LSTM: split, then activated in place."""

    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.info = NodeInfo(FORWARD)
        pair = [w.call(aten.add.Tensor, x, p) for _ in range(2)]
        halves = [w.call(operator.getitem, w.call(aten.unsafe_split.Tensor, value, 2), 0) for value in pair]
        w.call(aten.sigmoid_.default, halves[0])
        return [(w.call(aten.stack.default, halves), R)]

    assert merged(body).count("add.Tensor") == 2


def test_results_that_leave_the_graph_are_not_shared() -> None:
    """Two states of an optimizer begin as the same zeros."""

    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.info = NodeInfo(FORWARD)
        return [(w.call(aten.zeros_like.default, p), R) for _ in range(2)]

    assert merged(body) == ["zeros_like.default"] * 2


def test_random_draws_are_not_shared() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.info = NodeInfo(FORWARD)
        pair = [w.call(aten.rand_like.default, x) for _ in range(2)]
        return [(w.call(aten.stack.default, pair), R)]

    steps = program(body)
    apply(common_subexpressions.PASS, steps)
    assert targets(steps[0]).count("rand_like.default") == 2


def test_forward_and_backward_share_views_but_compute_apart() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        products: list[fx.Node] = []
        for section in (FORWARD, BACKWARD):
            w.info = NodeInfo(section)
            products.append(w.call(aten.mm.default, x, w.call(aten.t.default, p)))
        return [(w.call(aten.stack.default, products), R)]

    assert merged(body) == ["t.default", "mm.default", "mm.default", "stack.default"]


@pytest.mark.parametrize("alive", [False, True])
def test_the_backward_pass_reuses_only_what_is_alive_anyway(alive: bool) -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.info = NodeInfo(BACKWARD)
        first = w.call(aten.exp.default, x)
        total = w.call(aten.sum.default, first)
        second = w.call(aten.exp.default, x)
        last = w.call(aten.add.Tensor, second, first if alive else p)
        return [(w.call(aten.mul.Tensor, last, total), R)]

    assert merged(body).count("exp.default") == (1 if alive else 2)


@pytest.mark.parametrize(("count", "left"), [(1, 1), (1000, 2)])
def test_the_backward_pass_keeps_a_few_bytes_of_no_operand(count: int, left: int) -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.info = NodeInfo(BACKWARD)
        sums = [w.call(aten.sum.default, w.call(aten.full.default, [count], 3.0)) for _ in range(2)]
        return [(w.call(aten.stack.default, sums), R)]

    assert merged(body).count("full.default") == left


def test_equal_all_reduces_become_one_with_one_wait() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        first, second = w.reduce(x), w.reduce(x)
        return [(w.call(aten.add.Tensor, first, second), R)]

    assert merged(body) == ["all_reduce.default", "wait_tensor.default", "add.Tensor"]


def test_an_all_reduce_whose_result_is_written_into_stays() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        first, second = w.reduce(x), w.reduce(x)
        w.call(aten.mul_.Tensor, first, 2.0)
        return [(w.call(aten.add.Tensor, first, second), R)]

    assert merged(body).count("all_reduce.default") == 2


def test_gathers_stay() -> None:
    """Parameters gathered again for the backward pass are meant to be."""

    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        return [(w.call(aten.add.Tensor, w.gather(p), w.gather(p)), R)]

    assert merged(body).count("all_gather_into_tensor.default") == 2


def test_recomputation_of_activation_checkpointing_stays() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: Any = checkpoint(lambda v: torch.tanh(self.up(v)).exp(), x, use_reentrant=False)
            return self.down(hidden)

    torch.manual_seed(0)
    captured, live = capture_module(Net(), images, (torch.randn(6, 12), torch.randint(0, 10, (6,))), update=sgd)
    steps = expand_all(captured, (3, 3))
    apply(common_subexpressions.PASS, steps)
    recomputed = [n for n in steps[0].graph_module.graph.nodes if n.target is aten.tanh.default]
    assert [info_of(n).section for n in recomputed] == [FORWARD, BACKWARD]
    assert_same_bits(expand_all(captured, (3, 3)), steps, live)


@pytest.mark.parametrize(
    ("name", "update"),
    [
        ("convnet", clipped),
        ("sequence_first", sgd),
        pytest.param("convnet", sgd, marks=pytest.mark.long),
        pytest.param("sequence_first", clipped, marks=pytest.mark.long),
    ],
)
def test_a_model_loses_duplicates_and_keeps_its_bits(name: str, update: Any) -> None:
    captured, live = captured_model(name, update)
    steps = expand_all(captured, (3, 3))
    before = len(targets(steps[0]))
    state = apply(common_subexpressions.PASS, steps)
    assert len(targets(steps[0])) < before
    assert "merged" in state.notes["common_subexpressions"]
    assert_same_bits(expand_all(captured, (3, 3)), steps, live)


def test_a_graph_without_duplicates_is_left_alone() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        return [(w.call(aten.add.Tensor, w.call(aten.exp.default, x), w.call(aten.exp.default, p)), R)]

    steps = program(body)
    before = [n.format_node() for n in steps[0].graph_module.graph.nodes]
    assert apply(common_subexpressions.PASS, steps).notes == {}
    assert [n.format_node() for n in steps[0].graph_module.graph.nodes] == before


def test_the_verifier_catches_a_value_reused_although_it_was_written_into() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        first = w.call(aten.exp.default, x)
        w.call(aten.mul_.Tensor, first, 2.0)
        return [(w.call(aten.neg.default, w.call(aten.exp.default, x)), R)]

    def blind(step: ShardedStep, _: PassState) -> None:
        first, second = (n for n in step.graph_module.graph.nodes if n.target is aten.exp.default)
        second.replace_all_uses_with(first)
        step.graph_module.graph.erase_node(second)

    with pytest.raises(VerificationError, match="'broken' broke the graph.*wrong side of a write"):
        run_passes(program(body)[0], [GraphPass("broken", blind)], PassState())


def test_training_on_two_ranks_is_bitwise_unchanged(two_ranks: RankPool, tmp_path: Path) -> None:
    case = TrainingCase("gpt_ignore_index", "adamw_loop", "clip_norm", batches=4)
    assert_training_is_unchanged(two_ranks, case, "common_subexpressions", tmp_path)
