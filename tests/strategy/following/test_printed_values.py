"""Values of tensors that become Python's numbers, texts and NumPy's arrays: they are those of the step, in graphs."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run

LOGGER = logging.getLogger("of a step")


class Keeps(Quiet):
    """Has lists."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.texts: list[str] = []


class Numbers(Keeps):
    """``float``, ``int`` and ``round`` of what a tensor holds."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        value, count = float(loss), int((batch[1] == 0).sum())
        self.kept.append((value, round(value, 3), math.exp(value) if isinstance(value, float) else None))
        self.log("count", float(count))
        self.log("mean", np.mean([value, 2.0 * count]))
        self.log("tensor", torch.tensor([value, count, 2.0]).mean())
        return loss


class Texts(Keeps):
    """``print``, formats and logging."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx % 2 == 0:
            print("count", (batch[1] == 0).sum().item(), flush=True)
        print(f"{batch_idx}: {loss:.4f} and {loss.item():>10.3e}", "{:.2f}".format(loss.item()))  # noqa: UP032
        message = f"loss {loss.detach()} at {batch_idx}"
        print(message)
        LOGGER.warning(message)
        LOGGER.warning("%.3f", loss.item())
        LOGGER.debug(f"nobody sees {loss.item():.3f}")
        self.texts.append(f"{float(loss):.3f}!")
        return loss


class Arrays(Keeps):
    """NumPy, which nobody decides with."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        found, wanted = scores.detach().cpu().numpy(), batch[1].cpu().numpy()
        right = found.argmax(axis=1) == wanted
        self.log("accuracy", right.mean())
        self.log("spread", np.abs(found - found.mean(0)).max() * 2 + 1)
        self.kept.append(loss.detach().numpy())
        self.texts.append(f"{float(right.sum())} of {found.shape[0]}: {np.round(found[0, 0], 2):.2f}")
        return loss


@pytest.mark.parametrize("kind", [Numbers, Texts, Arrays])
def test_what_is_only_told_stays_in_graphs(
    kind: type[Keeps], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Keeps] = []
    told: list[Any] = []

    def make() -> Keeps:
        told.append((capsys.readouterr().out, [r.getMessage() for r in caplog.records if r.name == LOGGER.name]))
        caplog.clear()
        made.append(kind())
        return made[-1]

    assert_as_eager(make)
    make()
    theirs, ours = made[:2]
    assert [repr(item) for item in ours.kept] == [repr(item) for item in theirs.kept]
    assert ours.texts == theirs.texts
    assert told[2] == told[1]
    assert bool(ours.kept) or len(told[1][1]) == 36


@pytest.mark.parametrize("kind", [Numbers, Arrays])
def test_what_is_told_is_of_the_global_batch(kind: type[Keeps], two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, kind, "spmd", 2, max_epochs=1)
    assert_compiled(*ours)
    assert_equals_one_device(ours, run(kind, "auto", data=lambda: InOrder(rows(), ROWS, shuffle=False), max_epochs=1))


class Measures(Quiet):
    """A text that decides."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        text = f"{loss.item():.1f}"
        print(text)
        return loss * 2 if text > "1.0" else loss


class Kinds(Quiet):
    """``float`` that is asked about."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * 2 if type(float(batch_idx)) is float else loss


class Indexes(Quiet):
    """A text that names an attribute, an array that decides."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        layer = getattr(self, f"{'first' if int((batch[1] == 0).sum()) > 2 else 'first'}")
        counts = {1: 0.5, 2: 2.0}
        factor = counts[1 + int((batch[1] == 0).sum()) % 2]
        return self.loss(batch) * factor + layer.weight.square().mean()


class Opaque(Quiet):
    """An array that leaves NumPy."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("sum", sum(loss.detach().numpy().reshape(1).tobytes()))
        return loss


@pytest.mark.parametrize("kind", [Measures, Kinds, Indexes, Opaque])
def test_what_decides_is_read(kind: type[Quiet]) -> None:
    assert_as_eager(kind)
