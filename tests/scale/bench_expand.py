"""Seconds to capture, expand and verify a 12-layer GPT at 8 and at 1024 fake ranks, on one core.

Once without and once with sequences that four ranks share. Run ``python -m tests.scale.bench_expand``. Nothing is
asserted: a timed test fails on a busy machine.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spmd.ir import known_results
from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.ir.verify import verify_captured, verify_sharded
from lightning_spmd.parallel.context_parallel import CONTEXT_PARALLEL
from lightning_spmd.stages.expand import expand
from tests.helpers.long_sequences import DATA, context_plan
from tests.helpers.models import GPT
from tests.helpers.tiny_capture import capture_module


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _adamw(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    moments = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
    steps = [torch.ones(()) for _ in parameters]
    torch._fused_adamw_(
        parameters, gradients, *moments, [], steps,
        lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def measure(ranks: int, context: int = 1) -> float:
    """Print and return the total seconds; nothing is remembered of calls before.

    Args:
        ranks: of the mesh.
        context: of these, ranks that share each sequence.
    """
    torch.manual_seed(0)
    known_results._results.clear()
    model = GPT(layers=12)
    data = ranks // context
    x = torch.randint(0, 256, (2 * data, 32 * context))
    axes = [ShardAxis(DATA, data, 0, "sim", (2,) * data)]
    if context > 1:
        length = x.shape[1] // context
        axes.insert(0, ShardAxis(CONTEXT_PARALLEL, context, 0, "sim", (length,) * context))
    marks = [time.perf_counter()]
    captured, _ = capture_module(model, _loss, (x, x), update=_adamw)
    marks.append(time.perf_counter())
    step = expand(captured, tuple(axes), context_plan() if context > 1 else None)
    marks.append(time.perf_counter())
    verify_captured(captured)
    verify_sharded(step)
    marks.append(time.perf_counter())
    capture, expansion, verification = (b - a for a, b in zip(marks, marks[1:], strict=False))
    nodes = len(captured.graph_module.graph.nodes), len(step.graph_module.graph.nodes)
    print(
        f"{ranks:5} ranks, {context} a sequence: capture {capture:.2f} s, expand {expansion:.2f} s, verify "
        f"{verification:.2f} s, total {marks[-1] - marks[0]:.2f} s; {nodes[0]} → {nodes[1]} nodes"
    )
    return marks[-1] - marks[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(2)  # imports and operator caches
    small, large = measure(8), measure(1024)
    print(f"ratio {large / small:.3f}")
    measure(4, context=4)
    small, large = measure(8, context=4), measure(1024, context=4)
    print(f"ratio {large / small:.3f}")
