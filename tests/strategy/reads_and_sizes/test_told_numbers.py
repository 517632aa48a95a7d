"""Numbers that Python draws or counts itself are places and lengths of parts: one graph does for all of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_spmd.stages.capture.follow import follower
from lightning_spmd.stages.capture.follow.count_formulas import CountFormulas, _Pass
from lightning_spmd.stages.capture.follow.trial_runs import Run
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import assert_bitwise, assert_compiled, assert_equals_one_device
from tests.strategy.reads_and_sizes.test_numbers_of_counts import Counting, _as_two_ranks_have_them, train
from tests.strategy.small import run


class Telling(Counting):
    """A loss of parts that Python chooses."""

    seed = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.drawn = random.Random(self.global_step + self.seed)
        self.step = self.global_step
        return super().training_step(batch, batch_idx)

    def hidden(self, x: Tensor) -> Tensor:
        """Twelve numbers of steps in each row."""
        return self.wide(x)[:, None] * self.embedding.weight[:12]


class Window(Telling):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        begin = self.drawn.randint(0, 8)
        return self.hidden(x)[:, begin : begin + 4].tanh().square().mean()


class Paused(Window):
    """A hook looks at gradients: the graph waits before its update."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = float(self.wide.weight.grad.norm())  # type: ignore[union-attr]


class WindowAndNext(Telling):
    """Each step of the window and the one behind it."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        begin, hidden = self.drawn.randint(0, 7), self.hidden(x)
        now, then = hidden[:, begin : begin + 4], hidden[:, begin + 1 : begin + 5]
        return (now - then.detach()).square().mean()


class NextWindow(Telling):
    """Of a length that was drawn, and its targets: the second call of a line that tells for the first time."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden, length = self.hidden(x), self.drawn.randint(3, 8)
        at = self.drawn.randint(0, 11 - length)
        return (hidden[:, at : at + length] - hidden[:, at + 1 : at + 1 + length].detach()).square().mean()


class TwoWindows(Telling):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.hidden(x)
        one, other = self.drawn.randint(0, 8), self.drawn.randint(0, 8)
        return (hidden[:, one : one + 4].tanh() * hidden[:, other : other + 4].flip(1)).abs().mean()


class Crop(Telling):
    """A part of an image, at random."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        images = self.hidden(x)[..., None] * self.embedding.weight[20:36, 0]
        left, top = self.drawn.randint(0, 8), self.drawn.randint(0, 8)
        return images[:, left : left + 4, :, top : top + 8].square().mean()


class AnyLength(Telling):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        begin = self.drawn.randint(0, 4)
        return self.hidden(x)[:, begin : self.drawn.randint(begin + 3, 12)].tanh().square().mean()


class CutOut(Telling):
    """Written into."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden, begin = self.hidden(x).clone(), self.drawn.randint(0, 8)
        hidden[:, begin : begin + self.drawn.randint(1, 4)] = 0
        return hidden.square().mean()


class Parts(Telling):
    """All of it in three: the last part follows from the others."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        one, other = self.drawn.randint(2, 5), self.drawn.randint(2, 5)
        first, second, rest = self.hidden(x).split([one, other, 12 - one - other], 1)
        return first.square().mean() + second.mean() + rest.abs().mean()


class EmptyParts(Telling):
    """A part is nothing, or all of it: symbols stand for two at least, and what is left was less than nothing."""

    ends = ((1, 2), (2, 3), (2, 4), (1, 3), (3, 5), (1, 5), (0, 4), (0, 0), (1, 1), (2, 5), (12, 12), (0, 12))

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        one, other = self.ends[self.step % 12]
        first, second, rest = self.hidden(x).split([one, other - one, 12 - other], 1)
        return (first.sum() + second.square().sum() + rest.abs().sum()) / 500


class Written(Telling):
    """A whole number that is put into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slot", torch.zeros(2))
        self.slot: Tensor

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        length = self.drawn.randint(3, 9)
        self.slot[1] = length + 1
        return self.hidden(x)[:, :length].square().mean() + self.slot.sum() * self.wide(x).mean() / 10


