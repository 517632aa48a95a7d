"""The graph with its buckets: how each is packed, started, waited and handed out again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.node_info import SUBJECT, NodeInfo, Section, TensorSpec, info_of, spec_of
from lightning_spmd.ir.verify import starts_collective
from lightning_spmd.stages.passes.bucket_operands import after_getitems, move_behind, shaping
from lightning_spmd.stages.passes.flat_buffers import (
    Memory,
    aten,
    call,
    contiguous,
    filled,
    flattened,
    is_contiguous,
    shaped,
    split,
)

_functional = torch.ops._c10d_functional  # noqa: SLF001 - the namespace of functional collectives
_WAIT = _functional.wait_tensor.default


ALL_REDUCE = _functional.all_reduce.default


_ALL_REDUCE_IN_PLACE = _functional.all_reduce_.default


ALL_GATHER = _functional.all_gather_into_tensor.default


REDUCE_SCATTER = _functional.reduce_scatter_tensor.default


WAIT = _functional.wait_tensor.default


@dataclass(frozen=True, eq=False)
class Member:
    """One collective of the graph: positions are indices in the graph before the pass.

    Args:
        start, wait: its two nodes.
        ready: when its value is complete.
        needed: when its result is read first.
        expires: when its value is overwritten.
        dtype: in which it travels.
        of_input: whether an input of the graph is gathered, as it is, cast or padded.
        section: of the first reader.
    """

    start: fx.Node
    wait: fx.Node
    ready: int
    needed: int
    expires: int
    dtype: torch.dtype
    of_input: bool
    section: Section

    @property
    def value(self) -> fx.Node:
        """The value that is sent."""
        return self.start.all_input_nodes[0]

    @cached_property
    def spec(self) -> TensorSpec:
        """The spec of the value that is sent."""
        return spec_of(self.value)

    @property
    def bytes(self) -> int:
        """That are sent."""
        return self.spec.numel * self.dtype.itemsize

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What must agree for two members to share a bucket, including when operand and result are needed."""
        when = self.section is not Section.FORWARD if self.of_input else None
        return (self.start.target, *self.start.args[1:], self.spec.dtype, self.dtype, self.spec.device, when)

    @property
    def subject(self) -> str:
        """What it moves."""
        return ", ".join(self.start.meta.get(SUBJECT, ()))

    @property
    def traffic(self) -> tuple[Any, str]:
        """Operator and group: collectives with the same traffic share one bucket size."""
        return self.start.target, str(self.start.args[-1])

    def result(self) -> TensorSpec:
        """The spec of the result: the layout of the value if shapes agree."""
        return self.spec if self.start.target is ALL_REDUCE else spec_of(self.wait)


@dataclass(eq=False)
class Bucket:
    """Collectives that become one, and its place."""

    members: list[Member]
    start_at: int = 0
    wait_at: int = 0
    started: fx.Node | None = None
    layout: list[Member] = field(default_factory=list[Member])
    made_in_place: int = 0

    @property
    def bytes(self) -> int:
        """That are sent."""
        return sum(m.bytes for m in self.members)

    @property
    def info(self) -> NodeInfo:
        """Where it comes from."""
        first = info_of(self.members[0].start)
        return NodeInfo(Section.COMMUNICATION, first.module, first.source)


# ---------------------------------------------------------------- how
def write(graph: fx.Graph, memory: Memory, buckets: Sequence[Bucket], *, in_place: bool = True) -> None:
    """Walk the old order and write the buckets. Waits go before a node, starts behind it; replaced nodes go last.

    Args:
        graph: the graph.
        memory: the graph's storages before anything was written.
        buckets: the buckets to write.
        in_place: whether gradients may be computed inside buckets, in the order in which they are made.
    """
    starts: dict[int, list[Bucket]] = {}
    waits: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        starts.setdefault(bucket.start_at, []).append(bucket)
        waits.setdefault(bucket.wait_at, []).append(bucket)
    for index, node in enumerate(memory.order):
        for bucket in waits.get(index, ()):
            with graph.inserting_before(node):
                _finish(graph, memory, bucket)
        if index in starts:
            following = _with_padding(after_getitems(node), starts[index]).next
            for bucket in starts[index]:
                with graph.inserting_before(following):
                    _start(graph, memory, bucket, in_place=in_place)
    for member in (m for bucket in buckets for m in bucket.members):
        value = member.value
        graph.erase_node(member.wait)
        graph.erase_node(member.start)
        _erase_views(graph, memory, value)


def _with_padding(anchor: fx.Node, buckets: Sequence[Bucket]) -> fx.Node:
    """Move the padding of gathered inputs behind ``anchor``; gives the last node that was moved."""
    for member in (m for bucket in buckets for m in bucket.members):
        if member.of_input:
            anchor = move_behind(anchor, shaping(member.value, casts=True)[1])
    return anchor


def _erase_views(graph: fx.Graph, memory: Memory, node: fx.Node) -> None:
    """Views of a value that was made in a buffer have no reader any more."""
    while not node.users and memory.roots.get(node, node) is not node and node.op == "call_function":
        if getattr(getattr(node.target, "_schema", None), "is_mutable", True):
            return
        parent = node.all_input_nodes[0]
        graph.erase_node(node)
        node = parent


