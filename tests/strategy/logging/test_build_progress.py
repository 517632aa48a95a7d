"""While a graph is built the progress bar says so; lines of the log go above it; else it is quiet."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import rich
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning_utilities.core import rank_zero

from lightning_spmd import messages
from lightning_spmd.strategy.graphs.run_context import BuildEvent, RunContext
from lightning_spmd.strategy.notices import build_progress
from lightning_spmd.strategy.notices.build_progress import BuildProgress, printer_above
from tests.strategy.small import Quiet, loader_of, rows


@pytest.fixture(autouse=True)
def console() -> Iterator[None]:
    """Rich's own console remembers that it was made for a terminal."""
    yield
    rich.reconfigure()


def text_of(bar: Any) -> str:
    """How the line of training is named now."""
    return bar.train_progress_bar.desc if isinstance(bar, TQDMProgressBar) else bar.train_progress_bar.description


def fit(module: L.LightningModule, bar: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    """What the bar showed of building, and what it showed after the first step."""
    seen: list[str] = []
    show = BuildProgress.on_build

    def on_build(self: BuildProgress, event: BuildEvent) -> None:
        show(self, event)
        if bar is not None:
            seen.append(text_of(bar))

    class After(L.Callback):
        text = ""

        def on_before_zero_grad(self, *_: Any) -> None:
            self.text = self.text or "" if bar is None else text_of(bar)

    monkeypatch.setattr(BuildProgress, "on_build", on_build)
    after = After()
    trainer = L.Trainer(
        strategy="spmd", devices=1, accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
        enable_model_summary=False, limit_val_batches=0, callbacks=[after, *([] if bar is None else [bar])],
        enable_progress_bar=bar is not None,
    )  # fmt: skip
    trainer.fit(module, loader_of(rows(32)))
    return seen, after.text


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_the_bar_says_what_building_is_at(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    seen, after = fit(Quiet(), kind(), monkeypatch)
    assert [text.strip(": ") for text in seen[:2]] == ["Graph: recording the step", "Graph: running passes"]
    assert "Epoch 0" in seen[2]
    assert "Epoch 0" in after


@pytest.mark.parametrize(("patience", "lines"), [(0.0, 1), (10.0, 0)])
@pytest.mark.parametrize("quiet", [True, False])
def test_elsewhere_it_is_a_line_if_it_takes_long(
    patience: float, lines: int, quiet: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_progress, "PATIENCE", patience)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with caplog.at_level(logging.INFO, logger=logger.name):
        seen, _ = fit(Quiet(), None if quiet else TQDMProgressBar(), monkeypatch)
    assert not any("Graph" in text for text in seen)
    said = [r.getMessage() for r in caplog.records if "building the graph of a step for" in r.getMessage()]
    assert bool(said) == bool(lines)


def test_other_ranks_and_bars_that_show_it_themselves_are_left_alone() -> None:
    event = BuildEvent("capture", "apply", 0.0)
    bars = (SimpleNamespace(), SimpleNamespace(on_build_event=lambda _: None))
    for trainer in (
        SimpleNamespace(is_global_zero=False, progress_bar_callback=bars[0]),
        SimpleNamespace(is_global_zero=True, progress_bar_callback=bars[1]),
    ):
        progress = BuildProgress(trainer)
        progress.on_build(event)
        assert progress._timer is None
        progress.end()


def test_compiling_regions_is_counted_and_ends() -> None:
    events: list[BuildEvent] = []
    settings = SimpleNamespace(listeners=[events.append])
    context = SimpleNamespace(settings=settings, control=None, steps_left=lambda _method: 1.0)
    lowering = RunContext.lowering_context(context, "training_step", lambda _stage, _step: None)  # type: ignore[arg-type]
    for number in (0, 1, 2):
        lowering.on_region(number, 2)
    assert [(e.stage, e.detail) for e in events] == [("lower", "1 of 2"), ("lower", "2 of 2"), ("lowered", "")]


# ---------------------------------------------------------------- lines of the log beside a bar
def test_lines_for_a_terminal_go_above_the_bar_and_all_others_where_they_went(tmp_path: Path) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    handlers = [logging.StreamHandler(terminal), logging.FileHandler(tmp_path / "log")]
    logger, above = rank_zero.log, list[str]()
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        with messages.printing_with(above.append):
            messages.tell("one")
        messages.tell("two")
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
    assert above == ["one"]
    assert terminal.getvalue() == "two\n"
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_closed_bars_of_tqdm_do_not_swallow_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen: ``TQDMProgressBar.print`` after training prints nothing, so the line of the end was lost."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    printer = printer_above(SimpleNamespace(progress_bar_callback=TQDMProgressBar()))
    assert printer is not None
    printer("the end")
    assert "the end" in capsys.readouterr().out
    assert printer_above(SimpleNamespace(progress_bar_callback=None)) is None
