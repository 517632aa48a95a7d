"""Bytes alive while a graph runs, counted from the sizes of its values: memory on paper.

A storage lives from the node that makes it to the last node that reads it under any name: views, in-place results and
waits are names of one storage. What a collective sends lives until it is waited, because libraries hold it until then.
What leaves the graph lives to its end, and so do its inputs, which are not the graph's own; but for pending values,
which are handed over and end with their last reader (``phases/split.py``).

Not counted: what a kernel allocates for itself, what an allocator rounds up or keeps, and copies of a GPU's tensors
that wait in the host's memory (``ir.operators.host_copies``).
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_spmd._private_api import OpOverload
from lightning_spmd.ir.aliasing import storage_roots
from lightning_spmd.ir.effects import leaving_storages
from lightning_spmd.ir.node_info import TensorSpec, info_of
from lightning_spmd.ir.operators.host_copies import OFFLOAD
from lightning_spmd.ir.signature import InputRole, Signature
from lightning_spmd.ir.verify import copies_nothing, is_wait


@dataclass(frozen=True)
class Storage:
    """A piece of memory that is made in a graph, or handed over to it.

    Args:
        maker: the node that makes it, or the input that is handed over.
        bytes: its size.
        first: position of the first node at which it is there.
        last: position of the last one.
        leaves: whether it is there when the graph has run.
    """

    maker: fx.Node
    bytes: int
    first: int
    last: int
    leaves: bool


@dataclass(frozen=True)
class Liveness:
    """The contents of memory while a graph runs.

    Args:
        order: the nodes as they run.
        storages: what is made and used up.
        alive: by position, the bytes of these that are there while the node runs, its operands and its result included.
        inputs: bytes of what is there all the time, by role; empty if no signature was given.
    """

    order: Sequence[fx.Node]
    storages: Sequence[Storage]
    alive: Sequence[int]
    inputs: Mapping[InputRole, int]

    @property
    def peak(self) -> int:
        """The most bytes alive at once, beside the inputs."""
        return max(self.alive, default=0)

    @property
    def total(self) -> int:
        """The most bytes alive at once, with the inputs."""
        return self.peak + sum(self.inputs.values())

    @property
    def peak_at(self) -> fx.Node | None:
        """The first node at which the most is alive."""
        pairs = zip(self.order, self.alive, strict=True)
        return next((node for node, alive in pairs if alive == self.peak), None)

    def peaks(self) -> dict[str, int]:
        """By path of the module that runs, the most bytes alive meanwhile; in order of their first node."""
        found: dict[str, int] = {}
        for node, alive in zip(self.order, self.alive, strict=True):
            if node.op == "call_function":
                module = info_of(node).module
                found[module] = max(alive, found.get(module, 0))
        return found

    def holders(self, node: fx.Node | None = None) -> dict[str, int]:
        """By path of the module that made them, the bytes alive at a node; by default where the most is."""
        node = self.peak_at if node is None else node
        if node is None:
            return {}
        position = list(self.order).index(node)
        found = Counter[str]()
        for storage in self.storages:
            if storage.first <= position <= storage.last:
                found[info_of(storage.maker).module] += storage.bytes
        return dict(found.most_common())


def liveness(graph: fx.Graph, signature: Signature | None = None) -> Liveness:
    """The contents of memory while a graph runs.

    Args:
        graph: in the order in which it runs.
        signature: tells what inputs are; without it none is counted, and none is handed over.
    """
    order = list(graph.nodes)
    storages = _storages(order, {} if signature is None else _roles(order, signature))
    inputs = {} if signature is None else _live_inputs(signature)
    return Liveness(order, storages, _alive(storages, len(order)), inputs)


def peak_bytes(graph: fx.Graph) -> int:
    """The most bytes alive at once of storages that a graph makes and frees itself: activations, in a training step."""
    found = liveness(graph)
    return max(_alive([s for s in found.storages if not s.leaves], len(found.order)), default=0)


# ---------------------------------------------------------------- pieces
def _alive(storages: Sequence[Storage], count: int) -> list[int]:
    """Bytes of these storages by position."""
    changes = [0] * (count + 1)
    for storage in storages:
        changes[storage.first] += storage.bytes
        changes[storage.last + 1] -= storage.bytes
    return list(itertools.accumulate(changes[:-1]))


_Place = tuple[fx.Node, tuple[int, ...]]
"""A storage: the node that makes it, and which of its results it is."""


def _roles(order: Sequence[fx.Node], signature: Signature) -> dict[fx.Node, bool]:
    """By input whether it is handed over."""
    placeholders = [node for node in order if node.op == "placeholder"]
    return {node: _is_handed_over(e) for node, e in zip(placeholders, signature.inputs, strict=True)}


def _is_handed_over(entry: Any) -> bool:
    return entry.role is InputRole.PENDING and isinstance(entry.value, TensorSpec)


def _live_inputs(signature: Signature) -> dict[InputRole, int]:
    found = Counter[InputRole]()
    for entry in signature.inputs:
        if isinstance(entry.value, TensorSpec) and not _is_handed_over(entry):
            found[entry.role] += _extent(entry.value)
    return dict(found)


def _storages(order: Sequence[fx.Node], handed_over: Mapping[fx.Node, bool]) -> list[Storage]:
    graph = order[-1].graph if order else fx.Graph()
    roots = storage_roots(graph)
    leaving = leaving_storages(graph, roots)
    position = {node: i for i, node in enumerate(order)}
    places = {node: _place(roots[node], handed_over) for node in order}
    sizes = {place: size for node in order for place, size in _made_by(node, roots, handed_over)}
    last = {place: position[place[0]] for place in sizes}
    gone = {places[node] for node in leaving}
    for node in order:
        for value in _held_by(node):
            for place in _places_of(value, places, sizes):
                last[place] = max(last[place], position[node])
    end = len(order) - 1
    return [
        Storage(place[0], size, position[place[0]], end if place in gone else last[place], place in gone)
        for place, size in sizes.items()
        if size
    ]


def _place(root: fx.Node, handed_over: Mapping[fx.Node, bool]) -> _Place:
    """The node and position of a storage root: an item of a tuple is a result of the operator, a box is its content."""
    path: tuple[int, ...] = ()
    while root.target is operator.getitem and isinstance(parent := root.args[0], fx.Node):
        path, root = (root.args[1], *path), parent  # type: ignore[assignment]
    if root.op == "call_function" and not isinstance(root.target, OpOverload):
        boxes = [n for n in root.all_input_nodes if handed_over.get(n)]
        root = boxes[0] if boxes else root
    return root, path


def _made_by(
    node: fx.Node, roots: Mapping[fx.Node, fx.Node], handed_over: Mapping[fx.Node, bool]
) -> Iterator[tuple[_Place, int]]:
    if node.target is OFFLOAD:
        return
    makes = node.op == "call_function" and roots[node] is node and _place(node, handed_over) == (node, ())
    if not makes and not handed_over.get(node):
        return
    for path, spec in _specs(node.meta.get("val")):
        yield (node, path), _extent(spec)


def _specs(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], TensorSpec]]:
    if isinstance(value, TensorSpec):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            yield from _specs(item, (*path, index))


def _held_by(node: fx.Node) -> list[fx.Node]:
    """The values that must be there while a node runs."""
    found = [node, *node.all_input_nodes]
    if is_wait(node):
        start = node.all_input_nodes[0]
        found += start.all_input_nodes if copies_nothing(start) else []
    return found


def _places_of(value: fx.Node, places: Mapping[fx.Node, _Place], sizes: Mapping[_Place, int]) -> Iterator[_Place]:
    """The storages that a name stands for: all of its results where it is a tuple."""
    root, path = places[value]
    if (root, path) in sizes:
        yield root, path
        return
    yield from ((root, other) for place, other in sizes if place is root and other[: len(path)] == path)


def _extent(spec: TensorSpec) -> int:
    """Bytes from the first element to the last one."""
    if 0 in spec.shape:
        return 0
    reach = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    return reach * spec.dtype.itemsize
