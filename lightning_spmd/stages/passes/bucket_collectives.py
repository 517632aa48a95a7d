"""Fuse collectives into buckets, started as soon as the last member is there, waited where the first one is read.

Before::

    r1 = all_reduce(g1); w1 = wait(r1); use(w1); r2 = all_reduce(g2); w2 = wait(r2); use(w2)

After::

    flat = [g1, g2] in one piece of memory; r = all_reduce_(flat)         right after g2 is computed
    ...                                                                   the rest of the backward pass
    p1, p2 = wait(r).split(...); use(p1.view); use(p2.view)               where the first of them is read

Members share operator, process group, reduction, dtype and device. Buckets follow the order in which values become
ready, and no value is cut. The first bucket is small (1 MiB: communication starts early) and holds the loss and the
logged scalars, which Python reads right after the step. A value that is read before another member exists cannot wait
for it and starts a bucket of its own; that is how the token count of a mean with ``ignore_index`` stays where it is.
Nor does a value wait that is written to later.

All-reduces work in place: large gradients are made inside the buffer (``flat_buffers``), the rest is copied into it
once; a value alone in its bucket is reduced where it is if nobody else reads it. Buckets of gathers and scatters are
copied in and out, so they stay small; gathers of inputs start when the gather before them is waited, so that not all of
them are in memory at once. Gathers of the backward pass are buckets of their own for the same reason.

``bucket_size_mb="auto"`` takes the size from ``cost.collectives``: the same on every rank and in every run, for it
decides the order of sums. ``reduce_dtype`` casts what only clipping and the optimizer read for the way.

Bitwise on two ranks without ``reduce_dtype``. On more ranks the ring sums the parts of a flat buffer in another order
than those of the single tensors. Does nothing to a graph without collectives.

The idea is DDP's (arXiv:2006.15704), applied to the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from lightning_spmd.cost.collectives import MIB, Kind, bucket_bytes, link_of
from lightning_spmd.ir.node_info import NodeInfo, Section, TensorSpec, info_of, spec_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes.bucket_operands import after_getitems, is_gradient, loosen, move_behind, shaping
from lightning_spmd.stages.passes.contract import REDUCE_DTYPES, GraphPass, PassState
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
_ALL_REDUCE = _functional.all_reduce.default
_ALL_REDUCE_IN_PLACE = _functional.all_reduce_.default
_ALL_GATHER = _functional.all_gather_into_tensor.default
_REDUCE_SCATTER = _functional.reduce_scatter_tensor.default
_WAIT = _functional.wait_tensor.default
_KINDS: dict[Any, Kind] = {_ALL_REDUCE: "all_reduce", _ALL_GATHER: "all_gather", _REDUCE_SCATTER: "reduce_scatter"}
FIRST_BUCKET = MIB
_SCALARS = 4096
"""Bytes up to which a first bucket holds nothing but scalars, so that any gradient may join it."""
_EXCESS = 1 / 16
"""By how much a bucket may be larger than the cap, or than the one member that is larger than the cap."""


@dataclass(frozen=True, eq=False)
class _Member:
    """One collective of the graph: positions are indices in the graph before the pass.

    Args:
        start, wait: its two nodes.
        ready: when its value is complete.
        needed: when its result is read first.
        expires: when its value is overwritten.
        dtype: in which it travels.
        of_input: whether an input of the graph is gathered, as it is or padded.
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
        return self.start.all_input_nodes[0]

    @cached_property
    def spec(self) -> TensorSpec:
        return spec_of(self.value)

    @property
    def bytes(self) -> int:
        return self.spec.numel * self.dtype.itemsize

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        backward = self.of_input and self.section is not Section.FORWARD
        return (self.start.target, *self.start.args[1:], self.spec.dtype, self.dtype, self.spec.device, backward)

    @property
    def traffic(self) -> tuple[Any, str]:
        """What shares one bucket size: operator and group."""
        return self.start.target, str(self.start.args[-1])

    def result(self) -> TensorSpec:
        """The spec of what is waited for: the layout of the value where shapes agree."""
        return self.spec if self.start.target is _ALL_REDUCE else spec_of(self.wait)


