"""Whether the iterations of a run overlap, and the fence around the hooks between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spmd.messages import tell
from lightning_spmd.stages.runtime.agreement.control import Place
from lightning_spmd.stages.runtime.executor import Pending
from lightning_spmd.strategy.graphs.run_context import GraphSettings, RunContext
from lightning_spmd.strategy.steps.loss_scaling import TrainersScaler
from lightning_spmd.strategy.support.feature import Mode
from lightning_spmd.strategy.user_hooks.fence import Fence, FencedHooks
from lightning_spmd.strategy.user_hooks.overlap import (
    CONTAINS_THE_STEP,
    data_that_knows,
    explain,
    finish_in_time,
    hooks_between_batches,
)


class Overlapping:
    """The choice for one run at a time, equal on all ranks.

    Args:
        settings: the user's options, and the ranks.
        pending: returns the work that the last iteration deferred.
        flush: completes it.

    Attributes:
        fenced: whether some rank has hooks behind the fence, and may finish pending work alone.
    """

    def __init__(
        self, settings: GraphSettings, pending: Callable[[], Pending | None], flush: Callable[[], None]
    ) -> None:
        self.fenced = False
        self._settings = settings
        self._flush = flush
        self._fenced = FencedHooks()
        self._fence = Fence(
            lambda: () if (work := pending()) is None else work.inputs,
            lambda: (work := pending()) is None or work.is_current(),
            flush,
        )

    def choose(self, module: Any, mode: Mode) -> bool | str:
        """Whether iterations may overlap (``"auto"``: if it is faster). If so, hooks run behind the fence from now on.

        Args:
            module: the LightningModule.
            mode: the mode of training.
        """
        wanted, control, trainer = (
            self._settings.options.overlap_iterations,
            self._settings.ranks.control,
            module.trainer,
        )
        if control is None or wanted is False:
            return False
        reason = None
        if not module.automatic_optimization:  # weights change in the middle of a step
            reason = "training_step optimizes by hand"
        elif TrainersScaler(trainer)() is not None:  # every update waits for a look at the last gradient
            reason = "loss scaling looks at all gradients before a step"
        if reason is not None:
            if wanted is True:
                tell(f"strategy='spmd' does not overlap iterations: {reason}")
            return False
        hooks = hooks_between_batches(module, trainer)
        side = [(f"{type(owner).__name__}.{hook}", hook == CONTAINS_THE_STEP) for owner, hook in hooks]
        found = dict(sum(control.gather(side, Place("the choice whether iterations overlap")), []))
        why, unfenced = "their code is around the step itself", [name for name, around in found.items() if around]
        self.fenced = bool(found)
        if unfenced and mode is Mode.COMPILED:
            tell(explain(unfenced, why, insisted=wanted is True))
        if unfenced and wanted is not True:
            return False
        for owner, hook in hooks:
            if hook != CONTAINS_THE_STEP:
                self._fenced.put(self._fence.call, owner, hook)
        finish_in_time(trainer, self._flush)
        return wanted

    def data_looks(self, context: RunContext) -> bool:
        """Whether data that is loaded between batches may look at weights, which keeps iterations apart."""
        control = self._settings.ranks.control
        if control is None or context.options.overlap_iterations is False:
            return False
        mine = data_that_knows(context.module, context.trainer.train_dataloader)
        names = [name for name in control.gather(mine, Place("a look at the data")) if name is not None]
        if names:
            tell(explain(list(dict.fromkeys(names)), "nothing sees what they read", insisted=False))
        return bool(names)

    def take_away(self) -> None:
        """The run is over: hooks are the user's own again."""
        self._fenced.take_away()
