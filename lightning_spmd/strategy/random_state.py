"""Random state in checkpoints, so that a resumed run draws the numbers that an uninterrupted one would have drawn.

Lightning saves none. Only plain tensors and numbers are stored, so the checkpoint stays loadable with
``weights_only=True`` and by a Trainer without this package, which ignores the entry.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from lightning_spmd.stages.runtime.random_streams import RandomStreams


def pack_random_state(streams: RandomStreams | None) -> dict[str, Any]:
    """The state of torch's and Python's generators and of the streams of several ranks."""
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": (version, list(numbers), gauss),
        "streams": None if streams is None else {"seed": streams.seed, "tick": streams.tick},
    }


def restore_random_state(state: dict[str, Any], streams: RandomStreams | None) -> None:
    """Continue where :func:`pack_random_state` was called."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if streams is not None and state["streams"] is not None:
        streams.seed, streams.tick = state["streams"]["seed"], state["streams"]["tick"]
