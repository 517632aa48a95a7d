"""Hugging Face's mixtures of experts, trained with experts split over a tensor or a data axis: one device's run."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.helpers import zoo
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device, fit

STEPS, EPOCH, ROWS = 8, 3, 4
STYLE: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"*mlp.experts": "experts"}}
SPLIT: dict[str, Any] = {"expert_parallel_size": 2}


class Language(L.LightningModule):
    """A model of the zoo on token numbers.

    Args:
        name: of the model.
        experts: Hugging Face's implementation of experts.
    """

    def __init__(self, name: str, experts: str = "grouped_mm") -> None:
        super().__init__()
        self.model, _ = zoo.build(name, ROWS)
        self.model.set_experts_implementation(experts)
        for parameter in self.model.parameters():
            if parameter.ndim > 1:  # the usual 0.02 would hide what experts give
                torch.nn.init.normal_(parameter, 0, 0.1)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        # eps: what no token is routed to has rounding for a gradient
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.1)


def _train(
    name: str, options: Any, devices: int, experts: str = "grouped_mm", steps: int = STEPS, **flags: Any
) -> tuple[Result, dict[str, Any]]:
    """(the run, the share of expert weights and of their AdamW state that this process keeps)."""
    torch.manual_seed(1)
    data = InOrder(torch.randint(5, zoo.VOCABULARY, (ROWS * EPOCH, zoo.LENGTH)), ROWS)  # type: ignore[arg-type]
    module = Language(name, experts)
    result, trainer = fit(module, data, options, devices, max_steps=steps, gradient_clip_val=1.0, **flags)
    return result, _shares(module, trainer)


def _shares(module: Language, trainer: L.Trainer) -> dict[str, Any]:
    """The share of each expert weight and of its AdamW state that this process keeps."""
    shares: dict[str, Any] = {}
    state = trainer.optimizers[0].state
    for path, parameter in module.named_parameters():
        if ".experts." in path and "shared" not in path:
            kept = [parameter, *(v for v in state[parameter].values() if isinstance(v, Tensor) and v.ndim)]
            shares[path] = {(t.to_local() if isinstance(t, DTensor) else t).numel() / t.numel() for t in kept}
            assert len(kept) == 3
    return shares


@functools.cache
def _alone(name: str) -> Result:
    return _train(name, "auto", 1)[0]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) for name in zoo.EXPERTS],
)
def test_experts_on_two_ranks_equal_one_device(two_ranks: RankPool, name: str) -> None:
    found = two_ranks.run(_train, name, STYLE, 2)
    results = [result for result, _ in found]
    assert_compiled(*results)
    assert_equals_one_device(results, _alone(name))
    for _, shares in found:
        _assert_halves(shares)


def _assert_halves(shares: dict[str, Any]) -> None:
    assert shares
    assert all(share == {0.5} for share in shares.values()), shares


@pytest.mark.long
@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_other_implementations_of_experts_equal_one_device(two_ranks: RankPool, experts: str) -> None:
    """A loop over the experts that Python finds hit, which reads their numbers; the weights of each row."""
    found = two_ranks.run(_train, "mixtral", STYLE, 2, experts, 4, timeout=600)
    results = [result for result, _ in found]
    assert_compiled(*results)
    assert_equals_one_device(results, _train("mixtral", "auto", 1, experts, 4)[0])
    for _, shares in found:
        _assert_halves(shares)


@pytest.mark.parametrize("data", ["replicate", pytest.param("zero3", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_two_rows_of_two_ranks_equal_one_device(four_ranks: RankPool, name: str, data: str) -> None:
    results = [result for result, _ in four_ranks.run(_train, name, {**STYLE, "data_parallel": data}, 4)]
    assert_compiled(*results)
    assert_equals_one_device(results, _alone(name))


def _interrupted(
    name: str, folder: str, first_plan: Any, second_plan: Any, devices: int
) -> tuple[Result, dict[str, Any]]:
    """Two epochs with one plan, the rest with another; what of the experts this process kept in the first."""
    file = os.path.join(folder, "second.ckpt")
    torch.manual_seed(1)
    data = InOrder(torch.randint(5, zoo.VOCABULARY, (ROWS * EPOCH, zoo.LENGTH)), ROWS)  # type: ignore[arg-type]
    flags: dict[str, Any] = {"gradient_clip_val": 1.0, "enable_checkpointing": True, "default_root_dir": folder}
    module = Language(name)
    first, trainer = fit(module, data, first_plan, devices, max_epochs=2, **flags)
    shares = _shares(module, trainer)
    trainer.save_checkpoint(file)
    rest, _ = fit(Language(name), data, second_plan, devices, max_steps=STEPS, ckpt_path=file, **flags)
    rest.losses = first.losses + rest.losses
    rest.logged = first.logged + rest.logged
    return rest, shares


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("mixtral", marks=pytest.mark.long)])
def test_experts_on_two_ranks_are_one_devices_and_their_checkpoint_is_read_without_the_style(
    two_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    found = two_ranks.run(_interrupted, name, str(tmp_path), STYLE, {"data_parallel": "zero2"}, 2)
    results = [result for result, _ in found]
    assert_compiled(*results)
    assert_equals_one_device(results, _interrupted(name, str(tmp_path), "auto", "auto", 1)[0])
    for _, shares in found:
        _assert_halves(shares)


# ---------------------------------------------------------------- experts in a list
class Listed(L.LightningModule):
    """Four experts in a loop, each of which finds its rows by ``torch.where``; some may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16)) for _ in range(4))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        x = self.embedding(batch[:, :-1]).flatten(0, 1)
        shares, which = torch.topk(self.router(x).softmax(1), 2, dim=1)
        mixed, mask = torch.zeros_like(x), F.one_hot(which, len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            places, rows = torch.where(mask[e])
            mixed.index_add_(0, rows, expert(x[rows]) * shares[rows, places, None])
        loss = F.cross_entropy(self.head(x + mixed), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)


def _train_list(options: Any, devices: int) -> tuple[Result, set[float]]:
    """(the run, the shares of the experts' weights that this process keeps)."""
    torch.manual_seed(1)
    data = InOrder(torch.randint(32, (ROWS * EPOCH, 9)), ROWS)  # type: ignore[arg-type]
    module = Listed()
    result, _ = fit(module, data, options, devices, max_steps=STEPS, gradient_clip_val=1.0)
    weights = [p for name, p in module.experts.named_parameters() if name.endswith("weight")]
    return result, {(w.to_local() if isinstance(w, DTensor) else w).numel() / w.numel() for w in weights}


@pytest.mark.long
@pytest.mark.parametrize("plan", [{"experts": "experts"}, "auto"], ids=str)
def test_a_list_of_experts_equals_one_device(two_ranks: RankPool, plan: Any) -> None:
    found = two_ranks.run(_train_list, {"tensor_parallel_size": 2, "tensor_parallel_plan": plan}, 2)
    results = [result for result, _ in found]
    assert_compiled(*results)
    assert_equals_one_device(results, _train_list("auto", 1)[0])
    assert all(shares == {0.5} for _, shares in found)


@pytest.mark.long
def test_a_list_of_experts_on_two_axes_equals_one_device(four_ranks: RankPool) -> None:
    options = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"experts": "experts"}}
    results = [result for result, _ in four_ranks.run(_train_list, options, 4)]
    assert_compiled(*results)
    assert_equals_one_device(results, _train_list("auto", 1)[0])


