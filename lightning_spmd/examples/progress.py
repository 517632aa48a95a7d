"""A progress bar that shows the building of the training graph as a step of its own."""

from typing import Any, Protocol

import rich
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities.types import STEP_OUTPUT
from rich.progress import TaskID
from typing_extensions import override

STAGES = ("capture", "expand", "agree", "ready")
"""What a build goes through, in this order; ``"ready"`` ends it."""


class BuildEvent(Protocol):
    """What a strategy says about a graph that it is building.

    Attributes:
        stage: What the build has come to; usually one of :data:`STAGES`.
        variant: Which of the iteration's graphs, for example the one that accumulates gradients.
        seconds: Since this build began.
        nodes: Of the graph, where their number is known already.
    """

    @property
    def stage(self) -> str: ...  # noqa: D102

    @property
    def variant(self) -> str: ...  # noqa: D102

    @property
    def seconds(self) -> float: ...  # noqa: D102

    @property
    def nodes(self) -> int | None: ...  # noqa: D102


class SPMDProgressBar(RichProgressBar):
    """Lightning's rich progress bar, and the building of the training graph as its own step.

    Before the first batch can run, the strategy captures, expands and agrees on a graph; meanwhile the bar of the epoch
    would just stand still. With a strategy that has no ``add_build_listener`` (``"auto"``, ``"ddp"``) this is a plain
    :class:`~lightning.pytorch.callbacks.RichProgressBar`. Where the output is not a terminal, one line is printed per
    stage and per ``refresh_rate`` batches, because a bar could not be seen there.

    Args:
        refresh_rate: Batches between two updates of the bar; 0 switches everything off.
        leave: Whether a finished epoch's bar stays on the terminal.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)
        self._strategy_listened_to: object | None = None
        self._build_task: TaskID | None = None

    @property
    @override
    def total_train_batches(self) -> int | float:
        """Batches of this epoch; where ``max_steps`` ends it, Lightning's takes steps of the optimizer for batches."""
        trainer = self.trainer
        if trainer.max_epochs != -1 or trainer.max_steps <= 0:
            return trainer.num_training_batches
        steps = trainer.max_steps - trainer.global_step
        return min(trainer.num_training_batches, steps * trainer.accumulate_grad_batches)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        strategy = trainer.strategy
        add_build_listener = getattr(strategy, "add_build_listener", None)
        # setup runs for every fit and validate of a trainer, whose strategy stays the same.
        if add_build_listener is not None and strategy is not self._strategy_listened_to:
            add_build_listener(self.on_build_event)
            self._strategy_listened_to = strategy

    def on_build_event(self, event: BuildEvent) -> None:
        """Show one step of a build; called by the strategy, on every rank."""
        if self.is_disabled:
            return
        console = rich.get_console()
        if event.stage == "lowered":
            self._remove_build_task()
            return
        if event.stage == "ready":
            self._remove_build_task()
            size = "" if event.nodes is None else f": {event.nodes} nodes"
            console.print(f"graph ready ({event.variant}){size} in {event.seconds:.1f} s", highlight=False)
            return
        detail = getattr(event, "detail", "")
        line = f"building the training graph ({event.variant}): {event.stage} {detail or '…'} {event.seconds:.1f} s"
        if self.progress is None or not console.is_terminal:
            if not detail or detail.startswith("1 of "):  # of a stage in parts the first is enough
                console.print(line, highlight=False)
            return
        completed = STAGES.index(event.stage) if event.stage in STAGES else 0
        if self._build_task is None:
            self._build_task = self.progress.add_task(line, total=len(STAGES) - 1, completed=completed)
        else:
            self.progress.update(self._build_task, description=line, completed=completed)
        # The bar's own thread draws only when asked, and capture leaves it no time: draw now.
        self.progress.refresh()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        # A build that ended in a fallback to eager execution never says "ready".
        self._remove_build_task()
        console = rich.get_console()
        if self.is_disabled or console.is_terminal or (batch_idx + 1) % int(self.refresh_rate) != 0:
            return
        metrics = "".join(
            f", {name} {value:.4g}" if isinstance(value, float) else f", {name} {value}"
            for name, value in self.get_metrics(trainer, pl_module).items()
        )
        # From the bar, because total_train_batches shrinks by the steps taken where max_steps ends the training.
        line = f"epoch {trainer.current_epoch}, batch {batch_idx + 1}/{self.train_progress_bar.total:.0f}{metrics}"
        console.print(line, highlight=False, soft_wrap=True)

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)  # the logger's version: the same all the time, where there is little room
        return metrics

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_build_task()
        super().on_exception(trainer, pl_module, exception)

    def _remove_build_task(self) -> None:
        if self._build_task is not None and self.progress is not None and self._build_task in self.progress.task_ids:
            self.progress.remove_task(self._build_task)
        self._build_task = None
