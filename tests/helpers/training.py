"""One short training run as data: what goes in (:class:`TrainingCase`), what comes out (:class:`Result`), comparisons.

N ranks bring ``DistributedSampler(shuffle=False)`` of ``rows / N`` rows each, so that their batches together are
those of one device that takes ``rows`` in order: Lightning's own distributed sampler would shuffle.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

import lightning_spmd
from tests.helpers.modules import MODELS, samples
from tests.helpers.ranks import RankPool

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 3},
    "clip_norm": {"gradient_clip_val": 0.3},
    "clip_value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulate_clip": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3},
}
QUIET = {
    "logger": False,
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class TrainingCase:
    """A model, an optimizer, Trainer flags and data.

    Args:
        model: name in ``modules.MODELS``.
        optimizer: name in ``modules.OPTIMIZERS``.
        option: name in OPTIONS.
        batches: training batches (not optimizer steps) of the run: enough for a graph's second use, for state of its
            own, for accumulation, and for the second epoch.
        rows: rows of the global batch.
        count: samples of the data set; by default such that an epoch ends within the run, with whole batches.
        shuffle: shuffled data, on one device only.
        dropout, scheduler, eps, groups: see ``modules.SmallModule``.
        precision: of the Trainer.
        seed: of the data.
    """

    model: str
    optimizer: str = "sgd"
    option: str = "plain"
    batches: int = 15
    rows: int = 16
    count: int = 16 * 9
    shuffle: bool = False
    dropout: float = 0.1
    scheduler: str | None = None
    eps: float | None = None
    groups: bool = False
    precision: Any = "32-true"
    seed: int = 1

    def __str__(self) -> str:
        return f"{self.model}-{self.optimizer}-{self.option}"

    def longer(self) -> TrainingCase:
        """Fifty batches in three epochs, in which small deviations add up: for the long matrices."""
        return dataclasses.replace(self, batches=50, count=16 * 21)

    def module(self) -> L.LightningModule:
        """The module, with weights from seed 3."""
        L.seed_everything(3)
        return MODELS[self.model](
            optimizer=self.optimizer, dropout=self.dropout, scheduler=self.scheduler, eps=self.eps, groups=self.groups
        )

    def flags(self) -> dict[str, Any]:
        """Trainer flags: as many epochs as it takes, cut at ``batches``."""
        per_epoch = math.ceil(self.count / self.rows)
        accumulate = OPTIONS[self.option].get("accumulate_grad_batches", 1)
        epochs, rest = divmod(self.batches, per_epoch)
        steps = epochs * math.ceil(per_epoch / accumulate) + math.ceil(rest / accumulate)
        return {**QUIET, **OPTIONS[self.option], "max_steps": steps, "precision": self.precision}


@dataclass
class Result:
    """What a run did. Everything is a plain value or a CPU tensor, so it travels between processes.

    Args:
        losses: what training_step returned, by batch; infinity where it returned None.
        logged: ``callback_metrics`` after each batch.
        to_logger: what a logger received: (step, values).
        final: ``callback_metrics`` at the end (epoch metrics included).
        weights: the module's state_dict.
        optimizer_state: the optimizer's ``state`` and numbers of its groups, flat, by name.
        captures: graphs built, 0 without our strategy.
        mode: of our strategy.
        eager_steps: steps of our strategy that no graph ran.
        warnings: texts of the warnings.
    """

    losses: list[float] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    to_logger: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    final: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer_state: dict[str, Any] = field(default_factory=dict)
    captures: int = 0
    mode: str = ""
    eager_steps: int = 0
    warnings: list[str] = field(default_factory=list)


class ListLogger(Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "list"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((-1 if step is None else step, dict(metrics)))


class Recorder(L.Callback):
    """Fills in a Result's per-batch parts."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.result.losses.append(float(outputs["loss"]) if "loss" in outputs else math.inf)
        self.result.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        accounts = getattr(trainer.strategy, "accounts", None)
        self.result.eager_steps += accounts is not None and accounts.ran.executable is None


