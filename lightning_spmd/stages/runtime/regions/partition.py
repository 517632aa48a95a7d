"""Cuts the final order of a graph into regions: runs of nodes that a compiler may take.

A run is consecutive, so what is not in it stays on its side: collectives start and are waited for where they did. A
run ends with a part of the iteration, and a long one is cut where a layer ends: then the layers' pieces are alike, and
compiled once. Regions whose values would make the graph's peak higher are halved, and dropped at last.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from torch import fx

from lightning_spmd.ir.node_info import info_of
from lightning_spmd.stages.runtime.regions.eligible import is_free, may_be_lowered, owner, storage_in

FEWEST = 2
"""Computing nodes below which there is nothing to fuse."""
LONG = 24
"""Computing nodes above which a run is cut where a layer ends."""
LONGEST = 64
"""Computing nodes above which a run is cut in any case: compilers take time more than in proportion."""


def runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """Runs of nodes that may be lowered, in order."""
    found: list[list[fx.Node]] = []
    for run in _consecutive(graph):
        for piece in _by_section(run):
            found.extend(_trimmed(_cut(piece)))
    return found


def halves(run: list[fx.Node]) -> list[list[fx.Node]]:
    """A run in two, or nothing where the halves would be too small."""
    middle = len(run) // 2
    return _trimmed([run[:middle], run[middle:]])


def computing(run: Iterable[fx.Node]) -> int:
    """How many nodes of a run compute."""
    return sum(not is_free(node) for node in run)


# ---------------------------------------------------------------- pieces
def _consecutive(graph: fx.Graph) -> Iterable[list[fx.Node]]:
    run: list[fx.Node] = []
    inside: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in inside:
            run.append(node)
            inside.add(node)
            continue
        if may_be_lowered(node) and _owns(node, inside):
            run.append(node)
            inside.add(node)
            continue
        if run:
            yield run
        run, inside = [], set()
        if may_be_lowered(node) and _owns(node, inside):
            run, inside = [node], {node}
    if run:
        yield run


def _owns(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a node writes nowhere but into what was born in the run."""
    written = owner(node)
    return written is None or storage_in(written, inside) in inside


def _by_section(run: Sequence[fx.Node]) -> Iterable[list[fx.Node]]:
    return (list(nodes) for _, nodes in groupby(run, key=lambda node: info_of(node).section))


def _cut(run: list[fx.Node]) -> list[list[fx.Node]]:
    if computing(run) <= LONG:
        return [run]
    pieces = [list(nodes) for _, nodes in groupby(run, key=_layer)]
    joined: list[list[fx.Node]] = []
    for piece in pieces:
        small = joined and computing(piece) < FEWEST and computing(joined[-1]) < LONG
        if small:
            joined[-1].extend(piece)
        else:
            joined.append(piece)
    return [part for piece in joined for part in _slices(piece, LONGEST)]


def _layer(node: fx.Node) -> str:
    """The path of a node's module as far as the first number in it: layers are numbered."""
    parts = info_of(node).module.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if first is None else ".".join(parts[: first + 1])


def _slices(run: list[fx.Node], most: int) -> list[list[fx.Node]]:
    pieces, count = [list[fx.Node]()], 0
    for node in run:
        count += not is_free(node)
        if count > most and not is_free(node):
            pieces.append([])
            count = 1
        pieces[-1].append(node)
    return pieces


def _trimmed(pieces: Iterable[list[fx.Node]]) -> list[list[fx.Node]]:
    """Pieces that are worth it, repaired where a cut left something behind: a write into what the piece before made."""
    found: list[list[fx.Node]] = []
    for piece in pieces:
        for part in _whole(piece):
            while part and is_free(part[0]):
                part = part[1:]
            while part and is_free(part[-1]) and part[-1].target is not operator.getitem:
                part = part[:-1]
            if computing(part) >= FEWEST:
                found.append(part)
    return found


def _whole(piece: list[fx.Node]) -> Iterable[list[fx.Node]]:
    """A piece, parted at nodes that write into what was not born in it, and at items of a tuple that was not."""
    part: list[fx.Node] = []
    inside: set[fx.Node] = set()
    for node in piece:
        item = node.target is operator.getitem and node.args[0] not in inside
        if item or not _owns(node, inside):
            if part:
                yield part
            part, inside = [], set()
            continue
        part.append(node)
        inside.add(node)
    if part:
        yield part


Fits = Callable[[Sequence[Sequence[fx.Node]]], Sequence[int]]
"""Gives the positions of the runs that make memory's peak higher; none if the runs are fine."""


def fitting(found: list[list[fx.Node]], fits: Fits) -> list[list[fx.Node]]:
    """Runs, halved or dropped until the peak of memory is no higher than without them."""
    while found:
        blamed = set(fits(found))
        if not blamed:
            return found
        found = [piece for i, run in enumerate(found) for piece in (halves(run) if i in blamed else [run])]
    return found
