"""Ranks whose data ends at different times: the same clear error on every rank, and never a hang."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_spmd import SPMDStrategy
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET
from tests.strategy.small import Quiet, loader_of, rows


class Stream(IterableDataset):  # type: ignore[type-arg]
    """So many batches of four on each rank; an index among ``holes`` yields None."""

    def __init__(self, counts: tuple[int, ...], holes: tuple[int, ...] = ()) -> None:
        self.counts, self.holes = counts, holes

    def __iter__(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank()
        for index in range(self.counts[rank]):
            samples = rows(4)
            hole = rank == 1 and index in self.holes
            yield None if hole else (torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))


def stream(*counts: int) -> Any:
    return DataLoader(Stream(counts), batch_size=None)


def with_a_hole(*counts: int) -> Any:
    return DataLoader(Stream(counts, holes=(1,)), batch_size=None)


class OwnLength(list):  # type: ignore[type-arg]
    """A loader with a length of its own on each rank."""

    def __init__(self, *counts: int) -> None:
        samples = rows(4)
        batch = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        super().__init__([batch] * counts[torch.distributed.get_rank()])


def sized(*counts: int) -> Any:
    return DataLoader(OwnLength(*counts), batch_size=None)


class ReadsLoss(Quiet):
    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        return loss if math.fsum([loss]) > 0 else -loss


class Fetches(Quiet):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class Manual(Quiet):
    """Rank 1 goes backward once more in its second batch, if ``once_more``."""

    automatic_optimization = False  # type: ignore[assignment]
    once_more = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.once_more and self.global_rank == 1 and batch_idx == 1:
            self.manual_backward(self.loss(batch))
        optimizer.step()


class OnceMore(Manual):
    """With a hook on gradients it is no graph."""

    once_more = True

    def on_after_backward(self) -> None:
        pass


class SkipsEpoch(Quiet):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.global_rank == 1 and batch_idx == 2 else None


class StopsOnRankZero(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or (trainer.global_rank == 0 and trainer.global_step == 2)


class RaisesStopIteration(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 2:
            raise StopIteration


class Distinct(Quiet):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch))


class DistinctEager(Distinct):
    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        return loss if torch.is_grad_enabled() or math.fsum([loss]) > 0 else -loss


def _trainer(plan: str, flags: dict[str, Any]) -> L.Trainer:
    trainer = L.Trainer(
        strategy=SPMDStrategy(data_parallel=plan), devices=2,  # type: ignore[arg-type]
        **{**QUIET, "use_distributed_sampler": False, "limit_val_batches": 0, "max_epochs": 2, **flags},
    )  # fmt: skip
    trainer.strategy.setup_environment()
    return trainer


def _outcome(run: Any, trainer: L.Trainer) -> tuple[str, str, int]:
    begun = time.monotonic()
    try:
        run()
    except Exception as error:
        assert time.monotonic() - begun < 60
        return type(error).__name__, str(error), trainer.global_step
    return "", "", trainer.global_step


def _fit(module: Any, train: Any, val: Any = None, plan: str = "replicate", **flags: Any) -> tuple[str, str, int]:
    trainer = _trainer(plan, flags)
    loaders = [None if loader is None else loader[0](*loader[1:]) for loader in (train, val)]
    return _outcome(lambda: trainer.fit(module(), *loaders), trainer)


LAST = [
    "different numbers of training batches",
    "is the last one of rank 0, and rank 1 has more",
    "limit_train_batches",
]
VAL = {"limit_val_batches": 1.0, "num_sanity_val_steps": 0}
UNEVEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rank 1 has more": ({"train": (stream, 3, 5)}, [*LAST, "training batch 2 of epoch 0", "limit_train_batches=3"]),
    "rank 0 has more": ({"train": (stream, 5, 3)}, ["training batch 2 of epoch 0 is the last one of rank 1"]),
    "one has none": ({"train": (stream, 0, 2)}, ["rank 0: the end of epoch 0 (after 0 batches)"]),
    "in chunks": ({"train": (stream, 3, 5), "plan": "zero3"}, LAST),
    "accumulated": ({"train": (stream, 3, 4), "accumulate_grad_batches": 2}, LAST),
    "validated": ({"train": (stream, 2, 3), "val": (stream, 1, 1), **VAL}, LAST),
    "validated at the last step": ({"train": (stream, 2, 3), "val": (stream, 1, 1), "max_steps": 2, **VAL}, LAST),
    "fallen back": ({"module": ReadsLoss, "train": (stream, 3, 5)}, LAST),
    "manual": ({"module": Manual, "train": (stream, 3, 5)}, LAST),
    "fetched by the step": ({"module": Fetches, "train": (stream, 2, 4)}, ["not at the same batch", "the end of"]),
    "of known lengths": ({"train": (sized, 3, 5)}, LAST),
    "an epoch skipped": ({"module": SkipsEpoch, "train": (stream, 5, 5)}, ["not at the same", "rank 1: the end of"]),
    "a batch of None": ({"train": (with_a_hole, 5, 5)}, ["not at the same", "rank 1: training batch 2"]),
    "stopped on one": (
        {"train": (stream, 5, 5), "callbacks": [StopsOnRankZero()]},
        ["rank 0: the end of epoch 0 (after 2 batches; trainer.should_stop is set there)", "rank 1: training batch 2"],
    ),
    "stopped and validated": (
        {"train": (stream, 5, 5), "val": (stream, 1, 1), "callbacks": [StopsOnRankZero()], **VAL},
        ["rank 0: the start of the validation of epoch 0 (trainer.should_stop", "rank 1: training batch 2"],
    ),
    "a StopIteration in a hook": (
        {"train": (stream, 5, 5), "callbacks": [RaisesStopIteration()]},
        ["rank 0: the end of epoch 0 (after 2 batches)"],
    ),
    "one backward more": (
        {"module": OnceMore, "train": (stream, 3, 3)},
        ["rank 0: training batch 2 of epoch 0", "rank 1: backward pass 2 of training batch 1 of epoch 0"],
    ),
    "validated in graphs": (
        {"train": (stream, 2, 2), "val": (stream, 3, 2), "plan": "zero3", **VAL},
        ["different numbers of validation batches", "batch 1 is the last one of rank 1", "limit_val_batches=2"],
    ),
    "validated with gathered layers": (
        {"module": DistinctEager, "train": (stream, 2, 2), "val": (stream, 2, 3), "plan": "zero3", **VAL},
        ["different numbers of validation batches", "limit_val_batches=2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNEVEN)
def test_different_numbers_of_batches_are_said_on_every_rank(name: str, two_ranks: RankPool) -> None:
    settings, words = UNEVEN[name]
    found = two_ranks.run(_fit, **{"module": Distinct, **settings})
    assert [kind for kind, _, _ in found] == ["RankDisagreementError"] * 2, found
    assert found[0][1] == found[1][1]
    for word in words:
        assert word in found[0][1], found[0][1]


EVEN: dict[str, tuple[dict[str, Any], int]] = {
    "limited": ({"train": (stream, 3, 5), "limit_train_batches": 3}, 6),
    "ended by max_steps": ({"train": (stream, 3, 5), "max_steps": 3}, 3),
    "validated eagerly": ({"train": (stream, 2, 2), "val": (stream, 1, 3), **VAL}, 4),
}


@pytest.mark.parametrize("name", EVEN)
def test_what_ends_alike_is_no_error(name: str, two_ranks: RankPool) -> None:
    settings, steps = EVEN[name]
    assert two_ranks.run(_fit, **{"module": Distinct, **settings}) == [("", "", steps)] * 2


def _evaluate(method: str, loaders: Any, plan: str = "zero3", module: type[Quiet] = Distinct) -> tuple[str, str, int]:
    trainer = _trainer(plan, {"limit_val_batches": 1.0})
    made = [loader[0](*loader[1:]) for loader in loaders]
    return _outcome(lambda: getattr(trainer, method)(module(), made if len(made) > 1 else made[0]), trainer)


@pytest.mark.parametrize(
    ("method", "loaders", "words"),
    [
        ("validate", [(stream, 2, 3)], ["validation batch 1 is the last one of rank 0"]),
        ("validate", [(stream, 1, 2), (stream, 2, 2)], ["validation batch 0 of dataloader 1", "validation batch 1"]),
        ("test", [(stream, 3, 2)], ["test batch 1 is the last one of rank 1", "limit_test_batches=2"]),
        ("predict", [(stream, 3, 2)], ["prediction batch 1 is the last one of rank 1"]),
        ("test", [(stream, 0, 2)], ["not at the same batch", "rank 0: the end of the test"]),
    ],
)
def test_evaluation_in_graphs_says_so_too(method: str, loaders: Any, words: list[str], two_ranks: RankPool) -> None:
    found = two_ranks.run(_evaluate, method, loaders)
    assert [kind for kind, _, _ in found] == ["RankDisagreementError"] * 2, found
    for word in words:
        assert word in found[0][1], found[0][1]


def test_known_lengths_are_compared_before_the_first_step(two_ranks: RankPool) -> None:
    with pytest.warns(UserWarning, match=r"different numbers of training batches, by rank \[3, 5\]"):
        raise_warnings(two_ranks.run(_warned))


def raise_warnings(found: list[list[str]]) -> None:
    import warnings

    assert found[1] == []  # rank zero says it
    for text in found[0]:
        warnings.warn(text, stacklevel=1)


def _warned() -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(Quiet, (sized, 3, 5))
    return [str(w.message) for w in caught if "different numbers" in str(w.message)]


def test_a_fit_after_the_error_trains(two_ranks: RankPool) -> None:
    two_ranks.run(_fit, Quiet, (stream, 1, 2))
    assert two_ranks.run(_fit, Quiet, (stream, 2, 2)) == [("", "", 4)] * 2


def test_lightnings_own_loaders_are_left_alone() -> None:
    trainer = L.Trainer(strategy="spmd", devices=1, max_epochs=2, limit_val_batches=0, **QUIET)
    trainer.fit(Quiet(), loader_of(rows(8), 4))
    assert trainer.global_step == 4
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
