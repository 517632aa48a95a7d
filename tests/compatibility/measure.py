"""Trains a row in a process: eagerly on one device, or with the strategy on any number of ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import lightning as L
from torch import fx
from torch.utils.data import DataLoader, DistributedSampler

import lightning_spmd
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.strategy.graphs.building import GraphBuilder
from tests.compatibility.rows import ROWS, STEPS, Row
from tests.helpers.activations import activation_collectives
from tests.helpers.training import QUIET

_LOGGERS = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")


@dataclass
class Run:
    """What a run of a row gave.

    Args:
        losses: what training_step returned, by step.
        weights: sums of the parameters at the end, in double precision, by name.
        mode: of the strategy; empty without it.
        captures: graphs built.
        seconds: that building took.
        nodes: of the last graph.
        moved: collectives on activations in the graphs as they are expanded.
        told: what the strategy said.
        error: what ended the run.
    """

    losses: list[float] = field(default_factory=list[float])
    weights: dict[str, float] = field(default_factory=dict[str, float])
    mode: str = ""
    captures: int = 0
    seconds: float = 0.0
    nodes: int = 0
    moved: list[str] = field(default_factory=list[str])
    told: list[str] = field(default_factory=list[str])
    error: str = ""


class _Said(logging.Handler):
    """Notes what the strategy tells."""

    def __init__(self, run: Run) -> None:
        super().__init__(logging.INFO)
        self.run = run

    def emit(self, record: logging.LogRecord) -> None:
        if (text := record.getMessage()).startswith("strategy='spmd'"):
            self.run.told.append(text)


class _Losses(L.Callback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = [v for name, v in trainer.callback_metrics.items() if "loss" in name]
        value = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else logged[0]
        self.run.losses.append(float(value))


def train(row: Row, strategy: str | dict[str, Any], ranks: int) -> Run:
    """Train ``row`` in this process, which is one of ``ranks``."""
    run = Run()
    L.seed_everything(3, verbose=False)
    module, samples, collate = row.make()
    with warnings.catch_warnings(record=True) as caught, watching(run):
        warnings.simplefilter("always")
        chosen: Any = strategy if isinstance(strategy, str) else lightning_spmd.SPMDStrategy(**strategy)
        if not isinstance(chosen, str):
            chosen.add_build_listener(lambda event: _note(run, event))
        flags = {**QUIET, "max_steps": STEPS, "limit_val_batches": 0, "use_distributed_sampler": False,
                 **dict(row.flags)}  # fmt: skip
        trainer = L.Trainer(strategy=chosen, devices=ranks, callbacks=[_Losses(run)], **flags)
        try:
            trainer.fit(module, _loader(samples, collate, trainer))
        except Exception as error:
            run.error = f"{type(error).__name__}: {error}"
    run.told += [text for text in (str(w.message) for w in caught) if text.startswith("strategy='spmd'")]
    run.weights = {name: float(p.detach().double().sum()) for name, p in module.named_parameters()}
    run.mode = str(getattr(trainer.strategy, "mode", ""))
    run.captures = getattr(trainer.strategy, "captures", 0)
    return run


def _loader(samples: Any, collate: Any, trainer: L.Trainer) -> DataLoader[Any]:
    """Batches in order; ranks take every N-th sample, so that together they have one device's batch."""
    if trainer.world_size == 1:
        return DataLoader(samples, batch_size=ROWS, collate_fn=collate)
    ranks: dict[str, int] = trainer.strategy.distributed_sampler_kwargs  # type: ignore[union-attr]
    sampler = DistributedSampler(samples, **ranks, shuffle=False)
    return DataLoader(samples, batch_size=ROWS // ranks["num_replicas"], sampler=sampler, collate_fn=collate)


def _note(run: Run, event: Any) -> None:
    if event.stage == "ready":
        run.seconds += event.seconds
        run.nodes = event.nodes or 0


@contextmanager
def watching(run: Run) -> Iterator[None]:
    """Note what expanded graphs move, and what is told."""
    dump, handler, logger = GraphBuilder._dump, _Said(run), logging.getLogger(_LOGGERS[1])
    level, outer = logger.level, logging.getLogger(_LOGGERS[0])
    outer.setLevel(logging.WARNING)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def noting(self: GraphBuilder, stage: str, graph_module: fx.GraphModule, signature: Any, *rest: Any) -> None:
        if stage == "expanded":
            step = ShardedStep(graph_module, signature, ())
            run.moved = [f"{n.target} of {n.args[0].meta['val']}" for n in activation_collectives(step)]  # type: ignore[union-attr]
        dump(self, stage, graph_module, signature, *rest)

    try:
        with mock.patch.object(GraphBuilder, "_dump", noting):
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True
