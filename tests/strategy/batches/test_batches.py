"""Batches of every shape that Lightning moves to a device; what training_step does not read never decides a graph."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Quiet, assert_as_eager, loader_of, rows, run


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


Plain = namedtuple("Plain", "x y")


@dataclass
class Both:
    x: Tensor
    y: Tensor
    names: Any = None


class Encoding(UserDict):  # type: ignore[type-arg]
    """As Hugging Face's BatchEncoding: a UserDict with attributes and its own ``to``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any, **_: Any) -> Encoding:
        self.data = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.data.items()}
        return self


def _stack(items: list[Any]) -> tuple[Tensor, Tensor, list[str]]:
    x, y = torch.stack([i[0] for i in items]), torch.stack([i[1] for i in items])
    return x, y, [f"file{float(v):.3f}" for v in x[:, 0]]


def _nested(items: list[Any]) -> Any:
    x, y, names = _stack(items)
    return [{"inner": (x, [y, {"names": names, "source": "train"}])}, None, 3, len(names) * 1.5]


SHAPES: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda i: _stack(i)[:2], lambda b: (b[0], b[1])),
    "list": (lambda i: list(_stack(i)[:2]), lambda b: (b[0], b[1])),
    "dict": (lambda i: dict(zip("xyn", _stack(i), strict=True)), lambda b: (b["x"], b["y"])),
    "named tuple": (lambda i: Pair(*_stack(i)[:2]), lambda b: (b.x, b.y)),
    "collections.namedtuple": (lambda i: Plain(*_stack(i)[:2]), lambda b: (b.x, b.y)),
    "dataclass": (lambda i: Both(*_stack(i)), lambda b: (b.x, b.y)),
    "user dict": (lambda i: Encoding(zip("xyn", _stack(i), strict=True)), lambda b: (b["x"], b.y)),
    "nested": (_nested, lambda b: (b[0]["inner"][0], b[0]["inner"][1][0])),
}


class Reads(Quiet):
    """Takes its two tensors out of the batch of one shape."""

    shape = "tuple"

    def loss(self, batch: Any) -> Tensor:
        x, y = SHAPES[self.shape][1](batch)
        return F.cross_entropy(self(x), y)


MAKERS = {name: type("Reads", (Reads,), {"shape": name, "__module__": __name__}) for name in SHAPES}


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_shapes_equal_eager_without_recaptures(shape: str) -> None:
    ours = assert_as_eager(MAKERS[shape], data=lambda: loader_of(rows(), collate_fn=SHAPES[shape][0]))
    assert ours.captures == 2


class TensorAlone(Quiet):
    def loss(self, batch: Any) -> Tensor:
        return self(batch).square().mean()


def test_a_tensor_as_batch_equals_eager() -> None:
    assert assert_as_eager(TensorAlone, data=lambda: loader_of([x for x, _ in rows()])).captures == 2


class ReadsSource(Quiet):
    """Reads one of the strings, and a number, and the length of a list."""

    def loss(self, batch: Any) -> Tensor:
        weight = 2.0 if batch["source"] == "a" else 1.0
        return F.cross_entropy(self(batch["x"]), batch["y"]) * weight * batch["scale"]


class Sources:
    """Collates batches whose source goes a, b, a, b ... and whose unread names always change."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, items: list[Any]) -> Any:
        self.count += 1
        x, y, names = _stack(items)
        return {"x": x, "y": y, "names": names, "id": self.count, "source": "ab"[self.count % 2], "scale": 0.5}


def test_a_string_decides_what_training_step_does() -> None:
    assert_as_eager(ReadsSource, data=lambda: loader_of(rows(), collate_fn=Sources()))


def _shape_on_ranks(shape: str, strategy: str, devices: int) -> Any:
    return run(MAKERS[shape], strategy, devices, data=lambda: loader_of(rows(), collate_fn=SHAPES[shape][0]))


@pytest.mark.parametrize("shape", ["dict", "dataclass", "user dict", "nested"])
def test_ranks_may_carry_different_strings(two_ranks: RankPool, shape: str) -> None:
    """Each rank's file names are its own; they are not part of the agreement."""
    results = two_ranks.run(_shape_on_ranks, shape, "spmd", 2)
    assert_compiled(*results)
    assert results[0].losses == results[1].losses


class Lengths(Quiet):
    def loss(self, batch: Any) -> Tensor:
        return self(batch).square().mean()


def test_all_sequence_lengths_but_the_first_share_a_graph() -> None:
    """Lengths 3, 5, 7, 3, 5, 7, ...: the first step's graph, that of all lengths, and the first length's own."""
    data = [torch.randn(length, 6, generator=torch.Generator().manual_seed(length)) for length in (3, 5, 7) * 8]
    ours = assert_as_eager(Lengths, data=lambda: loader_of(data, 1))
    assert ours.captures <= 3


class Empty(Quiet):
    def loss(self, batch: Any) -> Tensor:
        return self(batch[0]).square().sum()


def test_a_batch_without_rows_equals_eager() -> None:
    data = [(torch.zeros(0, 6),), (torch.ones(2, 6),)] * 3
    assert_as_eager(Empty, data=lambda: loader_of(data, None))


def test_channels_last_batches_equal_eager() -> None:
    class Images(Quiet):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)

        def loss(self, batch: Any) -> Tensor:
            return self.conv(batch).square().mean()

    images = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    images = [i.to(memory_format=torch.channels_last) if n % 2 else i for n, i in enumerate(images)]
    assert_as_eager(Images, data=lambda: loader_of(images, None))


class TakesAll(Quiet):
    """Its step names no argument."""

    def training_step(self, *args: Any) -> Tensor:
        batch, batch_idx = args
        return self.loss(batch) * (1.0 + 0.1 * (batch_idx % 2))


class TakesTheRest(Quiet):
    def training_step(self, batch: Any, *rest: Any, **more: Any) -> Tensor:
        return self.loss(batch) * (1.0 + 0.1 * len(rest) + len(more))


@pytest.mark.parametrize("make", [TakesAll, TakesTheRest])
def test_a_step_may_take_any_arguments(make: Any) -> None:
    assert_as_eager(make)


class Bag(dict):  # type: ignore[type-arg]
    """Every key is an attribute, also those that containers of others have."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def _bag(items: list[Any]) -> Bag:
    return Bag(zip(("x", "data"), _stack(items), strict=False))


class ReadsBag(Quiet):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch.x), batch.data)


def test_attributes_of_a_batch_may_be_its_keys() -> None:
    assert_as_eager(ReadsBag, data=lambda: loader_of(rows(), collate_fn=_bag))


class Complex(Quiet):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0].real * batch[0].imag), batch[1])


def _complex_rows() -> list[tuple[Tensor, Tensor]]:
    return [(torch.complex(x, x.cos()), y) for x, y in rows()]


def _complex_on_ranks(strategy: str, devices: int) -> Any:
    return run(Complex, strategy, devices, data=lambda: InOrder(_complex_rows(), ROWS))


def test_batches_may_be_complex_on_ranks(two_ranks: RankPool) -> None:
    results = two_ranks.run(_complex_on_ranks, "spmd", 2)
    assert_compiled(*results)
    assert_equals_one_device(results, _complex_on_ranks("auto", 1))
