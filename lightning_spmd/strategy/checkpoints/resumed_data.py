"""The position in the data of a run that ends mid-epoch and is resumed.

Lightning counts batches and starts the data again from the first one, unless a loader saves its position. Here the
checkpoint holds the random state from which the order was drawn, and a hash of the first batch. The resumed run draws
the same order and skips the trained batches. If its first batch differs, the loader has another way of ordering, and
Lightning's behaviour is kept.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.messages import tell, warn
from lightning_spmd.stages.capture.follow.memory import array_of
from lightning_spmd.stages.runtime.agreement.control import ControlPlane
from lightning_spmd.strategy.state.random_state import RandomState, pack_random_state, restore_random_state

KEY = "epoch_data"
"""In this package's part of a checkpoint."""
_END = object()


class EpochData:
    """The random state that decides the order of an epoch.

    Args:
        control: the other ranks; None on one device.
        random: random state of the run.
    """

    def __init__(self, control: ControlPlane | None, random: RandomState) -> None:
        self._control = control
        self._random = random
        self._iterator: dict[str, Any] | None = None  # random state when the epoch's iterator was made
        self._fetch: dict[str, Any] | None = None  # and when its first batch was asked for
        self._first: str | None = None  # that batch
        self._resumed: dict[str, Any] | None = None
        self._is_new = True

    # ------------------------------------------------------------------ checkpoints
    def entry(self) -> dict[str, Any]:
        """The entry for a checkpoint; all ranks together."""
        firsts = [self._first] if self._control is None else self._control.gather(self._first)
        return {"iterator": self._iterator, "fetch": self._fetch, "first": firsts}

    def resume(self, entry: dict[str, Any] | None) -> None:
        """Keep the entry of a checkpoint that the run resumes from."""
        if entry is not None and entry.get(KEY) is not None:
            self._resumed = entry

    # ------------------------------------------------------------------ the loop
    def before_iterator(self, trainer: Any, loader: Any) -> None:
        """Called when Lightning is about to create the training iterator."""
        if self._resumed is None:
            self._iterator = pack_random_state(None)
            return
        # Lightning says so before it knows; what becomes of the data is said in begin_epoch
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
        state = self._resumed[KEY]["iterator"]
        if state is not None:
            restore_random_state(state, None)
        for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            for one in (sampler, getattr(sampler, "sampler", None)):
                set_epoch = getattr(one, "set_epoch", None)
                if callable(set_epoch):  # workers ask for the first batches at once
                    set_epoch(trainer.fit_loop.epoch_progress.current.processed)

    def begin_epoch(self, trainer: Any, original: Callable[..., None], fetcher: Any) -> None:
        """Replaces what Lightning does before an epoch's first batch."""
        entry, self._resumed = self._resumed, None
        if entry is None:
            if not self._is_new:
                self._iterator = pack_random_state(None)
            self._is_new = False
            original(fetcher)
            self._fetch, self._first = pack_random_state(None), None
            _watch(fetcher, self._note)
            return
        self._is_new = False
        self._iterator, self._fetch = entry[KEY]["iterator"], entry[KEY]["fetch"]
        progress = trainer.fit_loop.epoch_loop.batch_progress
        done = 0 if progress.is_last_batch else progress.current.ready
        if done and not any(hasattr(loader, "load_state_dict") for loader in private.training_loaders(trainer)):
            self._pass_over(fetcher, done, entry[KEY])
        original(fetcher)
        restore_random_state(entry["random_state"], self._random.streams, trainer.lightning_module)

    # ------------------------------------------------------------------ pieces
    def _note(self, batch: Any) -> None:
        self._first = _look(batch)

    def _pass_over(self, fetcher: Any, done: int, data: dict[str, Any]) -> None:
        restore_random_state(data["fetch"], None)
        rank = 0 if self._control is None else self._control.rank
        known = data["first"][rank] if rank < len(data["first"]) else None
        self._note(next(fetcher, None))
        same = known is not None and known == self._first
        if self._control is not None:
            same = all(self._control.gather(same))
        if not same:
            restore_random_state(data["iterator"], None)
            iter(fetcher)
            warn(
                "the training data begins with another batch than before the requeue, so no batches are skipped: the "
                "loader orders its data itself. If it also saves its position, nothing is lost; declare that with "
                "state_dict() and load_state_dict()"
            )
            return
        for _ in range(done - 1):
            next(fetcher, None)
        fetcher.fetched -= done  # Lightning adds them
        tell(f"strategy='spmd' passes over the {done} batches of this epoch that were trained before")


def _watch(fetcher: Any, note: Callable[[Any], None]) -> None:
    """Look at the first batch when it is fetched, or now if it was."""
    if getattr(fetcher, "batches", None):
        note(fetcher.batches[0])
        return
    inner = fetcher.iterator

    def watched() -> Iterator[Any]:
        fetcher.iterator = inner
        batch = next(inner, _END)  # `for` would call iter(), where Lightning's loader begins anew
        if batch is not _END:
            note(batch)
            yield batch

    fetcher.iterator = watched()


def _look(batch: Any) -> str | None:
    """A hash of a batch's tensors; None if it has none."""
    found = hashlib.blake2b(digest_size=16)
    seen: list[bool] = []

    def add(tensor: Tensor) -> Tensor:
        seen.append(True)
        found.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        found.update(array_of(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)))
        return tensor

    try:
        apply_to_collection(batch, Tensor, add)
    except (RuntimeError, TypeError, ValueError, MisconfigurationException):
        return None
    return found.hexdigest() if seen else None
