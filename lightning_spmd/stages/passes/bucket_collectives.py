"""Fuse collectives into buckets, started when the last member is ready, waited for where the first one is read.

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
once; a value alone in its bucket is reduced where it is if nothing else reads it. Buckets of gathers and scatters are
copied in and out, so they stay small; gathers of inputs start when the gather before them is waited, so that not all of
them are in memory at once. Gathers of the backward pass are buckets of their own for the same reason.

``bucket_size_mb="auto"`` takes the size from ``bucket_size.py``: the same on every rank and in every run, for it
decides the order of sums. ``reduce_dtype`` casts what only clipping and the optimizer read for the way.

Bitwise on two ranks without ``reduce_dtype``. On more ranks the ring sums the parts of a flat buffer in another order
than those of the single tensors. Does nothing to a graph without collectives.

The idea is DDP's (arXiv:2006.15704), applied to the graph.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd.cost.collectives import Kind, link_of
from lightning_spmd.ir.node_info import info_of, spec_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes.bucket_operands import is_gradient, loosen, shaping
from lightning_spmd.stages.passes.bucket_size import MIB, bucket_bytes
from lightning_spmd.stages.passes.bucket_writing import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    Bucket,
    Member,
    write,
)
from lightning_spmd.stages.passes.contract import REDUCE_DTYPES, GraphPass, PassState
from lightning_spmd.stages.passes.flat_buffers import Memory

_KINDS: dict[Any, Kind] = {ALL_REDUCE: "all_reduce", ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter"}
FIRST_BUCKET = MIB
_SCALARS = 4096
"""Bytes up to which a first bucket holds nothing but scalars, so that any gradient may join it."""
_EXCESS = 1 / 16
"""By how much a bucket may be larger than the cap, or than the one member that is larger than the cap."""


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
    members = _in_order(members, step) if state.in_order else sorted(members, key=lambda m: (m.ready, m.needed))
    buckets = _assign(members, caps)
    _place(buckets, memory)
    write(graph, memory, buckets, in_place=not state.in_order)
    state.notes["bucket_collectives"] = _note(members, buckets, caps)


def _note(members: Sequence[Member], buckets: Sequence[Bucket], caps: dict[tuple[Any, str], int]) -> str:
    sizes = ", ".join(f"{bucket.bytes / MIB:.3g}" for bucket in buckets)
    in_place = sum(bucket.made_in_place for bucket in buckets)
    return (
        f"{len(members)} collectives in {len(buckets)} buckets of {sizes} MiB (cap {max(caps.values()) / MIB:.3g}); "
        f"{in_place / MIB:.3g} MiB of gradients are made in them, without a copy"
    )


# ---------------------------------------------------------------- which
def _find(step: ShardedStep, memory: Memory, reduce_dtype: torch.dtype | None) -> list[Member]:
    found: list[Member] = []
    end = len(memory.order) - 1
    last_input = max((i for i, node in enumerate(memory.order) if node.op == "placeholder"), default=0)
    for index, node in enumerate(memory.order):
        wait = next(iter(node.users), None)
        if node.target not in _KINDS or wait is None or wait.target is not WAIT:
            continue
        value = node.all_input_nodes[0]
        # the wait that makes a value is going to move, up to here at most
        ready = index if value.target is WAIT else max(memory.position[value], memory.last_write(value, index))
        needed = min((memory.position[user] for user in wait.users), default=end)
        of_input = node.target is ALL_GATHER and _is_input(memory, value, index)
        ready = last_input if of_input else ready
        dtype = spec_of(value).dtype
        if reduce_dtype is not None and _KINDS[node.target] != "all_gather" and is_gradient(step, memory, node, wait):
            dtype = reduce_dtype
        expires = memory.next_write(value, index)
        section = info_of(memory.order[needed]).section
        found.append(Member(node, wait, max(ready, last_input), needed, expires, dtype, of_input, section))
    return found


def _is_input(memory: Memory, value: fx.Node, index: int) -> bool:
    """Whether a value, read at ``index``, is an unwritten input, perhaps cast, permuted or padded: it can move."""
    source, _ = shaping(value, casts=True)
    return source.op == "placeholder" and memory.last_write(source, index) <= memory.position[source]


def _caps(members: Sequence[Member], ranks: dict[str, int], wanted: float | str) -> dict[tuple[Any, str], int]:
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


def _in_order(members: Sequence[Member], step: ShardedStep) -> list[Member]:
    """Gradients in the order of parameters, from the last to the first, each ready once those before it are.

    Ranks with batches of their own may make them in other orders; what they send must be in one.
    """
    names = [entry.name for _, entry in step.signature.inputs_of(InputRole.PARAMETER)]
    number = {f"gradient of {name}": index for index, name in enumerate(reversed(names))}
    gradients = sorted((m for m in members if m.subject in number), key=lambda m: number[m.subject])
    others = [m for m in members if m.subject not in number]
    ready, lifted = 0, list[Member]()
    for member in gradients:
        ready = max(ready, member.ready)
        lifted.append(dataclasses.replace(member, ready=ready))
    return sorted([*others, *lifted], key=lambda m: m.ready)  # stable: equals stay in their order


def _assign(members: Sequence[Member], caps: dict[tuple[Any, str], int]) -> list[Bucket]:
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[Any, ...], Bucket] = {}
    seen_gradients: set[tuple[Any, ...]] = set()
    for member in members:
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
        open_buckets[member.kind] = bucket = Bucket([member])
        buckets.append(bucket)
    return buckets


def _fits(bucket: Bucket, new: Member, cap: int) -> bool:
    """Members come in order of readiness: the bucket would start when the new one is ready.

    A bias may ride with a weight that is as large as a bucket.
    """
    together = [*bucket.members, new]
    largest = max(cap, *(m.bytes for m in together))
    size = bucket.bytes + new.bytes
    fits = size <= cap or size <= (1 + _EXCESS) * largest
    return fits and all(new.ready < min(m.needed, m.expires) for m in together)


def _place(buckets: Sequence[Bucket], memory: Memory) -> None:
    """Where each bucket starts and is waited. Gathers of inputs, ready from the beginning, follow one another."""
    before: dict[tuple[Any, str], Bucket] = {}
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


PASS = GraphPass(
    "bucket_collectives",
    bucket_collectives,
    after=frozenset({"early_operands", "gather_embedding_rows", "regather_parameters"}),
    changes_numerics=True,
)
