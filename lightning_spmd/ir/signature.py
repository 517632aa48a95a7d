"""The typed signature of a step graph: what each input and output *is*.

Program::

    loss = model(batch); loss.backward(); optimizer.step(); self.log("loss", loss)

Graph signature, one line an input (this is ``str(signature)``)::

    in   0  parameter        net.weight                 float32[8, 8]   mutated
    in   1  optimizer_state  net.weight/momentum_buffer float32[8, 8]   mutated
    in   2  hyper_parameter  group 0/lr                 float
    in   3  batch            [0]                        float32[32, 8]
    out  0  loss             loss                       float32[]
    out  1  logged           log 0/value                float32[]

Passes ask this table for nodes by role; they never use positions or node names.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import Placement

MOVES = "another one in most steps"
"""In the key of a constant: the tensor lies elsewhere when the graph runs next."""


class InputRole(enum.StrEnum):
    """The role of a graph input."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    OPTIMIZER_STATE = "optimizer_state"
    HYPER_PARAMETER = "hyper_parameter"
    BATCH = "batch"
    SHARED_BATCH = "shared_batch"  # a leaf of the batch that is the same for every sample
    HOST_VALUE = "host_value"
    GRADIENT = "gradient"
    LOSS_SCALE = "loss_scale"  # a tensor of the GradScaler, or what it found in gradients
    RNG = "rng"
    PENDING = "pending"
    KEPT = "kept"  # a value that an earlier piece of the step's beginning has left


class OutputRole(enum.StrEnum):
    """The role of a graph output."""

    LOSS = "loss"
    STEP_OUTPUT = "step_output"
    LOGGED = "logged"
    METRIC_INPUT = "metric_input"
    BUFFER = "buffer"
    OPTIMIZER_STATE = "optimizer_state"
    HYPER_PARAMETER = "hyper_parameter"
    GRADIENT = "gradient"
    SHOWN_GRADIENT = "shown_gradient"  # what p.grad is between backward and update; made where a hook looks at it
    FOUND_INF = "found_inf"  # other than 0: the step was skipped
    PENDING = "pending"
    KEPT = "kept"  # a value that later pieces of the step's beginning may take


@dataclass(frozen=True)
class GraphInput:
    """One placeholder.

    Args:
        role: its role.
        key: how the runtime finds the live value, by role: parameter, buffer, gradient ``(fqn,)``; constant
            ``(index into CapturedStep.constants,)``; optimizer state ``(fqn, name)``; hyper-parameter
            ``(group, name)`` or ``(group, name, index)``; batch ``(leaf index,)``; host value ``(name,)``; loss scale
            ``(name,)``; kept ``(name of its node,)``.
        name: readable fully qualified name.
        value: TensorSpec or Python number (the value seen at capture).
        mutated: whether the graph writes into it.
        placements: one entry a mesh axis; before expansion empty, unless the value is kept.
    """

    role: InputRole
    key: tuple[Any, ...]
    name: str
    value: Any
    mutated: bool = False
    placements: tuple[Placement, ...] = ()


@dataclass(frozen=True)
class GraphOutput:
    """One entry of the output tuple; ``key`` as in :class:`GraphInput` (loss ``()``, others their position)."""

    role: OutputRole
    key: tuple[Any, ...]
    name: str
    value: Any
    placements: tuple[Placement, ...] = ()


@dataclass(frozen=True)
class Signature:
    """Inputs in placeholder order and outputs in the order of the output tuple."""

    inputs: tuple[GraphInput, ...] = ()
    outputs: tuple[GraphOutput, ...] = field(default=())

    def inputs_of(self, *roles: InputRole) -> Iterator[tuple[int, GraphInput]]:
        """(position, input) of every input with one of the roles."""
        return ((i, entry) for i, entry in enumerate(self.inputs) if entry.role in roles)

    def outputs_of(self, *roles: OutputRole) -> Iterator[tuple[int, GraphOutput]]:
        """(position, output) of every output with one of the roles."""
        return ((i, entry) for i, entry in enumerate(self.outputs) if entry.role in roles)

    def __str__(self) -> str:
        def line(kind: str, index: int, entry: GraphInput | GraphOutput, note: str) -> str:
            what = str(entry.value) if isinstance(entry.value, TensorSpec) else type(entry.value).__name__
            where = " ".join(map(str, entry.placements))
            return f"{kind:4}{index:4}  {entry.role:16} {entry.name:40} {what:28} {where:8} {note}".rstrip()

        rows = [line("in", i, e, "mutated" if e.mutated else "") for i, e in enumerate(self.inputs)]
        return "\n".join(rows + [line("out", i, e, "") for i, e in enumerate(self.outputs)])
