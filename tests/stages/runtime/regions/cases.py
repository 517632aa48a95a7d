"""Captured steps with regions in them, and a compiler that takes no time and makes every mistake on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_spmd import _private_api as private
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.stages.runtime.regions import code
from tests.helpers.tiny_capture import capture_function

Fault = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""Makes wrong results of inputs and right results."""


class Compiler:
    """Stands for Inductor: its code are the region's own operators.

    Args:
        fault: what it does wrong, to every region or to those for which ``only`` says so.
    """

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.refuses = False
        self.only: Callable[[Any], bool] = lambda _function: True
        self.sources: dict[str, Any] = {}
        self.compiled = 0

    def compile(
        self, function: Any, fakes: Sequence[Tensor], mode: Any, folder: Path | None, *_: Any
    ) -> tuple[str, Any]:
        if self.refuses and self.only(function):
            raise RuntimeError("out of registers\nand more lines")
        self.compiled += 1
        source = f"source {len(self.sources)}"
        self.sources[source] = function
        return source, {"a/library.so": b"machine code"}

    def load(self, source: str, files: dict[str, bytes], folder: Path | None) -> Callable[[list[Any]], Sequence[Any]]:
        assert files == {"a/library.so": b"machine code"}
        function = self.sources[source]

        def call(inputs: list[Any]) -> Sequence[Any]:
            values = list(inputs)
            inputs.clear()
            right = function(*values)
            return right if self.fault is None or not self.only(function) else self.fault(values, right)

        return call


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """A compiler in place of Inductor, a cache of its own, and nothing known of earlier regions."""
    made = Compiler()
    monkeypatch.setattr(private, "compile_with_inductor", made.compile)
    monkeypatch.setattr(private, "load_inductor_code", made.load)
    monkeypatch.setattr(private, "compiler_settings", lambda: "settings")
    code._settings.cache_clear()
    monkeypatch.setenv("LIGHTNING_SPMD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(code.CODES, "_known", {})
    monkeypatch.setattr(code.CODES, "problems", {})
    monkeypatch.setattr(code.CODES, "counts", code.Counts())
    return made


def step_of(captured: CapturedStep) -> ShardedStep:
    """The step as one device runs it."""
    return ShardedStep(captured.graph_module, captured.signature, ())


def capture(
    function: Callable[..., Any], *batch: Tensor, parameters: dict[str, Tensor] | None = None
) -> tuple[ShardedStep, list[Tensor]]:
    """The captured step of ``function(parameters, *batch)``, and its live inputs."""
    given = {"w": torch.randn(16, 16)} if parameters is None else parameters
    owned = {name: value.requires_grad_() for name, value in given.items()}
    captured, live = capture_function(lambda p, _buffers, *args: function(p, *args), owned, {}, batch)
    return step_of(captured), live


def chain() -> tuple[ShardedStep, list[Tensor]]:
    """A product, and chains before and after it."""
    torch.manual_seed(4)

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = F.gelu(F.layer_norm(x, (16,))) + x
        return F.layer_norm(h @ p["w"] + h, (16,)).square().mean()

    return capture(loss, torch.randn(16, 16))


class Layer(nn.Module):
    """A layer without a product: a gated residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x * self.scale + self.shift)
        return x + torch.tanh(x * gate) * (1 - gate)
