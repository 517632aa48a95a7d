"""Evaluation steps: which of them are graphs, the fallback, and ranks with different numbers of batches.

A step that cannot be a graph runs eagerly on whole parameters, with one message that has the reason.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.messages import tell
from lightning_spmd.stages.runtime.agreement.control import Place
from lightning_spmd.strategy.graphs.run_context import FellBack
from lightning_spmd.strategy.state.layer_sharing import LayerSharing
from lightning_spmd.strategy.state.state_layout import StateLayout
from lightning_spmd.strategy.steps.evaluation import EvaluationSteps
from lightning_spmd.strategy.steps.replay import StepsInGraphs
from lightning_spmd.strategy.user_hooks.parts_as_wholes import PartsAsWholes


class FinishTurns(Callback):
    """The first callback of a prediction: takes part in the steps of other ranks before other hooks run.

    Args:
        take_part: runs these steps.
    """

    def __init__(self, take_part: Callable[[], None]) -> None:
        self._take_part = take_part

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After this rank's last batch."""
        self._take_part()


class Evaluation:
    """The validation, test and predict steps of a strategy.

    Args:
        layout: the placement of parameters. If every rank has all of them, no step needs a graph.
        layers: which layers ranks share; until a plan is found, they share none.
        steps: the methods that have run as graphs.
        wholes: lets eager steps compute with what hooks keep of parameters in parts.
        new_graphs: creates the owner of a run's graphs.
    """

    def __init__(
        self,
        layout: StateLayout,
        layers: LayerSharing,
        steps: StepsInGraphs,
        wholes: PartsAsWholes,
        new_graphs: Callable[[], EvaluationSteps],
    ) -> None:
        self.graphs: EvaluationSteps | None = None
        self._layout = layout
        self._layers = layers
        self._ranks = layout.ranks
        self._steps = steps
        self._wholes = wholes
        self._new_graphs = new_graphs
        # Lightning gives ranks different numbers of batches to predict, because every row is predicted once. Graphs
        # with collectives need all ranks: those whose batches have ended take part in the steps of others.
        self._owed: list[int] | None = None  # number of such steps, by dataloader
        self._last: tuple[Any, ...] = ()  # arguments of this rank's last step, which it repeats

    def begin(self) -> None:
        """A new run."""
        self.graphs = None

    @property
    def in_graphs(self) -> bool:
        """Whether steps run as graphs; the same on all ranks."""
        mesh = self._ranks.mesh  # a sequence that needs several ranks would not fit on one
        return mesh is not None and (mesh.splits_sequences or self._layout.plan.shards_parameters)

    def on_whole_parameters(self, module: Any) -> contextlib.AbstractContextManager[None]:
        """Around each step that runs eagerly although graphs were asked for; entered by all ranks together."""
        return self._layout.whole(module)

    # ------------------------------------------------------------------ steps
    def step(
        self, module: Any, method: str, eager: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a step on this rank's batch.

        Args:
            module: the LightningModule.
            method: name of the step method.
            eager: runs it as Lightning does.
            args: as Lightning passes them.
            kwargs: likewise.
        """
        turns = self._owed is not None and method == "predict_step"
        if turns:
            self._take_part(upto=args[2] if len(args) > 2 else 0)
            self._last = args
        batches = None if self._ranks.mesh is None else self._ranks.batches
        if not self.in_graphs:
            if self._layers.is_sought:  # behind the sanity check, graphs log under the same keys
                self._steps.add(method)
            return self._steps.run_eagerly(module, method, eager, args, kwargs, batches)
        if kwargs:
            raise ConfigurationError(f"{method} was called with keywords ({', '.join(kwargs)}); Lightning passes none")
        try:
            output = self._evaluate(method, args, turns=turns)
        except FellBack:
            with self.on_whole_parameters(module), self._wholes.inside():
                return self._steps.run_eagerly(module, method, eager, args, {}, batches)
        self._steps.add(method)
        return output

    def _evaluate(self, method: str, args: tuple[Any, ...], **how: bool) -> Any:
        if self.graphs is None:
            self.graphs = self._new_graphs()
        return self.graphs.evaluate(method, args, **how)

    # ------------------------------------------------------------------ ranks with different numbers of batches
    def compare(self, stage: str, batches: Sequence[float]) -> list[float] | None:
        """The largest number of batches of a rank, by dataloader, if ranks differ; otherwise None.

        Raises:
            ConfigurationError: they differ, and the stage cannot run with different numbers.
        """
        control = self._ranks.control
        if control is None or not self.in_graphs:
            return None
        everyone = control.gather(list(batches), Place(f"the start of {stage}"))
        if all(counts == everyone[0] for counts in everyone):
            return None
        known = all(len(counts) == len(everyone[0]) and math.inf not in counts for counts in everyone)
        if stage != "predict" or not known:
            raise ConfigurationError(
                f"the ranks have different numbers of batches for {stage}: {everyone}. The parameters are spread over "
                "the ranks, so every step needs all of them: use Lightning's own sampler "
                "(Trainer(use_distributed_sampler=True)), which gives all ranks the same number"
            )
        return [max(counts) for counts in zip(*everyone, strict=True)]

    def begin_prediction(self, trainer: Any) -> None:
        """Find out in how many steps of others this rank will take part."""
        most = self.compare("predict", trainer.num_predict_batches)
        self._owed, self._last = None, ()
        if most is not None:
            tell(
                "strategy='spmd' predicts in graphs, which need all ranks, and these differ in numbers of batches: "
                "a rank with fewer runs predict_step on its last batch again, as long as others have more. What that "
                "returns is discarded, and what it changes of the module is put back; files that it writes are not"
            )
            self._owed = [int(m - own) for m, own in zip(most, trainer.num_predict_batches, strict=True)]
            trainer.callbacks.insert(0, FinishTurns(self._take_part))

    def _take_part(self, upto: int | None = None) -> None:
        """Take part in the others' steps of the dataloaders before ``upto``; of all if it is None."""
        owed = self._owed
        if owed is None:
            return
        for loader in range(len(owed) if upto is None else upto):
            while owed[loader] > 0:
                owed[loader] -= 1
                batch, *numbers = self._last
                self._last = (batch, *[numbers[0] + 1, *numbers[1:]]) if numbers else (batch,)
                try:
                    self._evaluate("predict_step", self._last, turns=True, discard=True)
                except FellBack:
                    with self.on_whole_parameters(None if self.graphs is None else self.graphs.context.module):
                        pass
