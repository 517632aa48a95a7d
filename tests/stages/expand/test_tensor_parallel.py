"""Tensor parallelism: what a block moves is what Megatron's moves, at any number of ranks, and one device's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import starts_collective
from lightning_spmd.parallel.parallel_plan import MeshPlan, ReplicatedPlan, ShardedStatePlan
from lightning_spmd.parallel.tensor_parallel import TensorParallelPlan, resolve_plan
from lightning_spmd.stages.expand import expand
from tests.helpers.models import GPT, Block, ConvNet
from tests.helpers.simulate import assert_equals_one_device, axes_for, meshes_for
from tests.helpers.tiny_capture import capture_module
from tests.helpers.transformers_like import Conv1D, Llama, LlamaBlock
from tests.stages.expand.test_sharded_state import UPDATES

MEGATRON: dict[str, Any] = {
    "*qkv": {"style": "colwise", "parts": 3},
    "*proj": "rowwise",
    "*up": "colwise",
    "*down": "rowwise",
}
GATED: dict[str, Any] = {"*out": "rowwise", "*gate": "colwise", "*up": "colwise", "*down": "rowwise"}
SEPARATE: dict[str, Any] = GATED | {"*.[qkv]": "colwise"}
FUSED: dict[str, Any] = GATED | {"*qkv": {"style": "colwise", "parts": [64, 16, 16]}}
ENDS: dict[str, Any] = {"tokens": "embedding", "head": "loss"}
DATA = {
    "replicated": ReplicatedPlan(),
    "zero2": ShardedStatePlan(parameters=False),
    "zero3": ShardedStatePlan(parameters=True),
}


def collectives_of(step: ShardedStep) -> tuple[Counter[str], Counter[str]]:
    """Kinds of collectives before the backward pass begins, and from there on."""
    found, backward = (Counter[str](), Counter[str]()), False
    for node in step.graph_module.graph.nodes:
        backward = backward or info_of(node).section is Section.BACKWARD
        if starts_collective(node):
            found[backward][str(node.target).split(".")[1]] += 1
    return found


def tensor_plan(module: nn.Module, plan: Any, ranks: int, *, sequence: bool = False) -> MeshPlan:
    resolved = resolve_plan(module, plan, ranks, sequence_parallel=sequence)
    return MeshPlan({"tensor_parallel": TensorParallelPlan(resolved)})


def expanded(
    module: nn.Module, plan: Any, step: Any, batch: list[Tensor], ranks: int, *, sequence: bool = False
) -> ShardedStep:
    """The last rank's graph on a tensor axis of ``ranks``."""
    captured, _ = capture_module(module, step, batch)
    axis = axes_for((1,) * ranks, "tensor_parallel")[-1]
    return expand(captured, (axis,), tensor_plan(module, plan, ranks, sequence=sequence))


def square(module: nn.Module, x: Tensor) -> Tensor:
    """A loss that lets the gradient of a block's input be computed: ``x`` is scaled by a parameter."""
    return module(x).square().mean()


class Scaled(nn.Module):
    """A block behind something trained, so its backward pass goes all the way."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.scale, self.block = nn.Parameter(torch.ones(width)), block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x * self.scale)


WIDTH, HEADS = 4096, 2048
BLOCKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "megatron": (lambda: Block(WIDTH, HEADS), MEGATRON),
    "llama": (lambda: LlamaBlock(WIDTH, HEADS, 1024, gqa=True, fused=False), SEPARATE),
    "llama, heads repeated": (lambda: LlamaBlock(WIDTH, HEADS, 1024, gqa=False, fused=False), SEPARATE),
    "llama, fused": (
        lambda: LlamaBlock(WIDTH, HEADS, 1024, gqa=False, fused=True),
        GATED | {"*qkv": {"style": "colwise", "parts": [4096, 2048, 2048]}},
    ),
}


def _behind_scale(make: Callable[[], nn.Module], blocks: int = 1) -> nn.Module:
    """On the CPU, whose attention is meant, in memory that nobody touches."""
    with torch.device("meta"):
        return Scaled(nn.Sequential(*[make() for _ in range(blocks)]), WIDTH).to_empty(device="cpu")


RANKS = [
    pytest.param(block, ranks, marks=() if ranks == 1024 or (block, ranks) == ("megatron", 2) else pytest.mark.long)
    for block in BLOCKS
    for ranks in (2, 8, 1024)
]
"""A graph is the same at any number of ranks: the most of them, and two once."""


@pytest.mark.parametrize(("block", "ranks"), RANKS)
def test_a_block_has_two_all_reduces_forward_and_two_backward(block: str, ranks: int) -> None:
    make, plan = BLOCKS[block]
    step = expanded(_behind_scale(make), plan, square, [torch.empty(2, 1024, WIDTH)], ranks)
    assert any("flash_attention_for_cpu" in str(n.target) for n in step.graph_module.graph.nodes)
    assert collectives_of(step) == ({"all_reduce": 2}, {"all_reduce": 2})
    assert step.fallbacks == []


NORMS = {"megatron": 4}
"""Weights and biases of a block's norms; by default two weights."""


