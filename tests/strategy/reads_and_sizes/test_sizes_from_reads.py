"""A whole number that Python reads becomes the size of something: one graph does for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.helpers.ranks import RankPool
from tests.helpers.training import Result, assert_bitwise, assert_compiled, assert_equals_one_device, fit
from tests.strategy.reads_and_sizes.test_numbers_of_counts import Counting, _as_two_ranks_have_them, train
from tests.strategy.small import Quiet, run


class Longest(Counting):
    """Speech: as long as the longest says, which ``item`` reads."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        lengths = (x[:, 1].abs() * 40).long() + 1
        longest = lengths.max().item()
        places = torch.arange(longest)
        is_there = places[None] < lengths[:, None]
        hidden = self.wide(x)[:, None] * self.embedding(places)[None]
        return (hidden * is_there[..., None]).square().sum() / is_there.sum()


class CutToLongest(Counting):
    """The same, and what is longer is cut."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        lengths = (x[:, 1].abs() * 40).long() + 1
        longest = int(lengths.max())
        hidden = self.embedding.weight[None, :longest] * self.wide(x)[:, None]
        is_there = torch.arange(longest)[None] < lengths[:, None]
        return (hidden * is_there[..., None]).sum() / is_there.sum()


class Hardest(Counting):
    """As many of the hardest rows as there are positive ones, one at least."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        number = int(mask.sum())
        return F.cross_entropy(self(x), y, reduction="none").topk(max(1, number))[0].mean()


class BesideChosen(Counting):
    """The read number and that of the chosen rows are the same."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        places = self.embedding(torch.arange(int(mask.sum())))
        return (self.wide(x[mask]) + places).square().sum() / 50


class Signed(Counting):
    """What is read may be negative, and means something else then."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        few = int((y.sum() - x.shape[0]).clamp(-2, 30))
        return self.wide(x[:few]).square().sum() / 50 + self(x).mean()


class Half(Counting):
    """Computed with in Python."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        number = int(mask.sum())
        first, rest = self.wide(x).split([number // 2, len(x) - number // 2])
        return first.square().sum() / 50 + rest.abs().sum() / 50


class SizesOfOthers(Counting):
    """Up to 12, which other things in the step are as large as."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        number = int((x[0, 1].abs() * 12).clamp(max=11)) + 1
        hidden = self.wide(x)[:4, None] * self.embedding.weight[:12]
        rows = torch.zeros(number, 6) + self.wide.weight[0]
        return hidden[:, :number].sum(1).square().mean() / 50 + rows.square().mean()


class Rounds(Counting):
    """How often something is done, and how large it is."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        rounds = int(y[:2].sum())
        found = self.wide(x)
        for _ in range(rounds):
            found = torch.tanh(self.wide(found))
        return F.pad(found, (0, rounds)).square().mean()


class OftenRead(Counting):
    """Many are read; some of them are sizes."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        numbers = [int((x[:, i] > 0).sum()) for i in range(6)]
        found = self.wide(x)
        return sum((found[:n].square().sum() * (i + 1) for i, n in enumerate(numbers[:2])), self(x).mean()) / 50


class Dropped(Counting):
    """Random numbers before the read and behind it."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        before = F.dropout(self.wide(x), 0.5)
        return F.dropout(F.pad(before, (0, int(mask.sum()))), 0.5).square().mean()


class EachLength(Counting):
    """Lengths that are read where they are indices; some of them are all that there is: torch leaves out the slice."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        lengths = ((x[:4, 1].abs() * 8).long() + 2).clamp(max=12)
        hidden = self.wide(x)[:4, None] * self.embedding.weight[:12]
        means = torch.stack([hidden[i, :n].mean(0) for i, n in enumerate(self.read(lengths))])
        return self(means).square().mean() + hidden.mean()

    def read(self, lengths: Tensor) -> list[Any]:
        return list(lengths)


class Listed(EachLength):
    def read(self, lengths: Tensor) -> list[Any]:
        return lengths.tolist()


class Cut(EachLength):
    """The parts as one tensor, and each of them again."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        lengths = ((x[:3, 1].abs() * 8).long() + 2).clamp(max=12).tolist()
        flat = torch.cat([self.wide(x)[i] * self.embedding.weight[:n] for i, n in enumerate(lengths)])
        return torch.stack([self.wide(part).square().mean() for part in flat.split(lengths)]).mean()


class LongestOfList(EachLength):
    """Of a list only the largest number is a size: a path for each."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        lengths = (x[:4, 1].abs() * 2).long() + 3
        return (self.wide(x)[:4, None] * self.embedding.weight[: max(lengths.tolist())]).square().mean()


