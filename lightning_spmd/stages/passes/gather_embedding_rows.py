"""Gather the rows of an embedding's gradient instead of reducing the table, where that moves fewer bytes.

Before, a whole table goes over the network although each rank wrote only the rows that it looked up::

    table = embedding_dense_backward(rows, indices, ...); g = wait(all_reduce(table)); use(g)

After, every rank gets the rows of all ranks and adds them up itself::

    i = all_gather(indices)                                               as soon as they exist
    ...
    r = all_gather(rows)                                                  as soon as the rows exist
    ...
    g = embedding_dense_backward(wait(r), wait(i), ...); use(g)           where it is read first

The choice follows ``cost.collectives``: the same on every rank, in every run. Does nothing

* where the table is cheaper to reduce (bytes as vocabulary, many ranks, many tokens);
* where something else reads the rank's own table: with tied embeddings the gradient is the sum of this one and a matrix
  product's, which is dense;
* where ranks hold different numbers of rows, or the rows are partial sums themselves (position embeddings).

Changes the order of sums: where several ranks looked up one row, their contributions are added in the order of the
global batch, as one device adds them (batches split along their first dimension), and no longer rank by rank. Rows that
one rank alone looked up, or each of two ranks once, keep their bits.

Parallax (arXiv:1808.02621) and Horovod gather sparse gradients in this way; there the user asks for it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_spmd.cost.collectives import Link, link_of, seconds
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import NodeInfo, Section, info_of, spec_of
from lightning_spmd.ir.placement import Brought, Chosen, Replicate, Shard, ShardAxis
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes.contract import REDUCE_DTYPES, GraphPass, PassState
from lightning_spmd.stages.passes.flat_buffers import Memory, aten, call, contiguous, is_contiguous

_functional = torch.ops._c10d_functional  # noqa: SLF001 - the namespace of functional collectives


@dataclass(frozen=True)
class _Lookup:
    """An embedding's gradient whose table is reduced."""

    table: fx.Node
    start: fx.Node
    wait: fx.Node
    axis: ShardAxis

    @property
    def rows(self) -> fx.Node:
        return self.table.all_input_nodes[0]

    @property
    def indices(self) -> fx.Node:
        return self.table.all_input_nodes[1]


def gather_embedding_rows(step: ShardedStep, state: PassState) -> None:
    """Replace reductions of tables by gathers of rows; see the module docstring for when it does nothing."""
    graph = step.graph_module.graph
    memory = Memory(graph)
    saved = 0
    done: list[str] = []
    for start in list(graph.nodes):
        lookup = _lookup(step, start)
        if lookup is None or not _pays(lookup, state):
            continue
        reader = min(lookup.wait.users, key=memory.position.__getitem__)
        saved += spec_of(lookup.table).bytes - spec_of(lookup.rows).bytes
        _rewrite(graph, memory, lookup, reader)
        done.append(info_of(lookup.table).module or "(top)")
    if done:
        state.notes["gather_embedding_rows"] = (
            f"rows gathered instead of tables reduced, {saved / (1 << 20):.3g} MiB less a rank: {', '.join(done)}"
        )


def _lookup(step: ShardedStep, start: fx.Node) -> _Lookup | None:
    if start.target is not _functional.all_reduce.default or start.args[1] != "sum":
        return None
    table, wait = start.all_input_nodes[0], next(iter(start.users), None)
    if table.target is not aten.embedding_dense_backward.default or len(table.args) != 5 or len(table.users) != 1:
        return None
    position = next((i for i, axis in enumerate(step.axes) if axis.group == start.args[-1]), None)
    if wait is None or not wait.users or position is None or not step.axes[position].is_even:
        return None
    if len(table.all_input_nodes) != 2:  # one tensor as rows and as indices, or sizes that are nodes
        return None
    rows, indices = (n.meta.get("placements", ()) for n in table.all_input_nodes)
    if len(rows) != len(step.axes) or rows != indices:
        return None
    for i, placement in enumerate(rows):
        if not isinstance(placement, Shard if i == position else Replicate):
            return None
        if isinstance(placement, Shard) and isinstance(placement.outer, (Chosen, Brought)):  # each has so many rows
            return None
    return _Lookup(table, start, wait, step.axes[position])


