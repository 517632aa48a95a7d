"""Step time of two hosts on a network of limited bandwidth: DDP with several bucket sizes against this strategy.

    sudo env PYTHONPATH=. tests/scale/two_hosts.sh -r 1gbit -- \
        python -m tests.scale.bench_two_hosts simulated --spmd '{}' --spmd '{"overlap_iterations": false}'

``simulated``: compute is a sleep (154 ms a step), so the processor is the network's: what is measured is the schedule.
``gpt``: compute shares the cores with the network. Both have 5.3 M parameters (21 MB of gradients) and fused AdamW.

``--spmd '{"hooks": "idle"}'`` adds a callback with hooks between batches that look at nothing, ``"six"`` one with all
six, ``"reads"`` one that takes a weight's norm at the end of each, ``"norms"`` one with six that takes a gradient's.
``"history"`` is no hook: ``training_step`` keeps ``loss.item()``.

``sent MiB`` is what a host sends a step, as its interface counts it: two hosts that reduce all gradients send 20.
``alone`` is the eager step of one host by itself while the other does the same, ``all-reduce alone`` one reduction of
all gradients at once. No step can be shorter than either, and none needs to be longer than both together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_spmd.report.compare_table import Comparison
from lightning_spmd.report.measure import Amount, Build, measure
from lightning_spmd.report.sides import Side, side_of, spmd_side
from tests.scale import gpt_two_hosts, simulated_accelerator

MODELS = {
    "simulated": (simulated_accelerator.SimulatedAccelerator, simulated_accelerator.batches),
    "gpt": (gpt_two_hosts.GPTTwoHosts, gpt_two_hosts.batches),
}
ROWS = 4


class Idle(L.Callback):
    """Hooks of a user between batches; they look at nothing."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Nothing."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Nothing."""


class Six(Idle):
    """All six of them; the other four may look at gradients, and do not."""

    def on_before_zero_grad(self, *_: Any) -> None:
        """Nothing."""

    def on_before_backward(self, *_: Any) -> None:
        """Nothing."""

    def on_after_backward(self, *_: Any) -> None:
        """Nothing."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Nothing."""


class Reads(Idle):
    """The same, and after each batch the norm of a weight."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Look at one weight."""
        float(min(pl_module.parameters(), key=Tensor.numel).norm())


class Norms(Six):
    """All six, and the norm of a gradient before each update."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Look at one gradient."""
        gradient = min(pl_module.parameters(), key=Tensor.numel).grad
        float(torch.zeros(1) if gradient is None else gradient.norm())


class History(L.Callback):
    """Makes ``training_step`` read its loss and keep the number."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put a reading method in the place of the module's."""
        history, plain = list[float](), pl_module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            loss = plain(batch, batch_idx)
            history.append(loss.item())
            return loss

        pl_module.training_step = training_step


HOOKS = {"history": History, "idle": Idle, "six": Six, "reads": Reads, "norms": Norms}
_callbacks: dict[int, L.Callback] = {}  # of strategies, by id


def training(model: str) -> Build:
    """Makes the training of that model on this host."""
    kind, batches = MODELS[model]

    def build(strategy: Any, flags: dict[str, Any], callbacks: list[L.Callback]) -> tuple[L.Trainer, Any, Any]:
        L.seed_everything(1, verbose=False)
        users = [_callbacks.pop(id(strategy))] if id(strategy) in _callbacks else []
        trainer = L.Trainer(
            **flags,
            strategy=strategy,
            callbacks=[*callbacks, *users],
            accelerator="cpu",
            devices=1,
            num_nodes=1 if isinstance(strategy, SingleDeviceStrategy) else int(os.environ.get("NNODES", "1")),
            plugins=[LightningEnvironment()],
            use_distributed_sampler=False,
        )
        return trainer, kind(), batches(ROWS, int(os.environ.get("NODE_RANK", "0")))

    return build


def all_reduce_alone(model: str, times: int = 12) -> float:
    """Median seconds of one all-reduce of all gradients."""
    flat = torch.zeros(sum(p.numel() for p in MODELS[model][0]().parameters()))
    seconds = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(flat)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def counter_of_sent_bytes() -> Callable[[], int] | None:
    """Reads what this host's interface has sent; None outside of ``two_hosts.sh``, where others send as well."""
    statistics_file = Path("/sys/class/net", os.environ.get("GLOO_SOCKET_IFNAME", "none"), "statistics", "tx_bytes")
    # /sys shows the network namespace it was mounted in; `ip netns exec` mounts it anew
    return (lambda: int(statistics_file.read_text())) if statistics_file.exists() else None


def sides_of(names: Sequence[str], variants: Sequence[dict[str, Any]]) -> list[Side]:
    """``alone``, DDP by name, and this strategy with each variant's options."""
    alone = Side("alone", lambda: SingleDeviceStrategy(torch.device("cpu")))
    baselines = [alone if name == "alone" else side_of(name) for name in names]
    return baselines + [_variant(options) for options in variants]


def _variant(options: dict[str, Any]) -> Side:
    name = " ".join(["spmd", *(f"{k}={v}" for k, v in options.items())])
    side = spmd_side(name, {k: v for k, v in options.items() if k != "hooks"})
    if "hooks" not in options:
        return side

    def strategy() -> Any:
        made = side.strategy()
        _callbacks[id(made)] = HOOKS[options["hooks"]]()
        return made

    return dataclasses.replace(side, strategy=strategy)


def report(comparison: Comparison, network: float | None) -> None:
    """Print the table and what matters most in one line a variant."""
    print(comparison.table_text(), flush=True)
    if network is not None:
        print(f"all-reduce alone: {1e3 * network:.1f} ms")
    medians = {r.name: r.median for r in comparison.results if r.reason is None}
    ddp = {name: seconds for name, seconds in medians.items() if name.startswith("ddp")}
    for name, seconds in medians.items():
        if name.startswith("spmd") and ddp:
            best = min(ddp, key=ddp.__getitem__)
            default = f", {seconds / ddp['ddp']:.3f} of DDP's default" if "ddp" in ddp else ""
            print(f"{name}: {seconds / ddp[best]:.3f} of the best DDP ({best}){default}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--against", default="ddp,ddp:1,ddp:4,ddp:25,alone", help="comma-separated")
    parser.add_argument("--spmd", action="append", type=json.loads, help="JSON options of SPMDStrategy; repeatable")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="also write the measurements as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = os.environ.get("NODE_RANK", "0") == "0"

    def say(name: str, number: int) -> None:
        if first:
            print(f"round {number + 1} of {options.rounds}: {name}", flush=True)

    sides = sides_of([n for n in options.against.split(",") if n], options.spmd or [{}])
    amount = Amount(options.steps, options.warmup, options.rounds)
    results = measure(sides, training(options.model), amount, say, counter_of_sent_bytes())
    network = all_reduce_alone(options.model) if dist.is_initialized() else None
    if first:
        spmd = tuple(side.name for side in sides if side.name.startswith("spmd"))
        comparison = Comparison(results, amount, dist.get_world_size() if dist.is_initialized() else 1, spmd)
        report(comparison, network)
        if options.output:
            options.output.write_text(comparison.json_text())


if __name__ == "__main__":
    main()
