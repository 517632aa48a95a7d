"""Advice for errors whose messages are torch's."""

from __future__ import annotations

import traceback

import torch

_NO_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")
_PARTS = (
    "strategy='spmd' keeps a part of each parameter on every rank, and code outside of the steps used one as a whole "
    "tensor: `with trainer.strategy.full_parameters():` around it gives whole ones (all ranks must enter), "
    "`p.full_tensor()` one of them; data_parallel='replicate' keeps them whole"
)
_ELSEWHERE = (
    "on several ranks a checkpoint has its values on rank 0 alone, on the others its entries are without (device "
    "'meta'): in on_save_checkpoint read the module and its optimizers, which all ranks can, and not the checkpoint"
)
_MEMORY = (
    "this rank ran out of memory. SPMDStrategy(rematerialize=0.5) keeps half of the activations' bytes, "
    "data_parallel='zero3' a part of parameters, gradients and optimizer state on each rank; smaller batches with "
    "accumulate_grad_batches take less too, and `lightning-spmd plan` predicts what fits"
)


def advice_on(error: BaseException) -> str | None:
    """A note for an error, or None."""
    text = str(error)
    if "mixed torch.Tensor and DTensor" in text:
        return _PARTS
    functions = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if "cannot be called on meta tensors" in text and "on_save_checkpoint" in functions:
        return _ELSEWHERE
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)
    ):
        return _MEMORY
    return None
