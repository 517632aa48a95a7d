"""The net below the guards: now and then the step is traced again and compared with the graph that is in use.

Guards see Python values that they know of. What hides from them (a value behind a C object, a file, a clock) would stay
in the graph as it was at capture. So a graph's second use, then each time that the number of its uses has doubled, and
the first use in every epoch, are traced again on fake tensors before they run. If the trace differs from the graph:

* no step ran since it was known to be right: no number is wrong yet. The graph is built anew, with a warning that names
  the line; where that does not help either, the iteration runs eagerly from there on.
* steps ran in between: they may have used the old value, which nobody can mend. An error names the line and the steps.

The cost is bounded by :class:`Schedule`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_spmd.ir.reads import decides_as
from lightning_spmd.ir.same_step import Difference, difference_at_capture, first_difference
from lightning_spmd.ir.same_value import shown
from lightning_spmd.messages import batch_hook, place_of, tell, warn
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.strategy.building import GraphBuilder
from lightning_spmd.strategy.run_context import RunContext, StepRequest

# Tracing again may take these seconds and this share of the run; 1 % is what it and the guards may cost together.
ALLOWANCE_SECONDS = 0.4
SHARE = 0.003
# However long an epoch is: never longer than this without a look (where steps take that long).
LONGEST_GAP_SECONDS = 3600.0


@dataclass
class Watch:
    """What is known about one graph.

    Args:
        step: ``global_step`` when it was last known to be right.
        epoch: the epoch then.
        uses: how often it was asked for.
        right: the last use of which it is known to be right; the first one was captured for it.
        again: the use at which to look again.
    """

    step: int
    epoch: int
    uses: int = 1
    right: int = 1
    again: int = 2


class Schedule:
    """When to trace again: the same on all ranks, because it counts steps and knows only times that all agreed on.

    A graph's second use is always looked at: a value that changes from step to step is found before it did harm. The
    others wait until the time spent is at most :data:`ALLOWANCE_SECONDS` and :data:`SHARE` of the run, then they are
    made up for.
    """

    def __init__(self) -> None:
        self.count = 0
        self.spent = 0.0
        self.elapsed = 0.0
        self._steps = 0
        self._seconds_a_step = 0.0
        self._cost = 0.0
        self._counted = 0

    def is_due(self, watch: Watch, epoch: int) -> bool:
        """Whether to look at a graph before its next use."""
        if watch.uses + 1 < watch.again and epoch == watch.epoch:
            return False
        return watch.right == 1 or self.spent + self._cost <= ALLOWANCE_SECONDS + SHARE * self.time_so_far(1)

    def count_use(self, watch: Watch) -> None:
        """A graph is used once more."""
        watch.uses += 1
        self._steps += 1

    def time_so_far(self, further: int = 0) -> float:
        """The run's seconds after some further steps, estimated from the last ones that the ranks agreed on."""
        return self.elapsed + self._seconds_a_step * (self._steps + further - self._counted)

    def looked(self, watch: Watch, step: int, epoch: int, seconds: float, elapsed: float) -> None:
        """A graph was found to be right.

        Args:
            watch: of the graph.
            step: ``global_step``.
            epoch: the current epoch.
            seconds: that looking took.
            elapsed: of the run.
        """
        self.count += 1
        self.spent += seconds
        self._cost = seconds
        self._seconds_a_step = (elapsed - self.elapsed - seconds) / max(1, self._steps - self._counted)
        self.elapsed, self._counted = elapsed, self._steps
        watch.step, watch.epoch, watch.right = step, epoch, watch.uses
        longest = LONGEST_GAP_SECONDS / self._seconds_a_step if self._seconds_a_step > 0 else math.inf
        watch.again = watch.uses + max(1, int(min(watch.uses, longest)))


@dataclass(frozen=True)
class Stale:
    """A graph that does not do any more what Python would do.

    Args:
        text: the difference, for the user.
        harmless: whether no step can have used what is out of date.
        here: whether it is this rank's graph; ranks with graphs of their own may differ in that.
    """

    text: str
    harmless: bool
    here: bool = True


