"""Fuse all-reduces into buckets, started as soon as the last member is there, waited where the first one is read.

Before::

    r1 = all_reduce(g1); w1 = wait(r1); use(w1); r2 = all_reduce(g2); w2 = wait(r2); use(w2)

After::

    flat = cat([g1.flat, g2.flat]); r = all_reduce(flat)                  right after g2 is computed
    ...                                                                   the rest of the backward pass
    p1, p2 = wait(r).split(...); use(p1.view); use(p2.view)               where the first of them is read

Members share process group, reduction, dtype and device. Buckets follow the order in which values become ready, so the
first bucket (small, 1 MiB: communication starts early) holds the loss and the logged scalars, which then cost nothing
of their own. A value that is read before another member exists cannot wait for it and starts a bucket of its own; that
is how the token count of a mean with ``ignore_index`` stays where it is. A bucket of one is not copied, only moved.

Bitwise on two ranks. On more ranks the ring sums the parts of a flat buffer in another order than those of the single
tensors. Does nothing to a graph without all-reduces.

The idea is DDP's (arXiv:2006.15704), applied to the graph.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.node_info import NodeInfo, Section, TensorSpec, info_of, spec_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes.contract import GraphPass, PassState

aten = torch.ops.aten
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default  # noqa: SLF001 - an operator's public name
_WAIT = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001
_MIB = 1 << 20
FIRST_BUCKET = _MIB


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """One all-reduce of the graph: positions are indices in the graph before the pass."""

    start: fx.Node
    wait: fx.Node
    ready: int
    needed: int

    @property
    def value(self) -> fx.Node:
        return self.start.all_input_nodes[0]

    @property
    def spec(self) -> TensorSpec:
        return spec_of(self.value)

    @property
    def kind(self) -> tuple[Any, ...]:
        return (*self.start.args[1:], self.spec.dtype, self.spec.device)


def bucket_all_reduces(step: ShardedStep, state: PassState) -> None:
    """Fuse the all-reduces of a step; see the module docstring for what it does and when it does nothing."""
    graph = step.graph_module.graph
    order = list(graph.nodes)
    reductions = _find(graph, order)
    if not reductions:
        return
    cap = _cap(reductions, state.bucket_size_mb)
    buckets = _assign(reductions, cap)
    sizes = [sum(m.spec.bytes for m in members) / _MIB for members in buckets]
    for members in buckets:
        _emit(graph, order, members)
    state.notes["bucket_all_reduces"] = (
        f"{len(reductions)} all-reduces in {len(buckets)} buckets of "
        f"{', '.join(f'{size:.3g}' for size in sizes)} MiB (cap {cap / _MIB:.3g})"
    )


def _find(graph: fx.Graph, order: Sequence[fx.Node]) -> list[_Reduction]:
    position = {node: i for i, node in enumerate(order)}
    roots = storage_roots(graph)
    last_write: dict[fx.Node, int] = {}
    found: list[_Reduction] = []
    for index, node in enumerate(order):
        if node.target is _ALL_REDUCE:
            wait = next(iter(node.users))
            value = node.all_input_nodes[0]
            ready = max(position[value], last_write.get(roots[value], -1))
            needed = min((position[user] for user in wait.users), default=len(order) - 1)
            found.append(_Reduction(node, wait, ready, needed))
        for operand in written_arguments(node):
            last_write[roots[operand]] = index
    return found


def _cap(reductions: Sequence[_Reduction], wanted: float | str) -> int:
    """Largest bucket in bytes: about four buckets a step, between 1 and 25 MiB, unless the user says."""
    if isinstance(wanted, (int, float)):
        return max(1, int(wanted * _MIB))
    total = sum(r.spec.bytes for r in reductions)
    return min(max(total // 4, _MIB), 25 * _MIB)


def _assign(reductions: Sequence[_Reduction], cap: int) -> list[list[_Reduction]]:
    buckets: list[list[_Reduction]] = []
    open_buckets: dict[tuple[Any, ...], list[_Reduction]] = {}
    for reduction in sorted(reductions, key=lambda r: r.ready):
        members = open_buckets.get(reduction.kind)
        if members is not None and _fits(members, reduction, cap if buckets[0] is not members else FIRST_BUCKET):
            members.append(reduction)
            continue
        members = [reduction]
        open_buckets[reduction.kind] = members
        buckets.append(members)
    return buckets


def _fits(members: Sequence[_Reduction], new: _Reduction, cap: int) -> bool:
    size = sum(m.spec.bytes for m in members) + new.spec.bytes
    return size <= cap and min(m.needed for m in members) > new.ready


def _emit(graph: fx.Graph, order: Sequence[fx.Node], members: Sequence[_Reduction]) -> None:
    ready = order[max(m.ready for m in members)]
    if ready.op == "placeholder":
        ready = next(n for n in reversed(order) if n.op == "placeholder")
    reader = order[min(m.needed for m in members)]
    if len(members) == 1:
        only = members[0]
        _after_getitems(ready).append(only.start)
        reader.prepend(only.wait)
        return
    first = members[0].start
    info = NodeInfo(Section.COMMUNICATION, info_of(first).module, info_of(first).source)
    with graph.inserting_before(_after_getitems(ready).next):
        flats = [_flat(graph, m.value, info) for m in members]
        joined = _call(graph, aten.cat.default, (flats,), info, _one_dimension(members[0].spec, members))
        start = _call(graph, _ALL_REDUCE, (joined, *first.args[1:]), info, joined.meta["val"])
    with graph.inserting_before(reader):
        whole = _call(graph, _WAIT, (start,), info, joined.meta["val"])
        sizes = [m.spec.numel for m in members]
        pieces = [_one_dimension(m.spec, [m]) for m in members]
        parts = _call(graph, aten.split_with_sizes.default, (whole, sizes), info, pieces)
        for index, member in enumerate(members):
            part = _call(graph, operator.getitem, (parts, index), info, pieces[index])
            shaped = _shaped(graph, part, spec_of(member.wait), info)
            shaped.meta["placements"] = member.wait.meta.get("placements", ())
            member.wait.replace_all_uses_with(shaped)
    for member in members:
        graph.erase_node(member.wait)
        graph.erase_node(member.start)


def _after_getitems(node: fx.Node) -> fx.Node:
    """The last node of the block that makes a value: getitems of a multi-output operator belong to it."""
    while node.next.target is operator.getitem:
        node = node.next
    return node


def _one_dimension(like: TensorSpec, members: Sequence[_Reduction]) -> TensorSpec:
    return TensorSpec((sum(m.spec.numel for m in members),), (1,), like.dtype, like.device)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], info: NodeInfo, value: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta.update(val=value, info=info)
    return node


def _is_dense(spec: TensorSpec) -> bool:
    expected = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(spec.shape, spec.stride, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(graph: fx.Graph, value: fx.Node, info: NodeInfo) -> fx.Node:
    """The value's elements in memory order, without a copy where memory is dense."""
    spec = spec_of(value)
    one = TensorSpec((spec.numel,), (1,), spec.dtype, spec.device)
    if _is_dense(spec) and spec.stride != () and spec.numel > 0:
        return _call(graph, aten.as_strided.default, (value, [spec.numel], [1]), info, one)
    return _call(graph, aten.reshape.default, (value, [-1]), info, one)


def _shaped(graph: fx.Graph, part: fx.Node, spec: TensorSpec, info: NodeInfo) -> fx.Node:
    if _is_dense(spec) and spec.stride != ():
        return _call(graph, aten.as_strided.default, (part, list(spec.shape), list(spec.stride)), info, spec)
    contiguous = TensorSpec(spec.shape, torch.empty(spec.shape, device="meta").stride(), spec.dtype, spec.device)
    return _call(graph, aten.view.default, (part, list(spec.shape)), info, contiguous)


PASS = GraphPass("bucket_all_reduces", bucket_all_reduces, changes_numerics=True)
