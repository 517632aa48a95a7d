"""Context parallelism: sequences in pieces give one device's numbers, over updates and beside every other axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spmd.parallel.parallel_plan import ReplicatedPlan, ShardedStatePlan
from lightning_spmd.parallel.tensor_parallel import TensorParallelPlan, resolve_plan
from tests.helpers.long_sequences import (
    DATA,
    TENSOR,
    Encoder,
    assert_training_equals_one_device,
    choose_ring,
    classified,
    context_plan,
    next_token,
    text,
    words,
)
from tests.helpers.models import GPT
from tests.helpers.tiny_capture import capture_module
from tests.helpers.transformers_like import Llama
from tests.stages.expand.test_sharded_state import UPDATES
from tests.stages.expand.test_tensor_parallel import ENDS, MEGATRON

CP = "context_parallel"
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], list[Tensor]]]] = {
    "gpt": (lambda: GPT(layers=1, width=16), next_token, text),
    "llama": (lambda: Llama(layers=1, width=16), next_token, text),
    "llama, heads repeated": (lambda: Llama(layers=1, width=16, gqa=False), next_token, text),
    "encoder": (Encoder, classified, words),
    "encoder, no mask": (lambda: Encoder(masked=False), classified, words),
    "encoder, written out": (lambda: Encoder(written_out=True), classified, words),
    "causal, written out": (lambda: Encoder(written_out=True, masked=False, causal=True), classified, words),
}
MESHES: dict[str, dict[str, tuple[int, ...]]] = {
    "cp2": {CP: (1, 1)},
    "cp3": {CP: (1, 1, 1)},
    "cp4": {CP: (1, 1, 1, 1)},
    "cp2 dp2": {CP: (1, 1), DATA: (1, 3)},
}
SHORT = [
    ("gpt", "cp2", True), ("gpt", "cp3", False), ("llama", "cp4", True), ("llama", "cp2 dp2", False),
    ("encoder", "cp3", True), ("encoder", "cp2 dp2", False), ("encoder, written out", "cp2", False),
    ("causal, written out", "cp4", False),
]  # fmt: skip
LONG = [(m, n, ring) for m in MODELS for n in MESHES for ring in (False, True) if (m, n, ring) not in SHORT]


def captured_model(name: str, dtype: torch.dtype = torch.float32, update: str = "lists") -> Any:
    make, step, batch = MODELS[name]
    torch.manual_seed(0)
    return capture_module(make().to(dtype), step, batch(), update=UPDATES[update])


@pytest.mark.parametrize(
    ("model", "mesh", "ring"), [*SHORT, *[pytest.param(*case, marks=pytest.mark.long) for case in LONG]]
)
def test_training_equals_one_device(model: str, mesh: str, ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_ring(monkeypatch, ring)
    captured, live = captured_model(model)
    steps = assert_training_equals_one_device(captured, live, MESHES[mesh], context_plan())
    assert steps[0].fallbacks == []
    assert steps[0].axes[0].folded == (model in ("gpt", "llama", "llama, heads repeated"))


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("model", ["gpt", "encoder"])
def test_in_double_precision_nothing_but_rounding_differs(
    model: str, ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_ring(monkeypatch, ring)
    captured, live = captured_model(model, torch.float64)
    assert_training_equals_one_device(captured, live, MESHES["cp3"], context_plan(), exact=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_beside_sharded_state(stage: int) -> None:
    """Gradients are summed over both axes, first into chunks."""
    captured, live = captured_model("gpt")
    plan = context_plan(others={DATA: ShardedStatePlan(parameters=stage == 3)})
    assert_training_equals_one_device(captured, live, {CP: (1, 1), DATA: (1, 1)}, plan)


def beside_tensor(captured: Any, live: Any, sequence: bool, mesh: dict[str, tuple[int, ...]], data: Any) -> Any:
    resolved = resolve_plan(MODELS["gpt"][0](), MEGATRON | ENDS, 2, sequence_parallel=sequence)
    plan = context_plan(others={TENSOR: TensorParallelPlan(resolved), DATA: data})
    return assert_training_equals_one_device(captured, live, mesh, plan)


@pytest.mark.parametrize("sequence", [False, True])
def test_beside_shared_layers(sequence: bool) -> None:
    captured, live = captured_model("gpt")
    (step, *_) = beside_tensor(captured, live, sequence, {CP: (1, 1), TENSOR: (1, 1)}, ReplicatedPlan())
    assert step.fallbacks == []


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("sequence", [False, True])
def test_on_three_axes(sequence: bool, stage: int) -> None:
    captured, live = captured_model("gpt")
    data = ShardedStatePlan(parameters=stage == 3) if stage else ReplicatedPlan()
    beside_tensor(captured, live, sequence, {CP: (1, 1), TENSOR: (1, 1), DATA: (1, 1)}, data)


def test_a_length_that_the_ranks_do_not_divide_is_cut_in_unequal_pieces() -> None:
    torch.manual_seed(0)
    captured, live = capture_module(GPT(layers=1, width=16), next_token, text(time=11), update=UPDATES["lists"])
    (step, *_) = assert_training_equals_one_device(captured, live, {CP: (1, 1, 1)}, context_plan())
    assert step.axes[0].split == (4, 4, 3)
    assert step.fallbacks == []


class TwoLengths(nn.Module):
    """An encoder and a decoder that looks at it: sequences of two lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, 16)
        self.q, self.k, self.v, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 96)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, -1)).transpose(1, 2)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        keys, h = self.tokens(source), self.tokens(target)
        own = F.scaled_dot_product_attention(*[self._heads(f(h)) for f in (self.q, self.k, self.v)], is_causal=True)
        h = h + own.transpose(1, 2).flatten(2)
        seen = F.scaled_dot_product_attention(*map(self._heads, (self.q(h), self.k(keys), self.v(keys))))
        return self.head(h + seen.transpose(1, 2).flatten(2))


def translated(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(source, target).flatten(0, 1), target.flatten())


@pytest.mark.parametrize(("lengths", "ring"), [((12, 24), True), ((16, 24), False), ((9, 24), False)])
def test_sequences_of_two_lengths(lengths: tuple[int, int], ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last pair has one that the ranks do not divide: it stays whole, and so is what every query looks at."""
    choose_ring(monkeypatch, ring)
    torch.manual_seed(0)
    batch = [torch.randint(0, 96, (2, length)) for length in lengths]
    captured, live = capture_module(TwoLengths(), translated, batch, update=UPDATES["lists"])
    (step, *_) = assert_training_equals_one_device(captured, live, {CP: (1, 1)}, context_plan())
    whole = [line for line in step.fallbacks if "sequences of 9 positions" in line]
    assert len(step.fallbacks) == len(whole) == (lengths[0] == 9)
