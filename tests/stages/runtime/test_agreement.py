"""What ranks compare says nothing about which device a rank has, and everything about what it does."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_spmd.errors import RankDisagreementError
from lightning_spmd.ir.node_info import NodeInfo, Section
from lightning_spmd.ir.signature import Signature
from lightning_spmd.ir.steps import CapturedStep, ShardedStep, Variant
from lightning_spmd.stages.capture.batch.batch import Batch, memory_order
from lightning_spmd.stages.runtime.agreement.control import ControlPlane
from lightning_spmd.stages.runtime.agreement.same_graphs import (
    _explain,
    agree_on,
    describe,
    describe_capture,
    stable_hash,
)

aten = torch.ops.aten


def batch_on(index: int, rows: int = 4, transposed: bool = False) -> Batch:
    with FakeTensorMode():
        x = torch.empty(rows, 3, device=f"cuda:{index}")
        y = torch.empty(5, rows, device=f"cuda:{index}").t() if transposed else torch.empty(rows, 5, device="cuda:0")
        return Batch({"x": x, "y": y.to(f"cuda:{index}"), "name": "a"})


def test_ranks_with_devices_of_their_own_hold_the_same_kind_of_batch() -> None:
    first, second = batch_on(0), batch_on(1)
    assert stable_hash(first.shared_key()) == stable_hash(second.shared_key())
    assert first.describe() == second.describe()
    assert "cuda" in first.describe()
    assert "cuda:" not in repr(first.shared_key()) + first.describe()
    assert first.cache_key() != second.cache_key()  # on one rank a batch that moved is another one


def test_a_batch_on_another_kind_of_device_is_another_batch() -> None:
    on_host = Batch({"x": torch.empty(4, 3), "y": torch.empty(4, 5), "name": "a"})
    assert on_host.shared_key() != batch_on(0).shared_key()
    assert on_host.describe() != batch_on(0).describe()


def test_strides_that_only_the_number_of_rows_decides_do_not_count() -> None:
    assert batch_on(0, 4, transposed=True).shared_key() == batch_on(1, 6, transposed=True).shared_key()
    assert batch_on(0, 4, transposed=True).shared_key() != batch_on(0, 4).shared_key()


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.zeros(2, 3, 4), None),
        (torch.zeros(2, 3, 4)[:, :, :2], None),
        (torch.zeros(1, 3).expand(4, 3), None),
        (torch.zeros(3, 2).t(), (0, 1)),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), (1, 3, 2, 0)),
    ],
)
def test_memory_order(tensor: Tensor, order: Any) -> None:
    assert memory_order(tensor) == order


def test_keys_of_a_batch_that_are_objects_look_alike_in_every_process() -> None:
    keys = [Batch({object(): torch.zeros(2, 3)}) for _ in range(2)]
    assert keys[0].shared_key() == keys[1].shared_key()
    assert (
        Batch({"x": torch.zeros(2), "y": torch.zeros(2)}).shared_key()
        != Batch({"y": torch.zeros(2), "x": torch.zeros(2)}).shared_key()
    )


def graph_on(index: int, factor: float = 2.0) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    ones = graph.call_function(aten.full.default, ([3], 1.0), {"device": torch.device("cuda", index)})
    moved = graph.call_function(aten._to_copy.default, (ones,), {"device": torch.device("cuda", index)})
    scaled = graph.call_function(aten.mul.Tensor, (x, factor))
    scaled.meta["info"] = NodeInfo(Section.FORWARD, "head", f"{__file__}:{LINE}")
    graph.output((scaled, moved))
    return fx.GraphModule({}, graph)


LINE = 3


def step_of(graph_module: fx.GraphModule) -> ShardedStep:
    return ShardedStep(graph_module, Signature((), ()), (), [])


def capture_of(graph_module: fx.GraphModule) -> CapturedStep:
    step = CapturedStep.__new__(CapturedStep)
    object.__setattr__(step, "graph_module", graph_module)
    object.__setattr__(step, "variant", Variant())
    return step


def test_graphs_of_ranks_on_different_devices_are_the_same() -> None:
    assert describe(step_of(graph_on(0))) == describe(step_of(graph_on(1)))
    assert describe_capture(capture_of(graph_on(0))) == describe_capture(capture_of(graph_on(1)))
    assert describe(step_of(graph_on(0, 2.0))) != describe(step_of(graph_on(0, 3.0)))


def test_a_difference_in_the_step_names_both_sides_and_the_line() -> None:
    sides = [(describe_capture(capture_of(g)), describe(step_of(g)), [(2, 2)]) for g in (graph_on(0), graph_on(1, 3.0))]
    text = _explain(sides)
    assert "training_step is not the same on all ranks" in text
    assert "rank 0: mul_tensor = aten.mul.Tensor((x, 2.0), {}) in module 'head'" in text
    assert "rank 1: mul_tensor = aten.mul.Tensor((x, 3.0), {})" in text
    assert f"{__file__}:{LINE}: from __future__ import annotations" in text


class Exchanged:
    """What one rank gets of all, when each in turn has said what it has."""

    def __init__(self, *others: Any) -> None:
        self.answers = list(others)

    def gather(self, value: Any) -> list[Any]:
        return [value, self.answers.pop(0)]


def test_ranks_with_different_graphs_do_not_train() -> None:
    mine, other = ((capture_of(g), step_of(g)) for g in (graph_on(0), graph_on(1, 3.0)))
    theirs = describe_capture(other[0]), describe(other[1]), []
    control: Any = Exchanged(0, theirs)
    with pytest.raises(RankDisagreementError, match=r"rank 1: mul_tensor = aten.mul.Tensor\(\(x, 3.0\)"):
        agree_on(control, mine[1], mine[0])


def test_a_difference_that_expansion_made_is_not_blamed_on_the_user() -> None:
    captured = describe_capture(capture_of(graph_on(0)))
    text = _explain([(captured, ["a = f(x)"], [(1, 3)]), (captured, ["a = g(x)"], [(1, 3)])])
    assert "defect of lightning_spmd" in text
    assert "global_rank" not in text
    assert "(1, 3)" in text


def test_a_graph_that_ends_earlier_is_a_difference() -> None:
    captured = describe_capture(capture_of(graph_on(0)))
    assert "nothing more" in _explain([(captured, ["a", "b"], []), (captured, ["a"], [])])


def test_tensors_of_a_vote_outlive_the_thread_that_sends_them() -> None:
    """Seen: jobs that were done ended with "terminate called": Gloo's thread freed a tensor while Python ended."""
    sent: list[weakref.ref[Any]] = []

    class Group:
        def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> None:
            sent.extend(map(weakref.ref, (*outputs[0], *inputs)))
            for output in outputs[0]:
                output.copy_(inputs[0])

    plane: Any = object.__new__(ControlPlane)
    plane.group, plane.world_size, plane._wait = Group(), 2, lambda _work: None
    assert plane._through_messages([1, 2])() == [1, 2]
    assert len(sent) == 3
    assert all(one() is not None for one in sent)
