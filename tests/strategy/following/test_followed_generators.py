"""The state of torch's generator in steps that are followed: read, set and seeded between the graph's own draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import RankPool
from tests.helpers.training import assert_bitwise, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, loader_of, rows, run

SEEN: list[list[Any]] = []


class Looks(Net):
    """Keeps what it sees, apart from itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        SEEN.append(self.seen)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.factor(batch[0], batch_idx)

    def factor(self, x: Tensor, batch_idx: int) -> Any:
        raise NotImplementedError


class ReadsBetween(Looks):
    """Values are read between draws and seeds, and decide."""

    def factor(self, x: Tensor, batch_idx: int) -> Any:
        first = torch.rand(()).item()
        if first > 0.5:
            torch.manual_seed(batch_idx)
        second = torch.rand(())
        self.seen += [first, second.item(), torch.get_rng_state()[:64].tolist()]
        return second + torch.rand(())


class KeepsState(Looks):
    """Every third step begins where the one before did."""

    def factor(self, x: Tensor, batch_idx: int) -> Any:
        if batch_idx % 3 == 2:
            torch.set_rng_state(self.seen[-1])
        torch.rand(2)
        self.seen.append(torch.get_rng_state())
        return torch.rand(())


class UsesWhatSeedGives(Looks):
    """The generator that ``manual_seed`` gives is torch's own."""

    def factor(self, x: Tensor, batch_idx: int) -> Any:
        return torch.rand((), generator=torch.manual_seed(batch_idx)) + torch.rand(())


class DrawsWithItsOwn(Looks):
    """Its own generator draws by values of results, and into results and views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(5)

    def factor(self, x: Tensor, batch_idx: int) -> Any:
        likely = x.sigmoid()
        kept = torch.bernoulli(likely, generator=self.own) + likely.bernoulli(generator=self.own)
        noise = torch.zeros_like(likely).normal_(generator=self.own)
        noise[:, :2].uniform_(-1, 1, generator=self.own)
        chosen = torch.multinomial(likely, 2, generator=self.own)
        self.seen += [self.own.get_state()[:64].tolist(), chosen.tolist()]
        return kept.mean() + noise.sum() / 100 + noise.gather(1, chosen).mean()


class Forks(Looks):
    """Draws that leave no trace."""

    def factor(self, x: Tensor, batch_idx: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            noise = torch.rand_like(x)
        return (noise * torch.rand_like(x)).mean()


class BesidesTorch(Looks):
    """The generator's own methods, which nobody sees being called."""

    def factor(self, x: Tensor, batch_idx: int) -> Any:
        first = torch.rand(())
        torch.default_generator.manual_seed(batch_idx)
        return first + torch.rand(())


class BesidesTorchOnce(Looks):
    """The same in one step, of which the calls are known."""

    def factor(self, x: Tensor, batch_idx: int) -> Any:
        first = torch.rand(())
        if batch_idx == 4:
            torch.default_generator.manual_seed(5)
        return first + torch.rand(())


class SeedsWithClock(Looks):
    """What no graph does."""

    def factor(self, x: Tensor, batch_idx: int) -> Any:
        torch.rand(())
        self.seen.append(torch.initial_seed())
        return 1.0


@pytest.mark.parametrize(
    ("make", "graphs"),
    [
        (ReadsBetween, None),
        (KeepsState, None),
        (UsesWhatSeedGives, 2),
        (DrawsWithItsOwn, 2),
        (Forks, 2),
        (BesidesTorch, 2),
        (BesidesTorchOnce, None),
    ],
)
def test_numbers_are_eager_s(make: type[Net], graphs: int | None) -> None:
    SEEN.clear()
    ours = assert_as_eager(make, max_epochs=2)
    assert graphs in (None, ours.captures)
    (theirs, mine) = SEEN
    assert len(theirs) == len(mine)
    for one, other in zip(theirs, mine, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert not any("eagerly" in text for text in ours.warnings)


def test_what_no_graph_does_runs_eagerly() -> None:
    SEEN.clear()
    theirs, ours = run(SeedsWithClock, "auto", max_epochs=1), run(SeedsWithClock, max_epochs=1)
    assert_bitwise(ours, theirs)
    assert SEEN[0] == SEEN[1] != []


class DrawsRows(Quiet):
    """Draws by weights, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        likely = self.first.weight.detach().sigmoid() * 0.5
        kept = torch.bernoulli(likely, generator=self.own) * likely.new_ones(()).normal_(generator=self.own)
        return self.loss(batch) + (kept * self.first.weight).sum() / 10


def test_its_own_generator_draws_alike_on_ranks(two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, DrawsRows, "spmd", 2)
    assert_compiled(*ours)
    assert_equals_one_device(ours, run(DrawsRows, "auto", data=lambda: loader_of(rows(), ROWS)))
