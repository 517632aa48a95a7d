"""Invariants of every artefact, checked between stages and after every pass.

* the graph is in topological order, its placeholders and outputs are those of the signature, every node has its facts;
* nothing moved across a write to the storage that it reads (:func:`stamp_writes` remembers which side it was on);
* the memory of a collective under way is left alone;
* nothing that outlives a run is written before Python's last decision on a value of the step (``ir.reads``), but what
  the iteration before has deferred, which is done before the first one;
* every collective is waited exactly once, and nothing reads it before;
* operators that walk memory take tensors that are dense and lie alike, index by index (``ir.layout``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.aliasing import (
    Region,
    WritesSoFar,
    overlapping,
    storage_regions,
    storage_roots,
    written_arguments,
)
from lightning_spmd.ir.first import first
from lightning_spmd.ir.layout import is_dense, lies_as, walked
from lightning_spmd.ir.node_info import TAIL, NodeInfo, TensorSpec, spec_of
from lightning_spmd.ir.reads import checks_of, is_check
from lightning_spmd.ir.signature import OutputRole, Signature
from lightning_spmd.ir.steps import CapturedStep, ShardedStep

_NAMESPACE = "_c10d_functional"
STAMP = "write_counts"
"""In a node's ``meta``: what :func:`stamp_writes` noted."""


def verify_captured(step: CapturedStep) -> None:
    """Check a captured step.

    Raises:
        VerificationError: naming the node and what is wrong with it.
    """
    graph = step.graph_module.graph
    _verify_graph(graph, step.signature)
    _verify_reads(graph, storage_regions(graph))
    for node in graph.nodes:
        if _namespace(node) == _NAMESPACE:
            raise VerificationError(f"{node.name}: a collective in a captured graph, which is the one-device program")


def verify_sharded(step: ShardedStep, *, stamp: bool = False) -> None:
    """Check a sharded step, after expansion and after every pass.

    Args:
        step: the step.
        stamp: whether to remember the sides of its mutations for the next check, as :func:`stamp_writes` does.

    Raises:
        VerificationError: naming the node and what is wrong with it.
    """
    graph = step.graph_module.graph
    _verify_graph(graph, step.signature)
    _verify_collectives(graph, step.signature)
    regions = storage_regions(graph)
    _verify_in_flight(graph, regions)
    _verify_reads(graph, regions)
    counts = list(_write_counts(graph, regions))
    _verify_writes(counts)
    for entry in (*step.signature.inputs, *step.signature.outputs):
        if len(entry.placements) != len(step.axes):
            raise VerificationError(
                f"{entry.name} has {len(entry.placements)} placements on {len(step.axes)} mesh axes"
            )
    if stamp:
        for node, seen in counts:
            node.meta[STAMP] = seen


def stamp_writes(graph: fx.Graph) -> None:
    """Remember, for every node, how many writes each value that it reads has seen: the side of every mutation."""
    for node, counts in _write_counts(graph, storage_regions(graph)):
        node.meta[STAMP] = counts


def forget_writes(node: fx.Node) -> None:
    """Drop what :func:`stamp_writes` noted, for a node that was copied into another graph."""
    node.meta.pop(STAMP, None)