class EachOfBatch(EachLength):
    """As many as the batch has rows, and another count behind them."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        lengths = ((x[:, 1].abs() * 8).long() + 2).clamp(max=12)
        hidden = self.wide(x)[:, None] * self.embedding.weight[:12]
        means = torch.stack([hidden[i, :n].mean() for i, n in enumerate(lengths.tolist())])
        return means.square().mean() + self.wide(x[mask]).sum() / 50


class AsManyAsFound(EachLength):
    """The list is as long as the data say, or empty."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        lengths = (x[:4, 1].abs() * 4).long() + 2
        hidden = self.wide(x)[:4, None] * self.embedding.weight[:12]
        return sum((hidden[i, :n].mean() for i, n in enumerate(lengths[lengths > 5].tolist())), hidden.mean())


class RecurrentToLongest(Counting):
    """Often all that there is: no slice then, and the gradient has other strides. Weights are among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(6, 6, batch_first=True)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        longest = int((x[:4, 1].abs() * 6).long().clamp(max=11).max()) + 1
        hidden = self.wide(x)[:, None] * self.embedding.weight[:12]
        return self.recurrent(hidden[:, :longest])[1][0].square().mean()


class ByHandToLongest(Counting):
    """The gradient of what is cut, with other strides if all of it is taken, weighs the loss."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        longest = int((x[:4, 1].abs() * 6).long().clamp(max=11).max()) + 1
        hidden = self.wide(x)[:, None] * self.embedding.weight[:12]
        loss = torch.tanh(hidden[:, :longest].transpose(1, 2).contiguous()).square().mean()
        return self(x).square().mean() * torch.autograd.grad(loss, self.wide.weight)[0].square().sum()


class ApartAndJoined(Counting):
    """Two counts, on which a call before them was found to depend: all of a batch in parts, in twelves."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.wide(x)
        joined = torch.cat([hidden[mask], hidden[~mask].tanh()])
        return self.wide(joined).view(-1, 12, 6).mean(1).square().mean()


class SplitAsChosen(Counting):
    """As many rows as lengths together: a count that follows from others."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        lengths = ((x[:4, 1].abs() * 5).long() + 2).clamp(max=12)
        hidden = self.wide(x)[:4, None] * self.embedding.weight[:12]
        chosen = hidden[torch.arange(12)[None] < lengths[:, None]]
        return torch.stack([self.wide(part).square().mean() for part in chosen.split(lengths.tolist())]).mean()


ALL = (
    *(Longest, CutToLongest, Hardest, BesideChosen, Signed, Half, Rounds, OftenRead, Dropped),
    *(EachLength, Listed, Cut, SizesOfOthers, SplitAsChosen, RecurrentToLongest, ByHandToLongest),
)


@pytest.mark.parametrize("make", ALL)
def test_one_graph_for_all_numbers(make: type[Counting]) -> None:
    ours = train(make, "spmd", range(60, 61))
    assert_compiled(ours)
    assert (ours.captures <= 10, ours.eager_steps) == (True, 0)
    assert_bitwise(ours, train(make, "auto", range(60, 61)))


@pytest.mark.parametrize("make", ALL)
def test_batches_of_all_sizes(make: type[Counting]) -> None:
    ours = train(make, "spmd", range(48, 67))
    assert_compiled(ours)
    assert ours.eager_steps <= (3 if make is Cut else 2)
    assert_bitwise(ours, train(make, "auto", range(48, 67)))


