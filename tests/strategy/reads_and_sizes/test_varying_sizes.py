"""One graph for batches of many sizes: few captures, eager's bits, every decision on a size as Python takes it."""

from __future__ import annotations

import functools
import gc
import math
import os
import random
import weakref
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import lightning_spmd
from lightning_spmd import messages
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.strategy.graphs import graph_table
from lightning_spmd.strategy.graphs.graph_table import GraphTable
from tests.helpers.modules import Block
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET

VOCABULARY, WIDTH, LONGEST = 32, 8, 160
LENGTHS = (37, 52, 41, 33, 64, 17, 90, 3, 128, 2, 65, 16)


class Tokens(Dataset[dict[str, Tensor]]):
    """Batches of the given sizes, ``(rows, length)``."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"tokens": torch.randint(0, VOCABULARY, self.sizes[index], generator=generator)}


class Truncated(Tokens):
    """Rows that were padded to one length, up to the longest of the batch: a view with the strides of the whole."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = super().__getitem__(index)["tokens"]
        return {"tokens": F.pad(tokens, (0, LONGEST - tokens.shape[1]))[:, : tokens.shape[1]]}


class Turned(Tokens):
    """The first dimension is the inner one in memory."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": super().__getitem__(index)["tokens"].t().contiguous().t()}


class Shifted(Tokens):
    """All but the last of each row: a view with a gap of one."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": F.pad(super().__getitem__(index)["tokens"], (0, 1))[:, :-1]}


class Model(L.LightningModule):
    """An embedding, a body that subclasses choose, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.positions = nn.Parameter(0.1 * torch.randn(LONGEST, WIDTH))
        self.ran = 0

    def body(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ran += 1
        tokens = batch["tokens"]
        loss = F.cross_entropy(self.head(self.body(self.table(tokens))).flatten(0, 1), tokens.flatten())
        self.log("loss_of_step", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Transformer(Model):
    """Causal attention with positions and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH, 2, 0.1)

    def body(self, x: Tensor) -> Tensor:
        return self.block(x + self.positions[: x.shape[1]])


