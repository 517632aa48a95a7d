"""Move activations to host memory between the forward and the backward pass (GPUs).

Before::

    h = mm(x, w1); g = gelu(h); y = mm(g, w2)  ...  dg = mm(dy, w2.t); dh = gelu_backward(dg, h)

After::

    h = mm(x, w1); g = gelu(h); host = offload(h); y = mm(g, w2)  ...
    h2 = fetch(host); dg = mm(dy, w2.t); arrive_(h2, host); dh = gelu_backward(dg, h2)

``SPMDStrategy(offload_activations=0.5)`` moves so many activations that this share of their bytes is given back,
counted where most are alive; ``"512MiB"`` leaves so many of them on each GPU. Those go first that are large and idle
for long (bytes times the distance from their last reader of the forward pass to the first one of the backward pass). A
copy to the host begins behind that last reader, the one back two activations ahead of the first reader, so that two are
on their way at once; both directions have streams of their own. Views of what has gone are made again of what has come
back.

Bitwise: copies. Not moved is what leaves the graph, what a collective makes, what lies in memory with gaps, and what
the backward pass writes into. What ``rematerialize`` makes again is not there to be moved.

Does nothing without the option, without a backward pass, where activations fit anyway, or where some rank of uneven
ones has no row. On the host the option is an error: activations lie there already.

Ren et al., "ZeRO-Offload" (arXiv:2101.06840), have parameters and gradients there; activations are Rhu et al.'s vDNN
(arXiv:1602.08124).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from lightning_spmd.ir.aliasing import aliased_argument, written_arguments
from lightning_spmd.ir.layout import is_dense
from lightning_spmd.ir.node_info import NodeInfo, Section, TensorSpec, info_of, spec_of
from lightning_spmd.ir.operators.host_copies import ARRIVE, FETCH, OFFLOAD
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import forget_writes, is_wait, stamp_writes, starts_collective
from lightning_spmd.stages.passes.contract import GraphPass, PassState
from lightning_spmd.stages.passes.remat.values import Values
from lightning_spmd.stages.passes.remat.wanted import MIB, bytes_to_leave, short_of, values_to_spare

AHEAD = 2
"""How many activations are on their way back at once."""
SMALLEST = 4096
"""What is smaller than this part of the activations stays."""


def offload_activations(step: ShardedStep, state: PassState) -> None:
    """Move activations to the host; see the module docstring for which."""
    wanted = state.offload
    values = values_to_spare(step, wanted)
    if wanted is None or values is None:
        return
    moves = Moves(values)
    before = moves.peak(())
    limit = bytes_to_leave(wanted, before)
    chosen = moves.choose(limit, before // SMALLEST)
    if chosen:
        _write(moves, chosen)
    after = moves.peak(chosen)
    note = (
        f"activations take {after / MIB:.1f} MiB of the GPU instead of {before / MIB:.1f}, "
        f"{sum(map(values.size, chosen)) / MIB:.1f} MiB a step go to the host and back"
    )
    state.notes["offload_activations"] = note + short_of(wanted, limit, after)


class Moves:
    """What may be moved, and what is alive for a choice.

    Args:
        values: of the graph.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self.left = {root: self._last_early_reader(root) for root in values.activations}
        self.first = {root: values.position[readers[0][0]] for root, readers in values.late_readers.items()}
        self._last = {root: self._last_reader(root) for root in values.late_readers}

    def choose(self, limit: int, smallest: int) -> list[fx.Node]:
        """Storages whose way to the host leaves at most ``limit`` bytes, or as few as can be; by their first reader."""
        candidates = [root for root in self.values.activations if self._may_go(root, smallest)]
        candidates.sort(key=lambda root: (-self._worth(root), self.values.position[root]))
        best: Sequence[fx.Node] = ()
        peak = self.peak(best)
        low, high = 1, len(candidates)
        while peak > limit and low <= high:
            middle = (low + high) // 2
            found = self.peak(candidates[:middle])
            if found <= limit:
                best, high = candidates[:middle], middle - 1
            else:
                low = middle + 1
        if peak > limit and not best:
            sizes = range(len(candidates) + 1)
            best = candidates[: min(sizes, key=lambda count: (self.peak(candidates[:count]), count))]
        return self.in_order(best)

    def in_order(self, chosen: Sequence[fx.Node]) -> list[fx.Node]:
        """By the first reader in the backward pass."""
        return sorted(chosen, key=lambda root: (self.first[root], self.values.position[root]))

    def fetched(self, chosen: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """By storage, the position of the node in front of which its way back begins."""
        ordered = self.in_order(chosen)
        starts = [self.values.border] * AHEAD + [self.first[root] for root in ordered]
        return dict(zip(ordered, starts, strict=False))

    def peak(self, chosen: Sequence[fx.Node]) -> int:
        """The most bytes of activations alive at once."""
        values, fetched = self.values, self.fetched(chosen)
        changes: list[tuple[int, int]] = []
        for root in values.activations:
            size, last = values.size(root), max(self.left[root], self._last.get(root, 0))
            ways = [(values.position[root], last)]
            if root in fetched:
                ways = [(values.position[root], self.left[root]), (fetched[root], last)]
            for start, end in ways:
                changes += [(2 * start, size), (2 * end + 1, -size)]
        changes.sort()
        return max(itertools.accumulate(size for _, size in changes), default=0)

    # ------------------------------------------------------------------ pieces
    def _worth(self, root: fx.Node) -> int:
        return self.values.size(root) * (self.first[root] - self.left[root])

    def _last_early_reader(self, root: fx.Node) -> int:
        values = self.values
        readers = (user for alias in values.aliases[root] for user in alias.users)
        early = (values.position[n] for n in readers if values.position[n] < values.border)
        return max(early, default=values.position[root])

    def _last_reader(self, root: fx.Node) -> int:
        return max(self.values.position[user] for alias in self.values.aliases[root] for user in alias.users)

    def _may_go(self, root: fx.Node, smallest: int) -> bool:
        values, readers = self.values, self.values.late_readers.get(root)
        if not readers or values.size(root) <= smallest or self.first[root] > values.end:
            return False
        names = values.aliases[root]
        if starts_collective(root) or any(is_wait(name) for name in names) or not is_dense(spec_of(root)):
            return False
        if any(values.position[writer] >= values.border for writer in values.writers[root]):
            return False
        return all(can_be_named_again(operand, root) for _, operand in readers)


def can_be_named_again(name: fx.Node, root: fx.Node) -> bool:
    """Whether a name of a storage is a view of it, or a view of such views, or the storage itself."""
    while name is not root:
        source = aliased_argument(name)
        if source is None:
            return False
        if source in written_arguments(name):
            if name.meta.get("val") != source.meta.get("val"):
                return False
        elif name.all_input_nodes not in ([source], [name.args[0]]):
            return False
        name = source
    return True


def _write(moves: Moves, chosen: Sequence[fx.Node]) -> None:
    """Copies, and what reads them."""
    values = moves.values
    graph, order = values.graph, values.order
    stamp_writes(graph)
    back: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for root, start in moves.fetched(chosen).items():
        spec = spec_of(root)
        with graph.inserting_after(order[moves.left[root]]):
            host = graph.call_function(OFFLOAD, (root,))
        _describe(host, root, replace(spec, device=torch.device("cpu")), Section.FORWARD)
        with graph.inserting_before(order[start]):
            fetched = graph.call_function(FETCH, (host, spec.device))
        _describe(fetched, root, spec, Section.BACKWARD)
        back[root] = host, fetched
    for root, (host, fetched) in back.items():
        first = order[moves.first[root]]
        with graph.inserting_before(first):
            arrived = graph.call_function(ARRIVE, (fetched, host))
            _describe(arrived, root, None, Section.BACKWARD)
            names = {root: fetched}
            for reader, operand in values.late_readers[root]:
                reader.replace_input_with(operand, _named_again(graph, operand, names))
                forget_writes(reader)


def _named_again(graph: fx.Graph, name: fx.Node, names: dict[fx.Node, fx.Node]) -> fx.Node:
    """A name of what has gone, of what has come back; new ones are made where the graph inserts."""
    if name not in names:
        source = aliased_argument(name)
        if source is None:
            raise RuntimeError(f"unreachable: {name} is no name of what has gone")
        if source in written_arguments(name):
            names[name] = _named_again(graph, source, names)
        else:
            parent = name.all_input_nodes[0]  # of an item of a split, the split
            again = _named_again(graph, parent, names)
            copy = graph.node_copy(name, lambda n: again if n is parent else n)
            copy.meta["info"] = replace(info_of(name), section=Section.BACKWARD)
            forget_writes(copy)
            names[name] = copy
    return names[name]


def _describe(node: fx.Node, root: fx.Node, spec: TensorSpec | None, section: Section) -> None:
    info: NodeInfo = info_of(root)
    node.meta.update(val=spec, info=replace(info, section=section))
    if spec is not None and "placements" in root.meta:
        node.meta["placements"] = root.meta["placements"]


PASS = GraphPass("offload_activations", offload_activations, after=frozenset({"rematerialize", "dead_code"}))
