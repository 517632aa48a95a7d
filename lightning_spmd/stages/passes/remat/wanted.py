"""The request to passes that free activations' memory: a share of it, or the bytes to leave."""

from __future__ import annotations

from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes.remat.values import Values

MIB = 2**20


def values_to_spare(step: ShardedStep, wanted: float | None) -> Values | None:
    """The storages of the step's forward pass; None if nothing is requested, or the pass does not apply to the step.

    Args:
        step: The step.
        wanted: The share of the activations' bytes to give back, or as an integer the bytes to leave; None for nothing.
    """
    if wanted is None or any(0 in axis.split for axis in step.axes):
        return None
    values = Values(step)
    return None if values.border == len(values.order) else values


def bytes_to_leave(wanted: float, before: int) -> int:
    """How many bytes activations may take.

    Args:
        wanted: As for :func:`values_to_spare`.
        before: How many they take.
    """
    return wanted if isinstance(wanted, int) else int((1 - wanted) * before)


def short_of(wanted: float, limit: int, reached: int) -> str:
    """The end of a pass's note: empty, unless more was requested than can be reached.

    Args:
        wanted: As for :func:`values_to_spare`.
        limit: :func:`bytes_to_leave` of it.
        reached: How many bytes activations take now.
    """
    if reached <= limit or wanted == 1.0:
        return ""
    asked = f"{limit / MIB:.1f} MiB" if isinstance(wanted, int) else f"the share of {wanted:g}"
    return f"; {asked}, as asked for, cannot be reached"
