"""Evaluation in graphs against the plain Trainer: the strategy that asks for it, a module, its data, the comparison."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_spmd import SPMDStrategy
from lightning_spmd.strategy.steps.evaluating import Evaluation
from lightning_spmd.strategy.steps.replay import StepsInGraphs
from tests.helpers.training import QUIET
from tests.strategy.small import Quiet

ROWS, CLASSES = 8, 3
Sample = tuple[Tensor, Tensor]


class EvaluationInGraphs(Evaluation):
    """Evaluates in graphs; counts the steps that ran eagerly all the same."""

    eager_steps = 0

    @property
    def in_graphs(self) -> bool:
        return True

    def on_whole_parameters(self, module: Any) -> contextlib.AbstractContextManager[None]:
        self.eager_steps += 1
        return super().on_whole_parameters(module)


class InGraphs(SPMDStrategy):
    """Evaluates in graphs also where every rank has whole parameters."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._evaluation = EvaluationInGraphs(
            self._layout, self.layer_sharing, StepsInGraphs(), self._wholes, self._new_evaluation
        )

    @property
    def eager_steps(self) -> int:
        return self._evaluation.eager_steps


class Everything(Quiet):
    """Batch norm, dropout, every way of logging, metrics updated, called and logged; rows leave predict_step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(10), nn.Dropout(0.5)
        kind = torchmetrics.classification.MulticlassAccuracy
        self.accuracy, self.called = kind(CLASSES), kind(CLASSES, average="micro")
        self.mean = torchmetrics.MeanMetric()
        self.several = torchmetrics.MetricCollection({"top1": kind(CLASSES), "top2": kind(CLASSES, top_k=2)})

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(torch.tanh(self.first(x)))))

    def _evaluate(self, batch: Any, stage: str) -> dict[str, Tensor]:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy.update(logits, batch[1])
        self.mean.update(loss)
        self.several.update(logits, batch[1])
        self.log(f"{stage}/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log(f"{stage}/accuracy", self.accuracy)
        self.log(f"{stage}/largest", logits.amax(), reduce_fx="max")
        self.log(f"{stage}/called", self.called(logits, batch[1]), on_epoch=True, batch_size=len(batch[0]))
        self.log_dict({f"{stage}/right": (logits.argmax(-1) == batch[1]).float().mean(), f"{stage}/mean": self.mean})
        self.log_dict(self.several)
        return {"loss": loss, "largest": logits.amax(-1)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"class": logits.argmax(-1), "logits": logits, "target": batch[1], "batch": batch_idx}


class Loaders(L.LightningDataModule):
    """``sizes`` samples a loader; rank r of N takes every N-th row from the r-th: ranks may hold different numbers."""

    def __init__(self, sizes: Sequence[int], train: int = 6 * ROWS) -> None:
        super().__init__()
        self.sizes, self.train = sizes, train

    def _loader(self, count: int, seed: int) -> DataLoader[Any]:
        assert self.trainer is not None
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        return DataLoader(made(count, seed)[rank::ranks], batch_size=ROWS // ranks)  # type: ignore[arg-type]

    def train_dataloader(self) -> Any:
        return self._loader(self.train, 2)

    def val_dataloader(self) -> Any:
        loaders = [self._loader(size, 5 + i) for i, size in enumerate(self.sizes)]
        return loaders if len(loaders) > 1 else loaders[0]

    test_dataloader = predict_dataloader = val_dataloader


def made(count: int, seed: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 6, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)
    return list(zip(x, y, strict=True))


@dataclass
class Evaluation:
    """What validate, test and predict gave."""

    validated: list[dict[str, float]]
    tested: list[dict[str, float]]
    predicted: list[Any]
    captures: int = 0
    eager_steps: int = 0
    warnings: list[str] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


class Outputs(L.Callback):
    """Keeps what validation steps returned."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_batch_end(self, *args: Any, **_: Any) -> None:
        self.seen.append(args[2])


def evaluate(
    make: Callable[[], L.LightningModule], graphs: bool, devices: int = 1, sizes: Sequence[int] = (20,), **flags: Any
) -> Evaluation:
    """Validate, test and predict without fit, on one Trainer."""
    L.seed_everything(11)
    module, data, outputs = make(), Loaders(sizes), Outputs()
    strategy: Any = InGraphs() if graphs else "auto"
    trainer = L.Trainer(
        strategy=strategy, devices=devices, use_distributed_sampler=False, callbacks=[outputs], **{**QUIET, **flags}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        validated = trainer.validate(module, data, verbose=False)
        captures = getattr(trainer.strategy, "evaluation_captures", 0)
        tested = trainer.test(module, data, verbose=False)
        predicted = trainer.predict(module, data, return_predictions=True) or []
    if len(sizes) == 1:
        predicted = [predicted]
    eager_steps = getattr(trainer.strategy, "eager_steps", 0)
    told = [str(w.message) for w in caught]
    return Evaluation(
        [dict(v) for v in validated], [dict(t) for t in tested], predicted, captures, eager_steps, told, outputs.seen
    )


def assert_same_metrics(ours: Evaluation, theirs: Evaluation) -> None:
    for mine, reference in ((ours.validated, theirs.validated), (ours.tested, theirs.tested)):
        assert len(mine) == len(reference)
        for a, b in zip(mine, reference, strict=True):
            assert a == pytest.approx(b, rel=1e-5)


def joined(results: Sequence[Evaluation], key: str | None) -> list[Tensor]:
    """Predictions of all ranks in the order of one device, by loader."""
    found = []
    for loader in range(len(results[0].predicted)):
        parts = [[p if key is None else p[key] for p in r.predicted[loader]] for r in results]
        rows = [torch.cat(part) for part in parts]
        whole = torch.empty(sum(map(len, rows)), *rows[0].shape[1:], dtype=rows[0].dtype)
        for rank, piece in enumerate(rows):
            whole[rank :: len(results)] = piece
        found.append(whole)
    return found


class ByLoader(Everything):
    """Several dataloaders; the step looks at which one it is."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("scaled", loss * (1 + dataloader_idx))
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0]) + dataloader_idx


def predict(
    make: Callable[[], L.LightningModule], graphs: bool, devices: int = 1, sizes: Sequence[int] = (20,)
) -> Evaluation:
    """Predict alone."""
    L.seed_everything(11)
    strategy: Any = InGraphs() if graphs else "auto"
    trainer = L.Trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **QUIET)
    predicted = trainer.predict(make(), Loaders(sizes)) or []
    captures, eager_steps = getattr(strategy, "evaluation_captures", 0), getattr(strategy, "eager_steps", 0)
    return Evaluation([], [], predicted if len(sizes) > 1 else [predicted], captures, eager_steps)
