"""The stage's function: placements for every axis, then one local program."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.node_info import TensorSpec, named
from lightning_spmd.ir.placement import Placement, ShardAxis
from lightning_spmd.ir.reads import hands_over
from lightning_spmd.ir.signature import InputRole, Signature
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.ir.verify import stamp_writes
from lightning_spmd.messages import warn
from lightning_spmd.parallel.parallel_plan import ParallelPlan, ReplicatedPlan, experts_over, sequence_dim
from lightning_spmd.parallel.pieces import local_spec
from lightning_spmd.stages.expand.attention.kernels import why_whole
from lightning_spmd.stages.expand.axis_plan import AxisPlan
from lightning_spmd.stages.expand.emit import EmissionError, Emitter
from lightning_spmd.stages.expand.experts.exchanged_experts import gathered_experts
from lightning_spmd.stages.expand.experts.regions import mark_experts
from lightning_spmd.stages.expand.propagation.propagate import Propagation
from lightning_spmd.stages.expand.propagation.sequences import cut_of, find_sequences, uncut
from lightning_spmd.stages.expand.rewrites.associate import partial_sums_first
from lightning_spmd.stages.expand.rewrites.ignored_rows import ignore_instead_of_cutting
from lightning_spmd.stages.expand.rewrites.shared_casts import share_casts

_ATTEMPTS = 32
_SIZES = 4
"""Different numbers of rows that are all tried."""


class ReplicationWarning(UserWarning):
    """An operator without a sharding rule runs on gathered tensors: correct, slow, and named in the message."""


def announce(line: str) -> None:
    """Warn of an operator that runs on gathered tensors."""
    warn(line, ReplicationWarning)


def expand(
    captured: CapturedStep,
    axes: tuple[ShardAxis, ...],
    plan: ParallelPlan | None = None,
    tell: Callable[[str], None] = announce,
) -> ShardedStep:
    """This rank's program of a captured step: one-device semantics on the concatenated global batch.

    Args:
        captured: the global-view step; it is not changed.
        axes: the mesh axes, each with this rank's coordinate on it.
        plan: placements of inputs and outputs; by default the batch is split and everything else replicated, and
            gradients are exposed as the step's variant says.
        tell: told of each operator that runs on gathered tensors.

    Raises:
        ExpansionError: naming the operator, its module and line, if no correct local program was found.
        BatchError: if a leaf of the batch cannot be split like the batch.
    """
    plan = plan or ReplicatedPlan(reduce_gradients=captured.variant.expose_gradients)
    signature = captured.signature
    graph = share_casts(captured.graph_module.graph, axes, plan)
    graph = mark_experts(graph, signature, axes, plan)
    graph = partial_sums_first(graph, signature, axes, plan)
    graph = ignore_instead_of_cutting(graph, axes, plan)
    axes, starts, whole = _sequences(graph, signature, axes, plan)
    axes = _with_chosen(graph, axes)
    banned: dict[fx.Node, str] = {}
    for _ in range(_ATTEMPTS):
        plans: list[AxisPlan] = []
        for axis in axes:
            along = Propagation(graph, signature, axis, plan, banned, tuple(plans), starts.get(axis.name))
            plans.append(along.run())
        try:
            graph_module = _local_program(graph, signature, plans)
        except EmissionError as error:
            if error.node in banned:
                raise
            _ban(graph, banned, error)
            continue
        stamp_writes(graph_module.graph)
        for found in plans:
            whole += gathered_experts(graph, signature, found, experts_over(plan, found.axis))
        fallbacks = _describe(plans, banned, whole)
        for line in {line.split(" ", 1)[0]: line for line in reversed(fallbacks)}.values():
            tell(line)
        return ShardedStep(graph_module, _local_signature(graph, signature, plans), axes, fallbacks)
    raise ExpansionError("no correct local program after trying to replicate:\n" + "\n".join(banned.values()))


def _sequences(
    graph: fx.Graph, signature: Signature, axes: tuple[ShardAxis, ...], plan: ParallelPlan
) -> tuple[tuple[ShardAxis, ...], dict[str, dict[fx.Node, Placement]], list[str]]:
    """(the axes as they cut this graph's sequences, where each begins to, what stays whole)."""
    cut: list[ShardAxis] = []
    starts: dict[str, dict[fx.Node, Placement]] = {}
    whole: list[str] = []
    has_batch = any(True for _ in signature.inputs_of(InputRole.BATCH))
    for axis in axes:
        dim = sequence_dim(plan, axis) if has_batch else None
        if dim is not None:
            found = find_sequences(graph, signature, dim)
            axis = cut_of(axis, graph, found)
            starts[axis.name] = {node: s.where for node, s in found.items() if axis.splits(s.length, 1)}
            whole += uncut(axis, found)
        cut.append(axis)
    return tuple(cut), starts, whole


def _with_chosen(graph: fx.Graph, axes: tuple[ShardAxis, ...]) -> tuple[ShardAxis, ...]:
    """The axes, which know how many of the rows that values choose a rank holds with the counts of this graph."""
    found: dict[int, int] = {}
    for node in graph.nodes:
        if hands_over(node):
            target: Any = node.target
            found.update(filter(None, map(target.chosen, range(len(node.args)))))
    if not found:
        return axes
    parts = tuple(found.get(count, 0) for count in range(max(found) + 1))
    return tuple(dataclasses.replace(axis, chosen=parts) for axis in axes)


def _ban(graph: fx.Graph, banned: dict[fx.Node, str], error: EmissionError) -> None:
    """Replicate the operands of a node; of all calls of its operator once a second one fails, or there is no end."""
    known = any(node.target is error.node.target for node in banned)
    alike = [n for n in graph.nodes if n.target is error.node.target] if known else []
    for node in [error.node, *alike]:
        banned.setdefault(node, str(error))


def _local_program(graph: fx.Graph, signature: Signature, plans: list[AxisPlan]) -> fx.GraphModule:
    """This rank's graph, of calls that every rank can make; the ranks find out without a message.

    Raises:
        EmissionError: on every rank, if one of them cannot make a call.
    """
    axes = tuple(plan.axis for plan in plans)
    longer, written = _longer_forms(graph, signature, plans)
    own = written.get(axes) or Emitter(graph, plans, axes, longer).write(signature)
    return own.graph_module()


def _longer_forms(
    graph: fx.Graph, signature: Signature, plans: list[AxisPlan]
) -> tuple[set[tuple[fx.Node, int]], dict[tuple[ShardAxis, ...], Emitter]]:
    """(places where some rank cannot take the shorter form, the programs in which that was found by rank).

    Raises:
        EmissionError: one of the ranks cannot make a call.
    """
    others = list(_ranks_of_every_size(tuple(plan.axis for plan in plans)))
    longer: set[tuple[fx.Node, int]] = set()
    while True:
        known = len(longer)
        written = {seen: Emitter(graph, plans, seen, longer).write(signature) for seen in others}
        if len(longer) == known:
            return longer, written


def _ranks_of_every_size(axes: tuple[ShardAxis, ...]) -> Iterator[tuple[ShardAxis, ...]]:
    """The mesh as seen from one rank for each size of a piece; nothing where all ranks hold as much.

    No rank and one row are where torch's operators differ (contiguity, broadcasting, squeezing), so of many sizes those
    two, the smallest other and the largest stand for all. Of rows that values choose a rank may hold none, one or more.
    """
    counts, even = max((len(axis.chosen) for axis in axes), default=0), all(axis.is_even for axis in axes)
    if even and not counts:
        return
    choices: list[list[ShardAxis]] = []
    for axis in axes:
        sizes = sorted(set(axis.split))
        others = [size for size in sizes if size > 1]
        kept = [size for size in sizes if size <= 1] + (others if len(sizes) <= _SIZES else [others[0], others[-1]])
        choices.append([dataclasses.replace(axis, rank=axis.split.index(size)) for size in kept])
    for seen in itertools.product(*choices):
        has_rows = all(axis.split[axis.rank] or not axis.total for axis in seen)
        for number in range(2 if counts and has_rows else 1 if counts else 0):
            yield tuple(dataclasses.replace(axis, chosen=(number,) * counts) for axis in seen)
        if not even and (has_rows or not counts):
            yield seen


def _local_signature(graph: fx.Graph, signature: Signature, plans: list[AxisPlan]) -> Signature:
    axes = tuple(p.axis for p in plans)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    inputs = []
    for node, entry in zip(placeholders, signature.inputs, strict=True):
        placements = tuple(p.outputs[node][0] for p in plans)
        value = local_spec(entry.value, placements, axes) if isinstance(entry.value, TensorSpec) else entry.value
        inputs.append(dataclasses.replace(entry, value=value, placements=placements))
    outputs = []
    for i, entry in enumerate(signature.outputs):
        placements = tuple(p.results[i] for p in plans)
        value = local_spec(entry.value, placements, axes) if isinstance(entry.value, TensorSpec) else entry.value
        outputs.append(dataclasses.replace(entry, value=value, placements=placements))
    return Signature(tuple(inputs), tuple(outputs))


def _describe(plans: list[AxisPlan], banned: dict[fx.Node, str], lines: list[str]) -> list[str]:
    for plan in plans:
        for node, size in plan.replicated.items():
            known = banned.get(node) or plan.failures.get(node)
            reason = f" ({known})" if known else ""
            lines.append(
                f"{named(node)} has no sharding rule: its inputs are gathered over {plan.axis.name}, "
                f"{size} bytes a step{reason}; register one with "
                "torch.distributed.tensor.experimental.register_sharding"
            )
        for node, size in plan.gathered.items():
            if node not in plan.replicated:
                lines.append(
                    f"{named(node)} cannot work on pieces as its operands lie: they are gathered over "
                    f"{plan.axis.name}, {size} bytes a step; {why_whole(node) or plan.remedy}"
                )
    return lines
