"""The place of a rank in the run, sent with each exchange, and the error if other ranks are elsewhere.

Lightning gives every rank its own loop. If loops end at different times, one rank goes on to the next batch while
another validates, and both wait for ever. So each batch's exchange says whether the batch is the last one, and ranks
also meet at the ends of epochs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_spmd import _private_api as private
from lightning_spmd.errors import RankDisagreementError
from lightning_spmd.messages import tell, warn
from lightning_spmd.stages.runtime.agreement.control import THE_END, ControlPlane, Place, StepVote
from lightning_spmd.strategy.ranks.alike import check_alike, facts
from lightning_spmd.strategy.ranks.requeue import Requests
from lightning_spmd.strategy.state.new_parameters import NewParameters

_LIMITS = {"training": "limit_train_batches", "validation": "limit_val_batches", "test": "limit_test_batches"}
_LISTENS = 8
"""Batches of an eager validation from one exchange to the next."""
FITTING = TrainerFn.FITTING


@dataclass(frozen=True)
class Moment:
    """The state of a rank at an exchange.

    Args:
        place: the place in the run.
        ends: it has no batch after this one.
        stops: the loop ends here although batches follow, and nothing else needs the other ranks.
        requests: what this process was asked from outside (SIGTERM, requeue). It is sent to the others.
        finish: lets training end after the batch that begins here, as on one device; None: it ends here.
    """

    place: Place
    ends: bool = False
    stops: bool = False
    requests: Requests | None = None
    finish: Callable[[], None] | None = None

    @property
    def told(self) -> int:
        """The requests to this process, as a number."""
        return 0 if self.requests is None else self.requests.told

    def meet(self, control: ControlPlane, flag: bool = False) -> bool:
        """Check that all ranks are here and act on their states (:meth:`check`). Returns whether a rank has a flag."""
        vote = control.vote(self.place, None, int(flag), 0, ends=self.ends, told=self.told)
        self.check(control, vote)
        return vote.rows[1] > 0

    def check(self, control: ControlPlane, vote: StepVote) -> None:
        """Act on the states of all ranks.

        Raises:
            SIGTERMException: on every rank, if one of them received SIGTERM.
            RankDisagreementError: on every rank, if they have different numbers of batches.
        """
        if self.requests is not None:
            try:
                self.requests.hear(vote.told)
            except SIGTERMException:  # on all ranks
                told = [rank for rank, stops in enumerate(control.gather(self.requests.told_to_stop)) if stops]
                after = self.finish is not None
                tell(f"{_ranks(told)} received SIGTERM: all ranks end {'after' if after else 'at'} {self.place}")
                if self.finish is None:
                    raise
                self.finish()
        if vote.ends[0] == vote.ends[1]:
            return
        sides = control.gather((self.ends, self.ends or self.stops))
        if all(fine for _, fine in sides):
            return
        done = [rank for rank, (ends, _) in enumerate(sides) if ends]
        more = [rank for rank, (ends, _) in enumerate(sides) if not ends]
        what = self.place.what
        limit = (
            f"; Trainer({_LIMITS[what]}={(self.place.batch or 0) + 1}) leaves out the rest" if what in _LIMITS else ""
        )
        verb = "has" if len(more) == 1 else "have"
        raise RankDisagreementError(
            f"the ranks have different numbers of {what} batches: {self.place} is the last one of {_ranks(done)}, and "
            f"{_ranks(more)} {verb} more. Every step needs all ranks. Lightning's own sampler gives all the same "
            f"number; an IterableDataset must end after equally many batches on every rank itself{limit}"
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def training_moment(trainer: Any, *, applies: bool, knows_the_end: bool = True) -> Moment:
    """The state of this rank at the current training batch.

    Args:
        trainer: the Trainer.
        applies: whether the batch ends in an optimizer step.
        knows_the_end: whether Lightning knows that batches follow; it does not if training_step fetches them.
    """
    loop = trainer.fit_loop.epoch_loop
    steps = trainer.global_step + int(applies)
    return Moment(
        Place("training", trainer.current_epoch, loop.batch_idx, remark=_remark(trainer)),
        ends=knows_the_end and bool(loop.batch_progress.is_last_batch),
        stops=0 <= trainer.max_steps <= steps and not trainer.enable_validation,
        requests=trainer.strategy.requests,
        finish=functools.partial(private.end_after_this_batch, trainer),
    )


def evaluation_moment(trainer: Any, method: str, arguments: dict[str, Any], *, turns: bool) -> Moment:
    """The state of this rank at the current step of validation, test or prediction.

    Args:
        trainer: the Trainer.
        method: of the LightningModule.
        arguments: of the step, without the batch.
        turns: ranks whose batches have ended take part in the others' steps.
    """
    what = {"validation_step": "validation", "test_step": "test", "predict_step": "prediction"}[method]
    if turns:
        return Moment(Place(what))
    loop = _loop(trainer, method)
    place = Place(what, None, arguments.get("batch_idx"), arguments.get("dataloader_idx", 0), remark=_remark(trainer))
    return Moment(place, ends=bool(loop.batch_progress.is_last_batch), requests=trainer.strategy.requests)


def _loop(trainer: Any, method: str) -> Any:
    if method == "predict_step":
        return trainer.predict_loop
    if method == "test_step":
        return trainer.test_loop
    return trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == TrainerFn.FITTING else trainer.validate_loop


def _remark(trainer: Any) -> str:
    return "trainer.should_stop is set there" if trainer.should_stop else ""


class Borders(Callback):
    """The first callback of a run on several ranks. They meet at ends of epochs and of training, and before validation.

    Args:
        control: exchanges with the other ranks.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._meet = control.meet
        self._alike = False  # the ranks have equally many batches of this validation

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Meet before the user's hooks."""
        place = Place("the start of the validation", trainer.current_epoch, remark=_remark(trainer))
        Moment(place, requests=trainer.strategy.requests).meet(self._control)
        counts = list(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)
        self._alike = all(side == counts for side in self._control.gather(counts)) and trainer.state.fn == FITTING

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Exchange SIGTERM during a long validation."""
        if self._alike and batch_idx % _LISTENS == 0:
            place = Place("the validation", trainer.current_epoch, batch_idx, dataloader_idx)
            Moment(place, requests=trainer.strategy.requests).meet(self._control)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Likewise."""
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        remark = "; ".join(filter(None, [f"after {batches} batches", _remark(trainer)]))
        self._meet(Place(THE_END, trainer.current_epoch, remark=remark))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Meet: a rank that was told to stop between two epochs leaves, and the others would wait for it."""
        self._meet(Place(f"{THE_END} of training", remark=_remark(trainer)))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Likewise."""
        requests = trainer.strategy.requests if trainer.state.fn == FITTING else None
        Moment(Place(f"{THE_END} of the validation"), requests=requests).meet(self._control)

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Likewise."""
        self._meet(Place(f"{THE_END} of the test"))

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Likewise."""
        self._meet(Place(f"{THE_END} of the prediction"))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tell the others before slow work such as saving, because they are waiting."""
        self._control.peers.note(exception)


def meet_at_borders(trainer: Any, control: ControlPlane | None) -> None:
    """Add the callbacks that make ranks meet at ends of epochs and share SIGTERM."""
    if control is not None:
        trainer.callbacks.insert(0, Borders(control))
        private.stop_signal_sent_by_lightning(trainer, False)  # each batch's exchange carries it


def compare_training_batches(module: Any, control: ControlPlane | None) -> None:
    """Compare the numbers of training batches at the start. A difference would end the first epoch, hours later."""
    if control is None:
        return
    sides = control.gather((module.trainer.num_training_batches, facts()), Place("the start of training"))
    check_alike([side for _, side in sides])
    counts = [count for count, _ in sides]
    if len(set(counts)) > 1:
        warn(
            f"the ranks have different numbers of training batches, by rank {counts}: training will end with an error "
            f"after {min(counts)} of them, unless something else ends it before"
        )


def meet_in_training(module: Any, control: ControlPlane | None, new_parameters: NewParameters | None) -> None:
    """Exchange before each batch of the eager path, whose gradient reduction also needs all ranks."""
    if control is not None:
        trainer = module.trainer
        applies = (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0
        fetches_itself = "dataloader_iter" in inspect.signature(module.training_step).parameters
        moment = training_moment(trainer, applies=applies, knows_the_end=not fetches_itself)
        has_new = new_parameters is not None and new_parameters.among_parameters()
        if moment.meet(control, has_new) and new_parameters is not None:
            new_parameters.share()


def meet_after_backward(module: Any, control: ControlPlane, count: int) -> None:
    """Check before gradients are averaged on the eager path that ranks ran equally many backward passes."""
    place = training_moment(module.trainer, applies=False).place
    control.meet(dataclasses.replace(place, what=f"backward pass {count} of training"))
