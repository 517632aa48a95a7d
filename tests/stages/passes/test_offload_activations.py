"""Activations that wait in the host's memory: what is moved, when it comes back, and that no bit changes."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_spmd import ConfigurationError, SPMDStrategy, messages
from lightning_spmd.cost.memory import liveness, peak_bytes
from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.aliasing import storage_roots
from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.operators.host_copies import ARRIVE, FETCH, OFFLOAD
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.ir.verify import verify_sharded
from lightning_spmd.parallel.parallel_plan import ShardedStatePlan
from lightning_spmd.stages import BuildOptions, build
from lightning_spmd.stages.passes.offload_activations import AHEAD
from lightning_spmd.stages.runtime.agreement.same_graphs import describe
from lightning_spmd.strategy import spmd_strategy
from tests.helpers.simulate import meshes_for
from tests.helpers.tiny_capture import capture_module
from tests.helpers.training import TrainingCase, assert_bitwise, assert_compiled, one_device, train
from tests.stages.expand.test_sharded_state import UPDATES
from tests.stages.passes.test_rematerialize import InPlace, classify, gpt

Captured = tuple[CapturedStep, list[Tensor]]


@functools.cache
def in_place() -> Captured:
    torch.manual_seed(0)
    batch = [torch.randn(4, 3, 8, 8), torch.randint(10, (4,))]
    return capture_module(InPlace(), classify, batch, update=UPDATES["lists"])


def one(captured: CapturedStep, **options: Any) -> ShardedStep:
    return build(captured, (), BuildOptions(**options)).main


def results(step: ShardedStep, live: list[Tensor]) -> list[Tensor]:
    """Of a run on copies, with what was written into the inputs."""
    inputs = [value.clone() if isinstance(value, Tensor) else value for value in live]
    with torch.no_grad():
        outputs = step.graph_module(*inputs)
    return [value for value in (*outputs, *inputs) if isinstance(value, Tensor)]


def activation_bytes(step: ShardedStep) -> int:
    """The most bytes alive at once of what the forward pass made, or what came back."""
    found = liveness(step.graph_module.graph)
    names = {node: i for i, node in enumerate(found.order)}
    border = next(i for i, n in enumerate(found.order) if info_of(n).section is Section.BACKWARD)
    changes: list[tuple[int, int]] = []
    for storage in found.storages:
        if not storage.leaves and (names[storage.maker] < border or storage.maker.target is FETCH):
            changes += [(2 * storage.first, storage.bytes), (2 * storage.last + 1, -storage.bytes)]
    return max(itertools.accumulate(size for _, size in sorted(changes)))


def targets(step: ShardedStep) -> list[Any]:
    return [node.target for node in step.graph_module.graph.nodes]


@pytest.mark.parametrize("make", [gpt, in_place], ids=["gpt", "in place"])
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("rematerialize", [None, 0.3])
def test_bits_stay_and_bytes_go(make: Any, share: float, rematerialize: float | None) -> None:
    """What is fetched is NaN until it arrives, so nobody reads it before."""
    captured, live = make()
    plain, ours = (one(captured, rematerialize=rematerialize, offload_activations=w) for w in (None, share))
    before, after = map(activation_bytes, (plain, ours))
    assert targets(ours).count(OFFLOAD) == targets(ours).count(FETCH) == targets(ours).count(ARRIVE) > 0
    assert after <= (1.01 - share if share < 1 else 0.6) * before
    assert peak_bytes(ours.graph_module.graph) < peak_bytes(plain.graph_module.graph)
    for mine, theirs in zip(results(ours, live), results(plain, live), strict=True):
        assert torch.equal(mine, theirs)


def test_copies_begin_behind_the_last_reader_and_ahead_of_the_first_one() -> None:
    step = one(gpt()[0], offload_activations=0.5)
    order = {node: i for i, node in enumerate(step.graph_module.graph.nodes)}
    ways = []
    for host in (n for n in order if n.target is OFFLOAD):
        source, fetched = host.args[0], next(n for n in host.users if n.target is FETCH)
        arrived = next(n for n in fetched.users if n.target is ARRIVE)
        roots = storage_roots(step.graph_module.graph)
        readers = [user for name, root in roots.items() if root is roots[source] for user in name.users]
        assert order[host] == max(order[n] for n in readers if info_of(n).section is Section.FORWARD)
        assert all(info_of(n).section is Section.FORWARD for n in readers)
        readers = [n for n in fetched.users if n is not arrived]
        assert all(order[arrived] < order[n] for n in readers)
        ways.append((order[fetched], order[arrived]))
    ways.sort(key=lambda way: way[1])
    assert len(ways) > AHEAD + 1
    for (_, arrived), (begun, _) in itertools.pairwise(ways[: -AHEAD + 1 or None]):
        assert begun < arrived or arrived == ways[0][1]
    at_once = [sum(begun <= arrived <= end for begun, end in ways) for _, arrived in ways]
    assert max(at_once) <= AHEAD + 1


def test_on_ranks_with_sharded_state_numbers_and_graphs_agree() -> None:
    captured, _ = gpt(1)
    axes = meshes_for({"data_parallel": (2, 2)})
    plan = ShardedStatePlan(parameters=True)
    ours = [build(captured, a, BuildOptions(offload_activations=0.5), plan).main for a in axes]
    assert describe(ours[0]) == describe(ours[1])
    assert targets(ours[0]).count(OFFLOAD) > 3
    for step in ours:
        verify_sharded(step)


def test_a_reader_in_front_of_the_arrival_is_found() -> None:
    step = one(gpt()[0], offload_activations=0.5)
    graph: fx.Graph = step.graph_module.graph
    arrived = next(n for n in graph.nodes if n.target is ARRIVE)
    reader = next(n for n in arrived.args[0].users if n is not arrived)
    reader.append(arrived)
    with pytest.raises(VerificationError, match="wrong side of a write"):
        verify_sharded(step)


@pytest.mark.parametrize("value", [0, 1.5, True, "half", "512"])
def test_what_it_takes_is_said(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"offload_activations=.*number above 0 and at most 1"):
        SPMDStrategy(offload_activations=value)


def test_the_host_has_nothing_to_move() -> None:
    with pytest.raises(ConfigurationError, match="'cpu', whose activations are in host memory already"):
        train(TrainingCase("mlp", "sgd", batches=1), SPMDStrategy(offload_activations=0.5))
    with pytest.raises(ConfigurationError, match="use one of the two"):
        SPMDStrategy(offload_activations=0.5, cuda_graphs=True)
    with pytest.raises(ConfigurationError, match="needs the pass 'offload_activations'"):
        SPMDStrategy(offload_activations=0.5, passes=["dead_code"])


def test_training_keeps_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd_strategy, "check_offload", lambda *_: None)
    said: list[str] = []
    monkeypatch.setattr(messages, "rank_zero_info", said.append)
    case = TrainingCase("gpt", "adamw", batches=4)
    result = train(case, SPMDStrategy(offload_activations=0.7))
    assert_compiled(result)
    assert_bitwise(result, one_device(case))
    assert any("offload_activations: activations take " in text and "to the host and back" in text for text in said)
