"""The artefacts between stages: CapturedStep → ShardedStep → IterationGraphs. Each prints itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from lightning_spmd.ir.guards import Guards
from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.ir.signature import GraphOutput, Signature


@dataclass(frozen=True)
class Variant:
    """Which part of an iteration a graph holds.

    Args:
        forward: run the step method, and the backward pass unless told otherwise.
        accumulated: gradients of earlier micro-batches are inputs and are added up.
        apply: clip and run the optimizer; without it the gradients are outputs (or stay in the accumulators).
        expose_gradients: gradients leave the graph reduced over the ranks, for hooks that read or change ``p.grad``.
        backward: False: the step method alone, without gradients (validation, test, predict).
        method: the LightningModule's method that is the forward part.
        own_batch: the batch is this rank's own, no part of one that all ranks see.
        by_hand: the step method makes backward passes and optimizer steps itself; ``p.grad`` are inputs and outputs.
    """

    forward: bool = True
    accumulated: bool = False
    apply: bool = True
    expose_gradients: bool = False
    backward: bool = True
    method: str = "training_step"
    own_batch: bool = False
    by_hand: bool = False

    @classmethod
    def evaluation(cls, method: str) -> Variant:
        """``validation_step``, ``test_step`` or ``predict_step`` alone."""
        return cls(apply=False, backward=False, method=method)

    @classmethod
    @functools.cache
    def automatic(cls, apply: bool, expose_gradients: bool) -> Variant:
        """A micro-batch of automatic optimization."""
        return cls(apply=apply, expose_gradients=expose_gradients)

    @classmethod
    def optimized_by_hand(cls) -> Variant:
        """``training_step`` of a module with ``automatic_optimization = False``; ``p.grad`` is what users look at."""
        return cls(expose_gradients=True, by_hand=True)

    @property
    def pauses(self) -> bool:
        """The whole iteration, with a pause before the update: hooks that run in it may ask for gradients."""
        return self.forward and self.apply and self.expose_gradients and not self.by_hand

    def __str__(self) -> str:
        if not self.backward:
            return self.method
        if self.by_hand:
            return "optimization by hand"
        parts = [("forward", self.forward), ("accumulate", self.accumulated), ("apply", self.apply)]
        return (
            "+".join(name for name, present in parts if present)
            + ("" if not self.expose_gradients else " (with a pause)" if self.pauses else " (split)")
            + (" of a local batch" if self.own_batch else "")
        )


class OutputRef:
    """Stands for the graph output at ``position`` inside a recorded call or a returned structure.

    Not a dataclass: dataclasses are containers in batches and outputs (``ir.tree``), this is a leaf.
    """

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position

    def __repr__(self) -> str:
        return f"<output {self.position}>"


class LeafRef(OutputRef):
    """Stands for the leaf of the batch at ``position``, a rank's own that nothing looked at: a file name."""

    __slots__ = ()


class CallRef(OutputRef):
    """Stands for what the recorded call at ``position`` returns (a metric's value, known only after the graph ran).

    Args:
        position: of the call.
        key: of an entry of what it returns, the values of a collection of metrics; None: all of it.
    """

    __slots__ = ("key",)

    def __init__(self, position: int, key: str | None = None) -> None:
        super().__init__(position)
        self.key = key

    def __repr__(self) -> str:
        return f"<result {self.position}{'' if self.key is None else f'[{self.key!r}]'}>"


@dataclass(frozen=True)
class RecordedCall:
    """One call that training_step made on Lightning's or torchmetrics' side, to be made after the run.

    Args:
        target: module path of the object, ``""`` for the LightningModule; the object itself where it has none.
        method: ``"log"`` or ``"log_dict"`` of a LightningModule; ``"update"``, ``"forward"``, ``"compute"`` or
            ``"reset"`` of a metric.
        args, kwargs: arguments with tensors replaced by :class:`OutputRef`, metric values by :class:`CallRef`, leaves
            of the batch that are a rank's own by :class:`LeafRef`.
        source: ``file:line`` of the call, empty where unknown.
    """

    target: Any
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: str = ""


@dataclass(frozen=True)
class OwnBatchFacts:
    """What is known of a graph of a rank's own batch.

    Args:
        rows: position of the output that says how many rows the batches of all ranks have.
        weighed: how this rank's batch is weighed against the others', for the user.
    """

    rows: int
    weighed: str


@dataclass
class CapturedStep:
    """One training iteration as a global-view graph: the one-device program on the global batch.

    Args:
        graph_module: the graph. Placeholders follow ``signature.inputs``; the output node returns one flat tuple that
            follows ``signature.outputs``. Nodes have ``meta["val"]``, call nodes also ``meta["info"]`` (ir.node_info).
            In-place operators stay in place and name their result; parameters and state are updated through the
            placeholders.
        signature: roles of inputs and outputs.
        guards: when the graph may be used again.
        constants: readers of live tensors that the code reaches without being parameters, buffers or batch; each step
            reads anew what is in a module's attribute then.
        returned: what the step wants of the graph, with :class:`OutputRef` in place of tensors.
        variant: the part of an iteration that the graph holds.
        host_values: readers of the Python numbers that are inputs of this graph alone, by name.
        own_batch: of a graph of a rank's own batch; None of others.
        named: readers of parameters and buffers that the step names itself; others are found by their name.
    """

    graph_module: fx.GraphModule
    signature: Signature
    guards: Guards
    constants: list[Callable[[], Tensor]] = field(default_factory=list[Callable[[], Tensor]])
    returned: Any = None
    variant: Variant = Variant()
    host_values: dict[str, Callable[[], Any]] = field(default_factory=dict[str, Callable[[], Any]])
    own_batch: OwnBatchFacts | None = None
    named: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict[str, Callable[[], Tensor]])


@dataclass
class ShardedStep:
    """One rank's graph: local shapes, explicit collectives. ``signature`` carries placements, one a mesh axis."""

    graph_module: fx.GraphModule
    signature: Signature
    axes: tuple[ShardAxis, ...]
    fallbacks: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class ShownGradients:
    """How gradients are made where a hook looks at them, in the pause of an iteration before its update.

    Args:
        entries: the gradients; their keys are names of parameters.
        recipe: the graph that makes them of what is there in the pause.
        operands: how many values that takes.
        are_updated: whether the update reads these very tensors, so that what a hook writes into them reaches it.
    """

    entries: tuple[GraphOutput, ...]
    recipe: fx.GraphModule
    operands: int
    are_updated: bool


@dataclass(frozen=True)
class PausingStep:
    """A step that runs in two parts.

    Args:
        step: with a call of ``ir.source.pause`` before its update, which hands over what is there by then: outputs,
            then the operands of the recipe.
        early: positions of these outputs.
    """

    step: ShardedStep
    early: tuple[int, ...]


@dataclass
class IterationGraphs:
    """What runs: ``main`` each iteration; with work deferred across iterations also ``setup`` and ``cleanup``.

    Args:
        main: the iteration; with deferred work, the iteration with the end of the one before in it.
        setup: the iteration where no work is pending; None if nothing is deferred, then ``main`` is all there is.
        cleanup: the deferred work alone; None if nothing is deferred.
        notes: what is deferred and why not more, for the user.
        deferrable: whether there is something to defer once the graph has been measured.
        remarks: what else users are told of the graph, a line each.
        shown: how gradients are made in the pause of these graphs; None where they do not pause.
    """

    main: ShardedStep
    setup: ShardedStep | None = None
    cleanup: ShardedStep | None = None
    notes: str = ""
    deferrable: bool = False
    remarks: tuple[str, ...] = ()
    shown: ShownGradients | None = None