class Made(Telling):
    """Torch makes a tensor of a number before a dispatch mode sees it."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        length = self.drawn.randint(3, 9)
        return self.hidden(x)[:, :length].square().mean() * x.new_tensor([length, 2]).mean() / 10


class Chosen(Telling):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        length, slots = self.drawn.randint(3, 9), torch.zeros(len(mask))
        slots[mask] = length
        return (self.hidden(x)[:, :length].square().mean((1, 2)) * slots).mean() / 10


class SizesWritten(Telling):
    """Sizes of the batch, and of what data choose."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        slot, chosen = torch.zeros(2), self.wide(x[mask])
        slot[0], slot[1] = x.shape[0], len(chosen)
        return chosen.square().mean() + slot.sum() * self.wide(x).mean() / 50 + x.new_tensor(x.shape[0]) / 100


class Place(Telling):
    """One step, which torch's indexing takes as a plain number."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return self.hidden(x)[:, self.drawn.randint(0, 11)].square().mean()


class PlaceWritten(Telling):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden, place = self.hidden(x).clone(), self.drawn.randint(0, 11)
        hidden[:, place, None] = self.wide(x)[:, None]
        return hidden[..., place, :].sum() / 50 + hidden.square().mean()


class Ring(Telling):
    """A memory of a few slots, filled one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(12, 6))
        self.memory: Tensor
        self.slot = 0

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.wide(x)
        loss = (hidden @ self.memory.clone().t()).square().mean() + self(x).square().mean()
        with torch.no_grad():
            self.memory[self.slot : self.slot + 3] = hidden[:3]
        self.slot = (self.slot + 3) % 12
        return loss


class Turns(Telling):
    """As far as was drawn, and what came to the front is weighed once more."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden, by = self.hidden(x), self.drawn.randint(1, 6)
        turned = torch.cat([hidden[:, by:], hidden[:, :by]], 1)
        return turned.square().mean() + turned[:, :by].tanh().mean()


class Curriculum(Telling):
    """A step more in each step."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return self.hidden(x)[:, : 3 + self.step % 9].square().mean()


class BehindRead(Telling):
    """Drawn once a value has been read, in graphs that have begun."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.hidden(x)
        weight, begin = hidden.mean().item(), self.drawn.randint(0, 8)
        return hidden[:, begin : begin + 4].square().mean() * (1 + abs(weight))


class ReadBetween(Telling):
    """A value of the window is read before the next number is drawn."""

    seed = 6

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        begin = self.drawn.randint(0, 8)
        window = self.hidden(x)[:, begin : begin + 4]
        weight, row = window.mean().item(), self.drawn.randint(0, 7)
        return window[row].tanh().square().mean() * (1 + abs(weight))


class LastRows(Telling):
    """So few that hardly any number of rows is left in what graphs are made with."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        first = self.drawn.randint(0, 8)
        return F.cross_entropy(self(x[first:]), y[first:])


class OfChosen(Telling):
    """A window of the rows that a mask chooses: both kinds of counts."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        begin = self.drawn.randint(0, 8)
        return self.hidden(x[mask])[:, begin : begin + 4].square().sum() / 200


class WholeOnce(Telling):
    """All that there is in some steps: torch leaves out the slice, and the gradient has other strides."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.wide(x[:, None] * 1.0) * self.embedding.weight[:12]
        part = hidden[:, : self.drawn.choice([6, 9, 12])]
        return part.transpose(1, 2).contiguous().tanh().square().mean()


class Pooled(Telling):
    """To so many numbers; of one torch makes a mean instead."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.adaptive_avg_pool1d(self.hidden(x).transpose(1, 2), self.drawn.randint(1, 9)).tanh().square().mean()


class Multiple(Telling):
    """Filled up to a multiple of four, which is folded."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        length = self.drawn.randint(5, 12)
        steps = F.pad(self.hidden(x)[:, :length], (0, 0, 0, -length % 4))
        return steps.unflatten(1, (-1, 4)).mean(2).square().mean()