@dataclass(eq=False)
class _Bucket:
    """Collectives that become one, and where."""

    members: list[_Member]
    start_at: int = 0
    wait_at: int = 0
    started: fx.Node | None = None
    layout: list[_Member] = field(default_factory=list[_Member])
    made_in_place: int = 0

    @property
    def bytes(self) -> int:
        return sum(m.bytes for m in self.members)

    @property
    def info(self) -> NodeInfo:
        first = info_of(self.members[0].start)
        return NodeInfo(Section.COMMUNICATION, first.module, first.source)


def bucket_collectives(step: ShardedStep, state: PassState) -> None:
    """Fuse the collectives of a step; see the module docstring for what it does and when it does nothing."""
    graph = step.graph_module.graph
    loosen(graph, _KINDS)
    memory = Memory(graph)
    members = _find(step, memory, None if state.reduce_dtype is None else REDUCE_DTYPES[state.reduce_dtype])
    if not members:
        return
    ranks = {part.group: part.size for axis in step.axes for part in axis.parts}
    caps = _caps(members, ranks, state.bucket_size_mb)
    buckets = _assign(members, caps)
    _place(buckets, memory)
    _write(graph, memory, buckets)
    state.notes["bucket_collectives"] = _note(members, buckets, caps)


def _note(members: Sequence[_Member], buckets: Sequence[_Bucket], caps: dict[tuple[Any, str], int]) -> str:
    sizes = ", ".join(f"{bucket.bytes / MIB:.3g}" for bucket in buckets)
    in_place = sum(bucket.made_in_place for bucket in buckets)
    return (
        f"{len(members)} collectives in {len(buckets)} buckets of {sizes} MiB (cap {max(caps.values()) / MIB:.3g}); "
        f"{in_place / MIB:.3g} MiB of gradients are made in them, without a copy"
    )


# ---------------------------------------------------------------- which
def _find(step: ShardedStep, memory: Memory, reduce_dtype: torch.dtype | None) -> list[_Member]:
    found: list[_Member] = []
    end = len(memory.order) - 1
    last_input = max((i for i, node in enumerate(memory.order) if node.op == "placeholder"), default=0)
    for index, node in enumerate(memory.order):
        wait = next(iter(node.users), None)
        if node.target not in _KINDS or wait is None or wait.target is not _WAIT:
            continue
        value = node.all_input_nodes[0]
        # the wait that makes a value is going to move, up to here at most
        ready = index if value.target is _WAIT else max(memory.position[value], memory.last_write(value, index))
        needed = min((memory.position[user] for user in wait.users), default=end)
        of_input = node.target is _ALL_GATHER and _is_input(memory, value, index)
        ready = last_input if of_input else ready
        dtype = spec_of(value).dtype
        if reduce_dtype is not None and _KINDS[node.target] != "all_gather" and is_gradient(step, memory, node, wait):
            dtype = reduce_dtype
        expires = memory.next_write(value, index)
        section = info_of(memory.order[needed]).section
        found.append(_Member(node, wait, max(ready, last_input), needed, expires, dtype, of_input, section))
    return found


def _is_input(memory: Memory, value: fx.Node, index: int) -> bool:
    """Whether a value, read at ``index``, is an input that was not written before, permuted or padded: it can move."""
    source, _ = shaping(value)
    return source.op == "placeholder" and memory.last_write(source, index) <= memory.position[source]


