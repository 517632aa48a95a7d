"""NumPy, objects of C, and what gives another answer each time."""

import collections
import ctypes
import itertools
import os
import random
import tempfile
import time
from typing import Any

import numpy
import torch

from tests.strategy.kinds.base_kinds import Changed, Config, Kind


class NumpyArray(Kind):
    def start(self) -> None:
        self.box = Config(numpy.ones(3))

    def read(self) -> Any:
        return float(self.box.value.mean()) + self.box.value[0]

    def write(self, value: float) -> None:
        self.box.value[0] = value


class NumpyScalar(Kind):
    def start(self) -> None:
        self.gamma = numpy.float64(1.0)

    def read(self) -> Any:
        return self.gamma

    def write(self, value: float) -> None:
        self.gamma = numpy.float64(value)


class NumpyView(Kind):
    def start(self) -> None:
        self.whole = numpy.ones((40, 2000))
        self.view = self.whole[3:7, 5:8]

    def read(self) -> Any:
        return float(self.view.mean())

    def write(self, value: float) -> None:
        self.whole[4, 6] = value


class NumpyOfTensor(Kind):
    """An array that shares the memory of a tensor."""

    def start(self) -> None:
        self.tensor = torch.ones(3)
        self.box = Config(self.tensor.numpy())

    def read(self) -> Any:
        return float(self.box.value[0])

    def write(self, value: float) -> None:
        self.tensor.fill_(value)


class TensorOfNumpy(Kind):
    def start(self) -> None:
        self.array = numpy.ones(3, dtype="float32")

    def read(self) -> Any:
        return torch.from_numpy(self.array).mean() + torch.as_tensor(self.array)[0]

    def write(self, value: float) -> None:
        self.array[:] = value


class LargeArray(Kind):
    """Too large to be compared as a whole, but a tensor of it is read anew each step."""

    def start(self) -> None:
        self.array = numpy.ones(100_000, dtype="float32")

    def read(self) -> Any:
        return torch.from_numpy(self.array)[77_777]

    def write(self, value: float) -> None:
        self.array[77_777] = value


class LargeArrayInPython(LargeArray):
    """One element of it, in Python."""

    def read(self) -> Any:
        return float(self.array[77_777])


class CtypesNumber(Kind):
    def start(self) -> None:
        self.number = ctypes.c_double(1.0)

    def read(self) -> Any:
        return self.number.value

    def write(self, value: float) -> None:
        self.number.value = value


class Count(Changed):
    def start(self) -> None:
        self.numbers = itertools.count(1)

    def read(self) -> Any:
        return float(next(self.numbers))


class Generator(Changed):
    def start(self) -> None:
        self.numbers = (float(i) for i in range(1, 1000))

    def read(self) -> Any:
        return next(self.numbers)


class OwnIterator(Changed):
    class Numbers:
        def __init__(self) -> None:
            self.at = 0.0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> float:
            self.at += 1.0
            return self.at

    def start(self) -> None:
        self.numbers = self.Numbers()

    def read(self) -> Any:
        return next(self.numbers)


class File(Changed):
    def start(self) -> None:
        self.path = os.path.join(tempfile.gettempdir(), f"kinds_{os.getpid()}")

    def read(self) -> Any:
        with open(self.path) as file:
            return float(file.read())

    def write(self, value: float) -> None:
        with open(self.path, "w") as file:
            file.write(str(value))

    def on_train_end(self) -> None:
        os.unlink(self.path)


class FileExists(File):
    def read(self) -> Any:
        return 2.0 if os.path.exists(self.path) else 1.0

    def write(self, value: float) -> None:
        if value == 0.5:
            os.unlink(self.path)
        else:
            super().write(value)


class Folder(Changed):
    def read(self) -> Any:
        return 1.0 + 0 * len(list(os.scandir(tempfile.gettempdir())))


class NumpyFile(File):
    def read(self) -> Any:
        return float(numpy.loadtxt(self.path))


class Clock(Changed):
    def read(self) -> Any:
        return 1.0 + 0.0 * time.time()


class PythonRandom(Changed):
    def read(self) -> Any:
        return random.random()


class NumpyRandom(Changed):
    def read(self) -> Any:
        return numpy.random.rand()


class OwnRandom(Changed):
    def start(self) -> None:
        self.random = random.Random(3)
        self.numpy_random = numpy.random.default_rng(3)

    def read(self) -> Any:
        return self.random.random() + self.numpy_random.random()


class OwnCounter(Changed):
    def start(self) -> None:
        self.crit = Config()

    def read(self) -> Any:
        self.crit.value += 0.1
        return self.crit.value


class NonlocalCounter(Changed):
    def start(self) -> None:
        count = 0.0

        def tell() -> float:
            nonlocal count
            count += 1.0
            return count

        self.tell = tell

    def read(self) -> Any:
        return self.tell()


class GrowingDefault(Changed):
    def start(self) -> None:
        grown.__defaults__[0].clear()  # type: ignore[index]

    def read(self) -> Any:
        return grown()


def grown(items: Any = []) -> float:  # noqa: B006 - the kind of state that is meant
    """How often it was called."""
    items.append(1)
    return float(len(items))


class MissingKey(Kind):
    """Reading a ``defaultdict`` makes the entry: another one at each step."""

    def start(self) -> None:
        self.table: Any = collections.defaultdict(float)

    def write(self, value: float) -> None:
        pass

    def read(self) -> Any:
        return 1.0 + self.table[f"batch {self.trainer.fit_loop.epoch_loop.batch_idx}"] + len(self.table)