class AlikeOnce(Telling):
    """Two masks that are the same in a step that is recorded, and in hardly any other one."""

    places = ((0, 2), (3, 5), (2, 6), (4, 4), (1, 6), (2, 7), (5, 3))

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.hidden(x)
        one, other = (hidden[:, place : place + 4, 0] for place in self.places[self.step % 7])
        return (one[one > 0].sum() - other[other > 0].square().sum()) / 500


class Crops(Telling):
    """Two parts of any length: few numbers fulfill what is asked of all four together."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden, means = self.hidden(x), list[Tensor]()
        for _ in range(2):
            length = self.drawn.randint(4, 8)
            begin = self.drawn.randint(0, 12 - length)
            means.append(hidden[:, begin : begin + length].tanh().mean(1))
        return (means[0] - means[1]).square().mean()


class HardlyMoved(Telling):
    """Windows that begin at one of five steps each: sets of numbers have some in common."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.hidden(x)
        one, other, third = (hidden[:, begin : begin + 8] for begin in self.drawn.choices(range(5), k=3))
        return (one.tanh() * other.tanh() - third).abs().mean()


class CropOfEachRow(Telling):
    """Two windows of four rows, each as long as its row says; each is pooled to six steps, as which one may be long.

    In the second step two windows are as long as in the first one by chance, and two of them are alike.
    """

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        found = list[Tensor]()
        for row in self.hidden(x)[:4]:
            length = self.drawn.randint(4, 8)
            begin = self.drawn.randint(0, 12 - length)
            found.append(F.adaptive_avg_pool1d(row[begin : begin + length].t()[None], 6)[0])
        return torch.stack(found).tanh().square().mean()


class Rows(Telling):
    """Some of the rows, which ranks have in parts."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        begin = self.drawn.randint(0, 3)
        return self.wide(x)[begin : begin + 5].square().mean() + self(x).square().mean()


ALL = {
    Window: 3,
    WindowAndNext: 5,
    NextWindow: 4,
    TwoWindows: 5,
    Crop: 3,
    AnyLength: 3,
    CutOut: 5,
    Parts: 3,
    Written: 5,
    Place: 3,
    PlaceWritten: 6,
    Ring: 3,
    Turns: 3,
    Curriculum: 4,
    BehindRead: 4,
    ReadBetween: 8,
    LastRows: 5,
    OfChosen: 4,
    WholeOnce: 5,
    Pooled: 4,
    Multiple: 6,
    AlikeOnce: 6,
    Crops: 5,
    HardlyMoved: 7,
    CropOfEachRow: 3,
    Rows: 4,
}
"""With as many graphs at most: of numbers with which torch does something else there are more."""


@pytest.mark.parametrize("make", ALL)
def test_one_graph_for_all_numbers(make: type[Telling]) -> None:
    ours = train(make, "spmd", range(12, 13))
    assert_compiled(ours)
    assert (ours.captures <= ALL[make], ours.eager_steps) == (True, 0)
    assert_bitwise(ours, train(make, "auto", range(12, 13)))


@pytest.mark.parametrize("make", ALL)
def test_batches_of_all_sizes(make: type[Telling]) -> None:
    ours = train(make, "spmd", range(9, 15))
    assert_compiled(ours)
    assert ours.eager_steps <= (14 if make is Multiple else 2)
    assert_bitwise(ours, train(make, "auto", range(9, 15)))


@pytest.mark.parametrize("make", [Made, Chosen, SizesWritten])
@pytest.mark.parametrize("sizes", [range(12, 13), range(9, 15)])
def test_numbers_of_which_torch_makes_tensors(make: type[Telling], sizes: range) -> None:
    assert_bitwise(train(make, "spmd", sizes), train(make, "auto", sizes))


def _counted(monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> list[int]:
    """A list that grows with each call of a method."""
    calls, original = list[int](), getattr(kind, method)

    def counted(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(kind, method, counted)
    return calls


def test_what_torch_decides_is_asked_before_samples_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a path, where each window asks for another condition."""
    passes = _counted(monkeypatch, _Pass, "run")
    ours = train(CropOfEachRow, "spmd", range(12, 13), steps=3)
    assert (ours.eager_steps, len(passes) <= 4 * (ours.captures - 1)) == (0, True), len(passes)


