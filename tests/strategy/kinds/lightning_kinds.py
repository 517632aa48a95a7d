"""Lightning's objects."""

from typing import Any

import lightning as L

from tests.strategy.kinds.base_kinds import Changed, Config, Kind


class CallbackState(L.Callback):
    """A callback that anneals something."""

    def __init__(self) -> None:
        self.gamma, self.table = 1.0, {"x": [1.0]}


class LightningKind(Kind):
    def start(self) -> None:
        pass

    def on_train_start(self) -> None:
        pass


class CallbackAttribute(LightningKind):
    def configure_callbacks(self) -> Any:
        return [CallbackState()]

    def found(self) -> Any:
        return next(c for c in self.trainer.callbacks if isinstance(c, CallbackState))  # type: ignore[attr-defined]

    def read(self) -> Any:
        return self.found().gamma * self.found().table["x"][0]

    def write(self, value: float) -> None:
        self.found().gamma = value
        self.found().table["x"][0] = value


class Metrics(LightningKind):
    """What was logged before; each step another value."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        known = self.trainer.callback_metrics.get("seen")
        loss = super().training_step(batch, batch_idx)
        if known is not None:
            loss = loss + known
        self.log("seen", loss.detach())
        return loss

    def read(self) -> Any:
        return 1.0

    def write(self, value: float) -> None:
        pass


class DatamoduleAttribute(LightningKind):
    def read(self) -> Any:
        return getattr(self.trainer.datamodule, "gamma", 1.0)  # type: ignore[attr-defined]

    def write(self, value: float) -> None:
        self.trainer.datamodule.gamma = value  # type: ignore[attr-defined]


class LoaderAttribute(LightningKind):
    def read(self) -> Any:
        return getattr(self.trainer.train_dataloader, "gamma", 1.0)

    def write(self, value: float) -> None:
        self.trainer.train_dataloader.gamma = value  # type: ignore[union-attr]


class DatasetLength(LightningKind):
    def read(self) -> Any:
        return float(len(self.trainer.train_dataloader.dataset)) * 0.02  # type: ignore[union-attr]

    def write(self, value: float) -> None:
        dataset: Any = self.trainer.train_dataloader.dataset  # type: ignore[union-attr]
        if value == 0.5:
            dataset.append(dataset[0])


class TrainerAttribute(LightningKind):
    def read(self) -> Any:
        return 1.0 + self.trainer.max_epochs / 2 + self.trainer.should_stop  # type: ignore[operator]

    def write(self, value: float) -> None:
        self.trainer.fit_loop.max_epochs = int(2 * value)


class LoopAttribute(LightningKind):
    """A counter of a loop: another number at each step."""

    def read(self) -> Any:
        return 1.0 + self.trainer.fit_loop.epoch_loop.batch_idx / 10

    def write(self, value: float) -> None:
        pass


class LastBatch(LightningKind):
    def read(self) -> Any:
        return 2.0 if self.trainer.is_last_batch else 1.0

    def write(self, value: float) -> None:
        pass


class Counters(LightningKind):
    def read(self) -> Any:
        return 1.0 + self.global_step + (2 if self.current_epoch % 2 else 1) * self.trainer.global_step

    def write(self, value: float) -> None:
        pass


class EachStep(Kind):
    """A number of a plain object that changes at each batch becomes an input."""

    def start(self) -> None:
        self.crit = Config()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.crit.value *= 0.9

    def read(self) -> Any:
        return self.crit.value

    def write(self, value: float) -> None:
        self.crit.value = value


class KeepsTensor(Changed):
    def start(self) -> None:
        self.box = Config(None)

    def read(self) -> Any:
        kept = self.box.value
        self.box.value = self.layer.weight.detach().mean()
        return 1.0 if kept is None else 1.0 + kept
