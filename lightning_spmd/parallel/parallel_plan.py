"""Which placement each graph input has on each mesh axis, and which placement each output must get.

A plan is asked by role, never by position. :class:`ReplicatedPlan` is plain data parallelism, :class:`ShardedStatePlan`
ZeRO's, ``tensor_parallel.TensorParallelPlan`` splits layers, ``context_parallel.ContextParallelPlan`` sequences;
:class:`MeshPlan` asks another plan on every axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightning_spmd.errors import BatchError, ConfigurationError, ExpansionError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import CHUNK, OWN, PARTIAL, REPLICATE, Partial, Placement, Shard, ShardAxis
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole


class ParallelPlan(Protocol):
    """The questions that expansion asks a plan."""

    @property
    def needs_graphs(self) -> bool:
        """Whether training steps can run in graphs only, because a rank alone has not all of the state."""
        ...

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank stores less than all of the parameters."""
        ...

    def input_placement(self, axis: ShardAxis, entry: GraphInput) -> Placement:
        """The placement of this input on ``axis``."""
        ...

    def output_placement(self, axis: ShardAxis, entry: GraphOutput, current: Placement) -> Placement:
        """The required placement of this output on ``axis``, given how it was computed."""
        ...

    def shards_state(self, axis: ShardAxis) -> bool:
        """Whether clipping and the optimizer work on chunks of gradients and parameters."""
        ...


@runtime_checkable
class PlansActivations(Protocol):
    """Additional questions for axes over which layers are split."""

    def between_blocks(self, axis: ShardAxis) -> Placement | None:
        """The placement of activations between split layers; partial sums take it at once. None: none is required."""
        ...


def activations_between(plan: ParallelPlan, axis: ShardAxis) -> Placement | None:
    """How the plan wants activations between split layers, or None if it does not say."""
    return plan.between_blocks(axis) if isinstance(plan, PlansActivations) else None


@runtime_checkable
class SplitsSequences(Protocol):
    """Additional questions for axes over which sequences are split."""

    def splits_sequence(self, axis: ShardAxis) -> int | None:
        """Which dimension of a leaf of the batch is its sequence, to be split; None: nothing is split for that."""
        ...


def sequence_dim(plan: ParallelPlan, axis: ShardAxis) -> int | None:
    """The dimension of a leaf of the batch that the plan splits over ``axis`` as a sequence, if it does."""
    return plan.splits_sequence(axis) if isinstance(plan, SplitsSequences) else None


@dataclass(frozen=True)
class ReplicatedPlan:
    """Data parallelism: the batch is split, everything else is on every rank.

    Args:
        reduce_gradients: gradients cross the graph's border as their sum over the ranks (hooks look at them). Otherwise
            they stay partial sums, and only the graph that applies them reduces them: once for all micro-batches.
    """

    reduce_gradients: bool = False
    needs_graphs: bool = False
    shards_parameters: bool = False

    def input_placement(self, axis: ShardAxis, entry: GraphInput) -> Placement:
        """Batch leaves are split along their first dimension, accumulated gradients are partial sums."""
        if entry.role is InputRole.GRADIENT and not self.reduce_gradients:
            return PARTIAL
        if entry.role is not InputRole.BATCH or not isinstance(entry.value, TensorSpec) or not entry.value.shape:
            return REPLICATE
        rows = entry.value.shape[0]
        if not axis.divides(rows):
            raise BatchError(
                f"batch leaf {entry.name} has {rows} rows, which cannot be split over {axis.size} ranks like the "
                f"global batch of {axis.total} rows; its first dimension must be the batch dimension"
            )
        return Shard(0)

    def shards_state(self, axis: ShardAxis) -> bool:
        """Every rank makes the whole update."""
        return False

    def output_placement(self, axis: ShardAxis, entry: GraphOutput, current: Placement) -> Placement:
        """Values that Python reads are global; outputs of single rows stay with their rank."""
        if entry.role is OutputRole.GRADIENT:
            return REPLICATE if self.reduce_gradients else PARTIAL
        if entry.role in (OutputRole.STEP_OUTPUT, OutputRole.METRIC_INPUT) and not isinstance(current, Partial):
            return current
        return REPLICATE


