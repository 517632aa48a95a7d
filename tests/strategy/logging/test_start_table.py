"""What a training tells of itself: a table for who looks at a terminal, else a line at the start; a line at the end."""

from __future__ import annotations

import logging
import sys
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_spmd.strategy.notices.start_table import as_text
from tests.strategy.small import Quiet, loader_of, rows


class Printed(TQDMProgressBar):
    """Keeps what is printed above the bar."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.texts += map(str, args)


class Reads(Quiet):
    """Cannot be a graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        loss.untyped_storage()  # memory, which a graph has not yet
        return loss


def _fit(module: L.LightningModule, bar: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with caplog.at_level(logging.INFO, logger=logger.name):
        trainer = L.Trainer(
            strategy="spmd", devices=1, accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False,
            enable_model_summary=False, limit_val_batches=0, callbacks=[] if bar is None else [bar],
            enable_progress_bar=bar is not None,
        )  # fmt: skip
        trainer.fit(module, loader_of(rows(32)))
    return [r.getMessage() for r in caplog.records]


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    bar = Printed()
    said = _fit(Quiet(), bar, caplog)
    (table,) = [text for text in bar.texts if "How this training runs" in text]
    for part in ("training_step", "one graph", "one device", "passes", "lowering", "first step", "capture", "run "):
        assert part in table
    assert not any("trains: training_step" in text for text in said)
    (end,) = [text for text in said if "ends: 3 steps" in text]
    assert "s (median), " in end
    assert " built" in end
    assert "eager" not in end


@pytest.mark.parametrize("quiet", [True, False])
def test_elsewhere_it_is_one_line(quiet: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Without a progress bar, and where the output is no terminal."""
    bar = None if quiet else Printed()
    said = _fit(Quiet(), bar, caplog)
    (line,) = [text for text in said if "trains: training_step: one graph" in text]
    assert "first step: " in line
    assert "\n" not in line
    assert bar is None or not bar.texts


def test_what_runs_eagerly_says_why_and_counts_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    bar = Printed()
    said = _fit(Reads(), bar, caplog)
    assert any("ran a step eagerly" in text and "test_start_table.py:" in text for text in said)
    (table,) = [" ".join(text.split()) for text in bar.texts if "How this training runs" in text]
    assert "runs eagerly" in table
    assert any("3 steps eager" in text for text in said)


def test_the_table_fits_a_terminal() -> None:
    text = as_text({"training_step": "one graph " * 20, "mesh": "data_parallel 2"}, width=80)
    assert max(map(len, text.splitlines())) <= 80
