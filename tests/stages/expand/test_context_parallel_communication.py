"""What context parallelism moves, by formula; what it keeps in memory; what it cannot split, by name."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_spmd.cost.attention import AttentionShape, gathered_bytes, ring_bytes
from lightning_spmd.cost.memory import peak_bytes
from lightning_spmd.ir.node_info import Section
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.parallel.tensor_parallel import TensorParallelPlan, resolve_plan
from lightning_spmd.stages.expand import expand
from tests.helpers.long_sequences import (
    CONTEXT_PARALLEL,
    TENSOR,
    Encoder,
    choose_ring,
    classified,
    context_plan,
    moved,
    next_token,
    sent_bytes,
    text,
    words,
)
from tests.helpers.models import GPT
from tests.helpers.simulate import expand_all, meshes_for
from tests.helpers.tiny_capture import capture_module
from tests.helpers.transformers_like import Llama
from tests.stages.expand.test_tensor_parallel import ENDS, MEGATRON


def last_rank(captured: Any, ranks: int, plan: Any = None) -> ShardedStep:
    axes = meshes_for({CONTEXT_PARALLEL: (1,) * ranks})[-1]
    return expand(captured, axes, plan or context_plan())


LAYERS = 2
MODELS: dict[str, tuple[Any, Any, Any, int]] = {
    "gpt": (lambda: GPT(layers=LAYERS, width=32), next_token, text, 4),
    "llama": (lambda: Llama(layers=LAYERS, width=32), next_token, text, 2),
    "encoder": (lambda: Encoder(width=32), classified, words, 4),
}
"""Model, step, batch, and heads of keys."""


@pytest.mark.parametrize(
    ("model", "ranks", "ring"),
    [
        pytest.param(model, ranks, ring, marks=() if (m + ranks // 2 + ring) % 2 == 0 else pytest.mark.long)
        for m, model in enumerate(MODELS)
        for ranks in (2, 4)
        for ring in (False, True)
    ],
)
def test_keys_and_values_move_by_formula_and_nothing_else(
    model: str, ranks: int, ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_ring(monkeypatch, ring)
    make, step, batch, groups = MODELS[model]
    captured, _ = capture_module(make(), step, batch())
    program = last_rank(captured, ranks)
    layers = 1 if model == "encoder" else LAYERS
    heads = 8 if model == "llama" else 4
    shape = AttentionShape(4, heads, groups, 24, 24, 32 // heads, 4)
    sent = sent_bytes(program)
    both = [(ring_bytes if ring else gathered_bytes)(shape, ranks, backward=b) for b in (False, True)]
    # beside keys and values: the loss and its number of tokens; a classifier's sums over the words
    small = sent.pop("all_reduce")
    assert small <= 2 * (4 * 32 + 4) * 4
    assert sum(sent.values()) == layers * sum(both)
    assert program.fallbacks == []


@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_a_gather_forward_a_gather_and_a_scatter_backward(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any number of ranks, in a graph of the same size."""
    choose_ring(monkeypatch, False)
    with torch.device("meta"):
        model = GPT(layers=1, width=8)
        model.positions = nn.Embedding(8192, 8)
    captured, _ = capture_module(model.to_empty(device="cpu"), next_token, [torch.zeros(1, 8193, dtype=torch.int64)])
    program = last_rank(captured, ranks)
    found = moved(program)
    assert found == {
        Section.FORWARD: {"all_gather_into_tensor": 1},
        Section.BACKWARD: {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1},
    }
    assert len(program.graph_module.graph.nodes) == pytest.approx(len(last_rank(captured, 2).graph_module.graph.nodes))


def test_a_ring_grows_with_the_ranks_and_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_ring(monkeypatch, True)
    captured, _ = capture_module(GPT(layers=1, width=8), next_token, text(time=32))
    sizes = [len(last_rank(captured, ranks).graph_module.graph.nodes) for ranks in (2, 4, 8, 16)]
    assert sizes[3] - sizes[2] == 2 * (sizes[2] - sizes[1]) == 4 * (sizes[1] - sizes[0])


