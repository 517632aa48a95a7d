"""The description of a kind of mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_spmd.parallel.parallel_plan import ParallelPlan


@dataclass(frozen=True)
class ParallelOptions:
    """The user's options of the mesh; ``SPMDStrategy`` explains them.

    Args:
        data_parallel: name of the plan of the data axis.
        data_parallel_size: number of ranks over which the batch is split.
        context_parallel_size: ranks that share each sequence.
        tensor_parallel_size: ranks that share each layer.
        layers: returns the tensor axis' plan.
        expert_parallel_size: neighbours on the data axis among which experts are split.
        experts: returns the shapes of their parameters by name.
    """

    data_parallel: str
    data_parallel_size: int | Literal["auto"]
    context_parallel_size: int
    tensor_parallel_size: int
    layers: Callable[[], ParallelPlan]
    expert_parallel_size: int = 1
    experts: Callable[[], Mapping[str, tuple[int, ...]]] = dict


@dataclass(frozen=True)
class AxisKind:
    """A kind of axis.

    Args:
        name: in meshes, graphs and messages.
        batch_dim: the dimension of the batch that its ranks split. Only if it is 0 do they hold different batches.
        holds_chunks: whether state sharded by ZeRO is in chunks over it.
        splits_layers: whether a rank's part of a parameter may consist of several pieces.
        size: how many ranks the user wants; ``"auto"``: all that are left.
        plan: its plan, given whether gradients leave the graph as their sum over the ranks.
    """

    name: str
    batch_dim: int | None
    holds_chunks: bool
    splits_layers: bool
    size: Callable[[ParallelOptions], int | Literal["auto"]]
    plan: Callable[[ParallelOptions, bool], ParallelPlan]
