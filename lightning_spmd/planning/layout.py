"""The graphs of one rank of many, without the others: a mesh on paper, and the stages on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from typing_extensions import override

from lightning_spmd.cost.collectives import decided_for
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.ir.steps import IterationGraphs, ShardedStep
from lightning_spmd.parallel.axes import DATA
from lightning_spmd.parallel.mesh import REPLICA, SHARD, Mesh, batch_coordinates, mesh_sizes, shard_size
from lightning_spmd.planning.capturing import Capture, Part
from lightning_spmd.stages import BuildOptions, GraphMaker, finish
from lightning_spmd.strategy.ranks.ranks import Ranks
from lightning_spmd.strategy.spmd_strategy import SPMDStrategy

SecondsOf = Callable[[ShardedStep], Mapping[str, float]]
"""Time of every node of a graph, by name."""


class PaperMesh(Mesh):
    """A mesh without process groups, of which the names alone are known."""

    @override
    def group(self, name: str) -> Any:
        return SimpleNamespace(group_name=name)


@dataclass(frozen=True)
class GroupPlace:
    """The ranks of a process group.

    Args:
        size: number of ranks.
        stride: distance between neighbours, in ranks.
    """

    size: int
    stride: int


@dataclass(frozen=True)
class Layout:
    """The layout of a training on its ranks.

    Args:
        options: options of ``SPMDStrategy`` in the recipe.
        devices: ranks per node.
        nodes: number of nodes.
    """

    options: Mapping[str, Any]
    devices: int
    nodes: int

    @property
    def ranks(self) -> int:
        """How many processes."""
        return self.devices * self.nodes

    def strategy(self) -> SPMDStrategy:
        """The strategy with these options.

        Raises:
            ConfigurationError: one of them is wrong.
        """
        return SPMDStrategy(**self.options)

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks on each axis of the mesh.

        Raises:
            ConfigurationError: the axes do not fill the ranks.
        """
        return mesh_sizes(self.strategy().parallel_options, self.ranks)

    @property
    def batches(self) -> int:
        """Number of ranks with different batches."""
        return batch_coordinates(self.sizes, 0)[0]

    def mesh(self) -> PaperMesh | None:
        """The mesh as rank 0 sees it; None on one device."""
        if self.ranks == 1:
            return None
        sizes, wanted = self.sizes, self.options.get("data_parallel_shard_size", "auto")
        shard = shard_size(wanted, sizes, self.devices, self.options.get("expert_parallel_size", 1))
        kept = {name: size for name, size in sizes.items() if size > 1 or name == DATA.name}
        nowhere: Any = None
        return PaperMesh(kept, 0, nowhere, nowhere, shard)

    def groups(self) -> dict[str, GroupPlace]:
        """The ranks of each process group, by its name."""
        mesh = self.mesh()
        if mesh is None:
            return {}
        found: dict[str, GroupPlace] = {}
        stride = 1
        for name in reversed(list(mesh.sizes)):
            found[name] = GroupPlace(mesh.sizes[name], stride)
            stride *= mesh.sizes[name]
        data = found[DATA.name]
        found[SHARD] = GroupPlace(mesh.shard, data.stride)
        found[REPLICA] = GroupPlace(data.size // mesh.shard, data.stride * mesh.shard)
        return found


@dataclass(frozen=True)
class BuiltPart:
    """The graphs of a part of the iteration.

    Args:
        part: the part that they were made from.
        graphs: setup, main and cleanup.
        seconds: times of all nodes, by the graph's name and the node's.
        gathered: tensors that had to be gathered, one line each.
    """

    part: Part
    graphs: IterationGraphs
    seconds: Mapping[str, Mapping[str, float]]
    gathered: tuple[str, ...]

    def phases(self) -> dict[str, ShardedStep]:
        """The graphs by name, in the order in which they run."""
        graphs = self.graphs
        named = {"setup": graphs.setup, "main": graphs.main, "cleanup": graphs.cleanup}
        return {name: graph for name, graph in named.items() if graph is not None}


def build_layout(
    capture: Capture,
    layout: Layout,
    seconds_of: SecondsOf,
    kind: Literal["cpu", "cuda"],
    on_stage: Callable[[str], None] = lambda _stage: None,
) -> list[BuiltPart]:
    """The graphs of rank 0 under a layout.

    Args:
        capture: the iteration.
        layout: the layout.
        seconds_of: returns the times of a graph's nodes.
        kind: kind of device, on which the stages depend.
        on_stage: called at each stage and pass; an exception that it raises ends the work.

    Raises:
        ConfigurationError: the layout does not fit the training.
        ExpansionError: an operator cannot be expressed.
    """
    if layout.options.get("batch") == "local":
        raise ConfigurationError(
            "batch='local' gives each rank a graph of its own, which a plan does not know: plan batch='global'"
        )
    strategy, mesh = layout.strategy(), layout.mesh()
    split = _split(capture, layout)
    axes = () if mesh is None else mesh.axes(split)
    options = strategy.parallel_options
    sharing = strategy.layer_sharing
    strategy.expert_sharing.resolve(capture.module)
    if sharing.size > 1 and sharing.is_sought:
        sharing.find(capture.parts[0].captured, capture.module, lambda found: found)
    sharing.resolve(capture.module)
    ranks = Ranks(options, "auto", None)
    with decided_for(kind):
        return [_build_part(part, axes, strategy, ranks, seconds_of, on_stage) for part in capture.parts]


def _split(capture: Capture, layout: Layout) -> tuple[int, ...]:
    rows, batches = capture.global_rows, layout.batches
    if rows % batches:
        raise ConfigurationError(
            f"{rows} rows of a global batch cannot be split evenly over {batches} data-parallel ranks"
        )
    return (rows // batches,) * batches


def _build_part(
    part: Part,
    axes: tuple[ShardAxis, ...],
    strategy: SPMDStrategy,
    ranks: Ranks,
    seconds_of: SecondsOf,
    on_stage: Callable[[str], None],
) -> BuiltPart:
    options: BuildOptions = strategy.build_options
    gathered: list[str] = []
    if not axes or not part.variant.apply or part.variant.by_hand:  # weights change in the middle of a step
        options = dataclasses.replace(options, overlap_iterations=False)
    own = axes if part.variant.forward else tuple(_without_rows(axis) for axis in axes)
    plan = ranks.plan(part.variant)
    maker = GraphMaker(own, options, plan, on_stage, lambda stage, _step: on_stage(stage), gathered.append)
    graphs = maker.make(part.captured)
    if graphs.deferrable:
        seconds = seconds_of(graphs.main)
        graphs = finish(part.captured, graphs.main, seconds, options.overlap_iterations)
    found = BuiltPart(part, graphs, {}, tuple(gathered))
    times = {name: seconds_of(graph) for name, graph in found.phases().items()}
    return dataclasses.replace(found, seconds=times)


def _without_rows(axis: ShardAxis) -> ShardAxis:
    """The axis where there is no batch (``strategy/graphs/building.py`` gives no split there)."""
    return dataclasses.replace(axis, split=(1,) * axis.size) if axis.name == DATA.name else axis