class TooManyWindows(Telling):
    """More numbers than one path tells, and more calls in some steps."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden, found = self.hidden(x), x.sum() * 0
        for _ in range(self.drawn.randint(36, 40)):
            begin = self.drawn.randint(0, 8)
            found = found + hidden[:, begin : begin + self.drawn.randint(2, 4)].square().mean()
        return found / 40


def test_a_search_ends_where_there_is_nothing_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _counted(monkeypatch, Run, "make")
    ours = train(TooManyWindows, "spmd", range(12, 13))
    assert_bitwise(ours, train(TooManyWindows, "auto", range(12, 13)))
    assert (ours.mode, len(made) < 6000) == ("compiled", True), len(made)


class Tally(Telling):
    """Elements at drawn places: of so few numbers many are equal, and what follows from which is not told."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        found = torch.zeros(8, 6)
        for row in range(16):
            found[row % 8, self.drawn.randrange(6)] += 1
        return self.wide(found).square().mean() + self(x).square().mean()


def test_a_path_is_for_its_numbers_alone_if_more_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, found = _counted(monkeypatch, _Pass, "run"), list[int]()
    for most in (follower._MOST_SEARCHED, 0):
        monkeypatch.setattr(follower, "_MOST_SEARCHED", most)
        monkeypatch.setattr(follower, "_FOR_EACH_CALL", 0)
        passes.clear()
        ours = train(Tally, "spmd", range(12, 13), steps=4)
        found.append(len(passes))
        assert_bitwise(ours, train(Tally, "auto", range(12, 13), steps=4))
    assert found[1] < found[0]


def test_searches_take_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at most half of what is left, and steps earn more."""
    taken, left = list[float](), list[float]()
    original = CountFormulas.end

    def end(own: CountFormulas) -> None:
        known, before = own._step.follower, own._step.follower.searched
        left.append(known.may_search(len(own._step.notes)))
        original(own)
        taken.append(known.searched - before)

    monkeypatch.setattr(CountFormulas, "end", end)
    monkeypatch.setattr(follower, "_MOST_SEARCHED", 4096)
    monkeypatch.setattr(follower, "_FOR_EACH_CALL", 0)
    ours = train(TooManyWindows, "spmd", range(12, 13), steps=8)
    assert_bitwise(ours, train(TooManyWindows, "auto", range(12, 13), steps=8))
    assert left[0] == 2048
    assert taken[0] > 0
    assert sum(taken) < 3 * 4096, (taken, left)


class Segments(Telling):
    """As in VITS: from each row one part, whose place torch draws, and Python reads as an index."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden, places = self.hidden(x)[:4], (torch.rand(4) * 9).long()
        parts = torch.zeros_like(hidden[:, :4])
        for row in range(4):
            place = places[row]
            parts[row] = hidden[row, place : place + 4]  # type: ignore[misc]
        return parts.tanh().square().mean()


class InLengths(Telling):
    """The place of a part is drawn within a length that is read; none of the lengths is a number of a call."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden, lengths = self.hidden(x), (y[:4] + 8).tolist()
        places = [self.drawn.randint(0, length - 4) for length in lengths]
        return torch.stack([hidden[i, n : n + 4] for i, n in enumerate(places)]).square().mean()


class Longest(Telling):
    """Cut where the longest ends, and a window of that is drawn."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        longest = int((y.cumsum(0) % 7).max()) + 5
        cut = self.hidden(x)[:, :longest]
        begin = self.drawn.randint(0, longest - 4)
        return cut[:, begin : begin + 4].square().mean()