@dataclass(frozen=True)
class ShardedStatePlan:
    """ZeRO (arXiv:1910.02054): the batch is split, and every rank stores and updates its chunk of the state.

    Args:
        parameters: whether parameters are stored in chunks too (stage 3) or whole (stage 2).
        reduce_gradients: whether gradients that leave the graph are placed like their parameters, because hooks read
            them; otherwise they are chunks.
    """

    parameters: bool
    reduce_gradients: bool = False
    needs_graphs: bool = True

    @property
    def shards_parameters(self) -> bool:
        """In stage 3."""
        return self.parameters

    def input_placement(self, axis: ShardAxis, entry: GraphInput) -> Placement:
        """Optimizer state and accumulated gradients are chunks, parameters in stage 3."""
        role = entry.role
        sharded = (
            role is InputRole.OPTIMIZER_STATE
            or (role is InputRole.GRADIENT and not self.reduce_gradients)
            or (role in (InputRole.PARAMETER, InputRole.GRADIENT) and self.parameters)
        )
        if sharded:
            return _chunk(entry.value)
        return ReplicatedPlan(reduce_gradients=True).input_placement(axis, entry)

    def output_placement(self, axis: ShardAxis, entry: GraphOutput, current: Placement) -> Placement:
        """As the inputs of the same role."""
        if entry.role is OutputRole.OPTIMIZER_STATE:
            return _chunk(entry.value)
        if entry.role is OutputRole.GRADIENT and (self.parameters or not self.reduce_gradients):
            return _chunk(entry.value)
        if entry.role is OutputRole.SHOWN_GRADIENT and self.parameters:
            return _chunk(entry.value)
        return ReplicatedPlan(reduce_gradients=True).output_placement(axis, entry, current)

    def shards_state(self, axis: ShardAxis) -> bool:
        """That is what it is for."""
        return True


def _chunk(value: object) -> Placement:
    return CHUNK if isinstance(value, TensorSpec) and value.shape else REPLICATE


DATA_PARALLEL_PLANS: dict[str, Callable[[bool], ParallelPlan]] = {
    "replicate": lambda exposed: ReplicatedPlan(reduce_gradients=exposed),
    "zero2": lambda exposed: ShardedStatePlan(parameters=False, reduce_gradients=exposed),
    "zero3": lambda exposed: ShardedStatePlan(parameters=True, reduce_gradients=exposed),
}


def check_data_parallel(name: str, shard_size: object) -> None:
    """Check the user's options of the data axis.

    Raises:
        ConfigurationError: for an unknown plan, or a shard size for a plan without sharding.
    """
    if name not in DATA_PARALLEL_PLANS:
        raise ConfigurationError(f"data_parallel={name!r}: known are {', '.join(DATA_PARALLEL_PLANS)}")
    if shard_size != "auto" and name == "replicate":
        raise ConfigurationError(
            f"data_parallel_shard_size={shard_size!r} splits the state of data_parallel='zero2' and 'zero3'; "
            "'replicate' splits none"
        )
    if not (shard_size in ("auto", "node") or (isinstance(shard_size, int) and shard_size > 0)):
        raise ConfigurationError(
            f"data_parallel_shard_size={shard_size!r}: give a number of ranks, 'node' for those of a node, or 'auto'"
        )


def options_in_parts(plan: ParallelPlan) -> str:
    """The options to change so that every rank has whole layers and state; empty if it has."""
    axes = dict(plan.axes) if isinstance(plan, MeshPlan) else {"data_parallel": plan}
    words: list[str] = []
    data = axes["data_parallel"]
    if isinstance(data, ExpertParallelPlan):
        words.append("expert_parallel_size=1")
        axes["data_parallel"] = data.plan
    needed = [name for name, own in axes.items() if own.needs_graphs]
    words += ["data_parallel='replicate'" if name == "data_parallel" else f"{name}_size=1" for name in needed]
    return " and ".join(words)


def data_parallel_plan(name: str, *, reduce_gradients: bool) -> ParallelPlan:
    """The plan of the data axis.

    Args:
        name: as the user gives it.
        reduce_gradients: whether gradients leave the graph as their sum over the ranks.
    """
    return DATA_PARALLEL_PLANS[name](reduce_gradients)


@runtime_checkable
class HoldsExperts(Protocol):
    """Additional questions for axes whose ranks have some of the experts each, and tokens of their own."""

    def experts_over(self, axis: ShardAxis) -> Collection[str]:
        """Names of the parameters that are in chunks by expert over ``axis``."""
        ...


def experts_over(plan: ParallelPlan, axis: ShardAxis) -> Collection[str]:
    """Names of the parameters that the plan has in chunks by expert over ``axis``."""
    return plan.experts_over(axis) if isinstance(plan, HoldsExperts) else ()


@dataclass(frozen=True)
class ExpertParallelPlan:
    """Experts are in chunks over the data axis, the other state is as in the given plan.

    Args:
        plan: the plan of everything else.
        experts: shapes of the stacked parameters of experts, one entry an expert, by name.
    """

    plan: ParallelPlan
    experts: Mapping[str, tuple[int, ...]]

    @property
    def needs_graphs(self) -> bool:
        """No rank has all experts."""
        return True

    @property
    def shards_parameters(self) -> bool:
        """As soon as it is known which parameters are experts, no rank has all of them."""
        return bool(self.experts) or self.plan.shards_parameters

    def input_placement(self, axis: ShardAxis, entry: GraphInput) -> Placement:
        """State of experts in chunks."""
        return CHUNK if self._is_of_experts(entry) else self.plan.input_placement(axis, entry)

    def output_placement(self, axis: ShardAxis, entry: GraphOutput, current: Placement) -> Placement:
        """As the inputs of the same role."""
        return CHUNK if self._is_of_experts(entry) else self.plan.output_placement(axis, entry, current)

    def shards_state(self, axis: ShardAxis) -> bool:
        """As the other plan."""
        return self.plan.shards_state(axis)

    def experts_over(self, axis: ShardAxis) -> Collection[str]:
        """All of them."""
        return self.experts

    def _is_of_experts(self, entry: GraphInput | GraphOutput) -> bool:
        if entry.role not in (*_STATE_INPUTS, *_STATE_OUTPUTS) or not isinstance(entry.value, TensorSpec):
            return False
        return bool(entry.key) and entry.value.shape == self.experts.get(str(entry.key[0]))


