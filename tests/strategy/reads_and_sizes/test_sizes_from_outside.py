"""Tensors that no call of the step made, of other sizes from step to step: one graph does for all of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import assert_bitwise, assert_compiled, assert_equals_one_device
from tests.strategy.reads_and_sizes.test_numbers_of_counts import Counting, _as_two_ranks_have_them, train
from tests.strategy.small import run


class FromOutside(Counting):
    """A loss with tensors that Python makes of its own data, in each step."""

    seed = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.drawn = np.random.default_rng([self.global_step, self.seed])
        self.number = random.Random(self.global_step)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class MaskOfBatch(FromOutside):
    """As large as the batch: wav2vec 2.0 and SpecAugment choose frames in NumPy."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        masked = torch.from_numpy(self.drawn.random(x.shape) < 0.3)
        return self.wide(x.masked_fill(masked, 0)).square().mean()


class Masked(FromOutside):
    """What the mask chooses is as large as its values say."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden, chosen = self.wide(x), torch.from_numpy(self.drawn.random(len(x)) < 0.5)
        hidden[chosen] = self.embedding.weight[3]
        return hidden.square().mean() + hidden[~chosen].sum() / 50


class Noise(FromOutside):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        noise = torch.from_numpy(self.drawn.standard_normal(x.shape).astype(np.float32))
        return (self.wide(x + noise) - self.wide(x)).square().mean()


class Weights(FromOutside):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        weights = torch.tensor([1 / (1 + row) for row in range(len(x))])
        return (self.wide(x).square().sum(1) * weights).mean()


class Order(FromOutside):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        order = torch.from_numpy(self.drawn.permutation(len(x)))
        return (self.wide(x) - self.wide(x)[order].detach()).square().mean()


class Words(FromOutside):
    """Sampled without replacement, as many as were drawn."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        ids = torch.tensor(self.number.sample(range(200), self.number.randint(3, 9)))
        return (self.embedding(ids).mean(0) * self.wide(x)).square().mean()


class Listed(FromOutside):
    """A list of positions, of which indexing makes a tensor."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        kept = [i for i in range(150) if self.number.random() < 0.1] or [0, 1]
        return (self.embedding.weight[kept].sum(0) * self.wide(x)).square().mean()


class New(FromOutside):
    """Of a tensor of the step, which says the dtype."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        scale = self.number.randint(1, 9)
        own = x.new_tensor([self.number.random() for _ in range(self.number.randint(2, 6))])
        return (self.wide(x).mean() * own * x.new_tensor(data=scale, dtype=None)).square().mean()


class NewOfStep(FromOutside):
    """Of numbers of which some are tensors of the step, which reads them; the others are others each time."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        loss, drawn = self.wide(x).mean(), self.number.random()
        return (loss * x.new_tensor([x[0, 0], drawn]) + torch.tensor([drawn, loss.detach()])).square().mean()


class Lengths(FromOutside):
    """Of the rows, as the step draws them."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        lengths = y.new_tensor([self.number.randint(1, 6) for _ in range(len(x))], dtype=torch.int32)
        return (self.wide(x) * (torch.arange(6) < lengths[:, None])).square().mean()


class Targets(FromOutside):
    """As long as a window that is drawn as well."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        length = self.number.randint(2, 8)
        hidden = (self.wide(x)[:, None] * self.embedding.weight[:12])[:, :length]
        targets = torch.tensor([self.number.random() for _ in range(length)])
        return F.mse_loss(hidden.mean((0, 2)), targets)


class Two(FromOutside):
    """In one call, with sizes of their own."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        one, other = (torch.tensor([self.number.random() for _ in range(n)]) for n in self._lengths())
        table = torch.outer(one, other)
        return (self.wide(x).mean() * table).square().sum() + self.embedding.weight[: len(one)].mean()

    def _lengths(self) -> tuple[int, int]:
        return self.number.randint(2, 6), self.number.randint(3, 9)


