"""A logger that keeps every call, for tests that compare what loggers are told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch.loggers import Logger
from torch import Tensor

from tests.helpers.training import Result
from tests.strategy.small import Net, run


def plain(value: Any) -> Any:
    """What a logger was given, as it was at that moment."""
    if isinstance(value, Tensor):
        return "tensor", value.dtype, value.detach().tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class Writer:
    """An experiment: keeps every call of any of its methods."""

    log_dir = "somewhere"

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.series: dict[str, list[Any]] = {}

    def _keep(self, name: str, *args: Any, **kwargs: Any) -> str:
        self.told.append((name, plain(args), plain(kwargs)))
        return f"call {len(self.told)}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("add_", "log_")):
            return functools.partial(self._keep, name)
        raise AttributeError(name)

    def __repr__(self) -> str:
        return "Writer"

    def __getitem__(self, name: str) -> list[Any]:
        return self.series.setdefault(name, [])


class Keeper(Logger):
    """Keeps what it is told, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = Writer()
        self.prefix, self.count = "p/", 0

    @property
    def name(self) -> str:
        return "keeper"

    @property
    def version(self) -> int:
        return 3

    @property
    def experiment(self) -> Writer:
        return self.writer

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.writer._keep("log_hyperparams", *args, **kwargs)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.count += 1
        self.writer._keep("log_metrics", metrics, step)


def told(
    make: Callable[[], Net], strategy: Any = "spmd", devices: int = 1, number: int = 2, **flags: Any
) -> tuple[Result, list[Any]]:
    """A run, and all that its loggers were told."""
    loggers = [Keeper() for _ in range(number)]
    result = run(make, strategy, devices, logger=loggers, log_every_n_steps=2, **flags)
    return result, [(logger.writer.told, plain(logger.writer.series)) for logger in loggers]