@pytest.mark.parametrize(("block", "ranks"), RANKS)
def test_a_sequence_parallel_block_scatters_and_gathers_twice_each_way(block: str, ranks: int) -> None:
    make, plan = BLOCKS[block]
    counts: list[tuple[Counter[str], Counter[str]]] = []
    for blocks in (1, 2):  # the first one begins with whole activations
        module = _behind_scale(make, blocks)
        step = expanded(module, plan, square, [torch.empty(2, 1024, WIDTH)], ranks, sequence=True)
        assert step.fallbacks == []
        counts.append(collectives_of(step))
    twice = {"reduce_scatter_tensor": 2, "all_gather_into_tensor": 2}
    assert counts[1][0] - counts[0][0] == twice
    assert counts[1][1] - counts[0][1] == twice | {"all_reduce": NORMS.get(block, 2)}


def cross_entropy(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x).flatten(0, 1), y.flatten(), ignore_index=3)


def smoothed(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = module(x).flatten(0, 1)
    weight = torch.linspace(0.5, 2.0, logits.shape[1])
    return F.cross_entropy(logits, y.flatten(), weight, ignore_index=3, label_smoothing=0.1)


def row_by_row(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = F.cross_entropy(module(x).flatten(0, 1), y.flatten(), reduction="none", ignore_index=3)
    return (rows * torch.linspace(0, 1, rows.shape[0])).sum()


def summed(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x).transpose(1, 2), y, reduction="sum", ignore_index=3) / 100


class Words(nn.Module):
    """A tied table as both ends."""

    def __init__(self, *, padding: int | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, 16, padding_idx=padding)
        self.head = nn.Linear(16, 96, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tokens(x).tanh())


def words(rows: int = 6, time: int = 5) -> list[Tensor]:
    torch.manual_seed(1)
    y = torch.randint(0, 96, (rows, time))
    y[0, :3] = 3
    return [torch.randint(0, 96, (rows, time)), y]


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_a_split_vocabulary_reduces_two_numbers_a_row(ranks: int) -> None:
    step = expanded(Words(), ENDS, cross_entropy, words(), ranks)
    reduced = [n.args[0].meta["val"].shape for n in step.graph_module.graph.nodes if starts_collective(n)]
    # the lookup; largest score and sum of exponentials; the loss; the gradient of what the head reads
    assert reduced == [(6, 5, 16), (30, 1), (30, 1), (), (6, 5, 16)]
    assert collectives_of(step)[0].keys() == {"all_reduce"}


@pytest.mark.parametrize("loss", [cross_entropy, smoothed, row_by_row, summed])
@pytest.mark.parametrize("padding", [None, 7])
def test_a_split_vocabulary_equals_one_device(loss: Any, padding: int | None) -> None:
    torch.manual_seed(0)
    module = Words(padding=padding)
    captured, live = capture_module(module, loss, words(), update=UPDATES["lists"])
    plan = MeshPlan({**tensor_plan(module, ENDS, 3).axes, "data_parallel": ReplicatedPlan()})
    (step, *_) = assert_equals_one_device(
        captured, live, {"tensor_parallel": (1, 1, 1), "data_parallel": (1, 5)}, plan=plan
    )
    assert step.fallbacks == []


def test_replicated_parameters_need_no_collective() -> None:
    module = GPT(layers=1)
    captured, _ = capture_module(module, cross_entropy, words(), update=UPDATES["lists"])
    axis = axes_for((1,) * 8, "tensor_parallel")[3]
    step = expand(captured, (axis,), tensor_plan(module, {}, 8))
    before, after = ([n.target for n in s.graph_module.graph.nodes] for s in (captured, step))
    assert before[len(captured.signature.inputs) :] == after[len(captured.signature.inputs) :]


def gpt() -> nn.Module:
    return GPT(layers=1, tied=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], bool]] = {
    "gpt": (gpt, MEGATRON | ENDS, False),
    "gpt, sequence": (gpt, MEGATRON | ENDS, True),
    "llama": (lambda: Llama(1), SEPARATE | ENDS, False),
    "llama, sequence": (lambda: Llama(1, gqa=False), SEPARATE | ENDS, True),
    "llama, fused": (lambda: Llama(1, fused=True), FUSED | ENDS, False),
    "llama, fused, sequence": (lambda: Llama(1, fused=True, gqa=False), FUSED | ENDS, True),
}
UPDATED = [("replicated", "lists"), ("zero2", "one by one"), ("zero3", "lists"), ("zero3", "state born here")]