class Rechecks:
    """Looks after the graphs of one run.

    Args:
        context: what they were made in.
        builder: what they were made by.
        schedule: shared with other graphs of the run.
    """

    def __init__(self, context: RunContext, builder: GraphBuilder, schedule: Schedule | None = None) -> None:
        self.schedule = schedule or Schedule()
        self._context = context
        self._builder = builder
        self._watches: dict[int, Watch] = {}
        self._started: float | None = None
        self._told_about_prints = False

    def begin(self, index: int) -> None:
        """A graph was built for the step that runs now."""
        if self._started is None:
            self._started = time.perf_counter()
        trainer = self._context.trainer
        self._watches[index] = Watch(trainer.global_step, trainer.current_epoch)

    def is_due(self, index: int) -> bool:
        """Whether to look at a graph before its next use; all ranks say the same."""
        return self.schedule.is_due(self._watches[index], self._context.trainer.current_epoch)

    def count_use(self, index: int) -> None:
        """A graph is used once more; all ranks count alike."""
        watch = self._watches[index] = self._watches.pop(index)  # the last one in the order of their use
        self.schedule.count_use(watch)

    def unused_for_longest(self, most: int) -> list[int]:
        """The graphs beyond so many, which are looked after no more; all ranks say the same."""
        gone = list(self._watches)[: max(0, len(self._watches) - most)]
        for index in gone:
            del self._watches[index]
        return gone

    def look(
        self, index: int | None, executable: Executable | None, request: StepRequest, split: tuple[int, ...]
    ) -> Stale | None:
        """Trace a step again, whose guards hold, and compare; all ranks do so together and get the same answer.

        Args:
            index: of the graph that would run it; None: this rank has nothing to look at, others do.
            executable: that graph.
            request: the step.
            split: rows of the global batch by data rank.

        Raises:
            BatchError: on all ranks; some that must hold the same batch do not.
        """
        control = self._context.control
        watch = Watch(0, 0) if index is None else self._watches[index]
        begun = time.perf_counter()
        self._builder.check_same_batch(request)
        found = None if executable is None else self._difference(executable, request, split)
        now = time.perf_counter()
        harmless = watch.uses == watch.right + 1
        mine = (now - begun, now - (self._started or begun), None if found is None else str(found), harmless)
        sides = [mine] if control is None else control.gather(mine)
        texts = {rank: text for rank, (_, _, text, _) in enumerate(sides) if text is not None}
        if not texts:
            trainer = self._context.trainer
            seconds = max(seconds for seconds, *_ in sides)
            self.schedule.looked(watch, trainer.global_step, trainer.current_epoch, seconds, sides[0][1])
            return None
        rank, text = min(texts.items())
        where = "" if len(texts) == len(sides) else f" (on rank {rank})"
        all_harmless = all(sides[r][3] for r in texts)
        return Stale(self._told(request, watch, text, where), all_harmless, here=found is not None)

    def tell(self) -> None:
        """At the end of a run: how often that was, and what it cost."""
        if self._started is not None and self.schedule.count:
            times = "once" if self.schedule.count == 1 else f"{self.schedule.count} times"
            spent, elapsed = self.schedule.spent, time.perf_counter() - self._started
            tell(
                f"strategy='spmd' traced the step again {times} and found its graphs up to date "
                f"({spent:.2f} s, {spent / elapsed:.1%} of the run)"
            )

    # ------------------------------------------------------------------ pieces
    def _difference(
        self, executable: Executable, request: StepRequest, split: tuple[int, ...]
    ) -> Difference | str | None:
        tensors = [] if request.batch is None else request.batch.tensor_values
        try:
            if not decides_as(executable.captured_for(tensors), lambda: executable.inputs(tensors)):
                return None  # what Python compares the numbers of the capture with has moved on
            with _silent() as printed:
                traced = self._builder.capture(request, split, executable.captured.answers)
            self._tell_about_prints(request, "".join(printed))
            used = executable.captured_for(tensors)
            live = functools.partial(executable.inputs, tensors)
            if used.host_values:  # constants of the trace
                found = difference_at_capture(used, traced, live())
            else:
                found = first_difference(used, traced, live=live)
            if found is None or found.source:
                return found
            method = getattr(type(self._context.module), request.variant.method)
            return dataclasses.replace(found, source=place_of(method).strip(" ()"))
        except Exception as error:  # the others wait for this rank's answer, whatever happened
            return f"  now it cannot be captured any more: {error}"

    def _tell_about_prints(self, request: StepRequest, printed: str) -> None:
        if not printed.strip() or self._told_about_prints:
            return
        self._told_about_prints = True
        warn(
            f"{request.variant.method} prints ({shown(printed.strip().splitlines()[0], 60)}): that happens when it is "
            "traced and not at each step; print() and self.print happen at each step"
        )

    def _told(self, request: StepRequest, watch: Watch, text: str, where: str) -> str:
        name = request.variant.method if request.variant.forward else "the optimizer's step"
        told = f"{name} does something else than its graph{where}, and no value that is watched has changed:\n{text}\n"
        unsure = watch.uses - watch.right - 1
        if unsure:
            steps = "1 step was" if unsure == 1 else f"{unsure} steps were"
            told += f"The graph was right at step {watch.step}; {steps} made with it since, perhaps with an old value. "
        return told + (
            "Values behind objects of C, files, clocks and iterators cannot be watched: keep what changes in a buffer "
            f"or a plain attribute of the module, or move the statement to a hook such as {batch_hook('end')}"
        )


class _Others:
    """Standard output for the other threads.

    Args:
        target: where they write to.
        dropped: receives what this thread writes.
    """

    def __init__(self, target: Any, dropped: list[str]) -> None:
        self._target = target
        self._dropped = dropped
        self._muted = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def write(self, text: str) -> int:
        """As of a file."""
        if threading.get_ident() != self._muted:
            return self._target.write(text)
        self._dropped.append(text)
        return len(text)


@contextlib.contextmanager
def _silent() -> Iterator[list[str]]:
    """What this thread prints inside goes into the list, and nowhere else."""
    before: Any = sys.stdout
    printed: list[str] = []
    sys.stdout = _Others(before, printed)
    try:
        yield printed
    finally:
        sys.stdout = before


# NOIMPORT
