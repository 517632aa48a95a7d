"""Two captures of one step: what counts as the same, and how the first difference reads."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_spmd.ir.same_step import first_difference
from lightning_spmd.ir.same_value import same_plain
from lightning_spmd.ir.steps import CapturedStep, OutputRef
from tests.helpers.tiny_capture import capture_function


def captured(loss: Callable[[Tensor, Tensor], Tensor]) -> CapturedStep:
    """The step whose loss is a function of a weight and a batch."""
    weight, batch = torch.randn(3, 4, requires_grad=True), torch.randn(2, 3)
    step, live = capture_function(lambda p, _, x: loss(p["weight"], x), {"weight": weight}, {}, [batch])
    inputs = []
    for entry, tensor in zip(step.signature.inputs, live, strict=True):
        if entry.role == "constant":  # as a capture of a module keeps it
            entry = dataclasses.replace(entry, key=(len(step.constants),))
            step.constants.append(functools.partial(_itself, tensor))
        inputs.append(entry)
    return dataclasses.replace(step, signature=dataclasses.replace(step.signature, inputs=tuple(inputs)))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def scaled(factor: float) -> CapturedStep:
    return captured(lambda w, x: ((x @ w) * factor).sum())


def test_the_same_step_twice_is_the_same() -> None:
    assert first_difference(scaled(0.5), scaled(0.5)) is None


def test_a_number_in_the_code_is_told_with_its_line() -> None:
    found = first_difference(scaled(0.5), scaled(0.25))
    assert found is not None
    assert (found.was, found.now) == ("aten.mul.Tensor(mm_default, 0.5)", "aten.mul.Tensor(mm_default, 0.25)")
    line = scaled.__code__.co_firstlineno + 1
    assert found.source.endswith(f"test_same_step.py:{line}")
    assert str(found).startswith(f"  at {found.source}\n  was: ")


@pytest.mark.parametrize(
    ("other", "was", "now"),
    [
        (lambda w, x: (x @ w).relu().sum(), "aten.sum.default(mm_default)", "aten.relu.default(mm_default)"),
        (lambda w, x: (x @ w).mean(), "aten.sum.default(mm_default)", "aten.mean.default(mm_default)"),
        (lambda w, x: (x @ w).sum(0).sum(), "aten.sum.default(mm_default)", "aten.sum.dim_IntList(mm_default, [0])"),
        (lambda w, x: (x @ w.detach() + w.sum()).sum(), "aten.sum.default(mm_default)", "aten.sum.default(weight)"),
    ],
)
def test_other_operators_are_told(other: Any, was: str, now: str) -> None:
    found = first_difference(captured(lambda w, x: (x @ w).sum()), captured(other))
    assert found is not None
    assert (found.was, found.now) == (was, now)


def test_a_step_that_does_less_or_more_is_told() -> None:
    short, long = captured(lambda w, x: (x @ w).sum()), captured(lambda w, x: (x @ w).sum())
    graph = long.graph_module.graph
    output = list(graph.nodes)[-1]
    with graph.inserting_before(output):
        extra = graph.call_function(torch.ops.aten.add_.Tensor, (output.prev, 1))
    extra.meta.update(output.prev.meta)
    assert (found := first_difference(short, long)) is not None
    assert found.was == "nothing more"
    assert (found := first_difference(long, short)) is not None
    assert found.now == "nothing more"


def test_tensors_from_outside_are_the_same_if_they_hold_the_same() -> None:
    table = torch.tensor([1.0, math.nan, 2.0, 3.0])

    def step(outside: Tensor) -> CapturedStep:
        return captured(lambda w, x: ((x @ w) * outside).sum())

    assert first_difference(step(table), step(table)) is None
    assert first_difference(step(table), step(table.clone())) is None
    found = first_difference(step(table), step(table + 1))
    assert found is not None
    assert found.was.startswith("aten.mul.Tensor(mm_default, tensor([1., nan, 2., 3.]")
    assert found.now.startswith("aten.mul.Tensor(mm_default, tensor([2., nan, 3., 4.]")


def test_inputs_of_another_kind_are_told() -> None:
    one, other = scaled(1.0), scaled(1.0)
    entry = other.signature.inputs[0]
    spec = dataclasses.replace(entry.value, stride=(1, 3))
    inputs = (dataclasses.replace(entry, value=spec), *other.signature.inputs[1:])
    other = dataclasses.replace(other, signature=dataclasses.replace(other.signature, inputs=inputs))
    found = first_difference(one, other)
    assert found is not None
    assert found.was == "weight: float32[3, 4] with strides [4, 1] on cpu"
    assert found.now == "weight: float32[3, 4] with strides [1, 3] on cpu"


def test_what_is_returned_counts() -> None:
    one = dataclasses.replace(scaled(1.0), returned={"loss": OutputRef(0), "rate": 0.5})
    other = dataclasses.replace(scaled(1.0), returned={"loss": OutputRef(0), "rate": 0.25})
    assert first_difference(one, dataclasses.replace(other, returned=dict(one.returned))) is None
    found = first_difference(one, other)
    assert found is not None
    assert found.was == "training_step returns {'loss': <output 0>, 'rate': 0.5}"


# ---------------------------------------------------------------------- values
Point = namedtuple("Point", "x y")


@dataclass(eq=False)
class Record:
    value: Any


class Opaque:
    __slots__ = ()


class Raises:
    def __eq__(self, other: object) -> bool:
        raise ValueError


def closure(number: float) -> Callable[[], float]:
    return lambda: number


SAME = [
    (lambda: 1.0),
    (lambda: math.nan),
    (lambda: [1, (2.0, {"a": {3}})]),
    (lambda: Point(1, 2)),
    (lambda: Record([1])),
    (lambda: SimpleNamespace(a=[1])),
    (lambda: np.array([1.0, 2.0])),
    (lambda: torch.tensor([1.0, math.nan])),
    (lambda: closure(1.0)),
    (lambda: functools.partial(closure, 2.0)),
    (lambda: OutputRef(3)),
    Opaque,
    (lambda: torch.float32),
    (lambda: torch.device("cpu")),
]


@pytest.mark.parametrize("make", SAME)
def test_equal_values_are_the_same(make: Callable[[], Any]) -> None:
    assert same_plain(make(), make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0.1, 0.2),
        ([1, 2], (1, 2)),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (Point(1, 2), Point(1, 3)),
        (Record([1]), Record([2])),
        (SimpleNamespace(a=1), SimpleNamespace(a=2)),
        (np.array([1.0]), np.array([2.0])),
        (np.array([1.0]), np.array([1.0, 1.0])),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.zeros(2), torch.zeros(3)),
        (closure(1.0), closure(2.0)),
        (functools.partial(closure, 1.0), functools.partial(closure, 2.0)),
        (OutputRef(1), OutputRef(2)),
        (Raises(), Raises()),
    ],
)
def test_different_values_are_not(one: Any, other: Any) -> None:
    assert not same_plain(one, other)
