"""Rows that values choose stay on the rank whose rows give them; what would see the difference gathers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_spmd.ir.node_info import TensorSpec, info_of
from lightning_spmd.ir.placement import Chosen, Shard
from lightning_spmd.ir.reads import HandedCounts, HandOver
from lightning_spmd.ir.sizes import Counts
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.ir.verify import collectives, verify_sharded
from lightning_spmd.parallel.parallel_plan import ReplicatedPlan
from lightning_spmd.stages.expand import expand
from lightning_spmd.stages.passes import PassState
from lightning_spmd.stages.passes.gather_embedding_rows import gather_embedding_rows
from tests.helpers.activations import activation_collectives
from tests.helpers.simulate import axes_for, run_global, run_ranks
from tests.helpers.tiny_capture import capture_function

ROWS, WIDTH = 12, 8
SPLITS = [(6, 6), (7, 5), (3, 4, 5), (12, 0), (1, 11)]
aten = torch.ops.aten


class Chooses:
    """``torch.where`` on masks, whose numbers of elements are those of a run before."""

    def __init__(self) -> None:
        self.masks: list[Tensor] = []
        self.known: list[int] | None = None

    def __call__(self, mask: Tensor) -> tuple[Tensor, ...]:
        if self.known is None:
            self.masks.append(mask)
            return torch.where(mask)
        return aten.nonzero_static(mask, size=self.known.pop(0)).unbind(1)

    def of_rank(self, begin: int, length: int) -> list[int]:
        """How many elements the rows of one rank have."""
        dims = [list(mask.shape).index(ROWS) for mask in self.masks]
        return [int(m.narrow(dim, begin, length).sum()) for m, dim in zip(self.masks, dims, strict=True)]


def _with_counts(captured: CapturedStep, totals: Sequence[int], parts: Sequence[int]) -> None:
    """Python is handed the number of elements before each ``nonzero_static``."""
    graph, counts = captured.graph_module.graph, Counts(len(totals), by_rank=True)
    for old in graph.find_nodes(op="call_function", target=aten.count_nonzero.default):
        for user in list(old.users):
            graph.erase_node(user)
        graph.erase_node(old)
    for number, found in enumerate(graph.find_nodes(op="call_function", target=aten.nonzero_static.default)):
        total = totals[number]
        handed = HandedCounts(counts, number, 1, lambda total=total: [total], "here", (parts[number],))
        with graph.inserting_before(found):
            count = graph.call_function(aten.count_nonzero.default, (found.args[0],))
            count.meta.update(val=TensorSpec((), (), torch.int64, torch.device("cpu")), info=info_of(found))
            hand = graph.call_function(HandOver(number, tuple, handed), (count,))
            hand.meta.update(val=(), info=info_of(found))
    captured.graph_module.recompile()


Function = Callable[[Chooses, dict[str, Tensor], Tensor, Tensor], Any]


def _run(function: Function, split: tuple[int, ...], fewer: int | None = None) -> list[ShardedStep]:
    """Compare with one device; gives the ranks' programs. With ``fewer`` rows from there on are of class 0."""
    torch.manual_seed(0)
    parameters = {
        "w": torch.randn(WIDTH, WIDTH).requires_grad_(),
        "bias": torch.randn(WIDTH).requires_grad_(),
        "table": torch.randn(4, WIDTH).requires_grad_(),
    }
    batch = [torch.randn(ROWS, WIDTH), torch.randint(0, 4, (ROWS,))]
    if fewer is not None:
        batch[1][fewer:] = 0
    choose = Chooses()
    function(choose, parameters, *batch)
    totals = [int(mask.sum()) for mask in choose.masks]
    choose.known = list(totals)
    captured, live = capture_function(lambda p, _, x, y: function(choose, p, x, y), parameters, {}, batch)
    steps: list[ShardedStep] = []
    for axis in axes_for(split):
        begin = sum(split[: axis.rank])
        _with_counts(captured, totals, choose.of_rank(begin, split[axis.rank]))
        steps.append(expand(captured, (axis,), ReplicatedPlan(reduce_gradients=True), lambda _: None))
        verify_sharded(steps[-1])
    wanted, _ = run_global(captured, live)
    for got, want in zip(run_ranks(steps, live)[0], wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    return steps


def _chooses_own(step: ShardedStep) -> bool:
    placements = [node.meta.get("placements", ()) for node in step.graph_module.graph.nodes]
    return any(isinstance(p, Shard) and isinstance(p.outer, Chosen) for each in placements for p in each)


# ---------------------------------------------------------------------- what stays
def _masked_loss(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    return F.cross_entropy((x @ p["w"] + p["bias"])[rows], y[rows])


def _masked_mean(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    return F.cross_entropy(x @ p["w"] + p["bias"], y, reduction="none")[rows].mean()


def _masked_elements(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    h = x @ p["w"]
    found = choose((x > 0.3) & (y > 0)[:, None])
    chosen = h[found]
    return (chosen * chosen).sum() / len(chosen) + chosen.var() + torch.linalg.vector_norm(chosen)


def _experts(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    h = x + p["bias"]
    shares, which = torch.topk(F.softmax(x @ p["w"][:, :4], dim=1), 2, dim=1)
    mask = F.one_hot(which, 4).permute(2, 1, 0)
    mixed = torch.zeros_like(h)
    for e in range(4):
        places, rows = choose(mask[e] > 0)
        mixed.index_add_(0, rows, F.linear(h[rows], p["w"] * (e + 1), p["bias"]).relu() * shares[rows, places, None])
    return (mixed * x).square().mean()


def _written_back(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 1)
    h = (x @ p["w"]).tanh().clone()
    h[rows] = h[rows].softmax(1) + p["bias"]
    return h.square().mean()


def _looked_up(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    classes = y[rows]
    return (F.embedding(classes, p["table"]) * p["table"][classes] * x[rows]).sum(1).square().sum()


def _the_same_for_all(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    chosen = (x * p["bias"])[rows]
    ones = torch.ones(len(rows), WIDTH) * p["bias"]
    return F.mse_loss(chosen + ones, torch.zeros(len(rows), WIDTH)) + chosen.mean(0).sum()


def _shapes(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    chosen = (x @ p["w"])[rows]
    heads = chosen.view(len(rows), 2, WIDTH // 2).transpose(0, 1).reshape(2, len(rows), -1)
    return heads.square().sum(0).flatten().mean() + chosen.reshape(-1).abs().mean()


def _chosen_twice(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    h, classes = (x @ p["w"])[rows], y[rows]
    return h.square().mean() + F.layer_norm(h, [WIDTH], p["bias"]).relu().sum() / len(classes)


def _counted_in_place(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    h = (x @ p["w"])[rows]
    sums = torch.zeros(4, WIDTH)
    sums.index_add_(0, y[rows], h)
    h = h.relu() + p["bias"]
    h *= 2.0
    return sums.square().mean() + h.mean()


STAYS: list[Function] = [
    _masked_loss,
    _masked_mean,
    _masked_elements,
    _experts,
    _written_back,
    _looked_up,
    _the_same_for_all,
    _shapes,
    _chosen_twice,
    _counted_in_place,
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("function", STAYS)
def test_no_activation_moves(function: Function, split: tuple[int, ...]) -> None:
    for fewer in (None, 5):
        steps = _run(function, split, fewer)
        assert all(map(_chooses_own, steps))
        assert activation_collectives(steps[0]) == []


def _embedded(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    return (F.embedding(y[rows], p["table"]) * x[rows]).square().sum() + p["w"].sum() + p["bias"].sum()


def test_rows_of_a_gradient_are_not_gathered_where_ranks_have_different_numbers(monkeypatch: Any) -> None:
    (step, _) = _run(_embedded, (6, 6))
    before = [str(node.target) for node in collectives(step.graph_module.graph)]
    monkeypatch.setattr(f"{gather_embedding_rows.__module__}._pays", lambda *_: True)
    gather_embedding_rows(step, PassState(bucket_size_mb=1.0))
    assert [str(node.target) for node in collectives(step.graph_module.graph)] == before


# ---------------------------------------------------------------------- what would see the order
def _first(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    return (x @ p["w"])[rows][0].square().mean()


def _last_ones(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    return (x @ p["w"])[rows][2:].square().mean()


def _running(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    return (x @ p["w"])[rows].cumsum(0).square().mean()


def _by_place(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    return ((x @ p["w"])[rows] * torch.arange(len(rows))[:, None]).mean()


def _numbers_of_rows(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    return ((x @ p["w"])[rows] * rows[:, None]).mean()


def _among_each_other(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    h = (x @ p["w"])[rows]
    return F.cross_entropy(h @ h.t(), torch.arange(len(rows)))


def _other_rows(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    return (x.flip(0) @ p["w"])[rows].square().mean() + (p["table"].repeat(3, 1)[rows] * x[rows]).sum()


def _returned(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
    (rows,) = choose(y > 0)
    h = (x @ p["w"])[rows]
    return h.square().mean(), h


def _two_choices(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (one,), (other,) = choose(y > 0), choose(y.flip(0) > 0)
    return ((x @ p["w"])[one] * x[other]).mean()


def _the_greatest(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    return (x @ p["w"])[rows].amax(0).sum()


def _views_written(choose: Chooses, p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    (rows,) = choose(y > 0)
    sums = torch.zeros(4, WIDTH)
    seen = sums[1]
    sums.index_add_(0, y[rows], (x @ p["w"])[rows])
    return sums.square().mean() + seen.sum()


@pytest.mark.parametrize("split", [(7, 5), (6, 6)], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        _first,
        _last_ones,
        _running,
        _by_place,
        _numbers_of_rows,
        _among_each_other,
        _other_rows,
        _returned,
        _two_choices,
        _the_greatest,
        _views_written,
    ],
)
def test_what_sees_the_order_gets_the_one_device_order(function: Function, split: tuple[int, ...]) -> None:
    _run(function, split, None)
    if function not in (_first, _last_ones):
        _run(function, split, 5)
