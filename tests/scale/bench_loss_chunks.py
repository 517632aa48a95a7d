"""Memory and step time of a GPT over many classes by ``loss_chunks``, on one device, alternating in one process.

    python tests/scale/bench_loss_chunks.py [--steps 4] [--rounds 3] [--classes 50257] [--precision 32-true]

Prints medians, their ratio to a step that makes all scores at once, what a step takes at its highest above what is
there before it (counted, and by the resident set), and how far the losses are from those of the whole. The first steps
of every round (capture, the second trace, allocator warm-up) are left out. Memory is given back to the system at once,
so that it can be measured; ``--plain`` leaves the allocator as it is, for times. ``--cpu-seconds``: times on the
processor, for machines that are shared.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_spmd import SPMDStrategy
from lightning_spmd.cost.memory import liveness
from lightning_spmd.examples.gpt2 import GPT2
from tests.scale.bench_rematerialize import M_MMAP_THRESHOLD, MIB, WARM_UP, Watch


class Tokens(L.LightningDataModule):
    """Random tokens, each with its successor; what this size asks of data modules."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        rows = options.batch * (WARM_UP + options.steps)
        self.tokens = torch.randint(
            options.classes, (rows, options.length + 1), generator=torch.Generator().manual_seed(1)
        )
        self.batch_size = options.batch

    def train_dataloader(self) -> Any:
        data = TensorDataset(self.tokens[:, :-1], self.tokens[:, 1:])
        return DataLoader(data, self.batch_size, collate_fn=_as_dict)


def _as_dict(rows: Any) -> dict[str, torch.Tensor]:
    inputs, targets = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"inputs": inputs, "targets": targets}


class _GPT(GPT2):
    def setup(self, stage: str) -> None:
        """Nothing to check: tokens are drawn."""


class _OnProcessor(Watch):
    """Seconds on the processor: what else runs on the machine does not count."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        super().on_train_batch_start(trainer)
        self._begun = time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs)
        self.seconds[-1] = time.process_time() - self._begun


def one_round(chunks: int | str | None, options: argparse.Namespace) -> tuple[Watch, int]:
    """Train some steps; also gives the bytes counted on paper."""
    L.seed_everything(1, verbose=False)
    watch, strategy = (_OnProcessor if options.cpu_seconds else Watch)(), SPMDStrategy(loss_chunks=chunks)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="auto",
        devices=1,
        precision=options.precision,
        max_steps=WARM_UP + options.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    sizes = {"width": options.width, "layers": options.layers, "heads": options.width // 64}
    trainer.fit(_GPT(options.classes, sequence_length=options.length, **sizes), Tokens(options))
    assert strategy._training.iteration is not None
    (executable,) = strategy._training.iteration.table.executables[-1:]
    main = executable.graphs.main
    return watch, liveness(main.graph_module.graph, main.signature).peak


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (
        ("steps", 4), ("rounds", 3), ("width", 256), ("layers", 2), ("batch", 16), ("length", 128), ("threads", 1),
        ("classes", 50257),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--cpu-seconds", action="store_true")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--chunks", type=int, nargs="+", default=[8])
    options = parser.parse_args()
    sides = [None, *options.chunks]
    torch.set_num_threads(options.threads)
    if not options.plain:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)  # what is freed goes back at once
    seconds: dict[Any, list[float]] = {side: [] for side in sides}
    memory: dict[Any, list[int]] = {side: [] for side in sides}
    counted: dict[Any, int] = {}
    losses: dict[Any, list[float]] = {}
    for _ in range(options.rounds):
        for side in sides:
            watch, counted[side] = one_round(side, options)
            seconds[side] += watch.seconds[WARM_UP:]
            memory[side].append((watch.memory.peak() if watch.memory else None) or 0)
            losses[side] = watch.losses
    print(f"torch {torch.__version__}, {vars(options)}")
    whole, most = statistics.median(seconds[None]), statistics.median(memory[None])
    for side in sides:
        median, highest = statistics.median(seconds[side]), statistics.median(memory[side])
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses[side], losses[None], strict=True))
        print(
            f"loss_chunks={side!s:5} median {1e3 * median:8.1f} ms   ratio {median / whole:.3f}   counted "
            f"{counted[side] / MIB:7.1f} MiB ({counted[side] / counted[None]:.2f})   measured {highest / MIB:7.1f} MiB "
            f"({highest / most:.2f})   losses apart by {apart:.1e}"
        )


if __name__ == "__main__":
    main()
