"""What is made again in graphs for GPUs, as plain values."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from lightning_spmd.ir.effects import draws_random
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import starts_collective
from lightning_spmd.stages import BuildOptions
from lightning_spmd.stages import build as build_graphs
from lightning_spmd.stages.passes.remat.plan import Planner
from lightning_spmd.stages.passes.remat.values import Values
from lightning_spmd.stages.runtime.agreement.same_graphs import describe
from tests.cuda.ranks import Wanted, build, process_groups
from tests.cuda.stand_ins import gpus


@dataclass(frozen=True)
class Again:
    """Of one rank.

    Args:
        bytes: of activations at once, without and with the option.
        operators: how many more there are of each.
        draws, collectives: how many there are, without and with the option.
        digest: what ranks compare.
    """

    bytes: tuple[int, int]
    operators: Counter[str]
    draws: tuple[int, int]
    collectives: tuple[Counter[str], Counter[str]]
    digest: str


def again(wanted: Wanted, share: float) -> list[Again]:
    """Of all ranks, each with a device of its own."""
    return [_again(dataclasses.replace(wanted, rank=rank), share) for rank in range(wanted.count)]


def _again(wanted: Wanted, share: float) -> Again:
    with gpus(wanted.kernel), process_groups(wanted.rank, wanted.count):
        built = build(wanted)
        captured, ranks = built.executable.captured, built.ranks
        axes = () if ranks.mesh is None else ranks.mesh.axes((wanted.rows,) * wanted.count)
        plain, ours = (
            build_graphs(captured, axes, BuildOptions(rematerialize=wish), ranks.plan(captured.variant)).main
            for wish in (None, share)
        )
        return Again(
            (_bytes(plain), _bytes(ours)),
            _operators(ours) - _operators(plain),
            (_draws(plain), _draws(ours)),
            (_collectives(plain), _collectives(ours)),
            stable_hash(describe(ours)),
        )


def _bytes(step: ShardedStep) -> int:
    return Planner(Values(step)).plan(()).peak


def _operators(step: ShardedStep) -> Counter[str]:
    calls = [n for n in step.graph_module.graph.nodes if n.op == "call_function"]
    return Counter(str(n.target).removesuffix(".default") for n in calls)


def _draws(step: ShardedStep) -> int:
    return sum(draws_random(n) for n in step.graph_module.graph.nodes)


def _collectives(step: ShardedStep) -> Counter[str]:
    return Counter(str(n.target) for n in step.graph_module.graph.nodes if starts_collective(n))
