"""Numbers that stay inputs: arithmetic becomes nodes, branches become decisions, all with the values of this step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.numbers.decisions import decision_program
from lightning_spmd.stages.capture.numbers.host_scalar import (
    HostScalar,
    scalar_of,
    sym_max,
    sym_min,
)
from lightning_spmd.stages.capture.record.recorder import Recorder


class Numbers:
    """A recorder and numbers that are inputs of its graph."""

    def __init__(self) -> None:
        self.recorder = Recorder(private.FakeTensorMode(allow_non_fake_inputs=True))

    def number(self, value: Any) -> Any:
        node = self.recorder.graph.placeholder(f"input_{len(self.recorder.graph.nodes)}")
        node.meta["val"] = value
        return HostScalar(value, node, self.recorder).as_symbol()

    def replayed(self, result: Any, *values: Any) -> Any:
        """What the recorded graph makes of other inputs."""
        graph = fx.Graph()
        copied = graph.graph_copy(self.recorder.graph, made := {})
        assert copied is None
        graph.output(made[scalar_of(result).node])
        return fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run(*values)


FORMULAS: dict[str, Callable[[Any, Any], Any]] = {
    "bias correction": lambda beta, step: 1 - beta**step,
    "reflected": lambda beta, step: 2 / beta - step * 3,
    "square root": lambda beta, step: (1 - beta**step) ** 0.5 / (1 + step),
    "division and rest": lambda beta, step: step // 2 + step % 3,
    "largest": lambda beta, step: torch.sym_max(beta * step, 1.0),
    "negated": lambda beta, step: -beta + abs(-step),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_arithmetic_is_python_at_capture_and_at_every_later_step(name: str) -> None:
    formula, numbers = FORMULAS[name], Numbers()
    result = formula(numbers.number(0.9), numbers.number(7))
    assert scalar_of(result).value == formula(0.9, 7)
    assert numbers.replayed(result, 0.5, 11) == formula(0.5, 11)
    assert numbers.recorder.decisions == []


@pytest.mark.parametrize(
    ("branch", "value", "outcome"),
    [
        (lambda x: bool(x > 5), 7, True),
        (lambda x: bool(x == 7), 3, False),
        (lambda x: int(x), 3, 3),
        (lambda x: str(x), 3, "3"),
        (lambda x: f"{x}", 3, "3"),
    ],
    ids=["greater", "equal", "int", "str", "format"],
)
def test_a_number_that_python_takes_is_a_decision(branch: Callable[[Any], Any], value: Any, outcome: Any) -> None:
    numbers = Numbers()
    assert branch(numbers.number(value)) == outcome
    ((node, seen, _),) = numbers.recorder.decisions
    assert isinstance(node, fx.Node)
    assert str(seen) == str(outcome)


def test_decisions_become_a_program_over_the_inputs() -> None:
    numbers = Numbers()
    rate, step = numbers.number(0.1), numbers.number(3)
    taken = [bool(rate * step > 0.2), bool(rate * step > 0.2), bool(step > 5)]
    assert taken == [True, True, False]
    program = decision_program(numbers.recorder.graph, numbers.recorder.decisions)
    assert program is not None
    assert program.expected == (True, False)  # one question asked twice is one question
    guard = program.guard([n for n in numbers.recorder.graph.nodes if n.op == "placeholder"])
    assert guard.failure([0.1, 3]) is None
    assert "changed from True to False" in str(guard.failure([0.05, 3]))
    assert "changed from False to True" in str(guard.failure([0.1, 6]))
    assert decision_program(numbers.recorder.graph, []) is None


def test_constants_are_not_recorded() -> None:
    numbers = Numbers()
    constant = HostScalar(3, None, numbers.recorder).as_symbol()
    assert scalar_of(constant + 1).node is None
    assert bool(constant > 2)
    assert numbers.recorder.decisions == []
    assert list(numbers.recorder.graph.nodes) == []


def test_what_is_no_recorded_number() -> None:
    assert scalar_of(3) is None
    assert scalar_of(torch.ones(1)) is None
    with pytest.raises(AttributeError, match="a recorded number has no operation 'frobnicate'"):
        scalar_of(Numbers().number(1)).frobnicate  # type: ignore[union-attr]  # noqa: B018


def test_a_tensor_of_a_number_follows_it() -> None:
    numbers = Numbers()
    rate = numbers.number(0.5)
    with torch.no_grad(), numbers.recorder.calls.mode, numbers.recorder:
        made = [torch.tensor(rate), torch.as_tensor(rate, dtype=torch.float64)]
    assert [t.dtype for t in made] == [torch.float32, torch.float64]
    users = next(iter(numbers.recorder.graph.nodes)).users
    assert len(users) == 2


def test_largest_and_smallest_promote_as_torch_does() -> None:
    assert [sym_max(1, 2.0), sym_max(3, 2), sym_min(1, 2.0), sym_min(3, 2)] == [2.0, 3, 1.0, 2]
    assert isinstance(sym_min(1, 2.0), float)
