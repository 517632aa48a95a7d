"""Near a SLURM job's time limit: writes a checkpoint between two batches and requeues the job.

Lightning answers the signal in its handler, wherever the process is: in a graph, in a collective, in a trace. Ranks at
different places then wait for each other until SLURM ends them. Here the handler only notes the signal, every batch's
exchange carries the note (``Requests``), and all ranks act at the end of the same batch. ``early_signals.py`` notes
the signal from the first line of the program on. The checkpoint is the one that Lightning would write:
``hpc_ckpt_N.ckpt`` in ``default_root_dir``. The restarted job resumes from it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_spmd import _private_api as private
from lightning_spmd import early_signals
from lightning_spmd.messages import tell, warn
from lightning_spmd.stages.runtime.agreement.control import ControlPlane, Place
from lightning_spmd.strategy.checkpoints.resumed_data import KEY, EpochData
from lightning_spmd.strategy.ranks.slurm import FIT, JOB, SlurmLauncher, job_name
from lightning_spmd.strategy.state.random_state import RandomState, pack_random_state

_LONGEST_WAIT = 600.0
_REQUEUE, _STOP = 1, 2


def signal_of(cluster: Any) -> int | None:
    """The signal by which SLURM announces the time limit; None if this package should not answer it."""
    if not isinstance(cluster, SLURMEnvironment) or not cluster.auto_requeue or cluster.requeue_signal is None:
        return None
    return int(cluster.requeue_signal) if early_signals.watch(cluster.requeue_signal) else None


class Requests:
    """Requests from outside to end (SIGTERM) or to return to SLURM's queue: this process's, and what all ranks know.

    Args:
        trainer: the Trainer.
        requeue_signal: the signal by which SLURM announces the time limit; None if there is none.

    Attributes:
        to_requeue: all ranks know that the job is to be requeued. They write a checkpoint at the end of this batch.
        answered: they have done so, and SLURM is about to end the job.
    """

    def __init__(self, trainer: Any, requeue_signal: int | None) -> None:
        self._trainer = trainer
        self.requeue_signal = requeue_signal
        self.to_requeue = False
        self.answered = False

    @property
    def told(self) -> int:
        """The requests to this process as a number; the largest of all ranks counts."""
        requeue = self.requeue_signal is not None and not self.answered and early_signals.received(self.requeue_signal)
        return _REQUEUE * requeue + _STOP * self.told_to_stop

    @property
    def told_to_stop(self) -> bool:
        """Whether this process received SIGTERM."""
        return private.told_to_stop(self._trainer)

    def hear(self, told: int) -> None:
        """Act on the requests of all ranks.

        Raises:
            SIGTERMException: on every rank, if one of them received SIGTERM and nothing has to be done first.
        """
        if told & _REQUEUE and self.requeue_signal is not None and not self.answered:
            self.to_requeue = True
        if told & _STOP and not self.to_requeue:
            raise SIGTERMException


class Requeue(Callback):
    """The last callback of a run under SLURM. It acts when all ranks are between two batches.

    Args:
        requests: the requests to the run.
        control: the other ranks; None on one device.
        random: random state of the run.
    """

    def __init__(self, requests: Requests, control: ControlPlane | None, random: RandomState) -> None:
        self._requests = requests
        self._control = control
        self._random = random
        self._first = True
        self._validated = False
        self._meets_in_evaluation = False
        self._before_validation: dict[str, Any] | None = None
        self._saves = False
        self.data = EpochData(control, random)

    # ------------------------------------------------------------------ between batches
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Requeue without a checkpoint if the signal came before the first batch, which may take minutes."""
        if self._first and self._ask("the first batch of this start"):
            self._act(trainer, save=False)
        self._first = False

    def end_of_batch(self, trainer: Any, original: Callable[..., None], *args: Any) -> None:
        """Act at the end of a batch, in place of Lightning, which may start a validation there.

        After a validation, in the middle of an accumulation and after an epoch's last batch a resumed run would differ
        from an uninterrupted one. There the end of the next batch is awaited.
        """
        self._validated = False
        self._before_validation = pack_random_state(self._random.streams, trainer.lightning_module)
        original(*args)
        self._before_validation = None
        private.goes_on_as_ever(trainer)
        if self._control is None:
            self._requests.hear(self._requests.told & 1)
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self._requests.to_requeue and not (self._validated or last or private.accumulates(trainer)):
            self._act(trainer, save=True)

    # ------------------------------------------------------------------ in evaluation
    def _evaluation_begins(self, trainer: Any, batches: Any) -> None:
        """Ranks meet before each batch if they have as many."""
        counts = list(batches)
        sides = [counts] if self._control is None else self._control.gather(counts, Place("the start of evaluation"))
        alike = all(side == counts for side in sides) and all(isinstance(n, int) for n in counts)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._meets_in_evaluation = alike and not (fitting and private.accumulates(trainer))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Act before a validation. The one before training leaves requests to the first training batch."""
        self._validated = True
        if trainer.sanity_checking:
            self._meets_in_evaluation = False
        else:
            self._evaluation_begins(trainer, trainer.num_val_batches)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Act before each batch of a validation."""
        if self._meets_in_evaluation and self._ask("a batch of evaluation"):
            self._act(trainer, save=trainer.global_step > 0)

    on_test_batch_start = on_validation_batch_start
    on_predict_batch_start = on_validation_batch_start

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """As validation."""
        self._evaluation_begins(trainer, trainer.num_test_batches)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """As validation."""
        self._evaluation_begins(trainer, trainer.num_predict_batches)

    def _ask(self, what: str) -> bool:
        """Whether the job is to be requeued, at a place where all ranks are."""
        requests, told = self._requests, self._requests.told
        if self._control is not None:
            told = self._control.vote(Place(what), None, 0, 0, told=told).told
        requests.hear(told)
        return requests.to_requeue

    # ------------------------------------------------------------------ what follows
    def _act(self, trainer: Any, *, save: bool) -> None:
        """Write a checkpoint, ask SLURM to start the job again, and wait for the end; all ranks together.

        If SLURM refuses, a warning says so, and the run goes on.

        Raises:
            SIGTERMException: SLURM ends the job.
        """
        requests, strategy = self._requests, trainer.strategy
        for logger in trainer.loggers:
            logger.finalize("finished")
        where = f"the checkpoint is {self._save(trainer)}" if save else "nothing was trained since the job's start"
        problem = strategy.broadcast(_requeue(requests) if trainer.is_global_zero else None)
        requests.to_requeue = False
        if requests.requeue_signal is not None:
            early_signals.forget(requests.requeue_signal)
        if problem is not None:
            warn(f"SLURM does not start this job again: {problem}. The run goes on until its time is over; {where}")
            return
        requests.answered = True
        tell(f"SLURM starts job {job_name()} again when there is room for it; {where}")
        until = time.monotonic() + _LONGEST_WAIT
        while not requests.told_to_stop and time.monotonic() < until:
            time.sleep(0.05)
        raise SIGTERMException

    def _save(self, trainer: Any) -> str:
        """Write the checkpoint under another name, then rename it: a job that dies meanwhile leaves what was there."""
        strategy = trainer.strategy
        path = str(strategy.broadcast(private.requeue_checkpoint(trainer)))
        here = "://" not in path
        partial = str(Path(path).with_name("unfinished_requeue.ckpt")) if here else path
        self._saves = True
        try:
            trainer.save_checkpoint(partial, weights_only=False)
        finally:
            self._saves = False
        strategy.checkpoint_io.teardown()  # AsyncCheckpointIO has written then
        strategy.barrier("the checkpoint is written")
        if here and trainer.is_global_zero:
            os.replace(partial, path)
        return path

    def complete(self, trainer: Any, checkpoint: dict[str, Any], entry: dict[str, Any]) -> None:
        """Add to a checkpoint what a restarted job needs; all ranks together.

        A checkpoint written during a validation is stored as one from before the validation.
        """
        if not self._saves:
            return
        entry[JOB], entry[FIT], entry[KEY] = job_name(), SlurmLauncher.fits, self.data.entry()
        if self._before_validation is not None and trainer.validating:
            private.validate_from_the_start(checkpoint)
            entry["random_state"], entry["within_epoch"] = self._before_validation, True


