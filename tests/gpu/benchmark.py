"""GPT-2 under this strategy, Lightning, Lightning with ``torch.compile``, and a hand-written compiled loop.

The sides take turns in one process. A side keeps its module between turns, so what was compiled is compiled once; while
another side has its turn, its module lies on the host. All have fused AdamW and bf16-mixed.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_spmd import SPMDStrategy, messages
from lightning_spmd.report.peak_memory import PeakMemory
from tests.gpu.child import Setting, settle
from tests.gpu.models import CASES, GPT2, TOYS, ByLogits, Case, Trained, flops_per_token, loader

ROUNDS, TRACED = 2, 3
LONGEST_FIRST = 25.0
"""Seconds that must be left for a side to begin: it may have to be compiled."""
OPTIONS: dict[str, dict[str, Any]] = {
    "spmd": {},
    "spmd, regions": {"lowering": "inductor"},
    "spmd, CUDA graphs": {"cuda_graphs": True},
    "spmd, both": {"lowering": "inductor", "cuda_graphs": True},
    "spmd, regions, loss in chunks": {"lowering": "inductor", "loss_chunks": 8},
}
"""Sides of this strategy; those with an option that it has not are left out."""


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Of every side."""
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


class Clock:
    """Follows one turn: the time of the first step, of a window of steps, and the memory of these.

    Nothing is waited for inside of the window, so the host runs as far ahead as the side lets it.

    Args:
        setting: device and folders.
        case: how long.
        trace: where the Chrome trace of the steps behind the window goes; None: none is made.
    """

    def __init__(self, setting: Setting, case: Case, trace: Path | None) -> None:
        self._device, self._case, self._trace = setting.device, case, trace
        self._memory = PeakMemory()
        self._created = time.perf_counter()
        self._began = 0.0
        self._marks: list[Any] = []
        self._profiler: Any = None
        self.found: dict[str, Any] = {}
        self.loss: Tensor | None = None

    @property
    def steps(self) -> int:
        """Of the whole turn."""
        return self._case.warmup + self._case.steps + (TRACED if self._trace else 0) + 1

    def begin(self, number: int) -> None:
        """A step begins."""
        first, behind = self._case.warmup, self._case.warmup + self._case.steps
        if number == first:
            settle(self._device)
            self._memory.begin(torch.device(self._device))
            self._began = time.perf_counter()
        if first <= number <= behind:
            self._mark()
        if number == behind:
            self._end_window()
        if number == behind + TRACED and self._profiler is not None:
            settle(self._device)
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._trace))
            self._profiler = None

    def end(self, number: int, loss: Tensor) -> None:
        """A step has been issued."""
        if number == 0:
            settle(self._device)
            self.found["first_step_seconds"] = time.perf_counter() - self._created
        self.loss = loss

    def _mark(self) -> None:
        if self._device == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def _end_window(self) -> None:
        settle(self._device)
        self.found["seconds"] = time.perf_counter() - self._began
        pairs = zip(self._marks, self._marks[1:], strict=False)
        on_gpu = self._device == "cuda"
        self.found["step_seconds"] = [1e-3 * a.elapsed_time(b) if on_gpu else b - a for a, b in pairs]
        self.found["peak_bytes"] = self._memory.peak()
        if on_gpu:
            self.found["reserved_bytes"] = torch.cuda.max_memory_reserved()  # with the pools of CUDA graphs
        if self._trace is not None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()