class Memory(FromOutside):
    """A bank that grows, and is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = torch.zeros(2, 6)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.wide(x)
        logits = hidden @ self.bank.T
        self.bank = torch.cat([self.bank, hidden[:2].detach()])[-30:]
        return logits.square().mean() + hidden.square().mean()


class Written(FromOutside):
    """The step writes into it, and Python keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[float] = []

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        own = torch.tensor([self.number.random() for _ in range(self.number.randint(2, 7))])
        hidden = self.wide(x)
        own += hidden.mean().detach()
        self.kept.append(own.sum().item())
        return (hidden.sum() * own).square().mean()


class AtTimes(FromOutside):
    """Not in each step, and before a layer as well as behind it."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        if self.global_step % 3:
            x = x + torch.from_numpy(self.drawn.random((len(x), 1)).astype(np.float32))
        return (self.wide(x) * torch.tensor([1.0, 2.0] * 3)).square().mean()


class OneOrMore(FromOutside):
    """One row is added to all; of several there is one for each."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        count = 1 if self.global_step % 3 == 1 else len(x)
        shift = torch.from_numpy(self.drawn.random((count, 6)).astype(np.float32))
        return self.wide(x + shift).square().mean()


class Nothing(FromOutside):
    """None, one or more rows."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        more = torch.from_numpy(self.drawn.random((self.number.randint(0, 3), 6)).astype(np.float32))
        return self.wide(torch.cat([x, more])).square().mean()


class Dimensions(FromOutside):
    """Of one dimension or two, of two types."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        shape = (self.number.randint(2, 5), 6)[self.global_step % 2 :]
        own = torch.from_numpy(self.drawn.random(shape).astype((np.float32, np.float64)[self.global_step % 3 == 0]))
        return (self.wide(x).mean(0) * own).square().mean().float()


class Shared(FromOutside):
    """Two tensors have memory in common, and two the batch's."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        whole = torch.tensor([self.number.random() for _ in range(self.number.randint(4, 9))])
        head = whole.detach()[:2]
        own = torch.from_numpy(x.detach().numpy())
        return (self.wide(own) * whole.sum()).square().mean() + (self.wide(x).mean() * head).sum()


class Recurrent(FromOutside):
    """A layer that torch unrolls over time, where no size varies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(6, 6, batch_first=True)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        words = torch.from_numpy(self.drawn.random((2, self.number.randint(2, 12), 6)).astype(np.float32))
        return self.layer(words)[0].square().mean() + self.wide(x).mean()


class Checkpointed(FromOutside):
    """What it saves is recomputed."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        own = torch.tensor([self.number.random() for _ in range(self.number.randint(2, 6))])
        return checkpoint(lambda x: (self.wide(x).mean() * own).square().sum(), x, use_reentrant=False)


class Resized(FromOutside):
    """The same object with other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.zeros(3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.own.resize_(2 + self.global_step % 5).fill_(self.global_step / 10)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (self.wide(x).mean() * self.own).square().sum()


class Asked(FromOutside):
    """A question, before any call has met the tensor."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        own = torch.tensor([self.number.random() for _ in range(self.number.randint(2, 6))])
        assert not self.wide.weight.is_shared()
        assert not own.is_neg()
        return (self.wide(x).mean() * own).square().sum()


class CountedOrNone(FromOutside):
    """``bincount`` of none reads no size."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        ones = torch.tensor([1] * (3, 5, 4, 6, 0, 2, 1)[self.global_step % 7], dtype=torch.long)
        return (torch.bincount(ones, minlength=3) * self.wide(x).mean()).square().sum()


ALL: dict[type[FromOutside], tuple[int, int]] = {
    MaskOfBatch: (2, 4),
    Masked: (2, 4),
    Noise: (2, 4),
    Weights: (2, 4),
    Order: (2, 4),
    Words: (3, 8),
    Listed: (3, 9),
    New: (4, 9),
    NewOfStep: (2, 4),
    Lengths: (2, 4),
    Targets: (2, 6),
    Two: (4, 10),
    Memory: (5, 10),
    Written: (3, 9),
    Recurrent: (4, 9),
    Checkpointed: (4, 10),
    Resized: (4, 10),
    Asked: (3, 9),
    CountedOrNone: (4, 10),
    AtTimes: (3, 6),
    OneOrMore: (6, 7),
    Nothing: (5, 11),
    Dimensions: (7, 12),
}
"""With as many graphs at most, for batches of one size and of several."""


@pytest.mark.parametrize("make", ALL)
def test_one_graph_for_all_sizes(make: type[FromOutside]) -> None:
    ours = train(make, "spmd", range(12, 13))
    assert_compiled(ours)
    assert (ours.captures <= ALL[make][0], ours.eager_steps) == (True, 0)
    assert_bitwise(ours, train(make, "auto", range(12, 13)))


@pytest.mark.parametrize("make", ALL)
def test_batches_of_all_sizes(make: type[FromOutside]) -> None:
    ours = train(make, "spmd", range(9, 15))
    assert_compiled(ours)
    assert (ours.captures <= ALL[make][1], ours.eager_steps <= 5) == (True, True)
    assert_bitwise(ours, train(make, "auto", range(9, 15)))


class Padded(FromOutside):
    """Arrays of several lengths; the call writes into what it makes itself."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        parts = [self.drawn.random((self.number.randint(1, 4), 6)).astype(np.float32) for _ in range(3)]
        return self.wide(nn.utils.rnn.pad_sequence(list(map(torch.from_numpy, parts)))).square().mean() + x.mean()


class OneChannel(FromOutside):
    """Images of one channel that lie with channels last: dropout behind a convolution walks them so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 3, 3)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        height = self.number.randint(4, 9)
        images = torch.from_numpy(self.drawn.random((2, height, 6, 1)).astype(np.float32).transpose(0, 3, 1, 2))
        return F.dropout(self.layer(images).relu(), 0.4).flatten(1)[:, ::2].square().mean() + self.wide(x).mean()


