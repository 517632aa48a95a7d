"""Loggers and threads: values logged in many ways, loggers called directly, metrics, work that goes on beside."""

from __future__ import annotations

import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from tests.helpers.training import ListLogger
from tests.untidy.untidy import CLASSES, Untidy, plain


class Writer:
    """What TensorBoard's writer has: scalars, histograms, texts."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        self.rows.append((tag, float(value), step))

    def add_histogram(self, tag: str, values: Tensor, step: int) -> None:
        self.rows.append((tag, torch.histc(values.detach().float(), 5).tolist(), step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.rows.append((tag, text, step))

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.rows.append(({name: float(value) for name, value in values.items()}, step))


class WriterLogger(ListLogger):
    """A logger with an experiment."""

    def __init__(self) -> None:
        super().__init__()
        self.experiment = Writer()


class WithWriter(Untidy):
    """Shared by cases: the Trainer's logger has a writer, which is what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.writer: Writer | None = None

    def made_loggers(self, folder: Path) -> list[Logger]:
        logger = WriterLogger()
        self.writer = logger.experiment
        return [logger]

    @property
    def experiment(self) -> Any:
        """Of the logger, as users reach it."""
        return self.logger.experiment  # type: ignore[union-attr]

    def kept(self) -> Any:
        assert self.writer is not None
        return self.writer.rows


class AddScalar(WithWriter):
    """self.logger.experiment.add_scalar, of a tensor and of a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.experiment.add_scalar("loss", loss, self.global_step)
        self.experiment.add_scalar("rounded", round(loss.item(), 2), self.global_step)
        return loss


class AddHistogram(WithWriter):
    """Histograms of weights and of the hidden layer, and a text, every fourth step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        loss = F.cross_entropy(self.head(h), batch[1])
        if batch_idx % 4 == 0:
            for name, parameter in self.named_parameters():
                self.experiment.add_histogram(name, parameter, batch_idx)
            self.experiment.add_histogram("hidden", h, batch_idx)
            self.experiment.add_text("note", f"{loss:.3f} in step {batch_idx}", batch_idx)
        return loss


class LogsDictionary(WithWriter):
    """As with wandb: experiment.log of a dictionary, whose number of rows is used."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.experiment.log({"loss": loss.detach(), "batch": batch_idx, "mean": self.head.weight.mean()})
        return loss * (1 + 0.01 * len(self.experiment.rows))


class CsvLogger(Untidy):
    """CSVLogger, by self.log and called directly; what its file says is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path()

    def made_loggers(self, folder: Path) -> list[Logger]:
        self.folder = folder
        return [CSVLogger(folder, name="csv", version=0, flush_logs_every_n_steps=5)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss)
        assert self.logger is not None
        self.logger.log_metrics({"double": 2 * loss.item()}, step=batch_idx)
        return loss

    def kept(self) -> Any:
        file = self.folder / "csv" / "version_0" / "metrics.csv"
        return file.read_text() if file.exists() else ""  # rank zero alone writes