class BelowNone(Telling):
    """What is read is less than none in some steps, and no size."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        shift, begin = int(x.sum()), self.drawn.randint(0, 8)
        return self.hidden(x)[:, begin : begin + 4].square().mean() * (1 + shift % 3)


@pytest.mark.parametrize(("make", "most"), [(Segments, 8), (InLengths, 4), (Longest, 8), (BelowNone, 10)])
def test_beside_reads(make: type[Telling], most: int) -> None:
    ours = train(make, "spmd", range(12, 13))
    assert_compiled(ours)
    assert (ours.captures <= most, ours.eager_steps) == (True, 0)
    assert_bitwise(ours, train(make, "auto", range(12, 13)))


@pytest.mark.parametrize("make", [Segments, InLengths, Longest, BelowNone])
def test_beside_reads_of_batches_of_all_sizes(make: type[Telling]) -> None:
    ours = train(make, "spmd", range(9, 15))
    assert_compiled(ours)
    assert ours.eager_steps <= 6
    assert_bitwise(ours, train(make, "auto", range(9, 15)))


class Filled(Telling):
    """With a number that is not whole and decides no size."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.wide(x).masked_fill(x > 1, self.drawn.random())
        return (hidden.mean(1) * torch.full((len(x),), self.drawn.random())).square().mean()


class Stepped(Telling):
    """With one that decides sizes."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        steps = torch.arange(0, len(x), self.drawn.choice((1.0, 1.25, 1.5)))
        return (self.wide(x).mean() * steps).square().mean()


@pytest.mark.parametrize(("make", "most"), [(Filled, 4), (Stepped, 12)])
def test_numbers_that_are_not_whole_beside_sizes(make: type[Telling], most: int) -> None:
    ours = train(make, "spmd", range(9, 15))
    assert_compiled(ours)
    assert (ours.captures <= most, ours.eager_steps <= 4) == (True, True)
    assert_bitwise(ours, train(make, "auto", range(9, 15)))


class Distances(Telling):
    """Of order two there are products of matrices, for more than 25 rows."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.hidden(x).transpose(0, 1)
        return torch.cdist(hidden, hidden[:, :3].detach() + 1, p=(1.0, 2.0)[self.step % 2]).mean()


def test_a_number_with_which_torch_does_otherwise_for_some_sizes() -> None:
    ours = train(Distances, "spmd", range(24, 26))
    assert_compiled(ours)
    assert_bitwise(ours, train(Distances, "auto", range(24, 26)))


def test_parts_that_are_empty_in_some_steps() -> None:
    ours = train(EmptyParts, "spmd", range(12, 13))
    assert ours.eager_steps <= 4
    assert_bitwise(ours, train(EmptyParts, "auto", range(12, 13)))


@pytest.mark.parametrize("make", [Window, Paused, AnyLength, Parts, Place, Ring, BehindRead, Rows])
def test_they_are_those_of_all_ranks(make: type[Telling], two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, make, "spmd", 2, max_epochs=3)
    assert_compiled(ours[0])
    assert_equals_one_device(ours, run(make, "auto", data=_as_two_ranks_have_them, max_epochs=3))


class Apart(Window):
    """Each rank has drawn another place."""

    @property
    def seed(self) -> int:  # type: ignore[override]
        return 7 * self.global_rank * (self.global_step > 5)


def test_ranks_that_tell_others_are_named(two_ranks: RankPool) -> None:
    expected = r"__getitem__ at .*test_told_numbers.py:\d+ is given \d+ on rank 0 and \d+ on rank 1"
    with pytest.raises(RankError, match=expected):
        two_ranks.run(run, Apart, "spmd", 2, max_epochs=3)
