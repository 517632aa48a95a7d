"""All operators of torch's database, checked one after the other, by several processes.

``python -m tests.operators`` runs it and prints what came of each; ``--write docs/operators.md`` makes the table.
"""

from __future__ import annotations

import logging
import multiprocessing
import queue
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from tests.operators.cases import Sample, Split, operators, samples, splits_of_parameters, splits_of_rows
from tests.operators.check import CRASHED, Checker, Outcome

Side: TypeAlias = Literal["rows", "parameters", "in place"]
SIDES: tuple[Side, ...] = ("rows", "parameters", "in place")


@dataclass(frozen=True)
class Result:
    """One check.

    Args:
        operator: the operator's name in the database.
        side: what was split.
        call: the sample, readable.
        number: which sample of the operator.
        split: how its tensors were split, readable.
        outcome: what came of it.
    """

    operator: str
    side: Side
    call: str
    number: int
    split: str
    outcome: Outcome

    def __str__(self) -> str:
        head = f"{self.outcome.kind:10} {self.operator} #{self.number}, {self.split}"
        return f"{head}: {self.outcome.reason}\n           {self.call[:300]}" if self.outcome.reason else head


@dataclass(frozen=True)
class Task:
    """What one process does at a time.

    Args:
        operator: the operator's name.
        side: what is split.
        count: number of samples; None: all.
        every: every split of every sample.
    """

    operator: str
    side: Side
    count: int | None = 4
    every: bool = False


def run_task(task: Task) -> list[Result]:
    """Check the samples of one operator."""
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # shape functions log what they refuse, with a trace
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(_results(task))


def _results(task: Task) -> Iterator[Result]:
    found = samples(operators()[task.operator], task.count, in_place=task.side == "in place")
    for turn, sample in enumerate(found):
        checkers: dict[tuple[int, ...], Checker] = {}
        for split in _splits(task, sample, turn):
            if split.batch not in checkers:
                checkers[split.batch] = Checker(sample, split.batch)
            outcome = checkers[split.batch].check(split)
            yield Result(task.operator, task.side, str(sample), sample.number, str(split), outcome)


def _splits(task: Task, sample: Sample, turn: int) -> list[Split]:
    if task.side == "parameters":
        return splits_of_parameters(sample, every=task.every)
    return splits_of_rows(sample, turn, every=task.every)


def tasks(
    pattern: str = ".*", sides: Sequence[Side] = SIDES, count: int | None = 4, *, every: bool = False
) -> list[Task]:
    """What there is to do for the operators whose names match."""
    names = [name for name in sorted(operators()) if re.fullmatch(pattern, name)]
    return [Task(name, side, count, every) for side in sides for name in names]


def sweep(todo: Sequence[Task], processes: int) -> Iterator[Result]:
    """The results of all tasks, as they come in; a kernel that ends its process is one of them."""
    waiting = iter(list(todo))
    lock = threading.Lock()
    done: queue.SimpleQueue[list[Result] | None] = queue.SimpleQueue()

    def work() -> None:
        pool = _one_process()
        while True:
            with lock:
                task = next(waiting, None)
            if task is None:
                break
            try:
                done.put(pool.submit(run_task, task).result())
            except BrokenProcessPool:
                outcome = Outcome(CRASHED, "the process ended (see `python -X faulthandler -m tests.operators --here`)")
                done.put([Result(task.operator, task.side, task.operator, -1, "", outcome)])
                pool = _one_process()
        pool.shutdown()
        done.put(None)

    threads = [threading.Thread(target=work) for _ in range(processes)]
    for thread in threads:
        thread.start()
    while processes:
        results = done.get()
        if results is None:
            processes -= 1
        else:
            yield from results
    for thread in threads:
        thread.join()


def _one_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
