"""Where a rank stays: its line, and the collective that it waits in."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_spmd.stages.runtime.agreement.whereabouts import Lookout, Whereabouts, whereabouts_of
from tests.helpers.training import QUIET

SOON = timedelta(seconds=0.05)


class _Stays(BoringModel):
    """Waits in a hook until it has been seen there."""

    def __init__(self, seen: threading.Event) -> None:
        super().__init__()
        self.seen = seen

    def on_train_start(self) -> None:
        self.seen.wait(20)


def _fit(module: Any) -> None:
    L.Trainer(max_steps=1, limit_val_batches=0, **QUIET).fit(module)


def test_the_line_of_a_hook_is_told_once_and_that_it_was_left() -> None:
    seen, told = threading.Event(), list[Whereabouts | None]()

    def tell(here: Whereabouts | None) -> None:
        told.append(here)
        seen.set()

    lookout = Lookout(tell, SOON)
    _fit(_Stays(seen))
    until = time.monotonic() + 20
    while told[-1] is not None and time.monotonic() < until:
        time.sleep(0.01)
    lookout.end()
    assert told[0] is not None
    assert str(told[0]).startswith(f"at {__file__}:")
    assert not told[0].needs(1)
    assert told[-1] is None


def test_outside_of_the_trainer_there_is_nothing_to_tell() -> None:
    assert whereabouts_of(threading.get_ident()) is None


def test_a_collective_is_named_with_its_ranks() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found: list[Whereabouts | None] = []

        class Looks:
            """An object that is looked at in the middle of a collective."""

            def __reduce__(self) -> Any:
                found.append(whereabouts_of(threading.get_ident()))
                return int, ()

        dist.all_gather_object([None], Looks())
        group = dist.new_group([0])
        dist.all_gather_object([None], Looks(), group=group)
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
    assert found == [Whereabouts("", "all_gather_object", (0,))] * 2
    assert found[0] is not None
    assert found[0].needs(0)
    assert not found[0].needs(1)
    assert Whereabouts.from_text(found[0].as_text()) == found[0]