def collectives(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that start a collective."""
    return (n for n in graph.nodes if starts_collective(n))


def starts_collective(node: fx.Node) -> bool:
    """Whether the node starts a collective."""
    return _namespace(node) == _NAMESPACE and not is_wait(node)


def collective_name(node: fx.Node) -> str:
    """What the node starts: ``all_reduce``."""
    return str(node.target).split(".")[1]


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective."""
    return _namespace(node) == _NAMESPACE and "wait_tensor" in str(node.target)


def copies_nothing(node: fx.Node) -> bool:
    """Whether the node starts a collective that reads its operands until it ends; an all-reduce works in a copy."""
    return starts_collective(node) and "all_reduce" not in str(node.target)


# ---------------------------------------------------------------- pieces
def _namespace(node: fx.Node) -> str:
    return getattr(node.target, "namespace", "") if node.op == "call_function" else ""


def _verify_graph(graph: fx.Graph, signature: Signature) -> None:
    seen: set[fx.Node] = set()
    placeholders: list[fx.Node] = []
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if operand not in seen:
                raise VerificationError(f"{node.name} reads {operand.name}, which comes later or is not in the graph")
        seen.add(node)
        if node.op == "placeholder":
            placeholders.append(node)
        elif node.op == "call_function":
            _verify_facts(node)
    if len(placeholders) != len(signature.inputs):
        raise VerificationError(f"{len(placeholders)} placeholders for {len(signature.inputs)} inputs in the signature")
    for node, entry in zip(placeholders, signature.inputs, strict=True):
        if isinstance(entry.value, TensorSpec) and node.meta.get("val") != entry.value:
            raise VerificationError(f"input {entry.name} is {entry.value}, its placeholder {node.meta.get('val')}")
    output = next(iter(reversed(graph.nodes)), None)
    if output is None or output.op != "output" or not isinstance(output.args[0], (tuple, list)):
        raise VerificationError("the graph does not end in a flat tuple of outputs")
    if len(output.args[0]) != len(signature.outputs):
        raise VerificationError(f"{len(output.args[0])} outputs, {len(signature.outputs)} in the signature")
    names = {node: entry.name for node, entry in zip(placeholders, signature.inputs, strict=True)}
    for node in graph.nodes:
        for column in walked(node):
            _verify_column(node, column, names)


def _verify_reads(graph: fx.Graph, regions: dict[fx.Node, Region]) -> None:
    """Nothing that outlives a run is written before the last question that may end it."""
    left = checks = len(checks_of(graph))
    for node in graph.nodes if left else ():
        left -= is_check(node)
        if not left:
            return
        if left == checks and TAIL in node.meta:  # of the iteration before, whatever this one does
            continue
        if any(regions[written][0].op in ("placeholder", "get_attr") for written in written_arguments(node)):
            raise VerificationError(f"{node.name} writes into an input before the last decision on a value of the step")


def _verify_facts(node: fx.Node) -> None:
    if "val" not in node.meta or not isinstance(node.meta.get("info"), NodeInfo):
        raise VerificationError(f"{node.name} ({node.target}) lacks meta['val'] or meta['info']")


def _verify_column(node: fx.Node, column: list[fx.Node], names: dict[fx.Node, str]) -> None:
    """What ``node`` walks side by side, the parameter first."""
    wanted = spec_of(column[0])
    other = next((n for n in column if not lies_as(spec_of(n), wanted)), None)
    if other is None and is_dense(wanted):
        return
    roots = storage_roots(node.graph)
    parameter = names.get(roots[column[0]], column[0].name)
    where = f"{node.name} ({node.target}) walks memory, and {parameter} of shape {list(wanted.shape)} has strides"
    if other is None:
        raise VerificationError(f"{where} {list(wanted.stride)}, with gaps")
    raise VerificationError(
        f"{where} {list(wanted.stride)} while {names.get(roots[other], other.name)} beside it has "
        f"{list(spec_of(other).stride)}"
    )


def _verify_collectives(graph: fx.Graph, signature: Signature) -> None:
    for node in collectives(graph):
        users = list(node.users)
        waited = len(users) == 1 and is_wait(users[0])
        handed_on = (
            len(users) == 1 and users[0].op == "output" and _roles(users[0], node, signature) == [OutputRole.PENDING]
        )
        if not waited and not handed_on:
            raise VerificationError(
                f"{node.name} must be waited for exactly once, or handed on to the next iteration, and have no "
                f"other reader; its users: {', '.join(u.name for u in users)}"
            )


def _verify_in_flight(graph: fx.Graph, regions: dict[fx.Node, Region]) -> None:
    """Between a collective and its wait nothing touches what it works in, nothing writes into what it reads.

    Only the functional all-reduce works in a copy of its input, made when it starts. What a collective reads may be one
    piece of a buffer (of a bucket's results) while another piece of it is written.
    """
    working: dict[fx.Node, fx.Node] = {}
    reading: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        starts = starts_collective(node)
        if not (starts or working or reading):
            continue  # nothing is under way
        used = {regions[operand][0] for operand in node.all_input_nodes}
        targets = written_arguments(node)
        if is_wait(node):
            reading.pop(node.all_input_nodes[0], None)
            for root in used:
                working.pop(root, None)
        elif node.op != "output":
            touched = [start for root, start in working.items() if root in used]
            touched += [
                start
                for start, sources in reading.items()
                if any(_overlap(regions[a], regions[b]) for a in sources for b in targets)
            ]
            if touched:
                raise VerificationError(
                    f"{node.name} ({node.target}) touches memory that {touched[0].name}, not waited yet, works on"
                )
        if starts:
            for operand in targets:
                working[regions[operand][0]] = node
            if copies_nothing(node):
                reading[node] = node.all_input_nodes


def _overlap(one: Region, other: Region) -> bool:
    return one[0] is other[0] and overlapping(one[1], other[1])


def _roles(output: fx.Node, node: fx.Node, signature: Signature) -> list[OutputRole]:
    """The roles in which ``node`` leaves the graph."""
    values: Any = output.args[0]
    return [entry.role for value, entry in zip(values, signature.outputs, strict=True) if value is node]


def _write_counts(graph: fx.Graph, regions: dict[fx.Node, Region]) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
    writes = WritesSoFar(regions)
    # Counted from the value on: a pass may replace a value by one that took other writes to make.
    born: dict[fx.Node, int] = {}
    for node in graph.nodes:
        operands = node.all_input_nodes
        if writes:
            yield node, tuple([writes.seen(operand) - born.get(operand, 0) for operand in operands])
        else:
            yield node, (0,) * len(operands)
        writes.note(node)
        if writes and (counted := writes.seen(node)):
            born[node] = counted


def _verify_writes(found: list[tuple[fx.Node, tuple[int, ...]]]) -> None:
    for node, counts in found:
        stamped = node.meta.get(STAMP)
        if stamped is not None and stamped != counts and len(stamped) == len(counts):
            pairs = zip(node.all_input_nodes, stamped, counts, strict=True)
            operand = first((o for o, before, after in pairs if before != after), "operand")
            raise VerificationError(
                f"{node.name} ({node.target}) reads {operand.name} on the wrong side of a write to its storage"
            )
