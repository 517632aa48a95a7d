"""Ranks decide together: which graph runs, whether to build one, whether to fall back. Nothing hangs.

All messages go through a process group of their own on the host, so they never wait behind bulk collectives (a
broadcast on the default group was seen to return after 149 ms with 20 MB in flight, after 1.2 ms on its own group).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from lightning_spmd.errors import RankDisagreementError
from lightning_spmd.ir.effects import mentions
from lightning_spmd.ir.node_info import info_of
from lightning_spmd.ir.placement import Chunk
from lightning_spmd.ir.steps import ShardedStep


def stable_hash(value: Any) -> int:
    """A 62-bit hash of ``repr(value)`` that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 2


@dataclass(frozen=True)
class StepVote:
    """What all ranks said before a step: extremes over the ranks of three numbers.

    Args:
        missing: some rank has no graph for its batch.
        graph: (smallest, largest) index of the graph that the ranks would run.
        rows: (smallest, largest) number of rows in a rank's batch.
        shape: (smallest, largest) hash of everything else about the batch.
    """

    missing: bool
    graph: tuple[int, int]
    rows: tuple[int, int]
    shape: tuple[int, int]


class ControlPlane:
    """Small host messages among all ranks.

    Args:
        timeout: how long to wait for the others, as ``datetime.timedelta``.
    """

    def __init__(self, timeout: Any) -> None:
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self._message = torch.zeros(7, dtype=torch.int64)

    def vote(self, graph: int | None, rows: int, shape: int) -> StepVote:
        """Exchange what this rank would do; one all-reduce of seven numbers."""
        index = -1 if graph is None else graph
        message = self._message
        message.copy_(torch.tensor([graph is None, index, -index, rows, -rows, shape, -shape], dtype=torch.int64))
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self.group)
        missing, high, low, most, fewest, up, down = message.tolist()
        return StepVote(bool(missing), (-low, high), (-fewest, most), (-down, up))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, by rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree_on(self, step: ShardedStep) -> None:
        """Check that all ranks built the same graph before the first collective of it runs.

        Raises:
            RankDisagreementError: on every rank, naming the first node that differs and both sides.
        """
        lines = describe(step)
        digests = self.gather(stable_hash(lines))
        if len(set(digests)) == 1:
            return
        everyone = self.gather(lines)
        raise RankDisagreementError(_first_difference(everyone))


def describe(step: ShardedStep) -> list[str]:
    """One line a node, without rank-dependent constants and without sizes that the rank's rows decide."""
    uneven = any(not axis.is_even for axis in step.axes)
    groups = {part.group: part.name for axis in step.axes for part in axis.parts}
    return [_describe_node(node, uneven, groups) for node in step.graph_module.graph.nodes]


def _describe_node(node: fx.Node, uneven: bool, groups: Mapping[str, str]) -> str:
    if node.op == "placeholder":
        return f"input {node.name}"
    if node.meta.get("rank_dependent") or uneven or mentions(node.meta.get("placements"), Chunk):
        arguments = ", ".join(n.name for n in node.all_input_nodes)
    else:
        # the groups of one axis of a mesh have a name each
        named = tuple(groups.get(a, a) if isinstance(a, str) else a for a in node.args)
        arguments = f"{named}, {node.kwargs}"
    # a Python function's repr holds its address, which is another one in every process
    target = getattr(node.target, "__qualname__", None) if isinstance(node.target, FunctionType) else None
    return f"{node.name} = {target or node.target}({arguments})  # {info_of(node).module} {info_of(node).source}"


def _first_difference(everyone: Sequence[list[str]]) -> str:
    for rank, lines in enumerate(everyone):
        for ours, theirs in zip(everyone[0], lines, strict=False):
            if ours != theirs:
                return (
                    "the ranks built different training graphs; the first difference is\n"
                    f"  rank 0: {ours}\n  rank {rank}: {theirs}\n"
                    "training_step must not depend on the rank (look for global_rank, is_global_zero or unseeded "
                    "random choices)"
                )
        if len(lines) != len(everyone[0]):
            return f"rank 0 built a graph of {len(everyone[0])} nodes, rank {rank} one of {len(lines)}"
    return "the ranks built different training graphs"