class InFours(Counting):
    """Filled up to a multiple of four, which torch divides by."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = self.wide(x)[: int(mask.sum())]
        fours = F.pad(chosen, (0, 0, 0, -len(chosen) % 4)).view(-1, 4, 6)
        return (fours @ fours.transpose(1, 2)).square().sum() / 500 + F.pad(self(x), (0, len(fours))).square().mean()


@pytest.mark.parametrize("sizes", [range(12, 13), range(2, 14)], ids=["of one size", "of all sizes"])
def test_torch_divides_by_sizes(sizes: range) -> None:
    ours = train(InFours, "spmd", sizes)
    assert_compiled(ours)
    assert_bitwise(ours, train(InFours, "auto", sizes))


def test_lists_as_long_as_the_batch() -> None:
    ours = train(EachOfBatch, "spmd", range(3, 6))
    assert_compiled(ours)
    assert ours.eager_steps <= 6
    assert_bitwise(ours, train(EachOfBatch, "auto", range(3, 6)))


@pytest.mark.parametrize("make", [LongestOfList, AsManyAsFound])
def test_lists_that_are_no_sizes(make: type[Counting]) -> None:
    ours = train(make, "spmd", range(12, 20))
    assert_compiled(ours)
    assert_bitwise(ours, train(make, "auto", range(12, 20)))


def test_two_counts_of_one_whole() -> None:
    ours = train(ApartAndJoined, "spmd", range(12, 49, 12))
    assert_compiled(ours)
    assert_bitwise(ours, train(ApartAndJoined, "auto", range(12, 49, 12)))


class CutTwice(Quiet):
    """Rows and steps: hardly any number of rows takes less than all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, lengths = batch
        longest, number = int(lengths.max()), int((lengths > 3).sum())
        hidden = self.wide(x)
        return hidden[:, :longest].mean(1).square().mean() + hidden[:number].square().mean()


class CutToEach(CutTwice):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, lengths = batch
        hidden = self.wide(x)
        return torch.stack([hidden[i, :n].mean(0) for i, n in enumerate(lengths.tolist())]).square().mean()


class SplitOfAll(CutTwice):
    """The chosen rows are known before the lengths whose sum they are, also of batches of another size."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, lengths = batch
        chosen = self.wide(x)[torch.arange(x.shape[1])[None] < lengths[:, None]]
        return torch.stack([self.wide(part[:, :6]).mean() for part in chosen.split(lengths.tolist())]).square().mean()


class OffDiagonal(CutTwice):
    """A count that is a product of another one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, lengths = batch
        chosen = self.wide(x[0])[torch.arange(x.shape[1]) < lengths[0]]
        number, alike = len(chosen), chosen @ chosen.t()
        return alike[~torch.eye(number, dtype=torch.bool)].view(number, number - 1).exp().mean()


WHOLE = {
    CutTwice: (10, [[3, 6, 6, 10], [2, 5, 8, 4], [4, 7, 7, 3], [10, 7, 6, 10], [10, 2, 10, 2]]),
    SplitOfAll: (
        12,
        [
            [4, 6, 6],
            [9, 12, 7],
            [10, 9, 10],
            [3, 6, 4],
            [4, 7, 9],
            [11, 11, 11],
            [2, 10, 8],
            [5, 12, 9],
            [12, 4, 7],
            [9, 7, 8],
            [8, 10, 6],
            [10, 2],
        ],
    ),
    OffDiagonal: (9, [[4], [7], [3], [5], [9], [2], [6], [8]]),
    CutToEach: (7, [[4, 1, 3, 7], [7, 4, 5, 5], [7, 3, 3, 5], [7, 7, 5, 7], [3, 3, 7, 7], [3, 7, 5, 2]]),
}
"""Lengths of rows: of some all that there is, of two at once before it is one, and with one row less in the end."""


@pytest.mark.parametrize("make", WHOLE)
def test_lengths_of_rows(make: type[Quiet]) -> None:
    longest, lengths = WHOLE[make]
    generator = torch.Generator().manual_seed(0)
    data: Any = DataLoader(
        [(torch.randn(len(its), longest, 6, generator=generator), torch.tensor(its)) for its in lengths],  # type: ignore[arg-type]
        batch_size=None,
    )

    def trained(strategy: str) -> Result:
        torch.manual_seed(5)
        return fit(make(), data, strategy, 1, [], max_epochs=2)[0]

    ours = trained("spmd")
    assert_compiled(ours)
    assert_bitwise(ours, trained("auto"))


@pytest.mark.parametrize(
    "make", [Longest, CutToLongest, Hardest, BesideChosen, Half, Listed, RecurrentToLongest, InFours]
)
def test_they_are_those_of_all_ranks(make: type[Counting], two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, make, "spmd", 2, max_epochs=3)
    assert_compiled(ours[0])
    assert_equals_one_device(ours, run(make, "auto", data=_as_two_ranks_have_them, max_epochs=3))
