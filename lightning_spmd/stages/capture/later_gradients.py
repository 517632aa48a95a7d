"""One graph for the first step of optimization by hand and for the later ones, which find gradients of the step before.

Most modules zero gradients before they make new ones: what was there decides nothing. That is looked up, not assumed:
the step is traced once more as if the gradients that it leaves were there when it begins.
"""

from __future__ import annotations

import dataclasses

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.same_step import first_difference
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages.capture.attempts import capture
from lightning_spmd.stages.capture.reads import ReadWanted
from lightning_spmd.stages.capture.request import CaptureRequest


def with_later_gradients(step: CapturedStep, request: CaptureRequest) -> CapturedStep:
    """``step``, for the gradients that it leaves too, if it does the same with them.

    Args:
        step: what was captured.
        request: what was asked for.
    """
    if step.gradients is None:
        return step
    made = {entry.key[0] for _, entry in step.signature.outputs_of(OutputRole.GRADIENT)}
    later = frozenset((step.gradients.present | made) - set(step.cleared))
    if later == step.gradients.present:
        return step
    try:
        other = capture(dataclasses.replace(request, presumed=later))
    except (CaptureError, ReadWanted):  # a value that gradients decide which are not there yet
        return step
    if other.gradients is None or other.gradients.present != later or first_difference(step, other) is not None:
        return step
    step.gradients.accept(later)
    return dataclasses.replace(step, cleared=tuple(dict.fromkeys((*step.cleared, *other.cleared))))
