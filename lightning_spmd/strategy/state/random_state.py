"""Random state in checkpoints, so that a resumed run draws the numbers that an uninterrupted one would have drawn.

Lightning saves none. Only plain tensors and numbers are stored, so the checkpoint stays loadable with
``weights_only=True`` and by a Trainer without this package, which ignores the entry. At the start of a run on
several ranks their states are made one device's.
"""

from __future__ import annotations

import os
import uuid
import zlib
from typing import Any

import torch
from torch import nn

from lightning_spmd import _private_api as private
from lightning_spmd.ir.random_states import python_random_states, set_python_random_states
from lightning_spmd.stages.runtime.agreement.control import ControlPlane
from lightning_spmd.stages.runtime.random_streams import RandomStreams
from lightning_spmd.strategy.state.kept_generators import pack_kept_generators, restore_kept_generators

_SEED = "PL_GLOBAL_SEED"
"""Where ``seed_everything`` notes the seed."""


def pack_random_state(streams: RandomStreams | None, module: nn.Module | None = None) -> dict[str, Any]:
    """The state of torch's, Python's and NumPy's generators, of a module's own, and of the streams of several ranks."""
    (version, numbers, gauss), of_numpy = python_random_states()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": (version, list(numbers), gauss),
        "numpy": of_numpy,
        "kept": pack_kept_generators(module),
        "streams": None if streams is None else {"seed": streams.seed, "tick": streams.tick},
    }


def restore_random_state(state: dict[str, Any], streams: RandomStreams | None, module: nn.Module | None = None) -> None:
    """Restore the states that :func:`pack_random_state` gave."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    version, numbers, gauss = state["python"]
    set_python_random_states(((version, tuple(numbers), gauss), state.get("numpy")))
    if module is not None:
        restore_kept_generators(state.get("kept", {}), module)
    if streams is not None and state["streams"] is not None:
        streams.seed, streams.tick = state["streams"]["seed"], state["streams"]["tick"]


def go_on_alike(control: ControlPlane) -> None:
    """Keep the generators' states if they are equal on all ranks; otherwise use rank 0's.

    So a run on several ranks begins with those of one device: Lightning's strategies seed again whenever a Trainer
    starts its processes, and numbers drawn before (for the module's initialisation, a split of the data set, an earlier
    fit) would repeat. If nothing was seeded, each rank keeps its own numbers. All ranks call this together.

    Args:
        control: messages among the ranks.
    """
    mine = {**pack_random_state(None), "cuda": None}
    sides = control.gather((zlib.crc32(repr(_comparable(mine)).encode()), _SEED in os.environ))
    if all(side == sides[0] for side in sides) or not sides[0][1]:
        return
    restore_random_state(control.gather(mine if control.rank == 0 else None)[0], None)


def _comparable(state: dict[str, object]) -> dict[str, object]:
    return {key: getattr(value, "tolist", lambda value=value: value)() for key, value in state.items()}


class RandomState:
    """The random state of a strategy's runs, for checkpoints.

    Attributes:
        streams: random numbers of several ranks; None on one device.
    """

    def __init__(self) -> None:
        self.streams: RandomStreams | None = None
        self._resumed: dict[str, Any] | None = None
        self._run = uuid.uuid4().hex

    def end_run(self) -> None:
        """What is saved from here on is another run's."""
        self._run = uuid.uuid4().hex

    def is_of_this_run(self, entry: dict[str, Any] | None) -> bool:
        """Whether an entry was saved in the run that is under way. Lightning's tuners go back by one, and draw on."""
        return entry is not None and entry.get("run") == self._run

    def entry(self, trainer: Any) -> dict[str, Any]:
        """The entry of a checkpoint."""
        within = private.is_within_training_epoch(trainer)
        state = pack_random_state(self.streams, trainer.lightning_module)
        return {"random_state": state, "within_epoch": within, "run": self._run}

    def resume(self, entry: dict[str, Any] | None) -> None:
        """Keep an entry until :meth:`restore`."""
        self._resumed = entry

    def restore(self, module: Any, *, within_epoch: bool) -> None:
        """Restore the entry if it was saved at such a moment."""
        if self._resumed is None or module is None or not module.trainer.training:
            return
        if self._resumed["within_epoch"] == within_epoch:
            restore_random_state(self._resumed["random_state"], self.streams, module)
            self._resumed = None
