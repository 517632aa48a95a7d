"""Contexts around a trace: mode of gradients, random state, and explanations of errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError, SPMDError
from lightning_spmd.ir.node_info import Section
from lightning_spmd.ir.random_states import TorchRandomState
from lightning_spmd.ir.steps import Variant
from lightning_spmd.messages import batch_hook, the_step
from lightning_spmd.stages.capture.record.recorder import Recorder
from lightning_spmd.stages.capture.user_code import location_of

_NO_DATA = "its data is not allocated yet"
"""What torch says where C++ code reads memory that a fake tensor does not have."""


@contextlib.contextmanager
def grad_mode(variant: Variant) -> Iterator[None]:
    """Outside inference mode, whose tensors know no versions; without gradients where none are asked for."""
    if variant.backward:
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """The recorder advances torch's generators to recognise recomputed draws; put them back afterwards."""
    before, seed = TorchRandomState(), private.host_seed()
    try:
        yield
        if private.host_seed() != seed:
            raise CaptureError(
                f"{the_step()} seeds torch (manual_seed, seed_everything): that would happen once, at capture; seed "
                f"before fit or in {batch_hook('start')}"
            )
    finally:
        before.restore()


def name_of_part(recorder: Recorder, optimizer: Optimizer | None) -> str:
    """The name of the captured step, for messages."""
    if recorder.section is Section.OPTIMIZER:
        return f"{type(optimizer).__name__}.step"
    words = {Section.BACKWARD: "the backward pass", Section.CLIP: "gradient clipping"}
    return words.get(recorder.section, the_step())


@contextlib.contextmanager
def explained(recorder: Recorder, what: Callable[[], str] = lambda: "training_step") -> Iterator[None]:
    """Whatever goes wrong under fake tensors becomes a CaptureError with the operator and the user's line."""
    try:
        yield
    except SPMDError:
        raise
    except Exception as error:
        if _NO_DATA in str(error):
            raise CaptureError(
                "an operator reads the values of a tensor (as positions or sizes), which one graph cannot express; use "
                "Python numbers there",
                location_of(error),
            ) from error
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        reason = f"{recorder.failing}{reason}"
        # contextlib takes a RuntimeError whose cause is the StopIteration for Python's own, and lets the latter out.
        cause = None if isinstance(error, StopIteration) else error
        raise CaptureError(f"{what()} could not be captured ({reason})", location_of(error)) from cause
