"""Memory that Python has as an array, too: what it writes and reads there is in order, as in eager training."""

from __future__ import annotations

import copy
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_spmd.stages.capture.follow import memory
from tests.helpers.training import assert_bitwise
from tests.strategy.small import Quiet, run


class Keeps(Quiet):
    """Has an array that is a buffer, and notes numbers."""

    seen: list[float]

    def __init__(self) -> None:
        super().__init__()
        type(self).seen = []
        self.table = np.linspace(0.5, 1.0, 6, dtype=np.float32)
        self.register_buffer("shared", torch.from_numpy(self.table))
        self.register_buffer("own", torch.linspace(0.5, 1.0, 6))
        self.plain = torch.from_numpy(self.table)

    def weighed(self, batch: Any, weights: Any) -> Tensor:
        return self.loss((batch[0] * weights, batch[1]))


class WrittenBehindACall(Keeps):
    """Of a buffer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.weighed(batch, self.shared)
        self.table[batch_idx % 6] *= 0.9
        return loss + self.shared.sum()


class WrittenInTheEnd(Keeps):
    """When all calls have been made, before the backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.weighed(batch, self.plain)
        self.table[batch_idx % 6] *= 0.9
        return loss


class WrittenBehindAView(Keeps):
    """A view of the buffer is what the later call has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        part = self.plain[2:4]
        loss = self.weighed(batch, self.plain)
        self.table[3] *= 0.9
        return loss * part.sum()


class ReadBehindAWrite(Keeps):
    """A call writes into the buffer, and Python reads the array."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.shared.mul_(0.9)
        self.seen.append(float(self.table.sum()))
        return self.weighed(batch, self.shared)


class WeightFromBefore(Keeps):
    """An array of a weight was asked for before."""

    def on_train_start(self) -> None:
        self.array = self.first.weight.detach().numpy()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.array *= 0.99
        return loss


class OwnAskedLater(Keeps):
    """A buffer is torch's own, until Python asks for its array between two steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.array = self.own.numpy()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.weighed(batch, self.own)
        if batch_idx >= 3:
            self.array[1] += 0.1
        return loss * self.own.sum()


class OwnWritten(Keeps):
    """An array is asked for in the step, and the tensor written by torch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        array = self.own.numpy()
        self.own.add_(0.1)
        self.seen.append(float(array.sum()))
        return self.weighed(batch, self.own)


class ResultWritten(Keeps):
    """The array of a result is written, and the result used."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = torch.zeros(8, 6)
        mask.numpy()[:, batch_idx % 6] = 1
        return self.weighed(batch, mask + 0.5)


class SavedResultWritten(Keeps):
    """Probabilities are scaled as an array, which autograd has saved."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chances = torch.softmax(self(batch[0]), 1)
        array = chances.detach().cpu().numpy()
        array /= array.sum(0)
        self.seen.append(float(array.sum()))
        return (chances * torch.tensor([1.0, 2.0, 3.0])).sum()


class ResultWrittenByTorch(Keeps):
    """The array of a result is read when torch has written into the result; a part of it is asked for, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = batch[0].detach() * 2
        array, part = h.numpy(), h[:, 1].numpy()
        h.add_(1)
        self.seen.append(float(array.sum() + part.sum()))
        array[0] = 0
        return self.weighed(batch, h)


class BatchWritten(Keeps):
    """The batch is written as an array behind a call."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        batch[0].numpy()[0] = 0
        return loss + self.loss(batch)


class ByDlpack(Keeps):
    """Memory goes out as DLPack."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        array = np.from_dlpack(self.own)
        self.own.mul_(0.9)
        self.seen.append(float(array.sum()))
        return self.weighed(batch, self.own)


class Statistics(Keeps):
    """Batch norm's statistics, of which somebody has an array."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.array: Any = self.norm.running_mean.numpy()  # type: ignore[union-attr]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.norm(batch[0])
        self.seen.append(float(self.array.sum()))
        return self.loss((x, batch[1]))


class WrittenBefore(Keeps):
    """The array is written before calls read the tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.table[batch_idx % 6] *= 0.9
        return self.weighed(batch, self.plain)


class ReadAlone(Keeps):
    """Arrays are read alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self(batch[0])
        self.seen.append(float(h.detach().numpy().sum() + self.own.numpy().sum() + np.asarray(h.detach()[0])[1]))
        self.own.add_(0.1)
        return self.weighed(batch, torch.from_numpy(np.full(6, self.seen[-1], np.float32)))