def _requeue(requests: Requests) -> str | None:
    """Ask SLURM to start the job again; what is wrong with that."""
    command = ["scontrol", "requeue", str(job_name())]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{' '.join(command)}` fails: {error}"
    if done.returncode == 0 or requests.told_to_stop:  # then the command was ended together with the job
        return None
    return f"`{' '.join(command)}` fails: {done.stdout.strip()}"


# ---------------------------------------------------------------------- from setup to teardown
def leave_signals_to_other_strategies() -> None:
    """Let Lightning answer SLURM's signal for other strategies, unless a handler is installed already."""
    if early_signals.is_watching():
        private.when_signals_are_answered(lambda t: [] if _is_answered(t) else early_signals.release())


def _is_answered(trainer: Any) -> bool:
    requests = getattr(trainer.strategy, "requests", None)
    return isinstance(requests, Requests) and requests.requeue_signal is not None


def begin_requests(trainer: Any, control: ControlPlane | None, random: RandomState) -> tuple[Requests, Requeue | None]:
    """Set up the requests of a run, and the callback that answers SLURM."""
    requests = Requests(trainer, signal_of(trainer.strategy.cluster_environment))
    if requests.requeue_signal is None:
        return requests, None
    requeue = Requeue(requests, control, random)
    trainer.callbacks.append(requeue)
    private.around_training_loop(trainer, "on_advance_end", functools.partial(requeue.end_of_batch, trainer))
    private.around_training_loop(trainer, "on_run_start", functools.partial(requeue.data.begin_epoch, trainer))
    return requests, requeue
