"""One case under one strategy, as data: what came of the weights, of Python and of what it wrote."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import math
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import torch
from torch import Tensor

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, fit
from tests.untidy.cases import CASES
from tests.untidy.untidy import ROWS, STEPS, Untidy, samples

NEAR = 1e-5
"""How far ranks may be from one device: relative, of numbers that are smaller than one absolute."""
_ROUNDED = 0.011
"""The same of numbers in a text, which has two digits of them or more."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@dataclass
class Outcome:
    """What one fit left behind; it travels between processes.

    Args:
        result: losses, logged values, weights, buffers, the optimizer's state.
        kept: what the case says that Python has.
        text: what was printed.
        random_states: digests of those of ``random``, NumPy and torch at the end.
        runs: how often Python ran ``training_step``.
        graph_steps: steps that a graph ran.
        seconds: of the fit.
    """

    result: Result
    kept: Any
    text: str
    random_states: dict[str, str]
    runs: int
    graph_steps: int
    seconds: float

    @property
    def how(self) -> str:
        """``graph``, ``eager``, or how many steps of the fit were graphs."""
        return {0: "eager", STEPS: "graph"}.get(self.graph_steps, f"graph {self.graph_steps}/{STEPS}")


def run_case(name: str, strategy: str, devices: int = 1, accelerator: str = "cpu") -> Outcome:
    """Fit the case for STEPS steps.

    Args:
        name: in CASES.
        strategy: of the Trainer.
        devices: ranks; for more than one this is one of them, as in a RankPool.
        accelerator: of the Trainer.
    """
    kind, text, ran = CASES[name], io.StringIO(), _HowItRan()
    with tempfile.TemporaryDirectory() as folder, _set_back(folder), _counted(kind, folder) as runs:
        L.seed_everything(11, verbose=False)
        module = kind()
        data = InOrder(_by_rank(samples(), devices), ROWS)
        flags = {"max_epochs": 1, "default_root_dir": folder, "logger": module.made_loggers(Path(folder))}
        flags["accelerator"] = accelerator
        begun = time.perf_counter()
        with contextlib.redirect_stdout(text):
            result, _ = fit(module, data, strategy, devices, [ran], **flags)
        seconds = time.perf_counter() - begun
        kept, states = module.kept(), _random_states()
        return Outcome(result, kept, text.getvalue(), states, runs(), ran.graph_steps, seconds)


def run_on_ranks(name: str, pool: RankPool) -> list[Outcome]:
    """The case under ``spmd`` on all ranks of the pool, whose batches together are one device's, row by row."""
    return run_all_on_ranks([name], pool)[name]


def run_all_on_ranks(names: Sequence[str], pool: RankPool) -> dict[str, list[Outcome]]:
    """:func:`run_on_ranks` of several cases, one after the other, with one call of the ranks."""
    ranks = pool.run(_run_cases, names, pool.size)
    return {name: [outcomes[name] for outcomes in ranks] for name in names}


def _run_cases(names: Sequence[str], devices: int) -> dict[str, Outcome]:
    return {name: run_case(name, "spmd", devices) for name in names}


class _HowItRan(L.Callback):
    """Counts the steps that a graph ran."""

    graph_steps = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        accounts = getattr(trainer.strategy, "accounts", None)
        self.graph_steps += accounts is not None and accounts.ran.executable is not None


@contextlib.contextmanager
def _counted(kind: type[Untidy], folder: str) -> Iterator[Any]:
    """Count the runs of a class's ``training_step``, in a file: nothing in Python can be set back or made again."""
    step = kind.training_step
    with open(Path(folder) / "runs", "wb", buffering=0) as file:
        number = file.fileno()

        @wraps(step)
        def counted(self: Untidy, *args: Any, **kwargs: Any) -> Any:
            os.write(number, b".")
            return step(self, *args, **kwargs)

        with mock.patch.object(kind, "training_step", counted):
            yield lambda: os.fstat(number).st_size


@contextlib.contextmanager
def _set_back(folder: str) -> Iterator[None]:
    """What a case changes of the process is as before behind it."""
    before, place = torch.get_default_dtype(), os.getcwd()
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ):
            yield
    finally:
        os.chdir(place)
        torch.set_default_dtype(before)