class Conjugate(FromOutside):
    """In some steps."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        own = torch.tensor([complex(self.number.random(), 1) for _ in range(self.number.randint(2, 5))])
        own = own if self.global_step % 3 else own.conj()
        return (torch.view_as_real(own.resolve_conj()).sum() * self.wide(x).mean()).square()


class ConjugateKept(Conjugate):
    """Made between steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        own = torch.tensor([1 + 2j, 3 - 1j])
        self.own = own if self.global_step % 3 else own.conj()

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (torch.view_as_real(self.own.resolve_conj()).sum() * self.wide(x).mean()).square()


@pytest.mark.parametrize("make", [OneChannel, Conjugate, ConjugateKept])
def test_how_it_lies(make: type[FromOutside]) -> None:
    assert_bitwise(train(make, "spmd", range(9, 15)), train(make, "auto", range(9, 15)))


@pytest.mark.parametrize("make", [Shared, Padded])
@pytest.mark.parametrize("sizes", [range(12, 13), range(9, 15)])
def test_memory_of_arrays(make: type[FromOutside], sizes: range) -> None:
    assert_bitwise(train(make, "spmd", sizes), train(make, "auto", sizes))


@pytest.mark.parametrize("make", [MaskOfBatch, Masked, Words, Targets, Memory])
def test_they_are_those_of_all_ranks(make: type[FromOutside], two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, make, "spmd", 2, max_epochs=3)
    assert_compiled(ours[0])
    assert_equals_one_device(ours, run(make, "auto", data=_as_two_ranks_have_them, max_epochs=3))


class Apart(FromOutside):
    """Each rank has drawn another length."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        length = self.number.randint(2, 6) + self.global_rank * (self.global_step > 5)
        return (self.wide(x).mean() * torch.tensor([0.5] * length)).square().mean()


def test_ranks_with_other_sizes_are_named(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"at .*test_sizes_from_outside.py:\d+ is given .* on rank 0 and .* on rank 1"):
        two_ranks.run(run, Apart, "spmd", 2, max_epochs=3)


class Parameters(FromOutside):
    """What the module has by name is found by its name, whatever its size."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))
        self.scale = nn.Parameter(torch.ones(6))

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        self.table = torch.ones(4 + self.global_step % 3)
        return (self.wide(x).mean() * self.table).sum() + (self.wide(x) * self.scale).square().mean()


def test_buffers_that_grow() -> None:
    assert_bitwise(train(Parameters, "spmd", range(12, 13)), train(Parameters, "auto", range(12, 13)))