def _caps(members: Sequence[_Member], ranks: dict[str, int], wanted: float | str) -> dict[tuple[Any, str], int]:
    """The largest bucket in bytes of operands, by operator and group."""
    totals: Counter[tuple[Any, str]] = Counter()
    device = {}
    for member in members:
        totals[member.traffic] += member.bytes
        device[member.traffic] = member.spec.device
    largest = max(ranks.values(), default=1)
    if isinstance(wanted, (int, float)):
        # a rank's piece of a gather is counted, and the whole of it is in memory
        shares = {key: ranks.get(key[1], largest) if _KINDS[key[0]] == "all_gather" else 1 for key in totals}
        return {key: max(1, int(wanted * MIB) // share) for key, share in shares.items()}
    return {
        key: bucket_bytes(_KINDS[key[0]], total, ranks.get(key[1], largest), link_of(device[key]))
        for key, total in totals.items()
    }


def _assign(members: Sequence[_Member], caps: dict[tuple[Any, str], int]) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    open_buckets: dict[tuple[Any, ...], _Bucket] = {}
    seen_gradients: set[tuple[Any, ...]] = set()
    for member in sorted(members, key=lambda m: (m.ready, m.needed)):
        bucket = open_buckets.get(member.kind)
        if bucket is not None:
            cap = caps[member.traffic]
            if member.kind not in seen_gradients and bucket.bytes > _SCALARS:
                cap = min(cap, FIRST_BUCKET)
            if _fits(bucket, member, cap):
                bucket.members.append(member)
                continue
            if bucket.bytes > _SCALARS:
                seen_gradients.add(member.kind)
        open_buckets[member.kind] = bucket = _Bucket([member])
        buckets.append(bucket)
    return buckets


def _fits(bucket: _Bucket, new: _Member, cap: int) -> bool:
    """Members come in order of readiness: the bucket would start when the new one is ready.

    A bias may ride with a weight that is as large as a bucket.
    """
    together = [*bucket.members, new]
    largest = max(cap, *(m.bytes for m in together))
    size = bucket.bytes + new.bytes
    fits = size <= cap or size <= (1 + _EXCESS) * largest
    return fits and all(new.ready < min(m.needed, m.expires) for m in together)


def _place(buckets: Sequence[_Bucket], memory: Memory) -> None:
    """Where each bucket starts and is waited. Gathers of inputs, ready from the beginning, follow one another."""
    before: dict[tuple[Any, str], _Bucket] = {}
    for bucket in buckets:
        bucket.start_at = max(m.ready for m in bucket.members)
        # clipping may write into what a collective still reads
        bucket.wait_at = min(min(m.needed, m.expires) for m in bucket.members)
        first = bucket.members[0]
        if not first.of_input:
            continue
        previous = before.get(first.traffic)
        last = min(bucket.wait_at, *(m.expires for m in bucket.members))
        if previous is not None and previous.wait_at < last:
            bucket.start_at = previous.wait_at - 1
        elif previous is not None and previous.wait_at == last:  # a weight and its bias, read by one operator
            bucket.start_at = previous.start_at
        before[first.traffic] = bucket


# ---------------------------------------------------------------- how
def _write(graph: fx.Graph, memory: Memory, buckets: Sequence[_Bucket]) -> None:
    """Walk the old order, waits before a node and starts behind it; what they replace goes at the end."""
    starts: dict[int, list[_Bucket]] = {}
    waits: dict[int, list[_Bucket]] = {}
    for bucket in buckets:
        starts.setdefault(bucket.start_at, []).append(bucket)
        waits.setdefault(bucket.wait_at, []).append(bucket)
    for index, node in enumerate(memory.order):
        for bucket in waits.get(index, ()):
            with graph.inserting_before(node):
                _finish(graph, bucket)
        if index in starts:
            following = _with_padding(after_getitems(node), starts[index]).next
            for bucket in starts[index]:
                with graph.inserting_before(following):
                    _start(graph, memory, bucket)
    for member in (m for bucket in buckets for m in bucket.members):
        value = member.value
        graph.erase_node(member.wait)
        graph.erase_node(member.start)
        _erase_views(graph, memory, value)


def _with_padding(anchor: fx.Node, buckets: Sequence[_Bucket]) -> fx.Node:
    """Move the padding of gathered inputs behind ``anchor``; gives the last node that was moved."""
    for member in (m for bucket in buckets for m in bucket.members):
        if member.of_input:
            anchor = move_behind(anchor, shaping(member.value)[1])
    return anchor


def _erase_views(graph: fx.Graph, memory: Memory, node: fx.Node) -> None:
    """Views of a value that was made in a buffer have no reader any more."""
    while not node.users and memory.roots.get(node, node) is not node and node.op == "call_function":
        if getattr(getattr(node.target, "_schema", None), "is_mutable", True):
            return
        parent = node.all_input_nodes[0]
        graph.erase_node(node)
        node = parent


def _start(graph: fx.Graph, memory: Memory, bucket: _Bucket) -> None:
    first = bucket.members[0]
    target: Any = first.start.target
    bucket.layout = bucket.members
    casts = first.dtype != first.spec.dtype
    if len(bucket.members) == 1 and not casts:
        operand = first.value
        if target is _ALL_REDUCE and memory.is_private(operand, first.start, bucket.start_at):
            target = _ALL_REDUCE_IN_PLACE
            operand = operand if is_contiguous(first.spec) else flattened(graph, bucket.info, operand)
        result = spec_of(operand) if target is _ALL_REDUCE_IN_PLACE else first.result()
    elif target is _ALL_REDUCE:
        target, operand = _ALL_REDUCE_IN_PLACE, _fill(graph, memory, bucket)
        result = spec_of(operand)
    else:
        operand = _pack(graph, bucket)
        size = spec_of(operand).numel
        ranks = first.start.args[-2]
        result = contiguous((size * ranks if target is _ALL_GATHER else size // ranks,), spec_of(operand))  # type: ignore[operator]
    bucket.started = call(graph, bucket.info, result, target, operand, *first.start.args[1:])


def _fill(graph: fx.Graph, memory: Memory, bucket: _Bucket) -> fx.Node:
    """The flat buffer of a bucket of all-reduces."""
    origins: dict[fx.Node, _Member] = {}
    for member in bucket.members:
        if memory.can_be_made_in_place(member.value, member.start, bucket.start_at, member.dtype):
            origins[memory.roots[member.value]] = member
    ordered = sorted(origins, key=memory.position.__getitem__)
    others = [m for m in bucket.members if m not in origins.values()]
    bucket.layout = [*(origins[origin] for origin in ordered), *others]
    bucket.made_in_place = sum(origins[origin].bytes for origin in ordered)
    return filled(graph, bucket.info, ordered, [m.value for m in others], bucket.members[0].dtype)


def _pack(graph: fx.Graph, bucket: _Bucket) -> fx.Node:
    """The flat input of a bucket of gathers (members one after another) or scatters (by rank, then by member)."""
    info, members = bucket.info, bucket.members
    values = [m.value for m in members]
    if members[0].start.target is _REDUCE_SCATTER:
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


def _finish(graph: fx.Graph, bucket: _Bucket) -> None:
    if bucket.started is None:
        raise RuntimeError("a bucket is waited before it starts")  # _fits and _place exclude it
    info, members = bucket.info, bucket.layout
    whole = call(graph, info, spec_of(bucket.started), _WAIT, bucket.started)
    whole = _cast(graph, info, whole, members[0].spec.dtype)
    if len(members) == 1:
        parts = [whole]
    elif members[0].start.target is _ALL_GATHER:
        parts = _gathered(graph, bucket, whole)
    else:
        parts = split(graph, info, whole, [m.result().numel for m in members])
    for member, part in zip(members, parts, strict=True):
        result = part if spec_of(part) == member.result() else shaped(graph, info, part, member.result())
        result.meta["placements"] = member.wait.meta.get("placements", ())
        member.wait.replace_all_uses_with(result)


def _gathered(graph: fx.Graph, bucket: _Bucket, whole: fx.Node) -> list[fx.Node]:
    """Each member's rows of all ranks, which lie apart in the buffer: a copy each."""
    ranks: Any = bucket.members[0].start.args[-2]
    info, spec = bucket.info, spec_of(whole)
    shape = [ranks, spec.numel // ranks]
    rows = call(graph, info, contiguous(shape, spec), aten.view.default, whole, shape)
    found = []
    for piece in split(graph, info, rows, [m.spec.numel for m in bucket.members]):
        copied = contiguous(spec_of(piece).shape, spec)
        copy = call(graph, info, copied, aten.clone.default, piece, memory_format=torch.contiguous_format)
        found.append(copy)
    return found


PASS = GraphPass(
    "bucket_collectives",
    bucket_collectives,
    after=frozenset({"early_operands", "gather_embedding_rows", "regather_parameters"}),
    changes_numerics=True,
)
