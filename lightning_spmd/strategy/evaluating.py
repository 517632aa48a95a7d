"""The evaluation half of the strategy: whether a step is a graph, what happens when it cannot be one, uneven loaders.

A step that cannot be a graph runs eagerly inside :meth:`EvaluatingStrategy._eager_evaluation`, which puts whole
parameters in place, and is announced once with the reason.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_spmd.errors import BatchError, ConfigurationError
from lightning_spmd.stages.capture.batch import Batch
from lightning_spmd.stages.runtime.control import Place
from lightning_spmd.strategy.boundary import names_lost_ranks
from lightning_spmd.strategy.evaluation import EvaluationSteps
from lightning_spmd.strategy.iteration import TrainingIteration
from lightning_spmd.strategy.ranks import RankedStrategy
from lightning_spmd.strategy.replay import log_keys_kept
from lightning_spmd.strategy.run_context import FellBack


@dataclass
class Turns:
    """Steps in which a rank takes part although its own batches have ended.

    Lightning gives ranks different numbers of batches to predict, for every row is predicted once; graphs with
    collectives need everybody.

    Args:
        owed: how many, by dataloader.
        last: arguments of this rank's last step, which it repeats.
    """

    owed: list[int]
    last: tuple[Any, ...] = ()


class FinishTurns(Callback):
    """The first callback of a prediction: takes part in the steps of other ranks before anybody's hook runs.

    Args:
        take_part: does what is owed.
    """

    def __init__(self, take_part: Callable[[], None]) -> None:
        self._take_part = take_part

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After this rank's last batch."""
        self._take_part()


class EvaluatingStrategy(RankedStrategy):
    """The evaluation steps of a strategy: eager, or as graphs.

    A subclass says which (:meth:`_evaluates_in_graphs`), makes the graphs' owner (:meth:`_new_evaluation`), and puts
    whole parameters in place for what must run eagerly (:meth:`_eager_evaluation`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._iteration: TrainingIteration | None = None
        self._evaluation: EvaluationSteps | None = None
        self._turns: Turns | None = None
        self._replayed: set[str] = set()  # methods that have logged from graphs: Lightning keeps a run's keys for good

    def _evaluates_in_graphs(self) -> bool:
        """Whether evaluation steps run as graphs; the same on all ranks. Replicated parameters need no graph."""
        return False

    @contextlib.contextmanager
    def _eager_evaluation(self) -> Iterator[None]:
        """Around each step that runs eagerly although graphs were asked for; entered by all ranks together."""
        yield

    @abstractmethod
    def _new_evaluation(self) -> EvaluationSteps:
        """The owner of the evaluation steps' graphs."""

    @abstractmethod
    def flush(self) -> None:
        """Bring weights up to date."""

    # ------------------------------------------------------------------ Lightning's steps
    @override
    @names_lost_ranks
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("validation_step", super().validation_step, args, kwargs)

    @override
    @names_lost_ranks
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("test_step", super().test_step, args, kwargs)

    @override
    @names_lost_ranks
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._turns is not None:
            self._take_part(upto=args[2] if len(args) > 2 else 0)
            self._turns.last = args
        return self._evaluated("predict_step", super().predict_step, args, kwargs)

    def _evaluated(self, method: str, eager: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._evaluates_in_graphs():
            return self._eagerly(method, eager, args, kwargs)
        if kwargs:
            raise ConfigurationError(f"{method} was called with keywords ({', '.join(kwargs)}); Lightning passes none")
        try:
            output = self._graphs().evaluate(method, args, turns=self._turns is not None and method == "predict_step")
        except FellBack:
            with self._eager_evaluation():
                return self._eagerly(method, eager, args)
        self._replayed.add(method)
        return output

    def _eagerly(
        self, method: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a step as Lightning does; under the keys of its graphs if it had some."""
        if not self.is_distributed or method not in self._replayed or self.lightning_module is None:
            return step(*args, **(kwargs or {}))
        try:
            rows = Batch(args[0]).rows()
        except BatchError:
            rows = None
        with log_keys_kept(self.lightning_module, rows, self.batches):
            return step(*args, **(kwargs or {}))

    def _graphs(self) -> EvaluationSteps:
        self.flush()
        if self._evaluation is None:
            self._evaluation = self._new_evaluation()
        return self._evaluation

    @property
    def evaluation_captures(self) -> int:
        """Number of graphs built for evaluation since the Trainer began; 0 where it runs eagerly."""
        return 0 if self._evaluation is None else self._evaluation.captures

    @property
    def rechecks(self) -> tuple[int, float]:
        """How often a step was traced again and found to be what its graph does, and the seconds that took."""
        schedules = [graphs.rechecks.schedule for graphs in (self._iteration, self._evaluation) if graphs is not None]
        return sum(s.count for s in schedules), sum(s.spent for s in schedules)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._iteration is not None:
            self._iteration.rechecks.tell()

    # ------------------------------------------------------------------ ranks with different numbers of batches
    @override
    def on_validation_start(self) -> None:
        trainer = self._trainer()
        self._compare(
            "validation", trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        )

    @override
    def on_test_start(self) -> None:
        self._compare("test", self._trainer().num_test_batches)

    @override
    def on_predict_start(self) -> None:
        trainer = self._trainer()
        most = self._compare("predict", trainer.num_predict_batches)
        self._turns = None
        if most is not None:
            self._turns = Turns([int(m - own) for m, own in zip(most, trainer.num_predict_batches, strict=True)])
            trainer.callbacks.insert(0, FinishTurns(self._take_part))

    @override
    def teardown(self) -> None:
        if self.lightning_module is not None:
            callbacks: list[Any] = self._trainer().callbacks
            callbacks[:] = [c for c in callbacks if not isinstance(c, FinishTurns)]
        super().teardown()

    def _trainer(self) -> Any:
        if self.lightning_module is None:
            raise ConfigurationError("there is no LightningModule to evaluate")
        return self.lightning_module.trainer

    def _compare(self, stage: str, batches: Sequence[float]) -> list[float] | None:
        """The largest number of batches of a rank, by dataloader, where the ranks differ; None where they do not."""
        if self._control is None or not self._evaluates_in_graphs():
            return None
        everyone = self._control.gather(list(batches), Place(f"the start of {stage}"))
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

    def _take_part(self, upto: int | None = None) -> None:
        """Take part in the others' steps of the dataloaders before ``upto``; of all if it is None."""
        turns = self._turns
        if turns is None:
            return
        for loader in range(len(turns.owed) if upto is None else upto):
            while turns.owed[loader] > 0:
                turns.owed[loader] -= 1
                batch, *numbers = turns.last
                turns.last = (batch, *[numbers[0] + 1, *numbers[1:]]) if numbers else (batch,)
                try:
                    self._graphs().evaluate("predict_step", turns.last, turns=True, discard=True)
                except FellBack:
                    with self._eager_evaluation():
                        pass