class SeveralLoggers(WithWriter):
    """Each of several loggers is told, by its kind."""

    def made_loggers(self, folder: Path) -> list[Logger]:
        return [*super().made_loggers(folder), ListLogger()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        for logger in self.loggers:
            if isinstance(logger, WriterLogger):
                logger.experiment.add_scalar("loss", loss, batch_idx)
            else:
                logger.log_metrics({"loss": float(loss)}, batch_idx)
        return loss

    def kept(self) -> Any:
        return super().kept(), [logger.rows for logger in self.loggers if isinstance(logger, ListLogger)]


class ManyLogs(Untidy):
    """self.log of tensors, numbers and whole dictionaries, with every way to put steps together."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("rows", len(x), reduce_fx=torch.sum, on_step=False, on_epoch=True)
        self.log("batch", float(batch_idx), batch_size=4, on_epoch=True)
        self.log_dict({"hits": (logits.argmax(1) == y).float().mean(), "weight": self.head.weight.norm()})
        self.log(f"of/{batch_idx % 3}", loss.detach() * 2)
        return loss


class LogsByValue(Untidy):
    """What is logged depends on values: names, whether at all, and a mean of what Python kept."""

    def __init__(self) -> None:
        super().__init__()
        self.large: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        if loss > 1.1:
            self.large.append(loss.item())
            self.log("large", sum(self.large) / len(self.large))
        self.log(f"class{int(batch[1][0])}", loss)
        seen = self.trainer.callback_metrics.get("large", torch.tensor(0.0))
        return loss + 0.01 * seen

    def kept(self) -> Any:
        return self.large


class ReturnsDictionary(Untidy):
    """The step returns a dictionary with more than the loss, which a hook gets."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return {"loss": loss, "logits": logits.detach(), "text": f"{loss:.2f}", "sizes": {"rows": len(logits)}}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.got.append([outputs["logits"].mean().item(), outputs["text"], outputs["sizes"]])

    def kept(self) -> Any:
        return self.got


class MetricLogged(Untidy):
    """A metric of torchmetrics is called and logged; a second one updated and computed now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.mean, self.means = torchmetrics.MeanMetric(), []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.mean.update(loss)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        if batch_idx % 6 == 5:
            self.means.append(self.mean.compute().item())
            self.log("mean", self.means[-1])
            self.mean.reset()
        return loss

    def kept(self) -> Any:
        return self.means


class MetricWeighs(Untidy):
    """What a metric says so far weighs the loss; metrics lie in a plain dictionary, too."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.others = {"confusion": MulticlassConfusionMatrix(CLASSES)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        now = self.accuracy(logits, batch[1])
        self.others["confusion"].update(logits, batch[1])
        so_far = self.accuracy.compute()
        return F.cross_entropy(logits, batch[1]) * (2 - so_far) * (1 if now > 0.4 else 1.5)

    def kept(self) -> Any:
        return self.accuracy.compute().item(), plain(self.others["confusion"].compute())


class MetricCollections(Untidy):
    """A collection of metrics, made anew in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = self.made("first/")

    def made(self, prefix: str) -> torchmetrics.MetricCollection:
        kinds = {"top1": MulticlassAccuracy(CLASSES), "top2": MulticlassAccuracy(CLASSES, top_k=2)}
        return torchmetrics.MetricCollection(dict(kinds), prefix=prefix)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 12:
            self.metrics = self.made("second/")
        logits = self(batch[0])
        self.log_dict(self.metrics(logits, batch[1]))
        return F.cross_entropy(logits, batch[1])

    def kept(self) -> Any:
        return plain(self.metrics.compute())


class ThreadThatPrints(Untidy):
    """A thread prints and draws random numbers while the step computes, which then waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def beside(self, number: int) -> None:
        for _ in range(3):
            self.drawn.append(random.random())
        print(f"thread {number}: {self.drawn[-1]:.4f}")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        thread = threading.Thread(target=self.beside, args=(batch_idx,))
        thread.start()
        loss = self.loss(*batch)
        thread.join()
        print(f"step {batch_idx}: {loss.item():.4f}")
        return loss * self.drawn[-1]

    def kept(self) -> Any:
        return self.drawn


class Heartbeat(Untidy):
    """A thread draws from a generator of its own for the whole fit; it must get its numbers, the step its own."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()
        self.beats: list[float] = []
        self.thread: threading.Thread | None = None

    def beat(self) -> None:
        own = random.Random(9)
        while not self.over.wait(0.001):
            self.beats.append(own.random())

    def on_train_start(self) -> None:
        self.thread = threading.Thread(target=self.beat, daemon=True)
        self.thread.start()

    def on_train_end(self) -> None:
        self.over.set()
        assert self.thread is not None
        self.thread.join()
        self.thread = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch) * random.uniform(0.5, 1.5)

    def kept(self) -> Any:
        own = random.Random(9)
        return self.beats == [own.random() for _ in self.beats]


class Pool(Untidy):
    """A pool of threads computes a weight of the loss's value; its answer is waited for in the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.answer = ThreadPoolExecutor(1), None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        weight = 1.0 if self.answer is None else self.answer.result()
        self.answer: Any = self.pool.submit(lambda value: 1 + 1 / (1 + value), loss.item())
        return loss * weight

    def kept(self) -> Any:
        self.pool.shutdown()
        return self.answer.result()


class WorkerQueue(Untidy):
    """A worker gets tensors by a queue, and answers with texts that the step prints."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: queue.Queue[Any] = queue.Queue()
        self.answers: queue.Queue[str] = queue.Queue()

    def work(self) -> None:
        while (tensor := self.asked.get()) is not None:
            self.answers.put(f"mean {tensor.mean().item():.5f}")

    def on_train_start(self) -> None:
        threading.Thread(target=self.work, daemon=True).start()

    def on_train_end(self) -> None:
        self.asked.put(None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        self.asked.put(h.detach().clone())
        loss = F.cross_entropy(self.head(h), batch[1])
        print(batch_idx, self.answers.get(timeout=3))
        return loss

    def kept(self) -> Any:
        return self.asked.qsize(), self.answers.qsize()


CASES = (
    AddScalar,
    AddHistogram,
    LogsDictionary,
    CsvLogger,
    SeveralLoggers,
    ManyLogs,
    LogsByValue,
    ReturnsDictionary,
    MetricLogged,
    MetricWeighs,
    MetricCollections,
    ThreadThatPrints,
    Heartbeat,
    Pool,
    WorkerQueue,
)