@pytest.mark.parametrize(
    ("model", "data", "update"),
    [
        pytest.param(model, *updated, marks=() if (m + u) % 2 == 0 else pytest.mark.long)
        for m, model in enumerate(MODELS)
        for u, updated in enumerate(UPDATED)
    ],
)
def test_a_mesh_trains_like_one_device(model: str, data: str, update: str) -> None:
    torch.manual_seed(0)
    make, plan, sequence = MODELS[model]
    module = make()
    captured, live = capture_module(module, cross_entropy, words(time=12), update=UPDATES[update])
    plans = MeshPlan({**tensor_plan(module, plan, 2, sequence=sequence).axes, "data_parallel": DATA[data]})
    mesh = {"tensor_parallel": (1, 1), "data_parallel": (3, 3)}
    (step, *_) = assert_equals_one_device(captured, live, mesh, plan=plans)
    assert step.fallbacks == []
    split = [e for _, e in step.signature.inputs_of(InputRole.PARAMETER) if str(e.placements[0]).startswith("S")]
    assert len(split) > 4


def images(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y)


class Grouped(nn.Module):
    """Depthwise, grouped and transposed convolutions, and groups of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.depth, self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 16, 1, groups=4)
        self.larger, self.last = nn.ConvTranspose2d(16, 12, 2, stride=2), nn.ConvTranspose2d(12, 10, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.depth(self.norm(self.first(x))))
        return self.last(F.gelu(self.larger(x))).mean((2, 3))


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[int, int]]] = {
    "batch norm": (ConvNet, {"features.0": "colwise", "features.1": "colwise", "features.4": "rowwise"}, (1, 0)),
    "groups": (
        Grouped,
        dict.fromkeys(["first", "norm", "depth", "grouped"], "colwise") | {"larger": "rowwise", "last": "colwise"},
        (1, 1),
    ),
}


@pytest.mark.parametrize("data", ["replicated", pytest.param("zero2", marks=pytest.mark.long), "zero3"])
@pytest.mark.parametrize("model", CONVOLUTIONS)
def test_channels_are_split_like_features(model: str, data: str) -> None:
    torch.manual_seed(0)
    make, plan, expected = CONVOLUTIONS[model]
    module = make()
    batch = [torch.randn(6, 3, 8, 8), torch.randint(0, 10, (6,))]
    captured, live = capture_module(module, images, batch, update=UPDATES["lists"])
    plans = MeshPlan({**tensor_plan(module, plan, 2).axes, "data_parallel": DATA[data]})
    mesh = {"tensor_parallel": (1, 1), "data_parallel": (2, 4)}
    (step, *_) = assert_equals_one_device(captured, live, mesh, plan=plans)
    assert step.fallbacks == []
    alone = expand(captured, meshes_for({"tensor_parallel": (1, 1)})[0], plans)
    sizes = Counter(len(n.args[0].meta["val"].shape) for n in alone.graph_module.graph.nodes if starts_collective(n))
    assert sizes[4] == sum(expected)


def test_transposed_weights_are_split_by_features() -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"up": Conv1D(32, 16), "down": Conv1D(16, 32)})

    def step(m: Any, x: Tensor) -> Tensor:
        return m["down"](F.gelu(m["up"](x))).square().mean()

    captured, live = capture_module(module, step, [torch.randn(4, 3, 16)], update=UPDATES["lists"])
    plan = tensor_plan(module, {"up": "colwise", "down": "rowwise"}, 4)
    (local, *_) = assert_equals_one_device(captured, live, {"tensor_parallel": (1,) * 4}, plan=plan)
    assert collectives_of(local)[0] == {"all_reduce": 1}


def test_a_layout_that_gathers_is_reported() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.up(x))

    with pytest.warns(match="gathered over tensor_parallel"):
        step = expanded(Normed(), {"up": "colwise"}, square, [torch.randn(4, 16)], 2)
    assert any("native_layer_norm" in line for line in step.fallbacks)


class PostNorm(nn.Module):
    """Three layers read what the residual connection reads, too: its gradient is a sum of four."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(x + self.out(self.q(x) * torch.sigmoid(self.k(x)) + self.v(x).tanh()))