class Arithmetic(Model):
    """Sizes in masks, views, divisors and powers, as numbers and as floats; and logged."""

    def body(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        scores = x @ x.transpose(1, 2) / math.sqrt(length)
        mask = torch.tril(torch.ones(length, length, device=x.device))
        weights = scores.masked_fill(mask == 0, -math.inf).softmax(-1)
        y = self.linear((weights @ x).reshape(rows * length, -1)) / length + 1.0 / length + (length / 3.0) * 0.01
        return y.view(rows, length, width) * length**-0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        length = batch["tokens"].shape[1]
        self.log("length", length)
        self.log("half", length / 2)
        return {"loss": super().training_step(batch, batch_idx), "length": length}


class Threshold(Model):
    """Long sequences count more."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return 3 * loss if batch["tokens"].shape[1] > 64 else loss


class Convolution(Model):
    """Lengths that are floors, and statistics over them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1), nn.BatchNorm1d(WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ran += 1
        tokens = batch["tokens"]
        x = F.relu(self.norm(self.convolution(self.table(tokens).transpose(1, 2))))
        return F.cross_entropy(self.head(x.mean(-1)), tokens[:, 0])


class Lies(Model):
    """What torch and Python do depends on how the batch lies in memory."""

    def body(self, x: Tensor) -> Tensor:
        tokens = self.tokens
        flat = tokens.view(-1) if tokens.is_contiguous() else tokens.reshape(-1).flip(0)
        step = tokens.stride(0) if tokens.is_contiguous() else tokens.stride(1)
        numbers = tokens.to(x.dtype)  # keeps the order of dimensions
        mixed = numbers @ numbers.t() + numbers.mT.matmul(numbers).sum() + numbers[:, 1:].mul(2).sum() * step
        return self.linear(x) + mixed.mean() * 1e-4 + self.table(flat).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tokens = batch["tokens"]
        self.tokens[:, -1] = 1
        return super().training_step(batch, batch_idx)


class Loop(Model):
    """A loop over positions: another program for each length."""

    def body(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), list[Tensor]()
        for position in range(x.shape[1]):
            state = torch.tanh(self.linear(state) + x[:, position])
            states.append(state)
        return torch.stack(states, 1)


class Recurrent(Model):
    """Layers that torch unrolls over time, and one whose kernel asks for plain sizes; weights are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, 2, dropout=0.2, bidirectional=True, batch_first=True)
        self.gru, self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.RNN(WIDTH, WIDTH, nonlinearity="relu")

    def body(self, x: Tensor) -> Tensor:
        x, (hidden, _) = self.lstm(x)
        x, last = self.gru(x, torch.cat(tuple(hidden[-2:]), -1)[None])
        x, _ = self.gru(x, last)
        x, _ = self.rnn(x.transpose(0, 1))
        return x.transpose(0, 1) * (1 + self.gru.weight_hh_l0.square().mean())


class Frozen(Model):
    """Products with weights that ask for no gradients, or in a part without any, are made otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.teacher = (nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.frozen.requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            told, _ = self.teacher(x)
        return self.linear(self.frozen(x)[0]) * told


class Undropped(Recurrent):
    """The same on any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm.dropout = 0.0


class Penalized(Recurrent):
    """A gradient through a recurrent layer is differentiated."""

    def body(self, x: Tensor) -> Tensor:
        y = self.gru(x)[0]
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + gradient


class Checkpointed(Model):
    """Activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH, 2, 0.1)

    def body(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=False)
        return checkpoint(self.linear, y, use_reentrant=True)


class Resized(Model):
    """Down and up again, to a size and by a factor; the largest of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.twice = nn.Conv2d(1, 2, 3, padding=1), nn.Upsample(scale_factor=2)

    def body(self, x: Tensor) -> Tensor:
        image = self.convolution(x[:, None])
        small = F.avg_pool2d(self.twice(image), 3, padding=1)
        back = F.interpolate(small, size=image.shape[-2:], mode="bilinear")
        return self.linear((image + back).sum(1)) + F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)


class Images(Tokens):
    """Images of one channel, with channels last: strides of one element are what kernels look at."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rows, length = self.sizes[index]
        images = torch.randn(rows, 1, length, WIDTH, generator=torch.Generator().manual_seed(index))
        return {"tokens": images.to(memory_format=torch.channels_last)}


class Convolved(Resized):
    """What a convolution gives lies as its operand."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ran += 1
        return {"loss": F.relu(self.convolution(batch["tokens"])).square().mean((0, 2, 3)).sum()}


class _Summed(torch.autograd.Function):
    """Its gradient is written into, from a place that depends on the size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.length = x.shape[1]
        return x.sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        found = gradient[:, None].expand(-1, ctx.length, -1).clone()
        found[:, ctx.length // 2 :] *= 2
        return found


class Summed(Model):
    def body(self, x: Tensor) -> Tensor:
        return self.linear(x) + _Summed.apply(x)[:, None] / 10  # type: ignore[operator]


class Hooked(Model):
    """Python in the backward pass, that asks for a size."""

    def body(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01) * gradient.shape[1])
        return self.linear(x)


class Asks(Model):
    """Asks of what type a size is: a symbol is no integer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        length: Any = batch["tokens"].shape[1]
        return 3 * loss if isinstance(length, int) and length > 64 else loss


class Writes(Model):
    """Looks a size up by its text."""

    def body(self, x: Tensor) -> Tensor:
        table = {str(length): float(length) for length in range(LONGEST)}
        return self.linear(x) * table[f"{x.shape[1]}"]


class Indexes(Model):
    """Whole slices, new dimensions and parts; torch leaves a whole slice out where it is the first index."""

    def body(self, x: Tensor) -> Tensor:
        count = (x > 0).sum((1, 2))
        x = self.linear(x) / count[:, None, None].clamp(min=1) + x[:, 0][:, None]
        flat = x.flatten(0, 1)
        flat = flat * flat.mean(-1)[:, None] + flat[:, :1]
        x = flat.view_as(x)[:].clone()
        x[:, -1] = x[None, :, 0][0]
        return x


class Windowed(Model):
    """A window that begins elsewhere in each step: in what graphs for all sizes are made with there is nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ran += 1
        tokens = batch["tokens"]
        begin = random.Random(self.ran).randint(0, tokens.shape[1] - 2)
        window = F.dropout(tokens[:, begin : begin + 2].to(torch.float32), 0.5).mean(1)
        return {"loss": (window[:, None] * self.linear.bias).pow(2).mean()}


class Folded(Model):
    """Filled up to a multiple of eight, which is folded: so many numbers as that are the same for all lengths."""

    def body(self, x: Tensor) -> Tensor:
        folded = F.pad(self.linear(x), (0, 0, 0, -x.shape[1] % 8)).unflatten(1, (-1, 8))
        return x + folded.mean((1, 2), keepdim=True).flatten(1, 2) + folded.mean(2).square().mean()


class Chained(Model):
    """Which product is first depends on the length, and which formula a distance has."""

    def body(self, x: Tensor) -> Tensor:
        y, weight = self.linear(x), self.linear.weight
        chain = torch.linalg.multi_dot([x[0], weight, weight[:, :3]])
        return y + torch.cdist(y, x, 2.0 if self.ran % 3 else 3.0).mean(-1, keepdim=True) + chain.mean()


class Paused(Arithmetic):
    """A hook looks at gradients: on several ranks the graph waits before its update."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norm = float(self.head.weight.grad.norm())  # type: ignore[union-attr]


class Spectrum(Model):
    """Cut or filled up to 40, within one operator."""

    def body(self, x: Tensor) -> Tensor:
        return x + torch.fft.fft2(self.linear(x), s=(40, WIDTH + 2)).abs().mean()


class ChainedByBoth(Model):
    """Which product is first depends on the number of rows, too."""

    def body(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        wide = torch.cat([self.positions[:rows].t()] * 3)
        by_both = x.mean(1) @ x.mean(0).t()
        return x + torch.linalg.multi_dot([wide, by_both, self.positions[:length, :2]]).mean()


class Record(L.Callback):
    """What a run shows at each step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append((float(outputs["loss"]), outputs.get("length"), logged))


def run(
    kind: type[Model], strategy: str, sizes: Sequence[tuple[int, int]], data: type[Tokens] = Tokens
) -> tuple[Any, L.Trainer]:
    torch.manual_seed(0)
    model, record = kind(), Record()
    trainer = L.Trainer(max_epochs=1, strategy=strategy, devices=1, callbacks=[record], **QUIET)
    trainer.fit(model, DataLoader(data(sizes), batch_size=None))
    assert model.ran == len(sizes)
    return (record.seen, [p.detach().clone() for p in model.parameters()]), trainer


@functools.cache
def eager(kind: type[Model], sizes: tuple[tuple[int, int], ...], data: type[Tokens] = Tokens) -> Any:
    return run(kind, "auto", sizes, data)[0]


def compare(kind: type[Model], sizes: Sequence[tuple[int, int]], data: type[Tokens] = Tokens) -> int:
    """Train both ways; the number of graphs that were built."""
    (seen, weights), trainer = run(kind, "spmd", sizes, data)
    its_seen, its_weights = eager(kind, tuple(sizes), data)
    assert seen == its_seen
    assert all(torch.equal(a, b) for a, b in zip(weights, its_weights, strict=True))
    training = trainer.strategy._training  # type: ignore[attr-defined]
    assert training.mode == "compiled"
    return training.iteration.captures


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(messages, "rank_zero_info", texts.append)
    return texts


def test_a_hundred_lengths_take_two_graphs(told: list[str]) -> None:
    lengths = random.Random(0).sample(range(2, LONGEST), 100)
    assert compare(Transformer, [(4, n) for n in lengths]) == 2
    (text,) = [t for t in told if "sizes" in t]
    assert f"one graph for all sizes of batch['tokens'] dim 1 ({lengths[0]}, {lengths[1]}, ...)" in text


def test_rows_and_lengths_vary_together() -> None:
    sizes = [(4, 37), (4, 52), (3, 41), (7, 33), (2, 64), (5, 17), (3, 90), (8, 8), (6, 128)]
    assert compare(Arithmetic, sizes) <= 3
    assert compare(Indexes, sizes) <= 3


def test_what_torch_decides_in_one_call_is_as_for_each_size() -> None:
    compare(Spectrum, [(3, length) for length in (12, 17, 40, 39, 41, 20, 60, 38)])
    sizes = [(12, 15), (17, 20), (9, 11), (30, 13), (14, 40), (25, 9), (11, 33), (40, 2), (120, 3), (64, 2)]
    compare(ChainedByBoth, sizes)


@pytest.mark.parametrize(
    ("kind", "graphs"),
    [
        (Arithmetic, 2),
        (Threshold, 4),
        (Convolution, 3),
        (Asks, 4),
        (Writes, 2),
        (Indexes, 3),
        (Undropped, 3),
        (Checkpointed, 2),
        (Hooked, 2),
        (Resized, 4),
        (Summed, 4),
        (Folded, 4),
    ],
)
def test_what_follows_from_sizes(kind: type[Model], graphs: int) -> None:
    assert compare(kind, [(4, n) for n in LENGTHS]) <= graphs


@pytest.mark.parametrize("data", [Truncated, Turned, Shifted])
@pytest.mark.parametrize("kind", [Transformer, Lies])
def test_batches_that_lie_otherwise_have_one_graph(kind: type[Model], data: type[Tokens]) -> None:
    graphs = 3 if kind is Lies else 2  # there a length of two is one of one
    assert compare(kind, [(4, n) for n in LENGTHS], data) == graphs


@pytest.mark.parametrize("kind", [Windowed, Chained])
def test_numbers_and_sizes_that_decide_together_are_eager_s(kind: type[Model]) -> None:
    compare(kind, [(4, n) for n in (600, 420, 700, 510, *LENGTHS[:8], 800, 2, 5)])


def test_images_of_one_channel_lie_with_channels_last() -> None:
    assert compare(Convolved, [(4, n) for n in LENGTHS], Images) == 2


def test_a_batch_is_as_long_as_the_whole_now_and_then() -> None:
    lengths = (37, 52, LONGEST, 41, LONGEST, 33, 1, 64, LONGEST)
    assert compare(Lies, [(4, n) for n in lengths], Truncated) == 4


def test_a_step_that_wants_the_very_size_has_a_graph_for_each(told: list[str]) -> None:
    lengths = (5, 7, 12, 6)
    assert compare(Loop, [(4, n) for n in lengths]) == len(lengths)
    (text,) = [t for t in told if "for each size of batch['tokens'] dim 1" in t]
    assert "the step makes other calls for other sizes: " in text
    assert "test_varying_sizes.py:" in text


def test_recurrent_layers_without_gradients_are_eager_s() -> None:
    """With three rows the products of weights that ask for gradients have other bits."""
    assert compare(Frozen, [(3, n) for n in (4, 6, 5, 7, 4, 9)]) == 3


def test_dropout_between_recurrent_layers_draws_eager_s_numbers() -> None:
    compare(Recurrent, [(4, n) for n in (5, 7, 12, 6)])


def test_a_recurrent_layer_whose_gradient_is_differentiated_is_torch_s() -> None:
    compare(Penalized, [(4, n) for n in (5, 7, 12)])


def test_one_row_is_a_size_of_its_own() -> None:
    assert compare(Model, [(4, 8), (4, 9), (4, 1), (4, 7), (4, 1)]) == 3


class Validates(Transformer):
    """Counts how often it was asked."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.ran += 1
        tokens = batch["tokens"]
        self.log("val", F.cross_entropy(self.head(self.body(self.table(tokens))).flatten(0, 1), tokens.flatten()))


class Part(Tokens):
    """This rank's rows of the same batches."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        rows = self.sizes[index][0] // ranks
        return {name: value[rank * rows : (rank + 1) * rows] for name, value in super().__getitem__(index).items()}


class TurnedPart(Turned, Part):
    """The same, turned."""


class TruncatedPart(Truncated, Part):
    """The same, of a longer whole."""


class TurnedOnOne(TurnedPart):
    """Turned on the first rank alone."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = super().__getitem__(index)["tokens"]
        return {"tokens": tokens if os.environ["RANK"] == "0" else tokens.contiguous()}


def run_on_ranks(
    kind: type[Model], sizes: Sequence[tuple[int, int]], options: dict[str, Any], data: type[Tokens] = Part
) -> tuple[Any, int, int]:
    """What a rank saw, the graphs that it built, and those whose end runs inside the next iteration."""
    torch.manual_seed(0)
    model, record = kind(), Record()
    strategy = lightning_spmd.SPMDStrategy(**options)
    trainer = L.Trainer(
        max_epochs=1, strategy=strategy, devices=2, callbacks=[record], use_distributed_sampler=False, **QUIET
    )
    trainer.fit(model, DataLoader(data(sizes), batch_size=None))
    assert model.ran == len(sizes)
    run_there = strategy._training.iteration  # type: ignore[union-attr]
    deferred = sum(e.graphs.cleanup is not None for e in run_there.table.executables)
    return record.seen, run_there.captures, deferred


@pytest.mark.parametrize(
    ("kind", "options", "built"),
    [
        pytest.param(Arithmetic, {"overlap_iterations": True, "bucket_size_mb": 0.001}, 2, id="overlapped"),
        pytest.param(Arithmetic, {"data_parallel": "zero3"}, 2, id="sharded"),
        pytest.param(Undropped, {"data_parallel": "zero3"}, 3, id="recurrent"),
        pytest.param(Paused, {}, 2, id="paused"),
    ],
)
def test_two_ranks_equal_one_device(
    two_ranks: RankPool, kind: type[Model], options: dict[str, Any], built: int
) -> None:
    sizes = tuple((4, n) for n in LENGTHS)
    losses, lengths, _ = zip(*eager(kind, sizes)[0], strict=True)
    for seen, graphs, deferred in two_ranks.run(run_on_ranks, kind, sizes, options):
        assert graphs == built
        assert deferred == ("overlap_iterations" in options)
        assert [loss for loss, _, _ in seen] == pytest.approx(list(losses), rel=1e-5)
        assert tuple(length for _, length, _ in seen) == lengths


@pytest.mark.parametrize("data", [TruncatedPart, TurnedPart, TurnedOnOne])
def test_two_ranks_have_batches_that_lie_otherwise(two_ranks: RankPool, data: type[Tokens]) -> None:
    sizes = tuple((4, n) for n in LENGTHS)
    losses, *_ = zip(*eager(Arithmetic, sizes)[0], strict=True)
    for seen, graphs, _ in two_ranks.run(run_on_ranks, Arithmetic, sizes, {}, data):
        assert graphs == 2
        assert [loss for loss, _, _ in seen] == pytest.approx(list(losses), rel=1e-5)


def validated(strategy: Any, data: Dataset[Any], devices: int) -> tuple[float, int, Any]:
    torch.manual_seed(0)
    model = Validates()
    trainer = L.Trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **QUIET)
    (found,) = trainer.validate(model, DataLoader(data, batch_size=None), verbose=False)
    return found["val"], model.ran, strategy


def validated_on_ranks(sizes: Sequence[tuple[int, int]]) -> tuple[float, int, int]:
    found, ran, strategy = validated(lightning_spmd.SPMDStrategy(data_parallel="zero3"), Part(sizes), 2)
    return found, ran, strategy._evaluation.graphs.captures


def test_evaluation_has_few_graphs_for_all_lengths(two_ranks: RankPool) -> None:
    sizes = [(4, n) for n in LENGTHS]
    expected, *_ = validated("auto", Tokens(sizes), 1)
    for found, ran, graphs in two_ranks.run(validated_on_ranks, sizes):
        assert found == pytest.approx(expected, rel=1e-5)
        assert ran == len(sizes)
        assert graphs <= 3


def test_graphs_that_were_not_used_for_long_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_table, "MOST_GRAPHS", 2)
    born = weakref.WeakSet[Executable]()
    add = GraphTable.add

    alive: list[int] = []

    def noted(table: GraphTable, key: tuple[Any, ...], executable: Executable) -> int:
        born.add(executable)
        gc.collect()
        alive.append(len(born))
        return add(table, key, executable)

    monkeypatch.setattr(GraphTable, "add", noted)
    with pytest.warns(UserWarning, match="graphs were built, most of them for a batch shape of their own"):
        assert compare(Loop, [(4, n) for n in (5, 7, 6, 5, 6, 8)]) == 5
    assert alive == [1, 2, 3, 3, 3]
