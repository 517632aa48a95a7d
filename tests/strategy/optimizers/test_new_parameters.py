"""What joins a module in mid-run: on one device as in eager training, on several ranks alike on all of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_spmd import SPMDStrategy, messages
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET
from tests.strategy.small import Net, Quiet, assert_as_eager, loader_of, rows


class ReplacesParameter(Net):
    """The optimizer goes on with the old one."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 4:
            self.last.weight = nn.Parameter(torch.linspace(-1, 1, 30).reshape(3, 10))


class ReplacesLayer(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 4:
            torch.manual_seed(5)
            self.last = nn.Linear(10, 3)


class AndTrainsIt(ReplacesParameter):
    def on_train_batch_end(self, *_: Any) -> None:
        old = self.last.weight
        super().on_train_batch_end()
        if self.last.weight is not old:
            optimizer: Any = self.trainer.optimizers[0]
            optimizer.param_groups[0]["params"][2] = self.last.weight
            del optimizer.state[old]


@pytest.mark.parametrize("make", [ReplacesParameter, ReplacesLayer, AndTrainsIt])
def test_one_device_trains_what_eager_training_trains(make: Any) -> None:
    assert_as_eager(make)


class OwnNumbers(Quiet):
    """Each rank draws a layer, its buffer and its bias for itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * getattr(self.last, "scale", 1.0)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            generator = torch.Generator().manual_seed(self.global_rank)
            self.last = nn.Linear(10, 3)
            nn.init.normal_(self.last.weight, generator=generator)
            self.last.register_buffer("scale", torch.rand(1, generator=generator))
            self.trainer.optimizers[0].add_param_group({"params": list(self.last.parameters())})
        if self.global_step == 4:
            self.first.bias = nn.Parameter(torch.full((10,), float(self.global_rank)))


class Eagerly(OwnNumbers):
    """Without graphs: a hook on a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient)


class OnOneRank(Quiet):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            self.last = nn.Linear(10, 3)
            if self.global_rank == 1:
                self.last.register_buffer("scale", torch.ones(2))


def _fit(module: type[Quiet], plan: str) -> tuple[dict[str, list[float]], list[str], str]:
    L.seed_everything(1)
    strategy = SPMDStrategy(data_parallel=plan)  # type: ignore[arg-type]
    trainer = L.Trainer(
        strategy=strategy, devices=2, max_steps=6, limit_val_batches=0, use_distributed_sampler=False, **QUIET
    )
    said: list[str] = []
    before, messages.rank_zero_info = messages.rank_zero_info, said.append
    model = module()
    try:
        trainer.fit(model, loader_of(rows(32), 4))
    except Exception as error:
        return {}, [type(error).__name__, str(error)], ""
    finally:
        messages.rank_zero_info = before
    weights = {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}
    return weights, [text for text in said if "what is new" in text], str(strategy.mode)


@pytest.mark.parametrize("plan", ["replicate", "zero2"])
def test_every_rank_takes_rank_zeros(plan: str, two_ranks: RankPool) -> None:
    (first, said, mode), (second, _, _) = two_ranks.run(_fit, OwnNumbers, plan)
    assert mode == "compiled", said
    assert first == second
    assert any("last.weight, last.bias, last.scale" in text for text in said), said
    assert any("first.bias" in text for text in said), said
    assert first["first.bias"] == [0.0] * 10  # rank 0's, and no longer the optimizer's


def test_the_eager_path_does_so_too(two_ranks: RankPool) -> None:
    (first, said, mode), (second, _, _) = two_ranks.run(_fit, Eagerly, "replicate")
    assert mode == "eager"
    assert first == second
    assert any("last.weight, last.bias" in text for text in said), said


def test_where_parameters_are_in_parts_a_whole_one_is_refused(two_ranks: RankPool) -> None:
    for _, (kind, text), _ in two_ranks.run(_fit, OwnNumbers, "zero3"):
        assert kind == "ConfigurationError"
        assert text.startswith("last.weight, last.bias came into the module after the start of the run, whole")


def test_what_only_one_rank_gets_is_an_error_on_both(two_ranks: RankPool) -> None:
    for _, (kind, text), _ in two_ranks.run(_fit, OnOneRank, "replicate"):
        assert kind == "RankDisagreementError"
        assert "rank 0: last.weight: float32[3, 10], last.bias: float32[3]\n" in text
        assert "rank 1: last.weight: float32[3, 10], last.bias: float32[3], last.scale: float32[2]" in text