@pytest.mark.parametrize("sequence", [False, True])
def test_what_meets_a_residual_gradient_is_reduced_once(sequence: bool) -> None:
    torch.manual_seed(0)
    module = PostNorm()
    captured, live = capture_module(module, square, [torch.randn(4, 6, 16)], update=UPDATES["lists"])
    before = [n.name for n in captured.graph_module.graph.nodes]
    plan = tensor_plan(module, {"[qkv]": "colwise", "out": "rowwise"}, 2, sequence=sequence)
    (step, *_) = assert_equals_one_device(captured, live, {"tensor_parallel": (1, 1)}, plan=plan)
    forward, backward = collectives_of(step)
    kind = "reduce_scatter_tensor" if sequence else "all_reduce"
    # a block's one each way; in one piece also the norm of the gradients
    assert (forward[kind], backward[kind]) == ((1, 1) if sequence else (1, 2))
    assert [n.name for n in captured.graph_module.graph.nodes] == before


def in_half_precision(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return cross_entropy(module, x, y)


@pytest.mark.parametrize("sequence", [False, True])
def test_autocast_moves_no_more(sequence: bool) -> None:
    torch.manual_seed(0)
    module = Llama(1)
    captured, live = capture_module(module, in_half_precision, words(time=12), update=UPDATES["lists"])
    plan = tensor_plan(module, SEPARATE | ENDS, 2, sequence=sequence)
    (step, *_) = assert_equals_one_device(captured, live, {"tensor_parallel": (1, 1)}, plan=plan, rtol=2e-2)
    forward, backward = collectives_of(step)
    if sequence:
        once_more = {"reduce_scatter_tensor": 3, "all_gather_into_tensor": 3}  # the table, the head
        assert once_more.items() <= forward.items()
        assert once_more.items() <= backward.items()
    else:
        assert (forward, backward) == ({"all_reduce": 6}, {"all_reduce": 4})


class Dropped(nn.Module):
    """Dropout of split features and of whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.dropout(self.up(x), 0.5)), 0.5)


def test_dropout_follows_the_axes_that_split_its_value() -> None:
    module = Dropped()
    captured, _ = capture_module(module, square, [torch.randn(4, 3, 8)])
    plan = {"up": "colwise", "down": "rowwise"}
    axes = meshes_for({"tensor_parallel": (1, 1), "data_parallel": (2, 2)})[0]
    plans = MeshPlan({**tensor_plan(module, plan, 2).axes, "data_parallel": ReplicatedPlan()})
    step = expand(captured, axes, plans)
    drawn = [n.meta["random"] for n in step.graph_module.graph.nodes if "random" in n.meta]
    assert drawn == [("tensor_parallel", "data_parallel"), ("data_parallel",)]