class _Marks(L.Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.clock.begin(batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.end(batch_idx, outputs["loss"])


def lightning(setting: Setting, case: Case, strategy: Callable[[], Any], *, compile_it: bool) -> Callable[..., str]:
    """A side that is a Trainer; what it gives takes a turn with a clock."""
    module = Trained(ByLogits(seeded(case)), optimizer_of)
    trained: Any = torch.compile(module) if compile_it else module

    def turn(clock: Clock) -> str:
        flags = {**setting.trainer_flags, "max_steps": clock.steps, "precision": "bf16-mixed"}
        trainer = L.Trainer(strategy=strategy(), callbacks=[_Marks(clock)], **flags)
        trainer.fit(trained, loader(case, clock.steps, setting.device))
        return str(getattr(trainer.strategy, "mode", ""))

    return turn


def hand_written(setting: Setting, case: Case) -> Callable[..., str]:
    """The loop that one would write by hand for speed."""
    network = seeded(case)
    compiled = torch.compile(network)

    def turn(clock: Clock) -> str:
        network.to(setting.device).train()
        optimizer = optimizer_of(network.parameters())
        for number, (tokens, targets) in enumerate(loader(case, clock.steps, setting.device)):
            clock.begin(number)
            x, y = (t.to(setting.device, non_blocking=True) for t in (tokens, targets))
            with torch.autocast(setting.device, torch.bfloat16):
                loss = F.cross_entropy(compiled(x).flatten(0, -2), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            clock.end(number, loss.detach())
        network.to("cpu")
        for parameter in network.parameters():
            parameter.grad = None
        return ""

    return turn


def seeded(case: Case) -> GPT2:
    """The network, with the same weights for every side."""
    torch.manual_seed(5)
    return GPT2(case)


def sides(setting: Setting, case: Case) -> dict[str, Callable[..., Callable[..., str]]]:
    """Name → function that makes the side."""
    known = inspect.signature(SPMDStrategy).parameters
    found: dict[str, Any] = {
        "lightning": lambda: lightning(setting, case, lambda: "auto", compile_it=False),
        "lightning, compiled": lambda: lightning(setting, case, lambda: "auto", compile_it=True),
        "hand-written, compiled": lambda: hand_written(setting, case),
    }
    for name, options in OPTIONS.items():
        if options.keys() <= known.keys():
            made = lambda options=options: SPMDStrategy(**options)  # noqa: E731
            found[name] = lambda made=made: lightning(setting, case, made, compile_it=False)
    return {name: side for name, side in found.items() if not setting.sides or name in setting.sides}


def compare(setting: Setting, name: str) -> dict[str, Any]:
    """All sides in turn, forwards and then backwards."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    case = (TOYS if setting.toy else CASES)[name]
    facts = {"kind": "benchmark", "case": {**vars(case), "flops_per_token": flops_per_token(GPT2(case), case)}}
    facts["attention"] = attention_kernel(setting, case)
    rows: dict[str, dict[str, Any]] = {}
    ready: dict[str, Callable[..., str]] = {}
    made = sides(setting, case)
    for number in range(ROUNDS):
        for side in list(made) if number == 0 else list(reversed(made)):
            row = rows.setdefault(side, {"side": side, "turns": []})
            if "error" in row:
                continue
            trace = setting.traces / f"{name}_{_file_name(side)}.json.gz" if number == 0 else None
            expected = LONGEST_FIRST if number == 0 else 1.5 * row["longest"]
            if time.monotonic() + expected > setting.deadline:
                if number == 0:
                    row["error"] = "not run: the part's time is up"
                continue
            began = time.monotonic()
            try:
                if side not in ready:
                    ready[side] = made[side]()
                row["turns"].append(_turn(setting, case, ready[side], trace))
            except Exception as error:  # the other sides go on
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                ready.pop(side, None)
            _free(setting)
            row["longest"] = time.monotonic() - began
            setting.write({**facts, "rows": [_summary(row, case) for row in rows.values()], "passed": True})
    found = [_summary(row, case) for row in rows.values()]
    wrong = [f"{row['side']}: {row['error']}" for row in found if "error" in row]
    return {**facts, "rows": found, "passed": not wrong, "reason": "; ".join(wrong)}


def _turn(setting: Setting, case: Case, turn: Callable[..., str], trace: Path | None) -> dict[str, Any]:
    clock, said = Clock(setting, case, trace), list[str]()
    messages.hear(said)
    try:
        mode = turn(clock)
    finally:
        messages.hear_no_more(said)
    if clock.loss is None:
        raise RuntimeError("no step was run")
    found = {**clock.found, "mode": mode, "said": said, "loss": float(clock.loss)}
    return {**found, "trace": None if trace is None else trace.name}


def _summary(row: dict[str, Any], case: Case) -> dict[str, Any]:
    """A side's turns as one row."""
    turns: Sequence[dict[str, Any]] = [t for t in row["turns"] if "seconds" in t]
    found = {"side": row["side"]} | ({"error": row["error"]} if "error" in row else {})
    if not turns:
        return found if "error" in row else {**found, "error": "no step was measured"}
    steps = [s for t in turns for s in t["step_seconds"]]
    reserved = [t["reserved_bytes"] for t in turns if "reserved_bytes" in t]
    peaks = [t["peak_bytes"] for t in turns if t["peak_bytes"] is not None]
    return found | {
        "tokens_per_second": statistics.median(case.tokens * case.steps / t["seconds"] for t in turns),
        "tokens_per_second_by_turn": [case.tokens * case.steps / t["seconds"] for t in turns],
        "median_step_seconds": statistics.median(steps),
        "first_step_seconds": turns[0]["first_step_seconds"],
        "later_first_step_seconds": [t["first_step_seconds"] for t in turns[1:]],
        "peak_bytes": max(peaks, default=None),
        "reserved_bytes": max(reserved, default=None),
        "loss": turns[-1]["loss"] if math.isfinite(turns[-1]["loss"]) else None,
        "mode": turns[-1]["mode"],
        "said": turns[0]["said"],
        "trace": turns[0]["trace"],
    }


def _free(setting: Setting) -> None:
    gc.collect()
    if setting.device == "cuda":
        with contextlib.suppress(torch.AcceleratorError):  # a GPU that failed tells so to everybody who asks
            torch.cuda.empty_cache()


def attention_kernel(setting: Setting, case: Case) -> str:
    """Which kernel ``scaled_dot_product_attention`` takes for the case."""
    shape = (1, case.heads, case.length, case.width // case.heads)
    q = torch.zeros(shape, dtype=torch.bfloat16, device=setting.device)
    names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
    return names.get(int(torch._fused_sdp_choice(q, q, q, None, 0.0, True)), "another")


def _file_name(side: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in side)