@pytest.mark.parametrize("ring", [False, True])
def test_all_ranks_have_the_same_work_with_causality(ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as queries times keys of every kernel, half of them in a causal one."""
    choose_ring(monkeypatch, ring)
    captured, _ = capture_module(GPT(layers=1, width=16), next_token, text(time=48))
    work = []
    for step in expand_all(captured, {CONTEXT_PARALLEL: (1,) * 4}, context_plan()):
        found = Counter[bool]()
        for node in step.graph_module.graph.nodes:
            if "flash_attention_for_cpu" in str(node.target):
                backward = "backward" in str(node.target)
                query, key = (node.args[backward + i].meta["val"].shape[2] for i in range(2))
                causal = node.args[6 + backward if backward else 4]
                found[backward] += query * key * (1 if causal else 2)
        work.append((found[False], found[True]))
    one_key = 2 * 6  # the first rank's kernel below the diagonal sees a key that does not count
    assert max(w[0] for w in work) - min(w[0] for w in work) <= (0 if ring else one_key)
    assert max(w[1] for w in work) - min(w[1] for w in work) <= (0 if ring else one_key)


@pytest.mark.parametrize(("ring", "share"), [(True, 0.26), (False, 0.32)])
def test_activations_of_a_long_sequence_are_shared(ring: bool, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 8,192 positions and four ranks; a gather holds all keys of one layer for a moment."""
    choose_ring(monkeypatch, ring)
    model = GPT(layers=3, width=64)
    model.positions = nn.Embedding(8192, 64)
    captured, _ = capture_module(model, next_token, [torch.zeros(1, 8193, dtype=torch.int64)])
    whole = peak_bytes(captured.graph_module.graph)
    assert peak_bytes(last_rank(captured, 4).graph_module.graph) <= share * whole


def test_attention_written_out_keeps_scores_in_rows() -> None:
    """Also where moving scores would move fewer bytes; each product gathers what its rows look at."""
    captured, _ = capture_module(Encoder(written_out=True, causal=True), classified, words())
    for ranks in (2, 4, 6):
        program = last_rank(captured, ranks)
        found = moved(program)
        assert found[Section.FORWARD] - Counter(all_reduce=9) == {"all_gather_into_tensor": 2}
        assert found[Section.BACKWARD]["all_gather_into_tensor"] == 2
        assert found[Section.BACKWARD]["all_to_all_single"] == 0
        shapes = {n.meta["val"].shape for n in program.graph_module.graph.nodes if "softmax" in str(n.target)}
        assert (4, 4, 24 // ranks, 24) in shapes
        assert program.fallbacks == []


@pytest.mark.parametrize("length", [6, 12])
def test_shared_layers_move_on_their_axis_what_they_move_alone(length: int) -> None:
    """Pieces of the sequence inside of pieces: at 6 positions two ranks' 3 are not cut again, and layers sum whole."""
    model = GPT(layers=2, width=16)
    captured, _ = capture_module(model, next_token, text(time=length))
    shared = TensorParallelPlan(resolve_plan(model, MEGATRON | ENDS, 2, sequence_parallel=True))
    plain = TensorParallelPlan(resolve_plan(model, MEGATRON | ENDS, 2))

    def on_tensor_axis(mesh: dict[str, tuple[int, ...]], layers: Any) -> Counter[str]:
        axes = meshes_for(mesh)[-1]
        program = expand(captured, axes, context_plan(others={TENSOR: layers}))
        assert program.fallbacks == []
        return Counter(
            str(n.target).split(".")[1] for n in program.graph_module.graph.nodes if axes[-1].group in n.args
        )

    both = on_tensor_axis({CONTEXT_PARALLEL: (1, 1), TENSOR: (1, 1)}, shared)
    assert both == on_tensor_axis({TENSOR: (1, 1)}, shared if length == 12 else plain)


class Convolved(nn.Module):
    """Layers that look along the sequence."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.head = nn.Embedding(96, 8), nn.Linear(8, 96)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        h = self.convolution(h.transpose(1, 2)).transpose(1, 2) if self.kind == "convolution" else h.cumsum(1)
        return self.head(h.tanh())


@pytest.mark.parametrize("kind", ["convolution", "cumsum"])
def test_what_looks_along_the_sequence_is_gathered_and_named(kind: str) -> None:
    captured, _ = capture_module(Convolved(kind), next_token, text())
    lines: list[str] = []
    axes = meshes_for({CONTEXT_PARALLEL: (1, 1)})[0]
    step = expand(captured, axes, context_plan(), lines.append)
    (forward, *_) = step.fallbacks
    assert f"aten.{kind}" in forward
    assert "test_context_parallel_communication.py" in forward
    assert "gathered over context_parallel" in forward
    assert "it works along the sequence" in forward
    assert len(lines) == len({line.split()[0] for line in step.fallbacks}), "each operator is told of once"


def test_a_batch_without_sequences_is_computed_by_all_ranks_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    batch = [torch.randn(4, 5), torch.randint(0, 3, (4,))]
    captured, _ = capture_module(model, classified, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = last_rank(captured, 2)
    assert moved(step) == {}
    assert "nothing is split over context_parallel" in step.fallbacks[0]
