"""NumPy: tables that the step changes by an element, shares with tensors, fills and looks into."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.untidy.untidy import CLASSES, WIDTH, Untidy

LARGE = 40_000
"""Numbers of eight bytes: 320 kB."""
TABLE = np.ones(LARGE)


class SmallTable(Untidy):
    """A table of a few weights; the step lowers that of the class it saw most."""

    def __init__(self) -> None:
        super().__init__()
        self.table = np.ones(CLASSES, dtype=np.float32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.table[int(y.mode().values)] *= 0.95
        return F.cross_entropy(self(x), y, weight=torch.tensor(self.table))

    def kept(self) -> Any:
        return self.table.tolist()


class LargeTable(Untidy):
    """A table of 320 kB on the module, of which a step changes and reads one element."""

    def __init__(self) -> None:
        super().__init__()
        self.table = np.ones(LARGE)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.table[1700 * (batch_idx % 6)] += 0.25
        return self.loss(*batch) * float(self.table[1700 * (batch_idx // 6)])

    def kept(self) -> Any:
        return self.table[::1700].tolist()


class GlobalTable(Untidy):
    """A table of 320 kB of the file, of which a step changes one element and reads all."""

    def __init__(self) -> None:
        super().__init__()
        TABLE[:] = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        TABLE[1234] *= 0.9
        TABLE[batch_idx] = 0.0
        return self.loss(*batch) * (float(TABLE[1234]) + float(TABLE.mean()))

    def kept(self) -> Any:
        return TABLE[:24].tolist(), float(TABLE[1234]), float(TABLE.sum())


class TableAsTensor(Untidy):
    """A tensor shares its memory with an array: what NumPy writes is what the layer is given."""

    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(WIDTH, dtype=np.float32)
        self.shared = torch.from_numpy(self.array)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.array[batch_idx % WIDTH] += 0.1
        return F.cross_entropy(self.head(self.hidden(batch[0]) + self.shared), batch[1])

    def kept(self) -> Any:
        return self.array.tolist()


class RunningStatistics(Untidy):
    """Running mean and variance of the batch in NumPy; the batch is normalized with them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance, self.seen = np.zeros(8), np.ones(8), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        values = x.numpy()
        self.seen += len(values)
        self.mean *= 0.9
        self.mean += 0.1 * values.mean(0)
        self.variance = 0.9 * self.variance + 0.1 * values.var(0)
        scaled = (values - self.mean) / np.sqrt(self.variance + 1e-5)
        return self.loss(torch.from_numpy(scaled.astype(np.float32)), y)

    def kept(self) -> Any:
        return self.mean.tolist(), self.variance.tolist(), self.seen


class Confusion(Untidy):
    """A confusion matrix is counted in NumPy; what is confused most is told apart by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = np.zeros((CLASSES, CLASSES), dtype=np.int64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        np.add.at(self.matrix, (y.numpy(), logits.argmax(1).numpy()), 1)
        errors = self.matrix.sum(1) - self.matrix.diagonal()
        weight = 1 + errors / max(int(errors.sum()), 1)
        return F.cross_entropy(logits, y, weight=torch.tensor(weight, dtype=torch.float32))

    def kept(self) -> Any:
        return self.matrix.tolist()


class NumpyOfHidden(Untidy):
    """NumPy computes a number of the hidden layer, which weighs the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        spread = np.asarray(h.detach()).std()
        rank = np.linalg.matrix_rank(h.detach().numpy())
        return F.cross_entropy(self.head(h), batch[1]) * float(1 / (1 + spread)) + 0.01 * int(rank)


class NumpyNumbers(Untidy):
    """Numbers of NumPy's own types are multiplied with tensors, index them and are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.step = np.float32(1.5), np.int64(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.step += 1
        self.scale = np.float32(max(self.scale * np.float32(0.95), np.float32(0.6)))
        loss = self.loss(x, y) * self.scale
        return loss + 0.1 * self.head.bias[self.step % CLASSES] if self.step > np.int64(10) else loss

    def kept(self) -> Any:
        return float(self.scale), int(self.step), type(self.scale).__name__


class WeightsAsArray(Untidy):
    """An array looks into the memory of a parameter, and sees each update."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        bias = self.head.bias.detach().numpy()
        self.norms.append(float(np.abs(bias).sum()))
        return self.loss(*batch) * (1 + self.norms[-1])

    def kept(self) -> Any:
        return self.norms


class Records(Untidy):
    """A structured array gets a record in each step, the last ones are read."""

    def __init__(self) -> None:
        super().__init__()
        self.records = np.zeros(24, dtype=[("step", np.int32), ("loss", np.float64)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.records[batch_idx] = (batch_idx, loss.item())
        recent = self.records["loss"][max(batch_idx - 3, 0) : batch_idx + 1]
        return loss * float(np.median(recent))

    def kept(self) -> Any:
        return self.records.tolist()


class SlicedSchedule(Untidy):
    """A table of weights is made once; a slice of it is rolled, scaled and looked up in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = np.linspace(1.0, 0.2, 24)
        self.view = self.schedule[6:18]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.view *= 0.99
        if batch_idx % 8 == 7:
            self.schedule[:] = np.roll(self.schedule, 1)
        return self.loss(*batch) * float(self.schedule[batch_idx])

    def kept(self) -> Any:
        return self.schedule.tolist()


CASES = (
    SmallTable,
    LargeTable,
    GlobalTable,
    TableAsTensor,
    RunningStatistics,
    Confusion,
    NumpyOfHidden,
    NumpyNumbers,
    WeightsAsArray,
    Records,
    SlicedSchedule,
)
