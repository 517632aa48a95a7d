"""The recorder below autograd: its graph is the program that ran, and what it cannot write it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.node_info import Section, info_of
from tests.helpers.simulate import run_global
from tests.helpers.tiny_capture import capture_function

aten = torch.ops.aten


def captured(function: Callable[[Tensor, Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    weight, batch = torch.randn(3, 4, requires_grad=True), torch.randn(2, 3)
    return capture_function(lambda p, _, x: function(p["weight"], x), {"weight": weight}, {}, [batch])


def nodes(function: Callable[[Tensor, Tensor], Tensor]) -> list[fx.Node]:
    return [n for n in captured(function)[0].graph_module.graph.nodes if n.op == "call_function"]


def in_place(w: Tensor, x: Tensor) -> Tensor:
    y = x @ w
    view = y[:, :2]
    view.mul_(3).add_(x[:, :1])
    return y.relu_().sum()


def broadcasting(w: Tensor, x: Tensor) -> Tensor:
    return torch.stack([(x @ w).tanh(), x.mean() * w[:2]]).logsumexp(0).sum()


@pytest.mark.parametrize("function", [in_place, broadcasting])
def test_the_graph_is_the_program_bit_for_bit(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    step, live = captured(function)
    weight = live[0].clone().requires_grad_()
    loss = function(weight, live[1].clone())
    loss.backward()
    outputs, _ = run_global(step, live)
    assert torch.equal(outputs[0], loss.detach())
    assert weight.grad is not None
    assert torch.equal(outputs[1], weight.grad)


def test_operators_in_place_stay_in_place() -> None:
    targets = [n.target for n in nodes(in_place)]
    assert {aten.mul_.Tensor, aten.add_.Tensor, aten.relu_.default} <= set(targets)


def test_every_node_says_where_it_comes_from() -> None:
    found = nodes(in_place)
    line = in_place.__code__.co_firstlineno
    product = next(n for n in found if n.target is aten.mm.default)
    assert info_of(product).source.endswith(f"test_recorder.py:{line + 1}")
    sections = [info_of(n).section for n in found]
    assert sections[0] is Section.FORWARD
    assert sections[-1] is Section.BACKWARD
    backward = [n for n in found if info_of(n).section is Section.BACKWARD and n.target is aten.mm.default]
    assert {info_of(n).source for n in backward} == {info_of(product).source}  # that of its forward


def test_a_tensor_from_outside_is_an_input_that_is_read_anew() -> None:
    outside = torch.full((4,), 2.0)
    step, live = captured(lambda w, x: (x @ w * outside).sum())
    constants = [(i, e) for i, e in enumerate(step.signature.inputs) if e.role == "constant"]
    assert len(constants) == 1
    before = run_global(step, live)[0][0]
    assert live[constants[0][0]] is outside
    outside.fill_(4.0)
    assert torch.equal(run_global(step, live)[0][0], 2 * before)


def test_torch_tensor_makes_a_new_one_each_step() -> None:
    def writes(w: Tensor, x: Tensor) -> Tensor:
        count = torch.tensor([1.0, 2.0])
        count += 1
        return (x @ w).sum() * count.sum()

    step, live = captured(writes)
    assert torch.equal(run_global(step, live)[0][0], run_global(step, live)[0][0])


def test_a_recomputed_dropout_takes_the_numbers_of_the_first() -> None:
    def twice(w: Tensor, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        first = F.dropout(x @ w, 0.5)
        torch.set_rng_state(state)
        second = F.dropout(x @ w, 0.5)
        other = F.dropout(x @ w, 0.5)
        return ((first - second).abs() + 0 * other).sum()

    step, live = captured(twice)
    draws = [n for n in step.graph_module.graph.nodes if "bernoulli" in n.name or "dropout" in n.name]
    assert float(run_global(step, live)[0][0]) == 0.0
    assert len(draws) >= 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda w, x: torch.linalg.lstsq(x @ w, x)[0].sum(), "the shape of what .* returns depends on the data"),
        (lambda w, x: F.dropout(x @ w).sum() + torch.rand(2, generator=torch.Generator()).sum(), "torch.Generator"),
        (
            lambda w, x: torch.ops._c10d_functional.all_reduce((x @ w).sum(), "sum", "0"),
            "a collective .* inside training_step: the graph already sees the whole global batch",
        ),
    ],
    ids=["shape", "generator", "collective"],
)
def test_what_one_graph_cannot_say_is_refused_with_the_line(function: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as error:
        captured(function)
    assert "test_recorder.py:" in str(error.value)