def _pays(lookup: _Lookup, state: PassState) -> bool:
    rows, indices, table = spec_of(lookup.rows), spec_of(lookup.indices), spec_of(lookup.table)
    dtype = table.dtype if state.reduce_dtype is None else REDUCE_DTYPES[state.reduce_dtype]
    row_bytes = rows.shape[-1] * rows.dtype.itemsize
    reduced = table.numel * dtype.itemsize
    link = link_of(table.device)
    return gathering_rows_is_faster(indices.numel, row_bytes, indices.dtype.itemsize, reduced, lookup.axis.size, link)


def _rewrite(graph: fx.Graph, memory: Memory, lookup: _Lookup, reader: fx.Node) -> None:
    table = lookup.table
    info = NodeInfo(Section.COMMUNICATION, info_of(table).module, info_of(table).source)
    rows, indices = spec_of(lookup.rows), spec_of(lookup.indices)
    with graph.inserting_before(_after_definition(memory, lookup)):
        numbers = _gather(graph, info, lookup.indices, (indices.numel,), lookup)
    with graph.inserting_before(table):
        started = [_gather(graph, info, lookup.rows, (indices.numel, rows.shape[-1]), lookup), numbers]
    with graph.inserting_before(reader):
        gathered = [call(graph, info, spec_of(s), _functional.wait_tensor.default, s) for s in started]
        result = call(graph, info_of(table), spec_of(table), table.target, *gathered, *table.args[2:])
    result.meta["placements"] = lookup.wait.meta.get("placements", ())
    lookup.wait.replace_all_uses_with(result)
    for node in (lookup.wait, lookup.start, table):
        graph.erase_node(node)


def _after_definition(memory: Memory, lookup: _Lookup) -> fx.Node:
    """Before which node the indices may be sent: behind bulk traffic at the end they would wait once more."""
    defined = memory.position[lookup.indices]
    if memory.next_write(lookup.indices, defined) < memory.position[lookup.table]:
        return lookup.table
    following = memory.order[defined + 1 :]
    return first((n for n in following if n.op != "placeholder" and n.target is not operator.getitem), "output")


def _gather(graph: fx.Graph, info: NodeInfo, value: fx.Node, shape: tuple[int, ...], lookup: _Lookup) -> fx.Node:
    spec, ranks = spec_of(value), lookup.axis.size
    if not is_contiguous(spec):
        whole = contiguous(spec.shape, spec)
        value = call(graph, info, whole, aten.clone.default, value, memory_format=torch.contiguous_format)
    if spec.shape != shape:
        value = call(graph, info, contiguous(shape, spec), aten.view.default, value, list(shape))
    target: Any = _functional.all_gather_into_tensor.default
    result = contiguous((ranks * shape[0], *shape[1:]), spec)
    return call(graph, info, result, target, value, ranks, lookup.axis.group)


def gathering_rows_is_faster(rows: int, row_bytes: int, index_bytes: int, table: int, ranks: int, link: Link) -> bool:
    """Whether to gather the rows of an embedding's gradient and their indices rather than to reduce the table.

    Args:
        rows: that one rank holds.
        row_bytes: of one row of the gradient.
        index_bytes: of one index.
        table: bytes of the table's gradient.
        ranks: of the process group.
        link: between the ranks.
    """
    gathered = seconds("all_gather", rows * row_bytes, ranks, link)
    gathered += seconds("all_gather", rows * index_bytes, ranks, link)
    # every rank then adds up the rows of all, where it added up its own before
    gathered += 2 * (ranks - 1) * rows * row_bytes / link.memory
    return gathered < seconds("all_reduce", table, ranks, link)


PASS = GraphPass("gather_embedding_rows", gather_embedding_rows, changes_numerics=True)
