"""Hugging Face models with all activations made again that can be: on one device, in parts, with shared layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_spmd.parallel.parallel_plan import ShardedStatePlan
from lightning_spmd.stages import BuildOptions, build
from lightning_spmd.stages.expand.auto_plan import find_plan
from lightning_spmd.stages.passes import PASSES, PassState, run_passes
from lightning_spmd.stages.runtime.agreement.same_graphs import describe
from tests.helpers import zoo
from tests.helpers.simulate import expand_all, run_ranks
from tests.helpers.tiny_capture import capture_module
from tests.stages.expand.test_sharded_state import UPDATES
from tests.stages.expand.test_tensor_parallel import tensor_plan

LONG = pytest.mark.long
SHARED_LAYERS = ("gpt2", "llama", "opt", "gemma2", "qwen3", "vit", "t5", "bert_cls")


def captured_model(name: str) -> tuple[Any, Any, list[Tensor]]:
    """(model, captured step, live inputs)."""
    model, batch = zoo.build(name, 4)
    keys = [k for k, v in batch.items() if hasattr(v, "shape")]
    others = {k: v for k, v in batch.items() if k not in keys}

    def loss(module: Any, *values: Tensor) -> Tensor:
        return module(**dict(zip(keys, values, strict=True)), **others).loss

    return model, *capture_module(model, loss, [batch[k] for k in keys], update=UPDATES["lists"])


def assert_same(got: Any, wanted: Any) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "t5" else LONG) for name in zoo.NAMES])
def test_on_one_device(name: str) -> None:
    _, captured, live = captured_model(name)
    found = []
    for share in (None, 0.4, 1.0):
        graphs = build(captured, (), BuildOptions(rematerialize=share))
        assert bool(graphs.remarks) == (share is not None)
        assert not any("cannot be reached" in remark for remark in graphs.remarks)
        inputs = [v.clone() if isinstance(v, Tensor) else v for v in live]
        with torch.no_grad():
            found.append([*fx.Interpreter(graphs.main.graph_module).run(*inputs), *inputs])
    for other in found[1:]:
        assert_same(other, found[0])


MESHES = [(name, mesh) for name in zoo.NAMES for mesh in ("uneven", "zero3")]
MESHES += [(name, mesh) for name in SHARED_LAYERS for mesh in ("tp2", "tp2 sequence")]


@LONG
@pytest.mark.parametrize(("name", "mesh"), MESHES)
def test_on_ranks(name: str, mesh: str) -> None:
    model, captured, live = captured_model(name)
    split: Any = {"uneven": (1, 3), "zero3": (3, 1)}.get(mesh, {"tensor_parallel": (1, 1)})
    plan: Any = {"uneven": None, "zero3": ShardedStatePlan(parameters=True)}.get(mesh, mesh)
    if plan is mesh:
        plan = tensor_plan(model, find_plan(captured, 2), 2, sequence=mesh == "tp2 sequence")
    found = []
    for share in (None, 1.0):
        steps = expand_all(captured, split, plan)
        for step in steps:
            run_passes(step, PASSES, PassState(bucket_size_mb=0.01, rematerialize=share))
        lines = [describe(step) for step in steps]
        assert all(line == lines[0] for line in lines), "the ranks took different decisions"
        found.append([x for part in run_ranks(steps, live) for x in part])
    assert_same(*found)
