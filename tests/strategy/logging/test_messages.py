"""What is said, when, by whom and where: every fit says how it runs, at the user's own line, from rank zero alone."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_spmd import messages
from lightning_spmd.messages import place_of, warn
from lightning_spmd.stages.expand.expand import ReplicationWarning
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET
from tests.strategy.small import Quiet, loader_of, rows


class HandsOutMemory(Quiet):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss if loss.data_ptr() > 0 else -loss


class LooksAtGradients(Quiet):
    def on_after_backward(self) -> None:
        pass


class Manual(Quiet):
    automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def on_after_backward(self) -> None:
        pass


class Hooked(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(_halved)


def _halved(gradient: Tensor) -> Tensor:
    return gradient / 2


class StepHooks(Quiet):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(_after_step)
        return optimizer


def _after_step(*_: Any) -> None:
    pass


def _fit(make: Callable[[], L.LightningModule], steps: int = 1) -> L.Trainer:
    trainer = L.Trainer(strategy="spmd", devices=1, max_steps=steps, limit_val_batches=0, **QUIET)
    trainer.fit(make(), loader_of(rows(8), 4))
    return trainer


def _line(function: Any, text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + [i for i, line in enumerate(lines) if text in line][0]


class Adafactor(Quiet):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def test_every_fit_of_a_process_announces_its_fallback_at_the_users_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # as a script has it: each text once for each place that warns
        for _ in range(2):
            _fit(HandsOutMemory, steps=10)
    said = [w for w in caught if "trains eagerly from here on" in str(w.message)]
    assert len(said) == 2
    for warning in said:
        assert warning.filename == __file__
        assert warning.lineno == _line(HandsOutMemory.loss, "data_ptr()")
        assert "data_ptr of a tensor in the step" in str(warning.message)
        assert "DDP" not in str(warning.message)  # one device averages nothing


@pytest.mark.parametrize(
    ("make", "found", "place"),
    [
        (LooksAtGradients, "split", LooksAtGradients.on_after_backward),
        (Manual, "eagerly", Manual.training_step),
        (Hooked, "eagerly", _halved),
        (StepHooks, "split", _after_step),
        (Adafactor, "split", torch.optim.Adafactor.step),
    ],
)
def test_every_fit_says_its_mode_and_why(make: Any, found: str, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(messages, "rank_zero_info", texts.append)
    for _ in range(2):
        _fit(make)
    trainer = _fit(make)
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 5, 5
    trainer.fit(make(), loader_of(rows(8), 4))  # a Trainer that is used again says it again
    said = [text for text in texts if "runs this training" in text]
    assert len(said) == 4, said
    assert all(f"runs this training {found}" in text and place_of(place) in text for text in said), said


class HookedLater(Quiet):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.first.weight.register_hook(_halved)


def test_a_hook_that_comes_in_mid_run_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(messages, "rank_zero_info", texts.append)
    _fit(HookedLater, steps=4)
    said = [text for text in texts if "builds another graph" in text]
    assert [text.partition("changed: ")[2] for text in said] == [f"_halved{place_of(_halved)} is new"]


def test_places_are_found_through_decorators_and_partials() -> None:
    @functools.wraps(_halved)
    def wrapped(gradient: Tensor) -> Tensor:
        return gradient

    own = f" ({__file__}:{_line(_halved, 'def _halved')})"
    assert place_of(wrapped) == place_of(functools.partial(_halved)) == place_of(_halved) == own
    assert place_of(Manual().training_step) == place_of(Manual.training_step)
    assert place_of(Manual).startswith(f" ({__file__}:")
    assert place_of(len) == place_of(3) == ""


def test_a_filter_of_the_user_counts() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="not this")
        warn("not this at all")
        warn("but this\n  at some file.py:12")
    assert [(str(w.message), w.filename, w.lineno) for w in caught] == [
        ("but this\n  at some file.py:12", "some file.py", 12)
    ]


@torch.library.custom_op("spmd_tests::reversed_rows", mutates_args=())
def reversed_rows(x: Tensor) -> Tensor:
    return x.flip(0)


reversed_rows.register_fake(lambda x: torch.empty_like(x))
reversed_rows.register_autograd(lambda ctx, grad: grad.flip(0))


class NoRule(Quiet):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((reversed_rows(batch[0]), batch[1]))


def _replications() -> list[str]:
    """With two shapes of batches; what this rank says."""
    data = functools.partial(loader_of, rows(7), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = L.Trainer(
            strategy="spmd", devices=2, max_epochs=1, limit_val_batches=0, use_distributed_sampler=False, **QUIET
        )
        trainer.fit(NoRule(), data())
        assert trainer.strategy.captures > 2, [str(w.message) for w in caught]
    return [str(w.message) for w in caught if issubclass(w.category, ReplicationWarning)]


def test_a_missing_rule_is_told_once_a_fit_and_by_rank_zero(two_ranks: RankPool) -> None:
    for _ in range(2):
        first, second = two_ranks.run(_replications)
        assert [len(first), len(second)] == [1, 0], (first, second)
        assert "spmd_tests.reversed_rows.default at " in first[0]
        assert "test_messages.py:" in first[0]
