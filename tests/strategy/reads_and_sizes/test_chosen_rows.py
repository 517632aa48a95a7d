"""Rows that values choose stay on their rank: no activation moves, one graph does for all numbers of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_spmd.ir.operators.ctc import PAD_TARGETS
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device
from tests.strategy.reads_and_sizes.watched import MOVED, TOLD, Watched
from tests.strategy.small import BATCHES, ROWS, Quiet, assert_as_eager, rows, run


class MaskedLoss(Watched):
    """The loss of what is labelled, beside a share that counts it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        labelled = y > 0
        loss = F.cross_entropy(self(x)[labelled], y[labelled])
        TOLD.append(int(labelled.sum()))
        self.log("labelled", y[labelled].float().mean())
        return loss


class MaskedMean(Watched):
    """The mean of the losses of some rows; Python looks at sizes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")[y > 0]
        TOLD.append((losses.shape, len(losses)))
        return losses.mean()


class Experts(Watched):
    """Mixtral's plain form, with dropout that does nothing and experts that may have no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Dropout(0.0), nn.Linear(8, 6)) for _ in range(4)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        shares, which = torch.topk(F.softmax(self.router(x) * 3, dim=1), 2, dim=1)
        shares = shares / shares.sum(1, keepdim=True)
        mixed = torch.zeros_like(x)
        mask = F.one_hot(which, len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            places, found = torch.where(mask[e])
            mixed.index_add_(0, found, expert(x[found]) * shares[found, places, None])
            TOLD.append(len(found))
        return F.cross_entropy(self(x + mixed), y)


class Speech(Watched):
    """CTC over padded targets, of which each batch has others; rows of one class have none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = torch.stack([self(x + t) for t in range(5)]).log_softmax(-1)
        targets = torch.stack([1 + y % 2, torch.ones_like(y), 1 + y // 2], dim=1)
        lengths = 3 + (x[:, 1] > 0).long() + (x[:, 2] > 0).long()
        return F.ctc_loss(scores, targets, lengths, y, zero_infinity=True)


class FlatSpeech(Watched):
    """The same with targets that are one list without padding, and lengths that differ."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = torch.stack([self(x + t) for t in range(5)]).log_softmax(-1)
        targets = torch.stack([1 + y % 2, torch.ones_like(y), 1 + y // 2], dim=1)
        lengths = 3 + (x[:, 1] > 0).long() + (x[:, 2] > 0).long()
        labels = targets[torch.arange(3) < y[:, None]]
        TOLD.append(len(labels))
        return F.ctc_loss(scores, labels, lengths, y, zero_infinity=True)


class Repeated(Watched):
    """Rows written down as often as their labels say, some not at all."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.first(x).repeat_interleave(y, 0)
        TOLD.append(hidden.shape)
        return F.cross_entropy(self.last(torch.tanh(hidden)), y.repeat_interleave(y))


def _rows(ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Batches in the order of that many ranks, of which the first one has no row above class 0 in each second batch."""
    found: list[tuple[Tensor, Tensor]] = []
    samples = rows()
    for number in range(BATCHES):
        batch = samples[number * ROWS : (number + 1) * ROWS]
        if number < BATCHES // 2:
            batch = [(x, y * ((number + i) % 2)) for i, (x, y) in enumerate(batch)]
        found += [sample for rank in range(ranks) for sample in batch[rank::ranks]]
    return found


def _run(make: Any, strategy: Any, devices: int, ranks: int = 1) -> tuple[Result, list[Any], list[Any]]:
    data = InOrder(_rows(ranks), ROWS)
    result = run(make, strategy, devices, data=lambda: data, max_epochs=2)
    return result, list(MOVED), list(TOLD)


def _on_one_device(make: Any, ranks: int) -> tuple[Result, list[Any]]:
    result, _, told = _run(make, "auto", 1, ranks)
    return result, told


def _assert_stays(pool: RankPool, make: type[L.LightningModule], strategy: str = "spmd") -> None:
    found = pool.run(_run, make, strategy, pool.size)
    ours = [result for result, _, _ in found]
    one, theirs = _on_one_device(make, pool.size)
    assert_compiled(ours[0])
    assert ours[0].captures <= 2  # SGD with momentum has a first step of its own
    assert_equals_one_device(ours, one)
    for _, moved, told in found:
        assert moved
        assert not any(gathered for _, gathered in moved)
        assert strategy != "spmd" or not any(nodes for nodes, _ in moved)  # parameters in parts move as well
        assert told == theirs


@pytest.mark.parametrize("make", [MaskedLoss, MaskedMean, Repeated, Experts, Speech])
def test_no_activation_moves(make: type[L.LightningModule], two_ranks: RankPool) -> None:
    _assert_stays(two_ranks, make)


@pytest.mark.parametrize("make", [MaskedLoss, Experts])
def test_nor_does_one_with_parameters_in_parts(make: type[L.LightningModule], two_ranks: RankPool) -> None:
    _assert_stays(two_ranks, make, "spmd_zero3")


@pytest.mark.parametrize("make", [MaskedMean, Experts, Speech])
def test_nor_among_four_ranks(make: type[L.LightningModule], four_ranks: RankPool) -> None:
    _assert_stays(four_ranks, make)


def test_of_labels_without_padding_no_activation_moves(two_ranks: RankPool) -> None:
    found = two_ranks.run(_run, FlatSpeech, "spmd", 2)
    one, theirs = _on_one_device(FlatSpeech, 2)
    assert_compiled(found[0][0])
    assert found[0][0].captures <= 2
    assert_equals_one_device([result for result, _, _ in found], one)
    for _, moved, told in found:
        assert told == theirs
        assert all(not dtype.is_floating_point for nodes, _ in moved for dtype in nodes.values())


def test_labels_and_lengths_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="target_lengths are 4 in all, and there are 5 targets"):
        PAD_TARGETS(torch.ones(5), torch.tensor([3, 0, 1]), 3)


def test_lengths_of_ctc_are_no_numbers_of_its_graph() -> None:
    ours = assert_as_eager(Speech)
    assert_compiled(ours)
    assert ours.captures <= 2


class Ordered(Watched):
    """Python keeps chosen rows, and the step looks at their order."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)[y > 0]
        TOLD.append(logits.detach())
        places = torch.arange(len(logits))
        return logits.square().mean() + (logits.sum(1) * places).sum() / (1 + places.sum())


def test_what_looks_at_the_order_gathers(two_ranks: RankPool) -> None:
    found = two_ranks.run(_run, Ordered, "spmd", 2)
    one, theirs = _on_one_device(Ordered, 2)
    assert_equals_one_device([result for result, _, _ in found], one)
    for _, _, told in found:
        for ours, wanted in zip(told, theirs, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


class PutsRows(Quiet):
    """Chosen rows of split features go through a whole layer, and into zeros like the features."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(10, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        out, chosen = torch.zeros_like(h), h[:, 0] > 0
        out[chosen] = self.expert(h[chosen])
        return self.last(out + h)


def test_zeros_like_split_features_take_sums_of_chosen_rows(two_ranks: RankPool) -> None:
    plan = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise", "last": "rowwise"}}
    results = two_ranks.run(run, PutsRows, plan, 2, data=_loader, max_epochs=1)
    assert_equals_one_device(results, run(PutsRows, "auto", data=_loader, max_epochs=1))


class ChosenSequences(Quiet):
    """Several results of one operator, of chosen rows."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.LSTM(2, 10, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        chosen = y > 0
        return F.cross_entropy(self.last(self.read(x[chosen].unflatten(1, (3, 2)))[0][:, -1]), y[chosen])


def test_recurrent_layers_take_chosen_rows(two_ranks: RankPool) -> None:
    results = two_ranks.run(run, ChosenSequences, "spmd", 2, data=_loader, max_epochs=1)
    for result in results:
        assert_compiled(result)
    assert_equals_one_device(results, run(ChosenSequences, "auto", data=_loader, max_epochs=1))


def _loader() -> InOrder:
    return InOrder(rows(), ROWS)