# ---------------------------------------------------------------- ranks with tokens of their own
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("gpt_oss", "deepseek_v3") else pytest.mark.long) for name in zoo.EXPERTS],
)
def test_experts_of_two_data_ranks_equal_one_device(two_ranks: RankPool, name: str) -> None:
    found = two_ranks.run(_train, name, SPLIT, 2)
    results = [result for result, _ in found]
    assert_compiled(*results)
    assert_equals_one_device(results, _alone(name))
    for _, shares in found:
        _assert_halves(shares)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixtral", SPLIT),
        pytest.param("gpt_oss", SPLIT, marks=pytest.mark.long),
        pytest.param("qwen3_moe", SPLIT, marks=pytest.mark.long),
        pytest.param("deepseek_v3", SPLIT, marks=pytest.mark.long),
        pytest.param("gpt_oss", {**SPLIT, "data_parallel": "zero2"}, marks=pytest.mark.long),
        pytest.param("mixtral", {**SPLIT, "data_parallel": "zero3"}, marks=pytest.mark.long),
        pytest.param("mixtral", {"expert_parallel_size": 4}, marks=pytest.mark.long),
    ],
)
def test_experts_of_four_data_ranks_equal_one_device(four_ranks: RankPool, name: str, options: Any) -> None:
    found = four_ranks.run(_train, name, options, 4)
    results = [result for result, _ in found]
    assert_compiled(*results)
    assert_equals_one_device(results, _alone(name))
    share = 1 / options["expert_parallel_size"]
    assert all(kept == {share} for _, shares in found for kept in shares.values())


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (SPLIT, STYLE),
        pytest.param({**SPLIT, "save_distributed_checkpoint": True}, STYLE, marks=pytest.mark.long),
        pytest.param({"data_parallel": "zero3", "save_distributed_checkpoint": True}, SPLIT, marks=pytest.mark.long),
    ],
    ids=["file", "folder", "folder of zero3"],
)
def test_a_checkpoint_of_split_experts_is_read_under_another_plan(
    two_ranks: RankPool, tmp_path: Path, written: Any, read: Any
) -> None:
    found = two_ranks.run(_interrupted, "mixtral", str(tmp_path), written, read, 2)
    results = [result for result, _ in found]
    assert_compiled(*results)
    assert_equals_one_device(results, _interrupted("mixtral", str(tmp_path / "alone"), "auto", "auto", 1)[0])
    for _, shares in found:
        _assert_halves(shares)
