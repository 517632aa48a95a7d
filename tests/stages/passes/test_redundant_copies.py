"""Copies go where nobody could tell them from their source."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes import GraphPass, PassState, redundant_copies, run_passes
from tests.helpers.ranks import RankPool
from tests.helpers.simulate import expand_all
from tests.helpers.training import TrainingCase
from tests.stages.expand.test_models import captured_model, clipped, sgd
from tests.stages.passes.local_programs import BATCH, PARAMETER, R, Writer, write
from tests.stages.passes.with_passes import apply, assert_same_bits, assert_training_is_unchanged, targets

aten = torch.ops.aten
X = torch.linspace(-1, 1, 12).reshape(4, 3)
LIVE = [X, X + 2]
Body = Any


def program(body: Body) -> list[ShardedStep]:
    return write(body, [(X, R, BATCH), (X + 2, R, PARAMETER)])


def cleaned(body: Body) -> list[str]:
    """What is left of a program, whose results stay the same bits."""
    steps = program(body)
    apply(redundant_copies.PASS, steps)
    assert_same_bits(program(body), steps, LIVE)
    return targets(steps[0])


@pytest.mark.parametrize("copy", [aten.clone.default, aten._to_copy.default], ids=str)
def test_a_copy_that_nobody_writes_into_goes(copy: Any) -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        view = w.call(aten.view.default, w.call(copy, p), [12])
        return [(w.call(aten.mul.Tensor, view, 2.0), R)]

    assert cleaned(body) == ["view.default", "mul.Tensor"]


def test_a_copy_goes_if_its_source_is_written_after_its_last_reader() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        read = w.call(aten.mul.Tensor, w.call(aten.clone.default, p), x)
        w.update(p, x)
        return [(read, R)]

    assert cleaned(body) == ["mul.Tensor", "add_.Tensor"]


def test_a_copy_stays_if_its_source_is_written_before_its_last_reader() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        view = w.call(aten.view.default, w.call(aten.clone.default, p), [12])
        w.update(p, x)
        return [(w.call(aten.mul.Tensor, view, 2.0), R)]

    assert cleaned(body) == ["clone.default", "view.default", "add_.Tensor", "mul.Tensor"]


def test_a_copy_stays_if_its_last_reader_writes_the_source() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.update(p, w.call(aten.clone.default, p))
        return [(w.call(aten.neg.default, x), R)]

    assert cleaned(body) == ["clone.default", "add_.Tensor", "neg.default"]


def test_writes_into_a_copy_go_into_its_source_if_nobody_reads_that_again() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        value = w.call(aten.exp.default, x)
        w.call(aten.mul_.Tensor, value, 3.0)
        copy = w.call(aten.clone.default, value)
        w.call(aten.relu_.default, w.call(aten.view.default, copy, [12]))
        return [(w.call(aten.neg.default, copy), R)]

    assert cleaned(body) == ["exp.default", "mul_.Tensor", "view.default", "relu_.default", "neg.default"]


@pytest.mark.parametrize("source_is_input", [False, True])
def test_writes_into_a_copy_keep_it_if_the_source_is_read_again_or_lasts(source_is_input: bool) -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        value = p if source_is_input else w.call(aten.exp.default, x)
        view = w.call(aten.view.default, value, [12])
        copy = w.call(aten.clone.default, value)
        w.call(aten.relu_.default, copy)
        read = w.call(aten.neg.default, copy)
        return [(read, R)] if source_is_input else [(read, R), (w.call(aten.neg.default, view), R)]

    assert "clone.default" in cleaned(body)


@pytest.mark.parametrize("through_view", [False, True])
def test_a_copy_that_leaves_the_graph_stays(through_view: bool) -> None:
    """``return {"weight": self.weight.clone()}``: the caller keeps it while the weight moves on."""

    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        copy = w.call(aten.clone.default, p)
        out = w.call(aten.view.default, copy, [12]) if through_view else copy
        w.update(p, x)
        return [(out, R)]

    assert "clone.default" in cleaned(body)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten.clone.default, {"memory_format": torch.contiguous_format}),  # of a transposed value: another layout
        (aten._to_copy.default, {"dtype": torch.float64}),
    ],
    ids=["layout", "dtype"],
)
def test_a_copy_that_changes_layout_or_dtype_stays(op: Any, arguments: dict[str, Any]) -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        copy = w.call(op, w.call(aten.t.default, p), **arguments)
        return [(w.call(aten.mul.Tensor, copy, 2.0), R)]

    assert len(cleaned(body)) == 3


def test_a_copy_of_a_piece_stays() -> None:
    """It would keep the rest alive, and may be aligned differently."""

    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        copy = w.call(aten.clone.default, w.call(aten.slice.Tensor, w.call(aten.exp.default, x), 0, 1, 3))
        return [(w.call(aten.mul.Tensor, copy, 2.0), R)]

    assert "clone.default" in cleaned(body)


def test_a_copy_of_what_is_written_piece_by_piece_stays() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        value = w.call(aten.exp.default, x)
        piece = w.call(operator.getitem, w.call(aten.split.Tensor, value, 2), 0)
        w.call(aten.mul_.Tensor, piece, 3.0)
        copy = w.call(aten.clone.default, value)
        half = w.call(operator.getitem, w.call(aten.split.Tensor, copy, 2), 1)
        return [(w.call(aten.neg.default, half), R)]

    assert "clone.default" in cleaned(body)


def test_a_copy_that_is_addressed_by_its_offset_or_gathered_from_stays() -> None:
    def addressed(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        piece = w.call(aten.as_strided.default, w.call(aten.clone.default, p), [3], [1], 6)
        return [(w.call(aten.neg.default, piece), R)]

    def gathered(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        return [(w.call(aten.neg.default, w.gather(w.call(aten.clone.default, p))), R)]

    assert "clone.default" in cleaned(addressed)
    assert "clone.default" in cleaned(gathered)


def test_a_copy_onto_itself_is_no_write() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        same = w.call(aten.t.default, w.call(aten.t.default, p))
        written = w.call(aten.copy_.default, p, same)
        w.update(p, x)
        return [(w.call(aten.mul.Tensor, written, w.call(aten.neg.default, p)), R)]

    assert cleaned(body) == ["t.default", "t.default", "add_.Tensor", "neg.default", "mul.Tensor"]


def test_a_transposed_copy_onto_itself_stays() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        square = w.call(aten.mm.default, x, w.call(aten.t.default, x))
        copied = w.call(aten.copy_.default, square, w.call(aten.t.default, square))
        return [(w.call(aten.neg.default, copied), R)]

    steps = program(body)
    apply(redundant_copies.PASS, steps)
    assert "copy_.default" in targets(steps[0])


def test_copies_into_tensors_that_are_not_read_again_go() -> None:
    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        w.update(p, x)
        w.call(aten.copy_.default, w.call(aten.empty_like.default, p), p)
        w.call(aten.copy_.default, p, x)
        return [(w.call(aten.neg.default, x), R)]

    assert cleaned(body) == ["add_.Tensor", "empty_like.default", "copy_.default", "neg.default"]


@pytest.mark.parametrize("update", [sgd, clipped])
def test_a_model_loses_copies_and_keeps_its_bits(update: Any) -> None:
    captured, live = captured_model("convnet", update)
    steps = expand_all(captured, (3, 3))
    state = apply(redundant_copies.PASS, steps)
    assert state.notes == {"redundant_copies": "copies removed: 3"}
    assert_same_bits(expand_all(captured, (3, 3)), steps, live)


def test_uneven_ranks_take_the_same_decisions() -> None:
    captured, live = captured_model("convnet", sgd)
    steps = expand_all(captured, (1, 3, 2))
    for step in steps:
        run_passes(step, [redundant_copies.PASS], PassState())
    assert targets(steps[0]) == targets(steps[1]) == targets(steps[2])
    assert_same_bits(expand_all(captured, (1, 3, 2)), steps, live)


def test_a_graph_without_copies_is_left_alone() -> None:
    captured, _ = captured_model("mlp", sgd)
    steps = expand_all(captured, (3, 3))
    before = targets(steps[0])
    assert apply(redundant_copies.PASS, steps).notes == {}
    assert targets(steps[0]) == before


def test_the_verifier_catches_the_removal_of_a_copy_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass itself with its question forgotten: what it tells the verifier about readers is what catches it."""

    def body(w: Writer, x: fx.Node, p: fx.Node) -> Any:
        copy = w.call(aten.clone.default, p)
        w.update(p, x)
        return [(w.call(aten.mul.Tensor, w.call(aten.view.default, copy, [12]), 2.0), R)]

    monkeypatch.setattr(redundant_copies._Uses, "can_share", lambda *_: True)
    with pytest.raises(VerificationError, match="'broken' broke the graph.*wrong side of a write"):
        run_passes(program(body)[0], [GraphPass("broken", redundant_copies.PASS.run)], PassState())


def test_training_on_two_ranks_is_bitwise_unchanged(two_ranks: RankPool, tmp_path: Path) -> None:
    case = TrainingCase("conv", "adamw_fused", batches=6)
    assert_training_is_unchanged(two_ranks, case, "redundant_copies", tmp_path)
