"""Losses that cut positions away ignore them instead: the same numbers, and no scores are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.long_sequences import CONTEXT_PARALLEL, context_plan
from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_module

WORDS = 32


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tokens(x).tanh())


def _shifted(scores: Tensor, x: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(scores[:, :-1].reshape(-1, WORDS), x[:, 1:].reshape(-1), ignore_index=3, **settings)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _shifted,
    "sum": lambda s, x: _shifted(s, x, reduction="sum") / 50,
    "weighted": lambda s, x: _shifted(s, x, weight=torch.linspace(0.5, 2, WORDS, dtype=s.dtype)),
    "copied and cast": lambda s, x: F.cross_entropy(
        s[..., :-1, :].contiguous().view(-1, WORDS).float(), x[..., 1:].contiguous().view(-1)
    ),
    "classes in the middle": lambda s, x: F.cross_entropy(s[:, :-1].transpose(1, 2), x[:, 1:], ignore_index=3),
    "from both ends": lambda s, x: F.cross_entropy(s[:, 2:-1].flatten(0, 1), x[:, 3:].flatten()),
    "not for training": lambda s, x: _shifted(s, x).detach() + s.mean(),
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "row by row": lambda s, x: _shifted(s, x, reduction="none").square().mean(),
    "smoothed": lambda s, x: _shifted(s, x, label_smoothing=0.1),
    "few": lambda s, x: F.cross_entropy(s[:, :2].flatten(0, 1), x[:, 1:3].flatten()),
}
"""Where not: rows count one by one, somebody else reads what the loss reads, most positions are cut away."""


@pytest.mark.parametrize("loss", [*LOSSES, *OTHERS])
def test_equals_one_device(loss: str) -> None:
    torch.manual_seed(0)
    step = (LOSSES | OTHERS)[loss]
    double = loss != "copied and cast"
    model = Scores().double() if double else Scores()
    captured, live = capture_module(model, lambda m, x: step(m(x), x), [torch.randint(0, WORDS, (3, 8))])
    (program, *_) = assert_equals_one_device(
        captured, live, {CONTEXT_PARALLEL: (1, 1)}, plan=context_plan(), rtol=1e-12 if double else 1e-5
    )
    gathers = [n for n in program.graph_module.graph.nodes if "all_gather" in str(n.target)]
    assert bool(gathers) == (loss in OTHERS)
    assert bool(program.fallbacks) == (loss in OTHERS)


def test_a_metric_beside_the_loss_gathers_for_itself() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        scores = model(x)
        kept = scores[:, :-1]
        return _shifted(scores, x), (kept.argmax(-1) == x[:, 1:]).double().mean()

    torch.manual_seed(0)
    captured, live = capture_module(Scores().double(), step, [torch.randint(0, WORDS, (3, 8))])
    (program, *_) = assert_equals_one_device(
        captured, live, {CONTEXT_PARALLEL: (1, 1)}, plan=context_plan(), rtol=1e-12
    )
    assert [line.split()[0] for line in program.fallbacks] == ["aten.slice.Tensor"]
