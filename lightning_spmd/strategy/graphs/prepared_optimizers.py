"""Prepares optimizers before a graph of their step is built."""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_spmd.ir.several_optimizers import parts_of
from lightning_spmd.parallel.state import StateMesh
from lightning_spmd.strategy.graphs.run_context import RunContext
from lightning_spmd.strategy.state.memory import lay_out_state
from lightning_spmd.strategy.state.wide_state import widen_state


def prepare(optimizer: Optimizer, context: RunContext, mesh: StateMesh | None) -> list[str]:
    """Bring an optimizer's state into the form that graphs expect. Returns a message for the user, if any."""
    advice = context.scaler.advice(optimizer)
    texts = [] if advice is None else [advice]
    for part in parts_of(optimizer):
        if widen_state(part, context.settings.bf16_updates, mesh):
            texts.append("the optimizer's state has no float32 masters: they begin as the bfloat16 weights")
        lay_out_state(part, mesh)
    return texts
