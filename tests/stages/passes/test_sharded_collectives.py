"""How many collectives sharded state costs after all passes, how many bytes, and how much is gathered at a time."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn

from lightning_spmd.cost.collectives import wire_bytes
from lightning_spmd.ir.node_info import spec_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import collectives
from lightning_spmd.parallel.parallel_plan import ShardedStatePlan
from lightning_spmd.stages.expand import expand
from lightning_spmd.stages.passes import PASSES, PassState, bucket_collectives, regather_parameters, run_passes
from tests.helpers.models import GPT
from tests.helpers.simulate import axes_for, meshes_for
from tests.helpers.tiny_capture import capture_module
from tests.stages.expand.test_models import clipped, sgd, tokens

aten = torch.ops.aten
functional = torch.ops._c10d_functional
MIB = 2**20
SIZE = 0.05
SHAPES = [(2, 64), pytest.param(8, 64, marks=pytest.mark.long), (8, 60), (1024, 60)]  # neither 8 nor 1024 divides 60
UPDATES = {"sgd": sgd, "clipped": clipped}
STAGE_3 = ShardedStatePlan(parameters=True)


@functools.cache
def captured(width: int, ranks: int, update: str) -> Any:
    torch.manual_seed(0)
    batch = [torch.randint(0, 256, (ranks, 6)) for _ in range(2)]
    return capture_module(GPT(width=width), tokens, batch, update=UPDATES[update])[0]


def passed(step: Any, ranks: int, size: float, *, parameters: bool = True, passes: Any = PASSES) -> ShardedStep:
    """The first rank's program after the passes."""
    first = expand(step, (axes_for((1,) * ranks)[0],), ShardedStatePlan(parameters=parameters))
    return run_passes(first, passes, PassState(bucket_size_mb=size))


def starts(step: ShardedStep, kind: str) -> list[fx.Node]:
    return [n for n in collectives(step.graph_module.graph) if kind in str(n.target)]


def whole_bytes(start: fx.Node) -> int:
    """Of what a gather gives and a scatter takes."""
    value = start if "all_gather" in str(start.target) else start.all_input_nodes[0]
    return spec_of(value).bytes


def padded_bytes(value: torch.Tensor, ranks: int) -> int:
    rows, *rest = value.shape
    return -(-rows // ranks) * ranks * torch.Size(rest).numel() * value.itemsize


def read_again(name: str) -> bool:
    """Matrices and normalizations of the blocks; not biases and tables, nor the last layer."""
    normalizes = any(part in name for part in ("norm", "first", "second"))
    return normalizes or ("blocks" in name and name.endswith("weight"))


def bucket_count(sizes: Sequence[int], cap: float) -> int:
    """In how many buckets values of these sizes go, in this order."""
    count, total, largest = 0, float("inf"), 0.0
    for size in sizes:
        most = max(cap, largest, size)
        if total + size <= max(cap, 17 / 16 * most):
            total, largest = total + size, max(largest, size)
        else:
            count, total, largest = count + 1, size, size
    return count


def sizes(width: int, ranks: int, update: str, kind: str, parameters: bool) -> list[int]:
    """Of all values one by one, in the order in which buckets take them."""
    return [whole_bytes(n) for n in starts(_one_by_one(width, ranks, update, parameters), kind)]


@functools.cache
def _one_by_one(width: int, ranks: int, update: str, parameters: bool) -> ShardedStep:
    with mock.patch.object(bucket_collectives, "_EXCESS", 0):
        return passed(captured(width, ranks, update), ranks, 1e-9, parameters=parameters)


# ---------------------------------------------------------------- how many, and of how many bytes
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("ranks", "width"), SHAPES)
def test_stage_3_gathers_a_bucket_a_pass_and_scatters_a_bucket_of_gradients(
    ranks: int, width: int, update: str
) -> None:
    weights = dict(GPT(width=width).named_parameters())
    single = sizes(width, ranks, update, "all_gather", parameters=True)
    forward, backward = single[: len(weights)], single[len(weights) :]
    assert sorted(forward) == sorted(padded_bytes(p, ranks) for p in weights.values())
    assert sorted(backward) == sorted(padded_bytes(p, ranks) for n, p in weights.items() if read_again(n))
    step = passed(captured(width, ranks, update), ranks, SIZE)
    gathers, scatters = starts(step, "all_gather"), starts(step, "reduce_scatter")
    assert len(gathers) == bucket_count(forward, SIZE * MIB) + bucket_count(backward, SIZE * MIB)
    scattered = sizes(width, ranks, update, "reduce_scatter", parameters=True)
    assert len(scatters) == bucket_count(scattered, SIZE * MIB)
    # the token count, then the loss, which the norms of clipping share
    assert [spec_of(n).numel for n in starts(step, "all_reduce")] == [1, 1 + len(weights) * (update == "clipped")]
    _assert_moved(gathers, sum(single), ranks)
    _assert_moved(scatters, sum(padded_bytes(p, ranks) for p in weights.values()), ranks)


