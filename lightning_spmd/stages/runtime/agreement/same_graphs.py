"""Checks that all ranks have built the same graph; the error shows the first difference."""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from lightning_spmd.errors import RankDisagreementError
from lightning_spmd.ir.effects import mentions
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import SUBJECT, TERM, info_of, spec_of
from lightning_spmd.ir.placement import Chunk
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.ir.verify import starts_collective
from lightning_spmd.messages import the_step
from lightning_spmd.stages.runtime.agreement.control import ControlPlane

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLACE = "  # "
"""Between what a node does and where the code says so."""
TENSOR = "tensor_parallel"


def agree_on(control: ControlPlane, step: ShardedStep, captured: CapturedStep) -> None:
    """Check that all ranks built the same graph, before its first collective runs.

    Args:
        control: the other ranks.
        step: this rank's graph.
        captured: the step that it was made from.

    Raises:
        RankDisagreementError: on every rank, naming the first node that differs and both sides.
    """
    # both: programs of uneven splits are compared without numbers, which the capture has
    lines = describe_capture(captured), describe(step)
    digest = stable_hash([_without_place(line) for line in itertools.chain(*lines)])
    if len(set(control.gather(digest))) == 1:
        return
    everyone = control.gather((*lines, [axis.split for axis in step.axes]))
    raise RankDisagreementError(_explain(everyone))


def gradients_of(captured: CapturedStep) -> list[str]:
    """The gradients in a graph of a local batch, by the names of their terms."""
    terms = (node.meta.get(TERM) for node in captured.graph_module.graph.nodes)
    return [term.name for term in terms if term is not None and term.is_gradient]


def exchanges(step: ShardedStep, captured: CapturedStep) -> list[str]:
    """One line per collective: what ranks with graphs of local batches must have in common."""
    groups = {part.group: part.name for axis in step.axes for part in axis.parts}
    lines: list[str] = []
    for node in step.graph_module.graph.nodes:
        if starts_collective(node):
            arguments = [groups.get(a, a) if isinstance(a, str) else a for a in node.args if not isinstance(a, fx.Node)]
            # what tensor-parallel ranks exchange among themselves has the size of their batch
            size = "" if TENSOR in map(str, arguments) else f" of {_spec_in_words(node)}"
            lines.append(f"{node.target}{tuple(map(str, arguments))}{size}: {', '.join(node.meta.get(SUBJECT, ()))}")
    return [*lines, *gradients_of(captured)]


def agree_on_exchanges(
    control: ControlPlane, step: ShardedStep, captured: CapturedStep, mates: Sequence[int]
) -> str | None:
    """Compare the collectives of ranks with graphs of local batches, before the first collective runs.

    Args:
        control: the other ranks.
        step: this rank's graph.
        captured: the step that it was made from.
        mates: for each rank the number of its batch; ranks with the same number must have the same graph.

    Returns:
        what differs, on every rank; None if nothing does.

    Raises:
        RankDisagreementError: on every rank, if ranks with the same batch built different graphs.
    """
    lines = exchanges(step, captured)
    alone = len(set(mates)) == len(mates)
    graph = [] if alone else [*describe_capture(captured), *describe(step)]
    sides = control.gather((stable_hash(lines), stable_hash([_without_place(line) for line in graph])))
    if len({(mate, side[1]) for mate, side in zip(mates, sides, strict=True)}) > len(set(mates)):
        everyone = control.gather((describe_capture(captured), describe(step), [axis.split for axis in step.axes]))
        pairs = itertools.combinations(range(len(mates)), 2)
        pair = first((p for p in pairs if _differ(p, mates, sides)), "pair of ranks that differ")
        raise RankDisagreementError(_explain([everyone[rank] for rank in pair]))
    if len({digest for digest, _ in sides}) == 1:
        return None
    everyone = control.gather(lines)
    return (
        "the ranks' own batches lead to different exchanges between the ranks; the first difference is\n"
        f"{_first_other_exchange(everyone)}\na layer that only some batches use, or an order of layers that a batch "
        "decides, makes it so: use every layer for every batch (if need be on an empty tensor)"
    )


def _first_other_exchange(everyone: Sequence[list[str]]) -> str:
    """Both sides of the first exchange in which a rank differs from rank 0, by what only one of them moves."""
    for rank, lines in enumerate(everyone):
        for sides in itertools.zip_longest(everyone[0], lines, fillvalue="nothing more: "):
            if sides[0] == sides[1]:
                continue
            (ours, moved), (theirs, moved_there) = (_taken_apart(side) for side in sides)
            alone = [_some(moved, moved_there), _some(moved_there, moved)]
            return f"  rank 0: {ours} of {alone[0]}\n  rank {rank}: {theirs} of {alone[1]}"
    return "none"


