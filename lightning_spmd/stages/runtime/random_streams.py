"""Random numbers on several ranks: replicated values draw the same numbers everywhere, sharded ones different ones.

Each run of a graph is one *tick*. Before operators that draw numbers the default generators are seeded from (seed,
tick, this rank's coordinates on the mesh axes that split the value): a value that is split over the data axis alone is
drawn alike by all ranks of the tensor axis, a replicated one by all ranks. So a run is reproducible from
``seed_everything``, two integers resume it exactly, and nothing the user draws between steps changes a mask. On one
device none of this happens: the graph draws eager's own numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping

from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.effects import draws_random
from lightning_spmd.ir.node_info import info_of
from lightning_spmd.ir.placement import REPLICATE
from lightning_spmd.ir.random_states import TorchRandomState
from lightning_spmd.ir.signature import GraphInput, InputRole
from lightning_spmd.ir.steps import ShardedStep


def draws_numbers(graph: fx.Graph) -> bool:
    """Whether a graph has random operators. Operators of other libraries may be random, whatever their tags say."""
    return any(
        draws_random(n) or getattr(n.target, "namespace", "aten") not in ("aten", "prims", "_c10d_functional")
        for n in graph.nodes
    )


class RandomStreams:
    """One rank's streams, one for every set of axes that split a value.

    Args:
        seed: the same on all ranks.
        coordinates: this rank's coordinate on every mesh axis by the axis' name; a number on a mesh of one axis.
    """

    def __init__(self, seed: int, coordinates: Mapping[str, int] | int) -> None:
        self.seed = seed
        self.coordinates = coordinates
        self.tick = 0

    @contextlib.contextmanager
    def active(self, *, draws: bool = True) -> Iterator[None]:
        """One run of a graph; the user's generators are as before afterwards.

        Args:
            draws: whether the graph draws numbers at all; every run counts either way.
        """
        self.tick += 1
        if not draws:
            yield
            return
        before = TorchRandomState()
        try:
            self.select(None, 0)
            yield
        finally:
            before.restore()

    def select(self, axes: tuple[str, ...] | None, draw: int) -> None:
        """Draw from now on for values split over these axes; None: all axes. ``draw`` tells calls of a run apart."""
        coordinates = self.coordinates
        if isinstance(coordinates, int):
            position: object = coordinates if axes is None or axes else -1
        else:
            position = [(name, coordinates[name]) for name in sorted(coordinates if axes is None else axes)]
        parts = (self.seed, self.tick, draw, position)
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
        seed = int.from_bytes(digest, "big")
        # torch.manual_seed would also queue a call, with a formatted stack, for every kind of device that is not in use
        for generator in private.generators():
            generator.manual_seed(seed)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Where the streams are.

    Args:
        number: of random operators so far.
        axes: that split the value of the last one; None: the run has drawn nothing yet.
    """

    number: int = 0
    axes: tuple[str, ...] | None = None

    def behind(self, step: ShardedStep) -> Drawn:
        """The same behind a graph that goes on from here."""
        draws = [n.meta["random"] for n in _draws(step.graph_module.graph)]
        return Drawn(self.number + len(draws), draws[-1]) if draws else self


NOTHING_DRAWN = Drawn()


def _draws(graph: fx.Graph) -> list[fx.Node]:
    choices = RandomStreams.select
    return [n for n in graph.nodes if n.meta.get("random") is not None and n.target is not choices]


def switch_streams(step: ShardedStep, drawn: Drawn = NOTHING_DRAWN) -> ShardedStep:
    """Make the graph choose the stream before each random operator.

    ``meta["random"]`` of a node names the axes that split its value. A graph that draws for values split over all axes
    alone is returned as it is: a run begins in that stream.

    Args:
        step: the graph.
        drawn: where the streams are when it begins.
    """
    graph = step.graph_module.graph
    everywhere = tuple(axis.name for axis in step.axes)
    draws, current = _draws(graph), everywhere if drawn.axes is None else drawn.axes
    if all(n.meta["random"] == current for n in draws):
        return step
    last_input = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last_input):
        streams = graph.placeholder("random_streams")
    streams.meta["val"] = None
    for index, node in enumerate(draws, drawn.number):
        if node.meta["random"] != current:
            current = node.meta["random"]
            _insert_switch(graph, node, streams, current, index)
    step.graph_module.recompile()
    entry = GraphInput(InputRole.RNG, (), "random streams", None, placements=(REPLICATE,) * len(step.axes))
    signature = dataclasses.replace(step.signature, inputs=(*step.signature.inputs, entry))
    return dataclasses.replace(step, signature=signature)


def _insert_switch(graph: fx.Graph, node: fx.Node, streams: fx.Node, axes: tuple[str, ...], index: int) -> None:
    with graph.inserting_before(node):
        switch = graph.call_function(RandomStreams.select, (streams, axes, index))
    switch.meta.update(val=None, info=info_of(node), random=axes)