@pytest.mark.parametrize("ranks", [8, 1024])
def test_rows_of_neighbours_move_buckets_as_so_many_ranks_do(ranks: int) -> None:
    """Hybrid sharding: nothing but the chunks of gradients, the loss and the token count crosses rows."""
    step = captured(64, ranks, "clipped")
    axes = meshes_for({"data_parallel": (1,) * ranks}, shard=4)[0]
    hybrid = run_passes(expand(step, axes, STAGE_3), PASSES, PassState(bucket_size_mb=SIZE))
    alone = run_passes(expand(step, (axes_for((1,) * 4)[0],), STAGE_3), PASSES, PassState(bucket_size_mb=SIZE))
    within, across = axes[0].parts[1:]
    for kind in ("all_gather", "reduce_scatter"):
        moved = [(whole_bytes(n), n.args[-1]) for n in starts(hybrid, kind)]
        assert moved == [(whole_bytes(n), within.group) for n in starts(alone, kind)]
    reduced = [n for n in starts(hybrid, "all_reduce") if n.args[-1] == across.group]
    chunks = sum(padded_bytes(p, 4) for p in GPT(width=64).parameters()) // 4
    assert sum(spec_of(n).bytes for n in reduced) == chunks
    assert len(reduced) <= len(starts(hybrid, "reduce_scatter"))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("ranks", "width"), SHAPES)
def test_stage_2_scatters_a_bucket_of_gradients_and_gathers_a_bucket_after_the_update(
    ranks: int, width: int, update: str
) -> None:
    weights = dict(GPT(width=width).named_parameters())
    step = passed(captured(width, ranks, update), ranks, SIZE, parameters=False)
    gathers, scatters = starts(step, "all_gather"), starts(step, "reduce_scatter")
    total = sum(padded_bytes(p, ranks) for p in weights.values())
    for found, kind in ((gathers, "all_gather"), (scatters, "reduce_scatter")):
        single = sizes(width, ranks, update, kind, parameters=False)
        assert len(found) == bucket_count(single, SIZE * MIB)
        assert sum(single) == total
        _assert_moved(found, total, ranks)
    assert [spec_of(n).numel for n in starts(step, "all_reduce")] == [1, 1 + len(weights) * (update == "clipped")]
    order = {node: i for i, node in enumerate(step.graph_module.graph.nodes)}
    assert max(order[n] for n in scatters) < min(order[n] for n in gathers)


def _assert_moved(found: Sequence[fx.Node], total: int, ranks: int) -> None:
    """Each rank's link carries all of it but the rank's own piece."""
    assert sum(whole_bytes(n) for n in found) == total
    moved = 0.0
    for node in found:
        kind: Any = "all_gather" if "all_gather" in str(node.target) else "reduce_scatter"
        moved += wire_bytes(kind, spec_of(node.all_input_nodes[0]).bytes, ranks)
    assert moved == pytest.approx((ranks - 1) / ranks * total)


