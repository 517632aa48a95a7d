"""``SPMDStrategy(loss_chunks=...)``: the same training to rounding, what it says, and what it takes."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_spmd import ConfigurationError, SPMDStrategy, messages
from lightning_spmd.cli import main as cli
from tests.cli.recipe import RECIPE
from tests.helpers.ranks import RankPool

CLASSES, WIDTH, LENGTH = 212, 16, 8


class Model(L.LightningModule):
    """A tied head over many classes, whose loss shifts and ignores."""

    def __init__(self, accuracy: bool = True, adam: bool = False) -> None:
        super().__init__()
        self.accuracy, self.adam = accuracy, adam
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.table.weight
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores = self.head(self.norm(torch.tanh(self.layer(self.table(batch[0])))))
        targets = torch.where(batch[1] % 5 == 0, -100, batch[1])
        loss = F.cross_entropy(scores[:, :-1].float().reshape(-1, CLASSES), targets[:, 1:].reshape(-1))
        if self.accuracy:
            self.log("accuracy", (scores.argmax(-1) == batch[1]).float().mean())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), 1e-3)
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Masked(Model):
    """The loss of the rows that a mask chooses, and, beside it, of all rows."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.beside = nn.Linear(WIDTH, CLASSES) if beside else None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.norm(torch.tanh(self.layer(self.table(batch[0]))))
        mask = batch[1] % 3 == 0
        loss = F.cross_entropy(self.head(hidden[mask]), batch[1][mask])
        if self.beside is not None:
            loss = loss + F.cross_entropy(self.beside(hidden).flatten(0, 1), batch[1].flatten())
        self.losses.append(loss.detach())
        return loss


class Parts:
    """Three quarters of a batch are of rank 0; the last batches are smaller."""

    def __init__(self, tokens: list[Tensor], rows: int, devices: int) -> None:
        self.batches = list(zip(*(t.split([rows] * 10 + [rows - 3, rows - 5]) for t in tokens), strict=True))
        self.devices = devices

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        rank = int(os.environ.get("RANK", 0))
        for x, y in self.batches:
            cut = len(x) - len(x) // 4
            part = slice(None) if self.devices == 1 else (slice(cut), slice(cut, None))[rank]
            yield x[part], y[part]


def fit(
    options: dict[str, Any],
    trainer: dict[str, Any],
    devices: int = 1,
    rows: int = 8,
    steps: int = 12,
    unequal: bool = False,
    module: Model | None = None,
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """(losses, weights, what the strategy said)."""
    said: list[str] = []
    told, messages.rank_zero_info = messages.rank_zero_info, lambda text, *_: said.append(text)
    try:
        L.seed_everything(0, verbose=False)
        strategy = SPMDStrategy(**options)
        if module is None:
            module = Model(options.get("tensor_parallel_size") is None, steps > 12)
        generator = torch.Generator().manual_seed(1)
        tokens = [torch.randint(CLASSES, (steps * rows, LENGTH), generator=generator) for _ in range(2)]
        quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
        fitted = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **quiet, **trainer)  # type: ignore[arg-type]
        even = DataLoader(TensorDataset(*tokens), rows // devices)
        fitted.fit(module, Parts([t[: 12 * rows - 8] for t in tokens], rows, devices) if unequal else even)
        with strategy.full_parameters():
            weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    finally:
        messages.rank_zero_info = told
    return [float(loss) for loss in module.losses], weights, [s for s in said if "loss_chunks" in s or "eager" in s]


def both(
    options: dict[str, Any], trainer: dict[str, Any], devices: int = 1, rows: int = 8, steps: int = 12
) -> list[str]:
    """Train with and without chunks; what was said of them."""
    plain, ours = (fit({**options, **more}, trainer, devices, rows, steps) for more in ({}, {"loss_chunks": 4}))
    exact = "precision" not in trainer
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(plain[0]), rtol=1e-6 if exact else 1e-2, atol=1e-6)
    for name, weight in plain[1].items():
        torch.testing.assert_close(ours[1][name], weight, rtol=0, atol=1e-5 if exact else 2e-2)
    return ours[2]


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
    ],
    ids=["plain", "accumulated and clipped", "bf16"],
)
def test_training_on_one_device(trainer: dict[str, Any]) -> None:
    (line,) = both({}, trainer)
    assert "loss_chunks: the loss on module 'head' is computed in 4 chunks of rows, with " in line


@pytest.mark.parametrize(
    "options", [{"rematerialize": 0.9}, pytest.param({"lowering": "inductor"}, marks=pytest.mark.long)], ids=str
)
def test_beside_other_options(options: dict[str, Any]) -> None:
    assert "in 4 chunks" in both(options, {})[0]


