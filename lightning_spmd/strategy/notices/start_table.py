"""Shows how a training runs: a table on a terminal, else one line of the log."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_spmd.messages import tell
from lightning_spmd.strategy.notices.build_progress import is_watched

_IN_A_LINE = ("training_step", "batch", "mesh", "first step")


def show(trainer: Any, rows: Mapping[str, str]) -> None:
    """Show the start table after the first step, on rank zero only.

    Args:
        trainer: the Trainer; without a progress bar nothing is shown.
        rows: the rows by subject.
    """
    bar = trainer.progress_bar_callback
    if not is_watched(trainer):
        tell("strategy='spmd' trains: " + "; ".join(f"{name}: {rows[name]}" for name in _IN_A_LINE if name in rows))
    elif trainer.is_global_zero:
        bar.print(as_text(rows))


def as_text(rows: Mapping[str, str], width: int | None = None) -> str:
    """The table as text for a terminal.

    Args:
        rows: the rows by subject.
        width: of the terminal; None: as it is.
    """
    table = Table(title="How this training runs", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in rows.items():
        table.add_row(name, text)
    width = width or Console().width
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    # rich chooses its lines by the encoding. What prints them does so strictly: a bar that cannot write a character
    # would end the training.
    file = io.TextIOWrapper(io.BytesIO(), encoding, errors="replace", newline="\n")
    Console(file=file, width=width, force_terminal=sys.stdout.isatty()).print(table)
    file.flush()
    return file.buffer.getvalue().decode(encoding).rstrip()