def _by_rank(rows: list[Any], ranks: int) -> list[Any]:
    """In an order in which every ``ranks``-th row of a batch is a block of it: ranks' rows together are in order."""
    each = ROWS // ranks
    order = [
        batch + rank * each + i for batch in range(0, len(rows), ROWS) for i in range(each) for rank in range(ranks)
    ]
    return [rows[place] for place in order]


def _random_states() -> dict[str, str]:
    _, keys, *rest = np.random.get_state()
    states = {
        "random": repr(random.getstate()),
        "numpy": repr((keys.tolist(), *rest)),  # type: ignore[union-attr]
        "torch": repr([torch.get_rng_state().tolist(), [state.tolist() for state in torch.cuda.get_rng_state_all()]]),
    }
    return {name: hashlib.sha256(state.encode()).hexdigest() for name, state in states.items()}


# ---------------------------------------------------------------------- comparing
def differences(ours: Outcome, theirs: Outcome, near: float = 0.0) -> list[str]:
    """What differs, in words; how often Python ran is not among it.

    Args:
        ours: a run.
        theirs: the reference.
        near: how far numbers may be apart, relative above one and absolute below; 0: they are the same bits. Ranks
            draw torch's numbers from streams of their own, so torch's state counts only with 0.
    """
    found: list[str] = []
    for name in ("losses", "logged", "to_logger", "final", "weights", "optimizer_state"):
        found += _first(getattr(ours.result, name), getattr(theirs.result, name), near, name)
    found += _first(ours.kept, theirs.kept, near, "kept")
    found += _text(ours.text, theirs.text, near, "text")
    for name, state in theirs.random_states.items():
        if (near == 0 or name != "torch") and ours.random_states[name] != state:
            found.append(f"state of {name}")
    return found


def disagreements(outcomes: list[Outcome]) -> list[str]:
    """What differs between ranks: none of their weights may."""
    return [f for other in outcomes[1:] for f in _first(other.result.weights, outcomes[0].result.weights, 0, "ranks")]


def _first(ours: Any, theirs: Any, near: float, path: str) -> list[str]:
    """Where two values differ first."""
    if isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        return _first(ours.tolist(), theirs.tolist(), near, path) if same else [f"{path}: {_kind(ours)}"]
    if type(ours) is not type(theirs):
        return [f"{path}: {_short(ours)}, not {_short(theirs)}"]
    if isinstance(theirs, dict):
        if list(ours) != list(theirs):
            return [f"{path}: keys {_short(list(ours))}, not {_short(list(theirs))}"]
        return next((found for key in theirs if (found := _first(ours[key], theirs[key], near, f"{path}.{key}"))), [])
    if isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return [f"{path}: {len(ours)} items, not {len(theirs)}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next((found for i, (a, b) in pairs if (found := _first(a, b, near, f"{path}[{i}]"))), [])
    if isinstance(theirs, str):
        return _text(ours, theirs, near, path)
    same = _same_number(ours, theirs, near) if isinstance(theirs, float) else ours == theirs
    return [] if same else [f"{path}: {_short(ours)}, not {_short(theirs)}"]


def _same_number(ours: float, theirs: float, near: float) -> bool:
    if near and math.isfinite(theirs):
        return abs(ours - theirs) <= near * max(1.0, abs(theirs))
    return repr(ours) == repr(theirs)


def _text(ours: str, theirs: str, near: float, path: str) -> list[str]:
    """Where two texts differ first; ranks may round a number in one otherwise."""
    if near:
        words = _first(_NUMBER.split(ours), _NUMBER.split(theirs), 0, path)
        numbers = [[float(number) for number in _NUMBER.findall(text)] for text in (ours, theirs)]
        return words or _first(*numbers, _ROUNDED, path)
    lines = enumerate(itertools.zip_longest(ours.splitlines(), theirs.splitlines()), 1)
    return next(([f"{path}, line {i}: {_short(a)}, not {_short(b)}"] for i, (a, b) in lines if a != b), [])


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