_STATE_INPUTS = (InputRole.PARAMETER, InputRole.OPTIMIZER_STATE, InputRole.GRADIENT)
_STATE_OUTPUTS = (OutputRole.OPTIMIZER_STATE, OutputRole.GRADIENT, OutputRole.SHOWN_GRADIENT)


@runtime_checkable
class HasOwnBatches(Protocol):
    """Additional questions for axes whose ranks have local batches."""

    def has_own_batches(self, axis: ShardAxis) -> bool:
        """Whether the ranks of an axis have graphs of their own up to the gradients."""
        ...


def own_batches(plan: ParallelPlan, axis: ShardAxis) -> bool:
    """Whether ranks of an axis have local batches."""
    return isinstance(plan, HasOwnBatches) and plan.has_own_batches(axis)


@dataclass(frozen=True)
class OwnBatchPlan:
    """A plan for graphs of local batches: batch values are the rank's own, state is placed as in the given plan.

    Args:
        plan: the plan of parameters, gradients and state.
    """

    plan: ParallelPlan

    @property
    def needs_graphs(self) -> bool:
        """As the other plan."""
        return self.plan.needs_graphs

    @property
    def shards_parameters(self) -> bool:
        """As the other plan."""
        return self.plan.shards_parameters

    def input_placement(self, axis: ShardAxis, entry: GraphInput) -> Placement:
        """Batch, buffers and other tensors of the module are the rank's own."""
        if entry.role in _OWN_INPUTS and isinstance(entry.value, TensorSpec):
            return OWN
        return self.plan.input_placement(axis, entry)

    def output_placement(self, axis: ShardAxis, entry: GraphOutput, current: Placement) -> Placement:
        """Values of the rank stay its own; results of reductions over the ranks are replicated."""
        if current == OWN:
            if entry.role in (OutputRole.OPTIMIZER_STATE, OutputRole.HYPER_PARAMETER):
                raise ExpansionError(f"{entry.name} is a rank's own: it would be another one on each of them")
            return OWN
        return self.plan.output_placement(axis, entry, current)

    def shards_state(self, axis: ShardAxis) -> bool:
        """As the other plan."""
        return self.plan.shards_state(axis)

    def experts_over(self, axis: ShardAxis) -> Collection[str]:
        """As the other plan."""
        return experts_over(self.plan, axis)

    def has_own_batches(self, axis: ShardAxis) -> bool:
        """That is what it is for."""
        return True


_OWN_INPUTS = (InputRole.BATCH, InputRole.SHARED_BATCH, InputRole.BUFFER, InputRole.CONSTANT)


@dataclass(frozen=True)
class MeshPlan:
    """Another plan on every axis of a mesh.

    Args:
        axes: the plan of each axis by the axis' name.
    """

    axes: Mapping[str, ParallelPlan]

    @property
    def needs_graphs(self) -> bool:
        """Whether one of the plans does."""
        return any(plan.needs_graphs for plan in self.axes.values())

    @property
    def shards_parameters(self) -> bool:
        """Whether one of the plans does."""
        return any(plan.shards_parameters for plan in self.axes.values())

    def input_placement(self, axis: ShardAxis, entry: GraphInput) -> Placement:
        """Asks the plan of the axis."""
        return self.axes[axis.name].input_placement(axis, entry)

    def output_placement(self, axis: ShardAxis, entry: GraphOutput, current: Placement) -> Placement:
        """Asks the plan of the axis."""
        return self.axes[axis.name].output_placement(axis, entry, current)

    def shards_state(self, axis: ShardAxis) -> bool:
        """Asks the plan of the axis."""
        return self.axes[axis.name].shards_state(axis)

    def between_blocks(self, axis: ShardAxis) -> Placement | None:
        """Asks the plan of the axis."""
        return activations_between(self.axes[axis.name], axis)

    def experts_over(self, axis: ShardAxis) -> Collection[str]:
        """Asks the plan of the axis."""
        return experts_over(self.axes[axis.name], axis)

    def splits_sequence(self, axis: ShardAxis) -> int | None:
        """Asks the plan of the axis."""
        return sequence_dim(self.axes[axis.name], axis)

    def has_own_batches(self, axis: ShardAxis) -> bool:
        """Asks the plan of the axis."""
        return own_batches(self.axes[axis.name], axis)
