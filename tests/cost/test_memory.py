"""Memory on paper is what a run allocates, node by node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_spmd.cost.memory import Liveness, liveness
from lightning_spmd.ir.steps import CapturedStep
from tests.helpers.models import GPT, ConvNet
from tests.helpers.tiny_capture import capture_function, capture_module


class Allocations(fx.Interpreter):
    """Runs a graph as its compiled code does, and counts what is really there while each operator runs."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, int] = {}

    def run_on(self, *inputs: Tensor) -> None:
        known = {t.untyped_storage()._cdata for t in inputs}
        made: dict[int, tuple[StorageWeakRef, int]] = {}

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                for value in out if isinstance(out, (tuple, list)) else [out]:
                    if isinstance(value, Tensor):
                        storage = value.untyped_storage()
                        if storage._cdata not in known and storage._cdata not in made:
                            made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                return out

        self._mode, self._made = Mode(), made
        self.run(*inputs)

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        with self._mode:
            value = super().run_node(n)
        for key, (reference, _) in list(self._made.items()):
            if reference.expired():
                del self._made[key]
        self.found[n.name] = sum(size for _, size in self._made.values())
        return value


def _update(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (0.5 / (total + 1e-6)).clamp(max=1.0))
    torch._foreach_add_(parameters, gradients, alpha=-0.1)


def _captured(make: Callable[[], nn.Module], *batch: Tensor) -> tuple[CapturedStep, list[Tensor]]:
    torch.manual_seed(0)
    return capture_module(make(), lambda m, x, y: F.cross_entropy(m(x).flatten(0, -2), y), batch, update=_update)


def _gpt() -> Any:
    return _captured(GPT, torch.randint(11, (3, 8)), torch.randint(11, (24,)))


def _convnet() -> Any:
    return _captured(ConvNet, torch.randn(4, 3, 8, 8), torch.randint(10, (4,)))


@pytest.mark.parametrize("make", [_gpt, _convnet], ids=["gpt", "convnet"])
def test_the_count_is_what_a_run_has_in_memory_at_every_operator(make: Any) -> None:
    captured, live = make()
    found = liveness(captured.graph_module.graph, captured.signature)
    run = Allocations(captured.graph_module)
    run.run_on(*live)
    counted = {n.name: a for n, a in zip(found.order, found.alive, strict=True) if n.op == "call_function"}
    # kernels give out what nobody picks up, in shapes of their own (the workspace of a convolution)
    wrong = {name: (counted[name], there) for name, there in run.found.items() if counted[name] != there}
    assert wrong == {}
    assert found.peak == max(run.found.values())


def _layers(step: Callable[..., Any]) -> tuple[Liveness, CapturedStep]:
    parameters = {"w": torch.randn(64, 64, requires_grad=True)}
    captured, _ = capture_function(step, parameters, {}, [torch.randn(32, 64)])
    return liveness(captured.graph_module.graph, captured.signature), captured


def test_views_and_writes_in_place_take_no_memory() -> None:
    found, _ = _layers(lambda p, _, x: ((x @ p["w"]).view(64, 32).t().mul_(2.0).relu_() * 1.0).sum())
    names = {n.name: a for n, a in zip(found.order, found.alive, strict=True)}
    assert names["mm_default"] == names["relu__default"] == 32 * 64 * 4
    assert found.inputs == {"parameter": 64 * 64 * 4, "batch": 32 * 64 * 4}
    assert found.total == found.peak + 64 * 64 * 4 + 32 * 64 * 4


def test_a_peak_names_the_modules_that_hold_it() -> None:
    captured, _ = _gpt()
    found = liveness(captured.graph_module.graph, captured.signature)
    assert found.peak_at is not None
    assert sum(found.holders().values()) == found.peak
    assert max(found.peaks().values()) == found.peak