def masked(beside: bool, devices: int, options: dict[str, Any]) -> list[str]:
    """Train on the positions of a mask with and without chunks; what was said of them, or of eager steps."""
    found: list[tuple[list[float], dict[str, Tensor], list[str]]] = []
    for more in ({}, {"loss_chunks": 4}):
        L.seed_everything(0, verbose=False)
        found.append(fit({**options, **more}, {}, devices, module=Masked(beside)))
    plain, ours = found
    if beside:
        torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(plain[0]), rtol=1e-6, atol=1e-6)
    else:
        assert ours[0] == plain[0]
    for name, weight in plain[1].items():
        torch.testing.assert_close(ours[1][name], weight, rtol=0, atol=1e-5 if beside else 0)
    assert not plain[2]
    return ours[2]


SAID = {
    False: "the loss on module 'head' stays whole: its number of rows is decided by values",
    True: "the loss on module 'beside' is computed in 4 chunks",
}


def test_rows_that_values_choose_stay_whole() -> None:
    for beside, text in SAID.items():
        (line,) = masked(beside, 1, {})
        assert text in line


@pytest.mark.parametrize("beside", SAID)
@pytest.mark.parametrize("options", [{}, {"data_parallel": "zero3"}], ids=str)
def test_rows_that_values_choose_stay_whole_on_two_ranks(
    two_ranks: RankPool, options: dict[str, Any], beside: bool
) -> None:
    (line,), *_ = two_ranks.run(masked, beside, 2, options)
    assert SAID[beside] in line


@pytest.mark.parametrize("value", [0, 1, -2, 1.5, True, "8", "0MiB", "256 MB", [8]])
def test_what_it_takes_is_said(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"loss_chunks=.*number of chunks.*'256MiB'.*or None"):
        SPMDStrategy(loss_chunks=value)


def test_numbers_and_bytes() -> None:
    for value, meant in ((None, (None, None)), (8, (8, None)), ("1.5 GiB", (None, 3 * 2**29))):
        options = SPMDStrategy(loss_chunks=value).build_options
        assert (options.loss_chunks, options.loss_bytes) == meant


def test_a_recipe_takes_it_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jsonargparse")
    for value, meant in (("8", 8), ("256MiB", "256MiB")):
        with pytest.raises(SystemExit) as stop:
            cli.main(
                ["fit", "--config", RECIPE, "--trainer.strategy", "spmd", "--print_config"]
                + ["--trainer.strategy.loss_chunks", value]
            )
        assert stop.value.code == 0
        assert yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]["init_args"]["loss_chunks"] == meant


@pytest.mark.parametrize(
    ("options", "trainer", "rows"),
    [
        ({"overlap_iterations": True}, {}, 14),
        ({"data_parallel": "zero3", "rematerialize": 0.9}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, 8),
        ({"tensor_parallel_size": 2, "tensor_parallel_plan": {"head": "loss", "table": "embedding"}}, {}, 8),
        ({"context_parallel_size": 2}, {}, 8),
    ],
    ids=["replicated, uneven chunks", "sharded and accumulated", "split classes", "split sequences"],
)
def test_training_on_two_ranks(
    two_ranks: RankPool, options: dict[str, Any], trainer: dict[str, Any], rows: int
) -> None:
    for said in two_ranks.run(both, options, trainer, 2, rows):
        assert not said or "in 4 chunks" in said[0]


LONG = {
    "accumulated and clipped": ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "rematerialized": ({"rematerialize": 0.9}, {}),
    "regions": ({"lowering": "inductor"}, {}),
}
LONG_ON_RANKS = {
    "replicate": ({}, {}),
    "zero2": ({"data_parallel": "zero2"}, {}),
    "zero3, accumulated and clipped": (
        {"data_parallel": "zero3"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "classes": ({"tensor_parallel_size": 2, "tensor_parallel_plan": {"head": "loss", "table": "embedding"}}, {}),
    "sequences": ({"context_parallel_size": 2}, {}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_fifty_steps_of_adamw(name: str) -> None:
    assert "in 4 chunks" in both(*LONG[name], steps=50)[0]


@pytest.mark.long
@pytest.mark.parametrize("name", LONG_ON_RANKS)
def test_fifty_steps_of_adamw_on_two_ranks(two_ranks: RankPool, name: str) -> None:
    said = two_ranks.run(both, *LONG_ON_RANKS[name], 2, 8, 50)
    assert any("in 4 chunks" in line for lines in said for line in lines)


@pytest.mark.parametrize("chunks", [4, "32KiB"])
def test_ranks_with_unequal_numbers_of_rows(two_ranks: RankPool, chunks: int | str) -> None:
    """Whether a cut piece is one in memory differs among the ranks, and so do bytes; their programs may not."""
    plain = fit({}, {}, unequal=True)
    for losses, weights, said in two_ranks.run(fit, {"loss_chunks": chunks}, {}, 2, 8, unequal=True):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain[0]), rtol=1e-5, atol=1e-6)
        for name, weight in plain[1].items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)
        assert not said or " chunks of rows" in said[0]
