"""SampleText and SPMDProgressBar beside a real Trainer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_spmd.examples import GPTBytes, SampleText, SPMDProgressBar, TextBytes


@dataclass
class Event:
    stage: str
    variant: str
    seconds: float
    nodes: int | None


class TellingStrategy(SingleDeviceStrategy):
    """One device, and a build that is only told about."""

    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"))
        self.listeners: list[Callable[[Event], None]] = []
        self.built = False

    def add_build_listener(self, listener: Callable[[Event], None]) -> None:
        self.listeners.append(listener)

    def training_step(self, *args: object, **kwargs: object) -> object:
        if not self.built:
            self.built = True
            for event in (Event("capture", "apply", 0.0, None), Event("ready", "apply", 2.14, 1234)):
                for listener in self.listeners:
                    listener(event)
        return super().training_step(*args, **kwargs)


@pytest.fixture
def trainer(tmp_path: Path):
    def make(*callbacks: L.Callback, strategy: str | SingleDeviceStrategy = "auto") -> L.Trainer:
        return L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            callbacks=list(callbacks),
            max_epochs=1,
            limit_train_batches=4,
            limit_val_batches=1,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=any(isinstance(c, SPMDProgressBar) for c in callbacks),
            default_root_dir=tmp_path,
        )

    return make


@pytest.fixture
def module() -> GPTBytes:
    return GPTBytes(width=16, layers=1, heads=2, sequence_length=16)


@pytest.fixture
def data(text: Path) -> TextBytes:
    return TextBytes(str(text), sequence_length=16, batch_size=2)


def test_samples_are_printed_when_training_ends(trainer, module, data, capsys) -> None:
    callback = SampleText(prompts=["the [red] fox", ""], length=20)
    trainer(callback).fit(module, data)
    out = capsys.readouterr().out
    assert "sample 2 of 2" in out
    assert "the [red] fox" in out  # not taken for rich's markup
    assert [s[: len(p)] for s, p in zip(callback.samples, ("the [red] fox", "\n"), strict=True)] == [
        "the [red] fox",
        "\n",
    ]


def test_sampling_leaves_the_runs_random_numbers_alone(trainer, module, data) -> None:
    after = []
    for callbacks in ([], [SampleText(length=5)]):
        L.seed_everything(0)
        trainer(*callbacks).fit(module, data)
        after.append(torch.rand(1))
    assert after[0] == after[1]


def test_a_module_that_cannot_generate_is_named(trainer) -> None:
    with pytest.raises(TypeError, match="BoringModel has none"):
        trainer(SampleText()).fit(BoringModel())


@pytest.mark.parametrize("arguments", [{"prompts": []}, {"prompts": "def "}, {"length": -1}, {"temperature": -1.0}])
def test_a_wrong_argument_of_sample_text_is_named(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        SampleText(**arguments)


def test_progress_bar_prints_a_line_per_stage_and_per_batch_without_a_terminal(trainer, module, data, capsys) -> None:
    strategy = TellingStrategy()
    fit = trainer(SPMDProgressBar(refresh_rate=2), strategy=strategy)
    fit.fit(module, data)
    fit.validate(module, data, verbose=False)
    out = capsys.readouterr().out
    assert len(strategy.listeners) == 1
    assert "building the training graph (apply): capture … 0.0 s" in out
    assert "graph ready (apply): 1234 nodes in 2.1 s" in out
    assert [line[: len("epoch 0, batch 4/4")] for line in out.splitlines() if "batch" in line] == [
        "epoch 0, batch 2/4",
        "epoch 0, batch 4/4",
    ]


def test_progress_bar_is_plain_with_a_strategy_that_does_not_tell(trainer, module, data, capsys) -> None:
    trainer(SPMDProgressBar()).fit(module, data)
    out = capsys.readouterr().out
    assert "graph" not in out
    assert "epoch 0, batch 4/4, train_loss" in out


def test_progress_bar_shows_the_build_as_a_task_on_a_terminal(trainer, module, data, monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the output for a terminal
    bar = SPMDProgressBar()
    descriptions: list[str] = []

    class WatchingStrategy(TellingStrategy):
        def training_step(self, *args: object, **kwargs: object) -> object:
            if not self.built:
                self.listeners.insert(1, lambda _: descriptions.extend(t.description for t in bar.progress.tasks))
            return super().training_step(*args, **kwargs)

    trainer(bar, strategy=WatchingStrategy()).fit(module, data)
    assert "building the training graph (apply): capture … 0.0 s" in descriptions
    assert not any("building" in task.description for task in bar.progress.tasks)
    assert "1234" in capsys.readouterr().out


def test_progress_bar_forgets_a_build_that_never_became_ready(trainer, module, data, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = SPMDProgressBar()

    class FallingBackStrategy(TellingStrategy):
        def training_step(self, *args: object, **kwargs: object) -> object:
            self.built = True
            self.listeners[0](Event("capture", "apply", 0.0, None))
            return super().training_step(*args, **kwargs)

    trainer(bar, strategy=FallingBackStrategy()).fit(module, data)
    assert not any("building" in task.description for task in bar.progress.tasks)
