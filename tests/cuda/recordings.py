"""What of a rank's graphs for GPUs would be recorded as CUDA graphs; runs in the lane's process."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.stages.runtime.cuda_graphs.recordable import Plan, cut
from tests.cuda.ranks import Wanted, build, process_groups
from tests.cuda.stand_ins import gpus


@dataclass(frozen=True)
class Recordings:
    """Of one graph.

    Args:
        kernels: how many operators are recorded.
        count: in how many recordings.
        left_out: how often each operator is not, with why.
        copied: how many values are copied into recordings.
    """

    kernels: int
    count: int
    left_out: Counter[tuple[str, str]]
    copied: int


def recordings(wanted: Wanted) -> Recordings:
    """Of the graph that the strategy builds."""
    with gpus(wanted.kernel), process_groups(wanted.rank, wanted.count):
        plan = cut(build(wanted).executable.graphs.main, _on_gpu)
    return _told(plan)


def host_copies(wanted: Wanted) -> tuple[int, bool]:
    """How many tensors a step copies to the host, and whether the first kernel of the update comes after the first."""
    with gpus(wanted.kernel), process_groups(wanted.rank, wanted.count):
        nodes = list(build(wanted).executable.graphs.main.graph_module.graph.nodes)
    copies = [i for i, n in enumerate(nodes) if "_to_copy" in str(n.target) and not _on_gpu(n.meta["val"])]
    updates = [i for i, n in enumerate(nodes) if "lerp" in str(n.target) or "_fused_adam" in str(n.target)]
    return len(copies), bool(copies) and copies[0] < updates[0]


def recordings_of_ranks(wanted: Wanted) -> list[Recordings]:
    """Of both ranks."""
    return [recordings(dataclasses.replace(wanted, rank=rank)) for rank in range(wanted.count)]


def _on_gpu(spec: TensorSpec) -> bool:
    return spec.device.type == "cuda"


def _told(plan: Plan) -> Recordings:
    left_out = Counter((str(n.target).removesuffix(".default"), why) for n, why in plan.left_out.items())
    return Recordings(plan.kernels, plan.recordings, left_out, sum(len(p.copied) for p in plan.pieces))
