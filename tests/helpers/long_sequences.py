"""Models on sequences, and their training on a simulated mesh with a context axis."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import is_wait, starts_collective
from lightning_spmd.parallel.context_parallel import CONTEXT_PARALLEL, ContextParallelPlan
from lightning_spmd.parallel.parallel_plan import MeshPlan, ReplicatedPlan
from tests.helpers.simulate import expand_all, run_global, run_ranks

DATA, TENSOR = "data_parallel", "tensor_parallel"


class Encoder(nn.Module):
    """Bidirectional or causal, attention as a kernel or written out, padding masked; mean over the words."""

    def __init__(
        self, *, written_out: bool = False, masked: bool = True, causal: bool = False, width: int = 16
    ) -> None:
        super().__init__()
        self.written_out, self.masked, self.causal, self.heads = written_out, masked, causal, 4
        self.tokens = nn.Embedding(50, width, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(64, width) * 0.1)
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 5)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        mask = present[:, None, None, :] if self.masked else None
        if not self.written_out:
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        if self.causal:
            time = scores.shape[-1]
            scores = scores.masked_fill(torch.ones(time, time, dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        present = x != 0
        h = self.tokens(x) + self.positions[: x.shape[1]]
        n = self.norm(h)
        q, k, v = (f(n).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = h + self.out(self._attention(q, k, v, present).transpose(1, 2).flatten(2))
        h = h + self.down(F.gelu(self.up(h)))
        weight = present.unsqueeze(-1).to(h.dtype)
        return self.head((h * weight).sum(1) / weight.sum(1))


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of a language model; some targets are ignored."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=3)


def classified(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The loss of a classifier of sequences."""
    return F.cross_entropy(model(tokens), labels)


def words(rows: int = 4, time: int = 24) -> list[Tensor]:
    """Sequences with padding of very different lengths, and their classes."""
    torch.manual_seed(1)
    tokens = torch.randint(1, 50, (rows, time))
    for row, length in enumerate((10, time, 3, time - 1)):
        tokens[row, length:] = 0
    return [tokens, torch.randint(0, 5, (rows,))]


def text(rows: int = 4, time: int = 24) -> list[Tensor]:
    """Sequences of ``time`` positions and the token behind them."""
    torch.manual_seed(1)
    return [torch.randint(0, 96, (rows, time + 1))]


def context_plan(*, others: Mapping[str, Any] | None = None) -> MeshPlan:
    return MeshPlan({CONTEXT_PARALLEL: ContextParallelPlan(), DATA: ReplicatedPlan(), **(others or {})})


def choose_ring(monkeypatch: Any, ring: bool) -> None:
    """Let keys travel one way, whatever the cost model says."""
    rules = importlib.import_module("lightning_spmd.stages.expand.rules.attention")
    monkeypatch.setattr(rules, "ring_is_better", lambda *_, **__: ring)


def assert_training_equals_one_device(
    captured: Any,
    live: Sequence[Any],
    mesh: Mapping[str, Sequence[int]],
    plan: Any,
    *,
    steps: int = 3,
    exact: bool = False,
) -> list[ShardedStep]:
    """Losses to 1e-5 and weights to 1e-4 after several updates; in double precision to 1e-11 (``exact``)."""
    programs = expand_all(captured, mesh, plan)
    ours, theirs = list(live), list(live)
    for _ in range(steps):
        outputs, ours = run_ranks(programs, ours)
        wanted, theirs = run_global(captured, theirs)
        torch.testing.assert_close(outputs[0], wanted[0], rtol=1e-11 if exact else 1e-5, atol=0)
    for entry, got, want in zip(captured.signature.inputs, ours, theirs, strict=True):
        if want.dtype.is_floating_point:
            scale = max(want.abs().max().item(), 1e-2)
            difference = (got - want).abs().max().item()
            assert difference <= (1e-11 if exact else 1e-4) * scale, f"{entry.name}: off by {difference / scale:.1e}"
    return programs


def moved(step: ShardedStep) -> dict[Section, Counter[str]]:
    """Collectives of more than a number by the part of the iteration that reads or makes what they move."""
    found: dict[Section, Counter[str]] = {}
    for node in step.graph_module.graph.nodes:
        if starts_collective(node) and node.args[0].meta["val"].numel > 1:
            section = info_of(node.args[0]).section
            found.setdefault(section, Counter())[str(node.target).split(".")[1]] += 1
    return found


def sent_bytes(step: ShardedStep, axis: str = CONTEXT_PARALLEL) -> Counter[str]:
    """Bytes that this rank sends over an axis, by the kind of collective."""
    (mine,) = (a for a in step.axes if a.name == axis)
    found = Counter[str]()
    for node in step.graph_module.graph.nodes:
        if not starts_collective(node) or mine.group not in node.args:
            continue
        (wait,) = (user for user in node.users if is_wait(user))
        kind, size = str(node.target).split(".")[1], node.args[0].meta["val"].bytes
        if kind == "all_gather_into_tensor":
            found[kind] += size * (mine.size - 1)
        elif kind == "all_to_all_single":
            shares = list(node.args[2])
            found[kind] += size * (sum(shares) - shares[mine.rank]) // sum(shares)
        else:
            found[kind] += size * (mine.size - 1) // mine.size * (2 if kind == "all_reduce" else 1)
        assert wait.meta["val"].dtype == node.args[0].meta["val"].dtype
    return found
