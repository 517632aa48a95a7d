"""Views that are an earlier value vanish; those that are not, or leave the graph, stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.geometry import geometries
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes import GraphPass, PassState, identity_views, run_passes
from tests.helpers.ranks import RankPool
from tests.helpers.simulate import expand_all
from tests.helpers.training import TrainingCase
from tests.stages.expand.test_models import captured_model, clipped, sgd
from tests.stages.passes.local_programs import BATCH, PARAMETER, R, Writer, write
from tests.stages.passes.with_passes import apply, assert_same_bits, assert_training_is_unchanged, targets

aten = torch.ops.aten
X = torch.linspace(-1, 1, 12).reshape(4, 3)
LIVE = [X, X + 2]


def program(body: Any) -> list[ShardedStep]:
    return write(body, [(X, R, BATCH), (X + 2, R, PARAMETER)])


def views(*calls: tuple[Any, ...]) -> Any:
    """``exp(x)`` seen through these views, then read."""

    def body(w: Writer, x: fx.Node, _: fx.Node) -> Any:
        value = w.call(aten.exp.default, x)
        for op, *arguments in calls:
            value = w.call(op, value, *arguments)
        return [(w.call(aten.mul.Tensor, value, 2.0), R)]

    return body


@pytest.mark.parametrize(
    "calls",
    [
        [(aten.view.default, [4, 3])],
        [(aten.expand.default, [4, 3])],
        [(aten.alias.default,)],
        [(aten.detach.default,)],
        [(aten._unsafe_view.default, [4, 3])],
        [(aten.permute.default, [0, 1])],
        [(aten.as_strided.default, [4, 3], [3, 1])],
        [(aten.as_strided.default, [4, 3], [3, 1], 0)],
        [(aten.slice.Tensor, 0, 0, 4)],
        [(aten.t.default,), (aten.t.default,)],
        [(aten.transpose.int, 0, 1), (aten.permute.default, [1, 0])],
        [(aten.unsqueeze.default, 1), (aten.squeeze.dim, 1)],
        [(aten.view.default, [12]), (aten.view.default, [2, 6]), (aten.view.default, [4, 3])],
    ],
    ids=str,
)
def test_views_that_cancel_go_with_those_that_only_they_read(calls: Any) -> None:
    steps = program(views(*calls))
    apply(identity_views.PASS, steps)
    left = targets(steps[0])
    assert left[0] == "exp.default"
    assert left[-1] == "mul.Tensor"
    multiply = next(n for n in steps[0].graph_module.graph.nodes if n.target is aten.mul.Tensor)
    assert multiply.args[0].name.startswith("exp")
    assert_same_bits(program(views(*calls)), steps, LIVE)


@pytest.mark.parametrize(
    "calls",
    [
        [(aten.t.default,)],
        [(aten.as_strided.default, [2, 3], [6, 1], 3)],
        [(aten.slice.Tensor, 0, 1, 4)],
        [(aten.t.default,), (aten.reshape.default, [4, 3])],  # a copy: same shape and strides, other elements
        [(aten.t.default,), (aten.clone.default,), (aten.t.default,)],
    ],
    ids=str,
)
def test_views_that_change_something_stay(calls: Any) -> None:
    steps = program(views(*calls))
    before = targets(steps[0])
    state = apply(identity_views.PASS, steps)
    assert targets(steps[0]) == before
    assert state.notes == {}


def test_two_equal_views_of_one_value_become_one() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        first, second = w.call(aten.t.default, p), w.call(aten.transpose.int, p, 0, 1)
        return [(w.call(aten.mm.default, x, first), R), (w.call(aten.mm.default, x, second), R)]

    steps = program(body)
    apply(identity_views.PASS, steps)
    assert targets(steps[0]) == ["t.default", "mm.default", "mm.default"]
    assert_same_bits(program(body), steps, LIVE)


def test_a_view_that_leaves_the_graph_stays_but_is_not_read_inside() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        own = w.call(aten.detach.default, p)
        return [(own, R), (w.call(aten.mul.Tensor, own, 2.0), R)]

    steps = program(body)
    apply(identity_views.PASS, steps)
    graph = steps[0].graph_module.graph
    assert targets(steps[0]) == ["detach.default", "mul.Tensor"]
    assert next(n for n in graph.nodes if n.target is aten.mul.Tensor).args[0].op == "placeholder"
    assert next(iter(reversed(graph.nodes))).args[0][0].target is aten.detach.default


def test_a_view_of_an_in_place_result_is_read_after_the_write() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        before = w.call(aten.view.default, p, [12])
        read = w.call(aten.mul.Tensor, before, 3.0)
        written = w.call(aten.add_.Tensor, before, 1.0)
        after = w.call(aten.view.default, written, [4, 3])
        same = w.call(aten.view.default, w.call(aten.view.default, after, [12]), [4, 3])
        return [(read, R), (w.call(aten.mul.Tensor, same, x), R)]

    steps = program(body)
    apply(identity_views.PASS, steps)
    assert targets(steps[0]) == ["view.default", "mul.Tensor", "add_.Tensor", "view.default", "mul.Tensor"]
    assert_same_bits(program(body), steps, LIVE)


def test_a_view_is_taken_back_across_writes_that_it_sees_too() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        first = w.call(aten.view.default, p, [12])
        read = w.call(aten.mul.Tensor, first, 3.0)
        w.update(p, x)
        second = w.call(aten.view.default, p, [12])
        w.update(p, x)
        return [(w.call(aten.mul.Tensor, read, second), R)]

    steps = program(body)
    apply(identity_views.PASS, steps)
    assert targets(steps[0]) == ["view.default", "mul.Tensor", "add_.Tensor", "add_.Tensor", "mul.Tensor"]
    assert_same_bits(program(body), steps, LIVE)


def test_pieces_that_differ_from_rank_to_rank_are_left_alone() -> None:
    def body(w: Writer, x: fx.Node, _: fx.Node) -> Any:
        piece = w.call(aten.slice.Tensor, x, 0, 0, 4)
        piece.meta["rank_dependent"] = True
        return [(w.call(aten.mul.Tensor, piece, 2.0), R)]

    steps = program(body)
    apply(identity_views.PASS, steps)
    assert targets(steps[0]) == ["slice.Tensor", "mul.Tensor"]


def test_uneven_ranks_take_the_same_decisions() -> None:
    """A rank with one row sees views that change nothing where others see views that do."""
    captured, live = captured_model("gpt", sgd)
    steps = expand_all(captured, (1, 5))
    for step in steps:
        run_passes(step, [identity_views.PASS], PassState())
    assert targets(steps[0]) == targets(steps[1])
    assert_same_bits(expand_all(captured, (1, 5)), steps, live)


@pytest.mark.parametrize(
    ("name", "update"),
    [
        ("gpt", clipped),
        ("sequence_first", sgd),
        pytest.param("gpt", sgd, marks=pytest.mark.long),
        pytest.param("sequence_first", clipped, marks=pytest.mark.long),
    ],
)
def test_a_model_loses_views_and_keeps_its_bits(name: str, update: Any) -> None:
    captured, live = captured_model(name, update)
    steps = expand_all(captured, (3, 3))
    before = len(targets(steps[0]))
    apply(identity_views.PASS, steps)
    assert len(targets(steps[0])) <= before - 15
    seen = list(geometries(steps[0].graph_module.graph).values())
    leaving = len(steps[0].signature.outputs)
    assert len(seen) - len(set(seen)) <= leaving, "equal views are left"
    assert_same_bits(expand_all(captured, (3, 3)), steps, live)


def test_the_verifier_catches_a_view_taken_back_across_a_write_into_another_tensor() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        copy = w.call(aten.clone.default, p)
        w.call(aten.add_.Tensor, p, 1.0)
        return [(w.call(aten.mul.Tensor, w.call(aten.view.default, copy, [12]), 2.0), R)]

    def look_through_copies(step: ShardedStep, _: PassState) -> None:
        copy = next(n for n in step.graph_module.graph.nodes if n.target is aten.clone.default)
        copy.replace_all_uses_with(copy.args[0])

    with pytest.raises(VerificationError, match="'broken' broke the graph.*wrong side of a write"):
        run_passes(program(body)[0], [GraphPass("broken", look_through_copies)], PassState())


def test_training_on_two_ranks_is_bitwise_unchanged(two_ranks: RankPool, tmp_path: Path) -> None:
    case = TrainingCase("gpt_everything", "adamw_loop", "clip_norm", batches=4)
    assert_training_is_unchanged(two_ranks, case, "identity_views", tmp_path)


@pytest.mark.parametrize("index", [0, 1])
def test_a_view_of_a_piece_is_taken_back_across_a_write_into_a_piece_of_another_split(index: int) -> None:
    """Pieces of two splits may overlap, and whether they do is not asked: the verifier counts the write for both."""

    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        piece = w.items_of(w.call(aten.split.Tensor, p, 2))[0]
        first = w.call(aten.view.default, piece, [6])
        read = w.call(aten.mul.Tensor, first, 3.0)
        w.call(aten.add_.Tensor, w.items_of(w.call(aten.split.Tensor, p, 3))[index], 1.0)
        second = w.call(aten.view.default, piece, [6])
        return [(w.call(aten.mul.Tensor, read, second), R)]

    steps = program(body)
    apply(identity_views.PASS, steps)
    assert targets(steps[0]).count("view.default") == 1
    assert_same_bits(program(body), steps, LIVE)