def _taken_apart(line: str) -> tuple[str, list[str]]:
    what, _, names = line.rpartition(": ")
    return what.partition("(")[0].removeprefix("_c10d_functional.").removesuffix(
        ".default"
    ) or "a gradient", names.split(", ")


def _some(names: Sequence[str], others: Sequence[str]) -> str:
    """What is among names and not among others; all where it is a matter of order."""
    alone = [name for name in names if name not in others] or list(names)
    return ", ".join(alone[:4]) + (f" and {len(alone) - 4} more" if len(alone) > 4 else "")


def _differ(pair: tuple[int, int], mates: Sequence[int], sides: Sequence[tuple[int, int]]) -> bool:
    one, other = pair
    return mates[one] == mates[other] and sides[one][1] != sides[other][1]


def _spec_in_words(node: fx.Node) -> str:
    spec = spec_of(node)
    return f"{str(spec.dtype)[6:]}{list(spec.shape)}"


def describe(step: ShardedStep) -> list[str]:
    """One line a node, without rank-dependent constants and without sizes that the rank's rows decide."""
    uneven = any(not axis.is_even for axis in step.axes)
    groups = {part.group: part.name for axis in step.axes for part in axis.parts}
    return [_describe_node(node, uneven, groups) for node in step.graph_module.graph.nodes]


def describe_capture(step: CapturedStep) -> list[str]:
    """One line a node of the graph in global shapes, which is the same on ranks whose code does the same."""
    return [_describe_node(node, False, {}) for node in step.graph_module.graph.nodes]


def _describe_node(node: fx.Node, uneven: bool, groups: Mapping[str, str]) -> str:
    if node.op == "placeholder":
        return f"input {node.name}"
    if node.meta.get("rank_dependent") or uneven or mentions(node.meta.get("placements"), Chunk):
        arguments = ", ".join(n.name for n in node.all_input_nodes)
    else:
        # the groups of one axis of a mesh have a name each
        named = tuple(groups.get(a, a) if isinstance(a, str) else a for a in node.args)
        arguments = f"{_without_indices(named)}, {_without_indices(node.kwargs)}"
    # a Python function's repr holds its address, which is another one in every process
    target = getattr(node.target, "__qualname__", None) if isinstance(node.target, FunctionType) else None
    info = info_of(node)
    return (
        _ADDRESS.sub("", f"{node.name} = {target or node.target}({arguments})") + f"{_PLACE}{info.module} {info.source}"
    )


def _without_indices(arguments: Any) -> Any:
    """Every rank has a device of its own: only its kind may be compared."""
    return map_aggregate(arguments, lambda a: a.type if isinstance(a, torch.device) else a)


def _without_place(line: str) -> str:
    """What must be equal: the code may lie in another folder on another machine."""
    return line.partition(_PLACE)[0]


def _explain(everyone: Sequence[tuple[list[str], list[str], Any]]) -> str:
    found = _first_difference([captured for captured, _, _ in everyone])
    if found is not None:
        return (
            f"{the_step()} is not the same on all ranks; the first difference is\n{found}\n"
            "every rank must compute the same on its part of the batch: look at that line for what only one rank has "
            "or does (a branch on global_rank, a random choice without a common seed, a value that one rank changed)"
        )
    rows = ", ".join(f"rank {rank}: {split}" for rank, (_, _, split) in enumerate(everyone))
    return (
        "the ranks captured the same training step and made different programs of it, a defect of lightning_spmd; "
        f"please report it with this message. Rows on each axis by {rows}; the first difference is\n"
        f"{_first_difference([lines for _, lines, _ in everyone])}"
    )


def _first_difference(everyone: Sequence[list[str]]) -> str | None:
    """Both sides of the first line in which a rank differs from rank 0; None where none does."""
    for rank, lines in enumerate(everyone):
        for ours, theirs in itertools.zip_longest(everyone[0], lines, fillvalue="nothing more"):
            if _without_place(ours) != _without_place(theirs):
                return f"  rank 0: {_readable(ours)}\n  rank {rank}: {_readable(theirs)}"
    return None


def _readable(line: str) -> str:
    """A node's line with the user's source line behind it."""
    node, _, place = line.partition(_PLACE)
    module, _, source = place.partition(" ")
    file, _, number = source.rpartition(":")
    text = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
    where = f" in module {module!r}" if module else ""
    return f"{node}{where}" + (f" at {source}" if number.isdigit() else "") + (f": {text}" if text else "")
