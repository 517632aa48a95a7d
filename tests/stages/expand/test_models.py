"""Whole models: data-parallel programs equal the one-device program and move no activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.ir.verify import collectives
from lightning_spmd.parallel.parallel_plan import ReplicatedPlan
from tests.helpers.activations import activation_collectives
from tests.helpers.models import GPT, ConvNet, SequenceFirst
from tests.helpers.simulate import assert_equals_one_device, axes_for, expand_all
from tests.helpers.tiny_capture import capture_module

SPLITS = [(3, 3), (2, 2, 2), (1, 3, 2)]


def tokens(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), ignore_index=3)


def images(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=torch.linspace(0.5, 2, 10), label_smoothing=0.1)


def sgd(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    torch._foreach_add_(parameters, gradients, alpha=-0.1)


def clipped(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    norms = torch._foreach_norm(gradients)
    factor = torch.clamp(0.1 / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, factor)
    sgd(parameters, gradients)


def _token_batch() -> tuple[Tensor, Tensor]:
    y = torch.randint(0, 256, (6, 12))
    y[0, :9] = 3
    return torch.randint(0, 256, (6, 12)), y


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[], tuple[Tensor, Tensor]]]] = {
    "gpt": (GPT, tokens, _token_batch),
    "gpt_tied": (lambda: GPT(tied=True), tokens, _token_batch),
    "convnet": (ConvNet, images, lambda: (torch.randn(6, 3, 8, 8) + 3, torch.randint(0, 10, (6,)))),
    "sequence_first": (SequenceFirst, tokens, lambda: (torch.randn(6, 5, 16), torch.randint(0, 10, (6, 5)))),
    "mlp": (lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 10)), images,
            lambda: (torch.randn(6, 12), torch.randint(0, 10, (6,)))),
}  # fmt: skip


def captured_model(name: str, update: Any = None) -> tuple[CapturedStep, list[Any]]:
    torch.manual_seed(0)
    make, loss, batch = MODELS[name]
    return capture_module(make(), loss, batch(), update=update)


@pytest.mark.parametrize(
    ("update", "split"),
    [
        # every model with every update and with every split; all triples take minutes
        pytest.param(update, split, marks=() if u == s else pytest.mark.long)
        for u, update in enumerate((None, sgd, clipped))
        for s, split in enumerate(SPLITS)
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_train_like_one_device_without_moving_activations(name: str, update: Any, split: tuple[int, ...]) -> None:
    captured, live = captured_model(name, update)
    steps = assert_equals_one_device(captured, live, split, floor=0.1)
    assert [n.name for n in activation_collectives(steps[0])] == []
    assert steps[0].fallbacks == []


@pytest.mark.parametrize("update", [sgd, clipped])
def test_each_gradient_is_reduced_once(update: Any) -> None:
    captured, _ = captured_model("gpt", update)
    (step, *_) = expand_all(captured, (3, 3))
    parameters = sum(1 for e in step.signature.inputs if e.role == "parameter")
    # one a parameter, the total weight of the targets, the loss
    assert sum(1 for _ in collectives(step.graph_module.graph)) == parameters + 2


def test_gradients_leave_as_partial_sums_unless_they_are_exposed() -> None:
    captured, live = captured_model("mlp")
    (step, *_) = expand_all(captured, (3, 3))
    assert {str(e.placements[0]) for e in step.signature.outputs if e.role == "gradient"} == {"P"}
    plan = ReplicatedPlan(reduce_gradients=True)
    (step, *_) = assert_equals_one_device(captured, live, (3, 3), plan=plan)
    assert {str(e.placements[0]) for e in step.signature.outputs if e.role == "gradient"} == {"R"}


def test_the_graph_has_the_same_size_at_any_number_of_ranks() -> None:
    from lightning_spmd.stages.expand import expand

    for name in ("gpt", "convnet"):
        sizes = set()
        for ranks in (2, 1024):
            torch.manual_seed(0)
            make, loss, batch = MODELS[name]
            rows = [b.repeat_interleave(ranks, 0) for b in batch()]
            captured, _ = capture_module(make(), loss, rows, update=sgd)
            step = expand(captured, (axes_for((6,) * ranks)[1],))
            sizes.add(len(step.graph_module.graph.nodes))
        assert len(sizes) == 1, name


def test_batch_norm_stays_with_one_device_for_twenty_steps() -> None:
    """Running statistics and weights, far from zero mean, uneven ranks."""
    from tests.helpers.simulate import run_global, run_ranks

    captured, live = captured_model("convnet", sgd)
    steps = expand_all(captured, (1, 3, 2))
    one, many = list(live), list(live)
    for _ in range(20):
        expected, one = run_global(captured, one)
        got, many = run_ranks(steps, many)
        torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-6)
    for a, b, entry in zip(many, one, captured.signature.inputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda m, e=entry: f"{e.name}: {m}")
