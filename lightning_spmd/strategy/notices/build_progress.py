"""Progress of building a graph: in the progress bar, or without one a line if it takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_spmd.messages import mention
from lightning_spmd.strategy.graphs.run_context import BuildEvent

PATIENCE = 10.0
"""Seconds after which a line says that a graph is being built."""
_WORDS = {
    "capture": "recording the step",
    "expand": "splitting over ranks",
    "passes": "running passes",
    "agree": "comparing ranks",
    "lower": "compiling regions",
}
_ENDS = ("ready", "lowered")


class BuildProgress:
    """Shows the progress of building graphs in one fit, on rank zero.

    Args:
        trainer: the Trainer; without a progress bar nothing is shown.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._restore: Callable[[], None] | None = None
        self._timer: threading.Timer | None = None
        self._stage = ""

    def on_build(self, event: BuildEvent) -> None:
        """A stage begins."""
        if not self._trainer.is_global_zero or hasattr(self._trainer.progress_bar_callback, "on_build_event"):
            return  # a bar that shows builds itself
        if event.stage in _ENDS:
            self.end()
            return
        self._stage = " ".join(filter(None, (_WORDS.get(event.stage, event.stage), event.detail)))
        if is_watched(self._trainer):
            self._put_on_bar()
        elif self._timer is None:
            self._timer = threading.Timer(PATIENCE, self._tell)
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """Nothing is being built any more, whether or not it became a graph."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._restore is not None:
            self._restore()
            self._restore = None

    # ------------------------------------------------------------------ pieces
    def _tell(self) -> None:
        mention(f"strategy='spmd' has been building the graph of a step for {PATIENCE:.0f} s: {self._stage}")

    def _put_on_bar(self) -> None:
        bar, loop = self._trainer.progress_bar_callback, _loop_of(self._trainer)
        if isinstance(bar, RichProgressBar):
            self._on_rich(bar.progress, getattr(bar, f"{loop}_progress_bar_id", None))
        elif isinstance(bar, TQDMProgressBar):
            name = "val_progress_bar" if loop == "val_sanity" else f"{loop}_progress_bar"
            try:
                self._on_tqdm(getattr(bar, name))
            except TypeError:  # which is how it says that there is none yet
                return

    def _on_rich(self, progress: Any, task: Any) -> None:
        if progress is None or task not in progress.task_ids:
            return
        if self._restore is None:
            before = progress.tasks[progress.task_ids.index(task)].description

            def restore() -> None:
                if task in progress.task_ids:
                    progress.update(task, description=before)
                    progress.refresh()

            self._restore = restore
        progress.update(task, description=f"Graph: {self._stage}")
        progress.refresh()  # its own thread draws when it gets the interpreter, and capture leaves it little

    def _on_tqdm(self, line: Any) -> None:
        if line.disable:
            return
        if self._restore is None:
            before = line.desc

            def restore() -> None:
                line.desc = before
                line.refresh()

            self._restore = restore
        line.set_description(f"Graph: {self._stage}")


def is_watched(trainer: Any) -> bool:
    """Whether a progress bar is visible: there is one, and the output is a terminal."""
    return trainer.progress_bar_callback is not None and sys.stdout.isatty()


def printer_above(trainer: Any) -> Callable[[str], None] | None:
    """A function that prints above the progress bar; None if no bar is visible.

    ``TQDMProgressBar.print`` prints nothing after its bars are closed at the end of training.
    """
    if not is_watched(trainer):
        return None
    bar = trainer.progress_bar_callback
    return Tqdm.write if isinstance(bar, TQDMProgressBar) else bar.print


def _loop_of(trainer: Any) -> str:
    """The loop that runs, as progress bars name their lines."""
    if trainer.sanity_checking:
        return "val_sanity"
    if trainer.validating:
        return "val"
    return "test" if trainer.testing else "predict" if trainer.predicting else "train"
