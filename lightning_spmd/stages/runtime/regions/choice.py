"""Which regions are tried: those that keep memory's peak, and for ``"auto"`` those that are likely to be worth it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx

from lightning_spmd.cost.memory import Liveness, liveness
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.runtime.regions.code import CODES
from lightning_spmd.stages.runtime.regions.eligible import is_free
from lightning_spmd.stages.runtime.regions.partition import fitting, runs
from lightning_spmd.stages.runtime.regions.region import Region, lowered_graph

CALL = 5e-6
"""Seconds that calling compiled code takes beside its work."""
WORTH = 0.005
"""Part of a step that regions of one kind must promise to save."""
COMPILING = 5.0
"""Seconds that one kind of region takes to compile, as a guess."""


def fitting_regions(step: ShardedStep) -> dict[int, Region]:
    """The regions of a graph, by number; with them the peak of memory is no higher."""
    graph = step.graph_module.graph
    most = liveness(graph).peak

    def blamed(found: Sequence[Sequence[fx.Node]]) -> list[int]:
        regions = {number: Region.of(run) for number, run in enumerate(found)}
        lowered = liveness(lowered_graph(graph, regions, {number: _stands_for(number) for number in regions}))
        return [] if lowered.peak <= most else _at_peak(lowered, most, regions)

    return {number: Region.of(run) for number, run in enumerate(fitting(runs(graph), blamed))}


def worthwhile(regions: Mapping[int, Region], seconds: Mapping[str, float], steps_left: float) -> list[int]:
    """The regions that ``"auto"`` compiles.

    A region saves, at best, the reading and writing of what stays inside. What one kind of region saves in a step must
    be a part of it that counts, and what it saves in the steps that are left more than compiling takes.

    Args:
        regions: of a graph.
        seconds: of the graph's nodes, by name.
        steps_left: how many steps may follow.
    """
    step = sum(seconds.values())
    kinds: dict[str, list[int]] = defaultdict(list)
    for number, region in regions.items():
        kinds[region.key].append(number)
    chosen: list[int] = []
    for numbers in kinds.values():
        saved = sum(_promise(regions[number], seconds) for number in numbers)
        cost = 0.0 if CODES.known(regions[numbers[0]]) is not None else COMPILING
        if saved > WORTH * step and saved * steps_left > cost:
            chosen.extend(numbers)
    return sorted(chosen)


# ---------------------------------------------------------------- pieces
class _StandIn:
    """Stands for the code of a region, in a graph that is looked at only."""

    def __init__(self, number: int) -> None:
        self.__name__ = f"region_{number}"
        self.__module__ = __name__

    def __call__(self, *_: object) -> None:
        """Does nothing."""


def _stands_for(number: int) -> _StandIn:
    return _StandIn(number)


def _at_peak(lowered: Liveness, most: int, regions: Mapping[int, Region]) -> list[int]:
    """The regions that run where more is alive than without them, or that made or hold what is."""
    calls = {n: int(n.target.__name__.rpartition("_")[2]) for n in lowered.order if isinstance(n.target, _StandIn)}
    high = [i for i, alive in enumerate(lowered.alive) if alive > most]
    there = {calls[lowered.order[i]] for i in high if lowered.order[i] in calls}
    if there:
        return sorted(there)
    held = {s.maker for s in lowered.storages if any(s.first <= i <= s.last for i in high)}
    makers = {calls[n] for n in held if n in calls}
    return sorted(makers) or list(regions)


def _promise(region: Region, seconds: Mapping[str, float]) -> float:
    """Seconds that a region may save a step."""
    computing = [node for node in region.nodes if not is_free(node)]
    eager = sum(seconds.get(node.name, 0.0) for node in computing)
    moved = sum(_bytes([node, *node.all_input_nodes]) for node in computing)
    stays = _bytes([*region.inputs, *region.outputs])
    return eager * max(0.0, 1.0 - stays / max(moved, 1)) - CALL


def _bytes(nodes: Sequence[fx.Node]) -> int:
    values = [value for node in nodes for value in _flat(node.meta.get("val"))]
    return sum(value.bytes for value in values if isinstance(value, TensorSpec))


def _flat(value: object) -> Sequence[object]:
    return value if isinstance(value, (tuple, list)) else (value,)