class InOrder(L.LightningDataModule):
    """Training, validation and test data; ranks take every N-th row of the same order."""

    def __init__(self, data: Sequence[Any], rows: int, shuffle: bool = False, evaluation: Sequence[Any] | None = None):
        super().__init__()
        self.data, self.rows, self.shuffle = data, rows, shuffle
        self.evaluation = data[: 2 * rows] if evaluation is None else evaluation

    def _loader(self, data: Sequence[Any], shuffle: bool) -> DataLoader[Any]:
        assert self.trainer is not None
        if self.trainer.world_size == 1:
            return DataLoader(data, batch_size=self.rows, shuffle=shuffle)  # type: ignore[arg-type]
        ranks: dict[str, int] = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[union-attr]
        sampler = DistributedSampler(data, **ranks, shuffle=shuffle)  # type: ignore[arg-type]
        return DataLoader(data, batch_size=self.rows // ranks["num_replicas"], sampler=sampler)  # type: ignore[arg-type]

    def train_dataloader(self) -> Any:
        return self._loader(self.data, self.shuffle)

    def val_dataloader(self) -> Any:
        return self._loader(self.evaluation, False)

    test_dataloader = predict_dataloader = val_dataloader


def fit(
    module: L.LightningModule,
    data: Any,
    strategy: Any = "auto",
    devices: int = 1,
    callbacks: Sequence[L.Callback] = (),
    ckpt_path: Any = None,
    **flags: Any,
) -> tuple[Result, L.Trainer]:
    """Train ``module`` on ``data`` (a loader or a data module) and note everything; also gives the Trainer.

    A dict as strategy: arguments of SPMDStrategy.
    """
    if isinstance(strategy, dict):
        strategy = lightning_spmd.SPMDStrategy(**strategy)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    result, logger = Result(), ListLogger()
    settings: dict[str, Any] = {**QUIET, "logger": logger, "log_every_n_steps": 1, "limit_val_batches": 0, **flags}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = L.Trainer(strategy=strategy, devices=devices, callbacks=[*callbacks, Recorder(result)], **settings)
        trainer.fit(module, data, ckpt_path=ckpt_path)
    result.warnings = [str(w.message) for w in caught]
    result.to_logger = logger.rows
    result.final = {k: float(v) for k, v in trainer.callback_metrics.items()}
    result.weights = {k: whole(v.detach()) for k, v in module.state_dict().items()}
    for number, optimizer in enumerate(trainer.optimizers):
        result.optimizer_state.update(_flat(optimizer.state_dict(), str(number)))
    result.captures = getattr(trainer.strategy, "captures", 0)
    result.mode = str(getattr(trainer.strategy, "mode", ""))
    return result, trainer


def _flat(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{path}/{i}").items()}
    return {path: whole(value.detach()) if isinstance(value, Tensor) else value}


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, as torch itself puts a sharded one together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def train(case: TrainingCase, strategy: Any = "auto", devices: int = 1, **flags: Any) -> Result:
    """Run ``case``. In a worker of a RankPool, ``devices`` is the pool's size."""
    data = InOrder(samples(case.model, case.count, case.seed), case.rows, case.shuffle)
    settings = {**case.flags(), **flags}
    settings.pop("logger", None)
    return fit(case.module(), data, strategy, devices, **settings)[0]


def train_on(pool: RankPool, case: TrainingCase, strategy: Any = "spmd", **flags: Any) -> list[Result]:
    """Run ``case`` on all ranks of ``pool``."""
    return pool.run(train, case, strategy, pool.size, **flags)


@functools.cache
def one_device(case: TrainingCase) -> Result:
    """The same case by Lightning's plain single-device Trainer; computed once a session."""
    return train(case)


# ---------------------------------------------------------------------- comparing
def assert_bitwise(result: Result, reference: Result) -> None:
    """Loss, logged values, weights and optimizer state are the same bits."""
    assert len(result.losses) == len(reference.losses)
    assert _first_difference(result.losses, reference.losses) is None
    assert _first_difference(result.logged, reference.logged) is None
    assert _first_difference(result.to_logger, reference.to_logger) is None
    assert result.final == reference.final
    assert _different(result.weights, reference.weights) == []
    assert _different(result.optimizer_state, reference.optimizer_state) == []


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str | None:
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if repr(a) != repr(b):
            return f"batch {step}: {a} instead of {b}"
    return None


def _different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    names = [f"only in one: {k}" for k in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
        if type(a) is not type(b) or not (_same_bits(a, b) if tensors else a == b):
            names.append(name)
    return sorted(names)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@dataclass(frozen=True)
class Deviation:
    """Largest differences of a run from a reference: relative in loss and metrics, absolute in weights."""

    loss: float
    weights: float
    logged: float
    final: float

    def __str__(self) -> str:
        parts = dataclasses.asdict(self).items()
        return "  ".join(f"{name} {value:.1e}" for name, value in parts)


def deviation(result: Result, reference: Result) -> Deviation:
    """How far ``result`` is from ``reference``; both must have the same batches and metrics."""
    assert len(result.losses) == len(reference.losses)
    logged = [_largest(a, b) for a, b in zip(result.logged, reference.logged, strict=True)]
    weights = [
        float((result.weights[k].double() - v.double()).abs().max()) if v.numel() else 0.0
        for k, v in reference.weights.items()
    ]
    return Deviation(
        max(_relative(a, b) for a, b in zip(result.losses, reference.losses, strict=True)),
        max(weights),
        max(logged),
        _largest(result.final, reference.final),
    )


def _largest(ours: dict[str, float], theirs: dict[str, float]) -> float:
    assert ours.keys() == theirs.keys()
    return max((_relative(ours[k], theirs[k]) for k in theirs), default=0.0)


def _relative(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(abs(b), 1e-3)


def assert_equals_one_device(results: Sequence[Result], reference: Result) -> None:
    """Loss and logged values within 1e-5 relative, weights within 1e-4, on every rank; all ranks hold the same bits."""
    for result in results:
        found = deviation(result, reference)
        assert found.loss <= 1e-5, found
        assert found.weights <= 1e-4, found
        assert found.logged <= 1e-4, found
        assert found.final <= 1e-4, found
        assert _different(result.weights, results[0].weights) == []


def assert_compiled(*results: Result) -> None:
    """The runs were graphs, not the eager path."""
    for result in results:
        assert (result.mode, result.captures > 0) == ("compiled", True), result.warnings