@pytest.mark.parametrize("parameters", [True, False])
def test_counts_do_not_depend_on_the_number_of_ranks_where_nothing_is_padded(parameters: bool) -> None:
    """A gather counts with all that it gives, so that buckets stay as large in memory."""
    parts = [part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.ReLU())]
    model = nn.Sequential(nn.Linear(8, 1024), nn.ReLU(), *parts)
    found = []
    for ranks in (2, 8, 1024):
        batch = (torch.randn(ranks, 8), torch.randint(0, 1024, (ranks,)))
        step, _ = capture_module(model, _cross_entropy, batch, update=sgd)
        done = passed(step, ranks, 0.5, parameters=parameters)
        found.append([len(starts(done, kind)) for kind in ("all_gather", "reduce_scatter", "all_reduce")])
        assert max(whole_bytes(n) for n in starts(done, "all_gather")) <= 4 * MIB * 17 / 16
    assert found[0] == found[1] == found[2], found


def _cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


# ---------------------------------------------------------------- when, and how long
_SAME_VALUES = {
    functional.wait_tensor.default, operator.getitem, aten.view.default, aten.split_with_sizes.default,
    aten.clone.default, aten.slice.Tensor, aten.t.default,
}  # fmt: skip


def lifetimes(step: ShardedStep) -> list[tuple[int, int]]:
    """From the start of each gather to the last reader of what it gave."""
    order = {node: i for i, node in enumerate(step.graph_module.graph.nodes)}
    found = []
    for start in starts(step, "all_gather"):
        last, todo = order[start], [start]
        while todo:
            for user in todo.pop().users:
                last = max(last, order[user])
                if user.target in _SAME_VALUES:
                    todo.append(user)
        found.append((order[start], last))
    return found


def most_alive(spans: Sequence[tuple[int, int]]) -> int:
    return max(sum(first <= at <= last for first, last in spans) for at, _ in spans)


@pytest.mark.parametrize(("ranks", "width"), SHAPES)
def test_three_buckets_of_gathered_parameters_are_alive_at_most(ranks: int, width: int) -> None:
    step = captured(width, ranks, "clipped")
    with_pass = lifetimes(passed(step, ranks, SIZE))
    assert len(with_pass) > 10
    assert most_alive(with_pass) <= 3
    without = [p for p in PASSES if p is not regather_parameters.PASS]
    assert most_alive(lifetimes(passed(step, ranks, SIZE, passes=without))) > 6


@pytest.mark.parametrize(("ranks", "width"), SHAPES)
def test_gathers_start_one_bucket_ahead_and_scatters_while_the_backward_pass_goes_on(ranks: int, width: int) -> None:
    step = passed(captured(width, ranks, "clipped"), ranks, SIZE)
    order = {node: i for i, node in enumerate(step.graph_module.graph.nodes)}
    gathers, scatters = starts(step, "all_gather"), starts(step, "reduce_scatter")
    waits = [order[next(iter(n.users))] for n in gathers]
    for before, (start, wait) in enumerate(zip(gathers[1:], waits[1:], strict=True)):
        assert order[start] < waits[before] < wait
        if before:
            assert waits[before - 1] < order[start], "two buckets ahead"
    last = max(waits)
    assert sum(order[n] < last for n in scatters) > len(scatters) / 2
    assert min(order[next(iter(n.users))] for n in scatters) > max(order[n] for n in scatters[:-2])


def test_parameters_stay_chunks_in_stage_3() -> None:
    step = passed(captured(64, 8, "sgd"), 8, SIZE)
    stored = sum(e.value.bytes for _, e in step.signature.inputs_of(InputRole.PARAMETER))
    assert stored * 8 == sum(p.nbytes for p in GPT(width=64).parameters())
