"""Layouts, ranked."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_spmd.cost.hardware import DEVICES, LINKS, Machines
from lightning_spmd.planning import search as search_module
from lightning_spmd.planning.capturing import Capture, capture_iteration, without_memory
from lightning_spmd.planning.facts import search_facts
from lightning_spmd.planning.layout import Layout
from lightning_spmd.planning.search import PLANS, Search, layouts, search
from tests.helpers.models import GPT
from tests.helpers.training import QUIET

OWN = Layout({}, 4, 1)


class Language(L.LightningModule):
    """A language model with shared layers to find."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(layers=1, width=32, heads=4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores = self.model(batch[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def language() -> Capture:
    def build(strategy: Any) -> Any:
        with without_memory():
            module = Language()
        trainer = L.Trainer(strategy=strategy, **{**QUIET, "devices": 1, "max_epochs": 1})
        return trainer, module, DataLoader(torch.zeros(8, 17, dtype=torch.int64), batch_size=2)

    return capture_iteration(build, OWN.batches)


def _machines(memory: float = 80e9) -> Machines:
    device = dataclasses.replace(DEVICES["h100"], memory=memory, reserved=0.0)
    return Machines(device, 4, 1, LINKS["nvlink4"])


@pytest.fixture(scope="module")
def found(language: Capture) -> Search:
    return search(language, OWN, _machines(), 60.0)


def test_every_layout_fills_the_ranks_and_none_is_there_twice(language: Capture) -> None:
    every = list(layouts(language, OWN))
    assert every[0] is OWN
    assert all(math.prod(layout.sizes.values()) == 4 for layout in every)
    kinds = [tuple(sorted(layout.sizes.items())) + (layout.options.get("data_parallel"),) for layout in every]
    assert len(set(kinds)) == len(kinds)
    assert {layout.options.get("data_parallel", "replicate") for layout in every} == set(PLANS)


def test_the_fastest_that_fits_is_first(found: Search) -> None:
    assert not found.others
    times = [c.outlook.step_seconds for c in found.built if c.fits and c.outlook]
    assert times == sorted(times)
    assert len(times) > 8
    assert found.best is found.built[0]
    assert {"tensor_parallel_size", "context_parallel_size"} <= {k for c in found.built if c.fits for k in c.options}
    assert all(c.outlook.global_rows == 8 for c in found.built if c.outlook)


def test_what_cannot_be_says_why(found: Search) -> None:
    assert all(c.reason for c in found.built if c.outlook is None)
    rows = search_facts(found)
    assert len(rows) == len(found.built)
    assert rows[0]["fits"]


def test_where_nothing_fits_activations_are_made_again(language: Capture) -> None:
    small = search(language, Layout({"data_parallel": "zero3"}, 1, 2), _machines(memory=300e3), 60.0)
    shares = [c.options["rematerialize"] for c in small.built if "rematerialize" in c.options]
    assert {0.5, 1.0} <= set(shares)
    needed = [c.outlook.needed_bytes for c in small.built if c.outlook and not c.fits]
    assert needed == sorted(needed)


def test_without_time_the_recipes_own_layout_is_built(language: Capture) -> None:
    found = search(language, OWN, _machines(), 0.0)
    assert found.best is not None
    assert found.best.layout is OWN
    assert len(found.others) + 1 == len(list(layouts(language, OWN)))


@pytest.mark.parametrize("late", [False, True])
def test_what_is_half_done_when_the_time_is_over_is_left(
    language: Capture, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: on a busy machine the search began what was not ready in time; and with no time left it found nothing."""
    begun: list[Layout] = []

    class Clock:
        """The second layout hangs."""

        def monotonic(self) -> float:
            return 1000.0 if late or len(begun) > 1 else 1.0

    def outlook_of(capture: Capture, layout: Layout, *rest: Any) -> Any:
        begun.append(layout)
        return make(capture, layout, *rest)

    make = search_module.outlook_of
    monkeypatch.setattr(search_module, "time", Clock())
    monkeypatch.setattr(search_module, "outlook_of", outlook_of)
    found = search(language, OWN, _machines(), 90.0, begun=0.0)
    assert (len(begun), len(found.built)) == ((1, 1) if late else (2, 1))
    assert found.built[0].outlook is not None
    assert late or found.others[0].layout is begun[1]
    assert len(found.others) + 1 == len(list(layouts(language, OWN)))