class FromNobody(Keeps):
    """Nobody has the array any more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nobodys", torch.from_numpy(np.ones(6, np.float32)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.weighed(batch, self.nobodys)
        self.nobodys.mul_(0.9)
        return loss


class LoggedAndWritten(WeightFromBefore):
    """The loss is logged before the array of a weight is written, as the last thing of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.array[0] += 0.1
        return loss


class StorageRead(Keeps):
    """A storage is kept, and its bytes read behind a call that writes; nobody ever had an array."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = self.own.untyped_storage()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.own.mul_(0.9)
        self.seen.append(sum(bytes(self.storage)))
        return self.weighed(batch, self.own)


class StorageOfAWeight(Keeps):
    """A storage is saved behind an update by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_train_start(self) -> None:
        self.storage = self.first.weight.untyped_storage()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, optimizer = self.loss(batch), self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]
        torch.save(self.storage, saved := io.BytesIO())
        self.seen.append(sum(torch.load(io.BytesIO(saved.getvalue()), weights_only=False).tolist()))


class StorageWritten(StorageRead):
    """A storage is written behind a call that reads."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.weighed(batch, self.own)
        self.storage[2] = batch_idx
        return loss + self.own.sum()


class TypedStorageRead(Keeps):
    """A storage with a dtype is listed; no call writes there."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = self.own.storage()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.weighed(batch, self.own)
        self.seen.append(sum(self.storage.tolist()) + self.storage[1])
        return loss


class CopyWritten(Keeps):
    """A shallow copy of the batch, which shares its memory and not its version, is written behind a layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        copy.copy(batch[0]).mul_(2)
        self.seen.append(float(batch[0].sum()))
        return loss


class MappedFile(Keeps):
    """A buffer is a file, which is read between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp()) / "buffer"
        np.ones(6, np.float32).tofile(self.path)
        self.register_buffer("mapped", torch.from_file(str(self.path), shared=True, size=6, dtype=torch.float32))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mapped.mul_(0.9)
        return self.weighed(batch, self.mapped)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(np.fromfile(self.path, np.float32).sum()))


EAGER = [WrittenBehindACall, WrittenInTheEnd, WrittenBehindAView, ReadBehindAWrite, WeightFromBefore, OwnWritten,
         ResultWritten, SavedResultWritten, ResultWrittenByTorch, BatchWritten, ByDlpack, Statistics,
         LoggedAndWritten, StorageRead, StorageOfAWeight, StorageWritten, MappedFile]  # fmt: skip
GRAPHS = [OwnAskedLater, WrittenBefore, ReadAlone, FromNobody, TypedStorageRead, CopyWritten]


@pytest.mark.parametrize("kind", EAGER + GRAPHS)
def test_python_and_the_step_see_one_memory(kind: type[Keeps]) -> None:
    theirs, seen = run(kind, "auto", max_epochs=2), kind.seen
    ours = run(kind, max_epochs=2)
    assert kind.seen == seen
    assert_bitwise(ours, theirs)
    assert (ours.mode == "eager") == (kind in EAGER), ours.warnings
    assert any("tests/strategy/" in text for text in ours.warnings) == (kind in EAGER), ours.warnings


class FromFile(Keeps):
    """All weights lie in memory that something else allocated, as those of a file do; one buffer's array is kept."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.data = torch.from_numpy(parameter.detach().numpy().copy())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weighed(batch, self.shared)

    def on_train_end(self) -> None:
        own = [parameter.untyped_storage().resizable() for parameter in self.parameters()]
        self.seen += [all(own), self.shared.data_ptr() == self.table.ctypes.data]


def test_who_has_the_memory_of_weights_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, looks = run(FromFile, "auto", max_epochs=2), list[int]()
    look = memory._in_python
    monkeypatch.setattr(memory, "_in_python", lambda: (looks.append(1), look())[1])
    ours = run(FromFile, max_epochs=2)
    assert_bitwise(ours, theirs)
    assert ours.mode != "eager"
    assert FromFile.seen == [True, True], "weights moved to torch's memory, and what an array has did not"
    assert len(looks) == 1