def _start(graph: fx.Graph, memory: Memory, bucket: Bucket, *, in_place: bool) -> None:
    first = bucket.members[0]
    target: Any = first.start.target
    bucket.layout = bucket.members
    casts = first.dtype != first.spec.dtype
    if len(bucket.members) == 1 and not casts:
        operand = first.value
        if target is ALL_REDUCE and memory.is_private(operand, first.start, bucket.start_at):
            target = _ALL_REDUCE_IN_PLACE
            operand = operand if is_contiguous(first.spec) else flattened(graph, bucket.info, operand)
        result = spec_of(operand) if target is _ALL_REDUCE_IN_PLACE else first.result()
    elif target is ALL_REDUCE:
        target, operand = _ALL_REDUCE_IN_PLACE, _fill(graph, memory, bucket, in_place=in_place)
        result = spec_of(operand)
    else:
        operand = _pack(graph, bucket)
        size = spec_of(operand).numel
        ranks = first.start.args[-2]
        result = contiguous((size * ranks if target is ALL_GATHER else size // ranks,), spec_of(operand))  # type: ignore[operator]
    bucket.started = call(graph, bucket.info, result, target, operand, *first.start.args[1:])
    bucket.started.meta[SUBJECT] = tuple(name for m in bucket.layout for name in m.start.meta.get(SUBJECT, ("",)))


def _fill(graph: fx.Graph, memory: Memory, bucket: Bucket, *, in_place: bool) -> fx.Node:
    """The flat buffer of a bucket of all-reduces."""
    origins: dict[fx.Node, Member] = {}
    for member in bucket.members:
        if in_place and memory.can_be_made_in_place(member.value, member.start, bucket.start_at, member.dtype):
            origins[memory.roots[member.value]] = member
    ordered = sorted(origins, key=memory.position.__getitem__)
    others = [m for m in bucket.members if m not in origins.values()]
    bucket.layout = [*(origins[origin] for origin in ordered), *others]
    bucket.made_in_place = sum(origins[origin].bytes for origin in ordered)
    return filled(graph, bucket.info, ordered, [m.value for m in others], bucket.members[0].dtype)


def _pack(graph: fx.Graph, bucket: Bucket) -> fx.Node:
    """The flat input of a bucket of gathers (members one after another) or scatters (by rank, then by member)."""
    info, members = bucket.info, bucket.members
    values = [m.value for m in members]
    if members[0].start.target is REDUCE_SCATTER:
        ranks: Any = members[0].start.args[-2]
        rows = [(ranks, m.spec.numel // ranks) for m in members]
        pieces = [
            call(graph, info, contiguous(r, m.spec), aten.view.default, m.value, list(r))
            for r, m in zip(rows, members, strict=True)
        ]
        both = contiguous((ranks, sum(n for _, n in rows)), members[0].spec)
        joined = call(graph, info, both, aten.cat.default, pieces, 1)
        operand = call(graph, info, contiguous((both.numel,), both), aten.view.default, joined, [both.numel])
    else:
        operand = filled(graph, info, (), values, members[0].spec.dtype)
    return _cast(graph, info, operand, members[0].dtype)


def _cast(graph: fx.Graph, info: NodeInfo, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    spec = spec_of(value)
    if spec.dtype == dtype:
        return value
    new = TensorSpec(spec.shape, spec.stride, dtype, spec.device)
    return call(graph, info, new, getattr(aten, "_to_copy").default, value, dtype=dtype)  # noqa: B009


def _finish(graph: fx.Graph, memory: Memory, bucket: Bucket) -> None:
    if bucket.started is None:
        raise RuntimeError("a bucket is waited before it starts")  # _fits and _place exclude it
    info, members = bucket.info, bucket.layout
    whole = call(graph, info, spec_of(bucket.started), WAIT, bucket.started)
    whole = _cast(graph, info, whole, members[0].spec.dtype)
    if len(members) == 1:
        parts = [whole]
    elif members[0].start.target is ALL_GATHER:
        parts = _gathered(graph, memory, bucket, whole)
    else:
        parts = split(graph, info, whole, [m.result().numel for m in members])
    for member, part in zip(members, parts, strict=True):
        result = _as_result(graph, info, part, member)
        result.meta["placements"] = member.wait.meta.get("placements", ())
        member.wait.replace_all_uses_with(result)


def _as_result(graph: fx.Graph, info: NodeInfo, part: fx.Node, member: Member) -> fx.Node:
    return part if spec_of(part) == member.result() else shaped(graph, info, part, member.result())


def _gathered(graph: fx.Graph, memory: Memory, bucket: Bucket, whole: fx.Node) -> list[fx.Node]:
    """Each member's rows of all ranks, which lie apart in the buffer: a copy each, made where it is read first.

    All copies at once would take as much memory as the buffer does.
    """
    ranks: Any = bucket.members[0].start.args[-2]
    info, spec = bucket.info, spec_of(whole)
    shape = [ranks, spec.numel // ranks]
    rows = call(graph, info, contiguous(shape, spec), aten.view.default, whole, shape)
    found = list[fx.Node]()
    for member, piece in zip(
        bucket.members, split(graph, info, rows, [m.spec.numel for m in bucket.members]), strict=True
    ):
        reader = memory.order[member.needed]
        moves = starts_collective(reader) or reader.op == "output"  # these go elsewhere, or stand for no reader
        copied = contiguous(spec_of(piece).shape, spec)
        with contextlib.nullcontext() if moves else graph.inserting_before(reader):
            copy = call(graph, info, copied, aten.clone.default, piece, memory_format=torch.contiguous_format)
            found.append(_as_result(graph, info, copy, member))
    return found
