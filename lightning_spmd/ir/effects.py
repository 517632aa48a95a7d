"""Effects of a node besides its value, and storage that outlives the graph: for passes that remove nodes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from lightning_spmd._private_api import OpOverload, draws
from lightning_spmd.ir.aliasing import Region, WritesSoFar, written_arguments
from lightning_spmd.ir.placement import Chunk, Shard
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import STAMP

_PLAIN_NAMESPACES = frozenset({"aten", "prims"})


def draws_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers, or chooses the stream that others draw from."""
    target: Any = node.target
    return node.meta.get("random") is not None or (
        isinstance(target, OpOverload) and draws(target, node.args, node.kwargs)
    )


def is_pure(node: fx.Node) -> bool:
    """Whether a node does nothing but make its value from its operands: unnoticed, and it writes nowhere."""
    schema = getattr(node.target, "_schema", None)
    return is_unnoticed(node) and not written_arguments(node) and (schema is None or not schema.is_mutable)


def is_unnoticed(node: fx.Node) -> bool:
    """Whether a node's only effects are its result and writes into its operands.

    Operators of libraries and users always count as noticed, whatever their schema says: a kernel that prints or counts
    is a debugging aid. So do collectives, random draws, the selection of a random stream, and assertions.
    """
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or node.meta.get("random") is not None:
        return False
    if node.target is operator.getitem:
        return True
    target: Any = node.target
    if not isinstance(node.target, OpOverload):
        return _is_host_arithmetic(node)
    if target.namespace not in _PLAIN_NAMESPACES or "assert" in str(target) or draws(target, node.args, node.kwargs):
        return False
    return bool(target._schema.returns) or target._schema.is_mutable  # noqa: SLF001 - an operator's description


def _is_host_arithmetic(node: fx.Node) -> bool:
    """Arithmetic on learning rates and counters: a Python function from numbers to a number."""
    numbers = (node, *node.all_input_nodes)
    return all(isinstance(n.meta.get("val"), (bool, int, float)) for n in numbers)


def outputs_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The values that leave the graph, in order; numbers that are no node are left out."""
    output = graph.output_node()
    values: Any = output.args[0]
    return tuple(v for v in values if isinstance(v, fx.Node))


def leaving_storages(graph: fx.Graph, roots: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Storage roots of the graph's outputs."""
    return {roots[value] for value in outputs_of(graph)}


def lasting_storages(graph: fx.Graph, roots: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Storage roots that may be read after the graph has run: inputs, constants and outputs."""
    return {n for n in graph.nodes if n.op in ("placeholder", "get_attr")} | leaving_storages(graph, roots)


def is_same_on_all_ranks(step: ShardedStep, node: fx.Node) -> bool:
    """Whether a node's arguments, shape and strides are the same in every rank's graph.

    Ranks must take the same decisions. With uneven rows, a local size may happen to make a view trivial on one rank and
    not on another. So only values that are not sharded count. The same holds for chunks.
    """
    if node.meta.get("rank_dependent"):
        return False
    placements = node.meta.get("placements")
    if all(axis.is_even for axis in step.axes):
        return not mentions(placements, Chunk)
    return placements is not None and not mentions(placements, (Shard, Chunk))


def mentions(placements: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether one of (nested) placements is of that kind."""
    if isinstance(placements, (tuple, list)):
        items: list[Any] = list(placements)  # pyright: ignore[reportUnknownArgumentType]
        return any(mentions(p, kind) for p in items)
    return isinstance(placements, kind)


def writes_before(graph: fx.Graph, regions: Mapping[fx.Node, Region]) -> dict[fx.Node, int]:
    """For every node, how many writes its storage, or its piece of it, has seen when the node has run."""
    writes, found = WritesSoFar(regions), dict[fx.Node, int]()
    for node in graph.nodes:
        writes.note(node)
        found[node] = writes.seen(node)
    return found


def replace_reads(old: fx.Node, new: fx.Node, shift: int = 0, *, keep_output: bool = False) -> None:
    """Make every reader of ``old`` read ``new``, and tell the verifier which writes come before.

    Args:
        old: a value.
        new: a value that is equal when the readers run.
        shift: how many writes ``new``'s storage has seen between ``new`` and the creation of ``old``.
        keep_output: leave the graph's output alone.
    """
    for reader in list(old.users):
        if keep_output and reader.op == "output":
            continue
        counts = counts_of(reader)
        if old in counts:
            moved = counts.pop(old) + shift
            if counts.get(new, moved) != moved:
                moved = -1  # read before and after a write: no order makes that right, the verifier says so
            counts[new] = moved
        reader.replace_input_with(old, new)
        set_counts(reader, counts)


def counts_of(node: fx.Node) -> dict[fx.Node, int]:
    """By operand, how many writes its storage must have seen from the operand to ``node``; empty if unknown."""
    counts = node.meta.get(STAMP)
    operands = node.all_input_nodes
    return {} if counts is None or len(counts) != len(operands) else dict(zip(operands, counts, strict=True))


def set_counts(node: fx.Node, counts: Mapping[fx.Node, int]) -> None:
    """Store the result of :func:`counts_of` after operands or counts have changed."""
    operands = node.all_input_nodes
    if all(o in counts for o in operands):
        node.meta[STAMP] = tuple(counts[o] for o in operands)
    else:
        node.meta.pop(STAMP, None)
