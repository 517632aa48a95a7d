"""Python computes with data-dependent sizes: what it passes on is a formula of them, and one graph does for all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_spmd.stages.capture.follow.count_formulas import CountFormulas
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, assert_bitwise, assert_compiled, assert_equals_one_device, fit
from tests.strategy.small import ROWS, Net, Quiet, rows, run

Way = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Counting(Quiet):
    """A loss of rows that a mask chooses."""

    way: Way

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 6)
        self.attention, self.embedding = nn.MultiheadAttention(6, 2, batch_first=True), nn.Embedding(200, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        least = (-0.2, 0.9, -1.4, 0.3, -0.7, 1.2, -5.0)[batch_idx % 7]
        loss = self.way(x, y, x[:, 0] > least)
        self.log("loss", loss)
        return loss


class Views(Counting):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = self.wide(x[mask])
        wide = chosen.unsqueeze(1).expand(-1, 3, -1).reshape(-1, 6)
        return wide.view(len(wide) // 3, 3, 6).sum(1).square().sum() / 50


class Positions(Counting):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = x[mask]
        return (chosen + self.embedding(torch.arange(chosen.shape[0]))).tanh().mul(self.wide(chosen)).sum() / 50


class Padded(Counting):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = self.wide(x[mask])
        return F.pad(chosen, (0, 0, 0, 150 - len(chosen))).square().mean()


class CutOff(Counting):
    """At most ten of them: fewer are another path."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        found = torch.nonzero(mask).squeeze(1)
        return self.wide(x[found[torch.argsort(x[found, 1])][:10]]).square().sum() / 50


class Sampled(Counting):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        near, far = torch.where(mask)[0], torch.where(~mask)[0]
        few = min(len(near), 16)
        more = min(len(far), 32 - few)
        both = torch.cat([near[torch.arange(len(near)).flip(0)[:few]], far[:more]])
        return F.cross_entropy(self(x[both]), y[both], reduction="sum") / 40


class Halves(Counting):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = self.wide(x[mask])
        first, rest = chosen.split([len(chosen) // 2, len(chosen) - len(chosen) // 2])
        return first.sum() / 50 - rest.square().sum() / (len(rest) + 1)


class InFours(Counting):
    """What is left when they are dealt in fours is dropped."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = self.wide(x[mask])
        return chosen[: len(chosen) // 4 * 4].view(-1, 4, 6).sum(1).square().sum() / 100


class Windows(Counting):
    """The number of windows is rounded, and the gradient of their mean divides by it."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = self.wide(torch.cat([x[mask], x[:3]]))
        return chosen.unfold(0, 3, 2).square().mean()


class Causal(Counting):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = torch.cat([x[mask], x[:2]])[None]
        length = chosen.shape[1]
        above = torch.triu(torch.full((length, length), float("-inf")), 1)
        return self.attention(chosen, chosen, chosen, attn_mask=above)[0].square().mean()


class Resized(Counting):
    """A call of which torch decides on the very number."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = self.wide(torch.cat([x[mask], x[:2]]))
        return F.interpolate(chosen.t()[None], size=20).square().mean()


class Edges(Counting):
    """A graph network: edges to itself are dropped, and one is added for each node."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        number = len(x)
        begin = (x[:, 1].abs() * 17).long() % number
        end = torch.arange(number)
        keep = (begin != end) & mask
        begin, end = torch.cat([begin[keep], end]), torch.cat([end[keep], end])
        degree = torch.zeros(number).scatter_add_(0, end, torch.ones(len(end)))
        sent = self.wide(x)[begin] * (degree.rsqrt()[begin] * degree.rsqrt()[end])[:, None]
        return F.cross_entropy(self(torch.zeros_like(x).index_add_(0, end, sent)), y)


class Adaptive(Counting):
    """The optimizer makes its state in a step whose path is already that for all counts."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return self.wide(x)[mask].square().sum() / 50

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


ALL = (Views, Positions, Padded, CutOff, Sampled, Halves, InFours, Windows, Causal, Resized, Edges, Adaptive)
MOST = {CutOff: 4, Sampled: 9, Halves: 5, InFours: 6, Padded: 4, Views: 3}
"""Graphs: there is one for the first step, some for the first counts, and one on each side of a number."""


def batches(sizes: range) -> list[tuple[Tensor, Tensor]]:
    """Batches of such sizes, in an order of no kind."""
    generator = torch.Generator().manual_seed(3)
    numbers = [sizes[i] for i in torch.randint(0, len(sizes), (28,), generator=generator).tolist()]
    return [(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in numbers]


def train(make: type[Net], strategy: str, sizes: range, steps: int = 28) -> Result:
    L.seed_everything(5)
    loader: Any = DataLoader(batches(sizes)[:steps], batch_size=None)  # type: ignore[arg-type]
    return fit(make(), loader, strategy, 1, [], max_epochs=1)[0]


@pytest.mark.parametrize("make", ALL)
def test_one_graph_for_all_counts(make: type[Counting]) -> None:
    ours = train(make, "spmd", range(60, 61))
    assert_compiled(ours)
    assert ours.captures <= MOST.get(make, 2)
    assert_bitwise(ours, train(make, "auto", range(60, 61)))


@pytest.mark.parametrize("make", ALL)
def test_one_graph_for_all_counts_and_batches_of_all_sizes(make: type[Counting]) -> None:
    ours = train(make, "spmd", range(48, 67))
    assert_compiled(ours)
    assert ours.captures <= MOST.get(make, 2) + 3
    assert_bitwise(ours, train(make, "auto", range(48, 67)))


class OfAFew(Net):
    """Of what is found a few are taken; at first nothing is found, and dropout is drawn before it is known."""

    counts = (0, 0, 3, 0, 3, 1, 2, 6, 0, 5, 4, 0, 0, 3)

    def few(self, found: Tensor) -> Tensor:
        return found[:1]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        chosen = self.few(losses[torch.arange(len(x)) < self.counts[batch_idx % len(self.counts)]])
        TOLD.append(len(chosen))
        loss = chosen.mean() if len(chosen) else self(x).square().mean()
        self.log("loss", loss)
        return loss


class Third(OfAFew):
    def few(self, found: Tensor) -> Tensor:
        return found.topk(math.ceil(0.3 * len(found))).values


class UpToFour(OfAFew):
    def few(self, found: Tensor) -> Tensor:
        return found[: min(len(found), 4)] if len(found) != 5 else found[1:]


TOLD: list[int] = []
"""How many were chosen in the run before."""


@pytest.mark.parametrize("make", [OfAFew, Third, UpToFour])
def test_nothing_is_found_at_first(make: type[OfAFew]) -> None:
    TOLD.clear()
    theirs = train(make, "auto", range(6, 7))
    expected = list(TOLD)
    TOLD.clear()
    ours = train(make, "spmd", range(6, 7))
    assert expected == TOLD
    assert_compiled(ours)
    assert_bitwise(ours, theirs)


class FewRows(Counting):
    """So many rows are chosen, in this order of steps."""

    order = (0, 5, 0, 6, 1, 3, 1, 0, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        mask = torch.arange(len(x)) < self.order[batch_idx % len(self.order)]
        loss = self.way(x, y, mask) + F.dropout(self(x), 0.2).mean()
        self.log("loss", loss)
        return loss


class DroppedOut(FewRows):
    """Dropout gives an empty tensor itself, and draws nothing."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.dropout(self.wide(x)[mask], 0.3).sum() / 50


class DroppedOutByRead(FewRows):
    order = (6, 3, 6, 1, 0, 0, 6, 3, 0)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.dropout(self.wide(x)[: int(mask.sum())], 0.3).sum() / 50


class ChannelsDropped(FewRows):
    """As many numbers are drawn for any number of rows, but for none."""

    order = (6, 3, 5, 1, 0, 0, 6, 3, 0)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.dropout1d(self.wide(x)[mask].t()[None], 0.3).sum() / 50


class Contiguous(FewRows):
    """It is what it is asked of where there is one row, and a copy where there are more."""

    order = (1, 6, 0, 6, 1, 3)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        columns = x[mask].t()
        doubled = columns.contiguous()
        doubled.mul_(2)
        return (self.wide(columns.t()) * doubled.t()).sum() / 50


class ByDimension(Contiguous):
    """Positions lie dimension by dimension: turned they are what they were, and what is written is seen."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        found = (x[mask] > 0).nonzero()
        turned = found.t().contiguous()
        turned[1] += 10
        return (self.embedding(found[:, 1]) * (1 + found.is_contiguous())).sum() / 50


class Flat(Contiguous):
    """A view of it or a copy."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        columns = x[mask].t()
        doubled = columns.reshape(-1)
        doubled.mul_(2)
        return self.wide(columns.t()).sum() / 50 + doubled.sum() * self.wide.weight.sum() / 50


class Gapped(Contiguous):
    """What comes before the first count has gaps, so a copy is made of it."""

    order = (6, 3, 5, 1, 6, 1)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        columns = self.wide(x)[:, :3]
        doubled = columns[: len(x[mask])].contiguous()
        doubled.mul_(2)
        return columns.square().sum() / 50 + doubled.sum() / 50


class Strided(Gapped):
    """The gradient is made in memory of ``6 * n - 3`` elements, but for no rows."""

    order = (6, 1, 0, 3, 0)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        columns = self.wide(x)[:, :3]
        rows = columns[: len(x[mask])]
        return torch.as_strided(rows, (len(rows), 3), rows.stride()).square().sum() / 50 + columns.mean()


class Widths(FewRows):
    """All columns are what they were asked of, which is then written into; fewer are a copy."""

    order = (6, 3, 5, 6, 2, 4)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = self.wide(x)
        part = hidden[:, : int(mask.sum())].contiguous()
        part.mul_(2)
        return hidden.square().sum() / 50 + part.sum() / 50


class AsksForStrides(Gapped):
    """A copy of one row keeps the gaps between rows."""

    order = (6, 1, 3, 0, 1, 5, 4)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        copied = self.wide(x)[:, :3][: len(x[mask])].clone()
        return copied.sum() * copied.stride(0) / 50


class AsksForOffsets(Gapped):
    """Where a view begins."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = self.wide(x[mask])
        part = chosen[1:, 2:]
        return chosen.sum() * (part.storage_offset() + 1) / 50 + part.sum()


@pytest.mark.parametrize(
    "make",
    [
        DroppedOut,
        DroppedOutByRead,
        ChannelsDropped,
        Contiguous,
        ByDimension,
        Flat,
        Gapped,
        Strided,
        AsksForStrides,
        AsksForOffsets,
        Widths,
    ],
)
def test_a_few_rows_are_treated_otherwise(make: type[Counting]) -> None:
    ours = train(make, "spmd", range(6, 7))
    assert_compiled(ours)
    assert_bitwise(ours, train(make, "auto", range(6, 7)))


class InThrees(FewRows):
    """What is left over is not taken: sometimes there is nothing."""

    order = (9, 0, 4, 8, 7, 6, 4, 3, 5, 9, 2, 1, 10)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = self.wide(x)[mask]
        return chosen[: len(chosen) // 3 * 3].view(-1, 3, 6).mean(1).tanh().sum() / 50


class Pooled(FewRows):
    """Until one is left: how many are pooled decides how often, and Python sees it before."""

    order = (2, 1, 4, 3, 5, 6, 4, 3, 3, 5)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        left = self.wide(x)[mask]
        loss = left.square().mean()
        while len(left) > 1:
            left = F.avg_pool1d(left.t()[None], 2, ceil_mode=True)[0].t()
            loss = loss + left.tanh().sum() / 50
        return loss


def test_pools_until_one_is_left() -> None:
    ours = train(Pooled, "spmd", range(6, 7), steps=9)
    assert_compiled(ours)
    assert_bitwise(ours, train(Pooled, "auto", range(6, 7), steps=9))


def test_rows_in_threes() -> None:
    ours = train(InThrees, "spmd", range(12, 13))
    assert_compiled(ours)
    assert_bitwise(ours, train(InThrees, "auto", range(12, 13)))


class OneSide(FewRows):
    """As many as there are rows, but no more than columns: for many rows that is a plain number."""

    order = (5, 9, 7, 3, 11, 5, 8, 2, 6)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        found = self.wide(x)[mask].diagonal()
        return found.detach().sum() * self.last.bias[0] / len(found)


class Factors(OneSide):
    order = (9, 11, 8, 5, 12, 3)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        _, found = torch.linalg.qr(self.wide(x)[mask].detach())
        return found.abs().sum() * self.last.bias[0] / len(found)


class OneSideOfTwo(OneSide):
    """There is another count, so that samples may be less than that number."""

    order = (5, 7, 6, 9, 4, 12, 8, 11)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return super().way(x, y, mask) + self.wide(x)[x[:, 1] > 0].tanh().mean()


@pytest.mark.parametrize("make", [OneSide, OneSideOfTwo, Factors])
def test_rows_up_to_a_number_of_the_model(make: type[Counting]) -> None:
    ours = train(make, "spmd", range(12, 13), steps=14)
    assert_compiled(ours)
    assert_bitwise(ours, train(make, "auto", range(12, 13), steps=14))


class OneInEachPart(FewRows):
    """Of two rows there is one in each part, which torch broadcasts in every call."""

    order = (5, 7, 12, 3, 11, 2)

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        found = mask.nonzero()[:, 0]
        scale, loss = x[found, 2] - x[found, 2].mean(), x.sum() * 0
        for part in torch.randperm(len(found)).chunk(2):
            hidden = self.last(torch.tanh(self.first(x[found[part]]))).log_softmax(-1)
            picked = hidden.gather(1, y[found[part], None])[:, 0].exp()
            loss = loss - torch.min(picked * scale[part], picked.clamp(0.8, 1.2) * scale[part]).mean()
        return loss


def test_a_path_for_few_counts_is_not_tried_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, original = list[int](), CountFormulas.samples
    monkeypatch.setattr(
        CountFormulas, "samples", lambda formulas: passes.append(len(formulas._step.counts)) or original(formulas)
    )
    ours = train(OneInEachPart, "spmd", range(12, 13), steps=6)
    assert_compiled(ours)
    assert_bitwise(ours, train(OneInEachPart, "auto", range(12, 13), steps=6))
    assert len(passes) < 24


class EndsEagerly(FewRows):
    """The first step asks for what no graph gives, behind a size that Python has been told."""

    order = (5, 7, 6, 9, 10, 11, 10, 9, 3, 10)
    at = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        return super().training_step(batch, batch_idx)

    def once(self, chosen: Tensor) -> None:
        chosen.data_ptr()

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = self.wide(x)[mask]
        scale = torch.ones(len(chosen), 1)
        if self.batch_idx == self.at:
            self.once(chosen.detach())
        return (chosen * scale).sum() / len(chosen)


class EndsWithTransforms(EndsEagerly):
    """Placeholders are other ones from then on."""

    at = 4

    def once(self, chosen: Tensor) -> None:
        torch.func.vmap(torch.sin)(chosen)


@pytest.mark.parametrize("make", [EndsEagerly, EndsWithTransforms])
def test_sizes_behind_a_step_that_ended_eagerly(make: type[Counting]) -> None:
    ours = train(make, "spmd", range(12, 13), steps=10)
    assert ours.captures > 0
    assert_bitwise(ours, train(make, "auto", range(12, 13), steps=10))


class TwoFound(Counting):
    """The smaller of two counts decides what is taken of the batch."""

    pairs = ((0, 0), (2, 0), (0, 2), (3, 3), (1, 1), (1, 3), (3, 1), (2, 5), (6, 6), (0, 6), (6, 0), (4, 4), (2, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        one, other = self.pairs[batch_idx % len(self.pairs)]
        number = torch.arange(len(x))
        few = min(len(x[number < one]), len(x[number < other]))
        return self(x).mean() + self.wide(x[:few]).sum() * (few + 1)


def test_the_smaller_of_two_counts() -> None:
    ours = train(TwoFound, "spmd", range(6, 7))
    assert_compiled(ours)
    assert_bitwise(ours, train(TwoFound, "auto", range(6, 7)))


class Together(Counting):
    """What torch itself makes of two counts."""

    pairs = ((2, 2), (4, 2), (2, 3), (1, 1), (1, 6), (3, 2), (5, 2), (2, 5), (1, 2), (6, 1), (3, 4), (4, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        counts = self.pairs[batch_idx % len(self.pairs)]
        one, other = (self.wide(x[torch.arange(len(x)) < count]) for count in counts)
        made = self.way(one, other, x)
        return self(x).mean() + made.square().mean() * made.shape[-1]


class Shorter(Together):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return torch.diagonal(torch.cat([x, x, x]) @ y.t())


class Longer(Together):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return nn.utils.rnn.pad_sequence([torch.cat([x, x, x]), y], padding_value=1.0).permute(1, 2, 0)


class HalfOfBoth(Together):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.interpolate(torch.cat([x, y]).t()[None], scale_factor=0.5, mode="linear")


class AsManyAsOthers(Counting):
    """Python asks it before the first call that works for as many alone."""

    pairs = ((4, 4), (3, 6), (2, 6), (5, 6), (6, 6), (4, 4), (2, 4), (5, 3), (1, 1), (2, 2), (6, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, other = self.pairs[batch_idx % len(self.pairs)]
        hidden, number = self.wide(batch[0]), torch.arange(6)
        left, right = hidden[number < one], hidden[number < other]
        if len(left) == len(right):
            return (left * right).tanh().mean()
        return (left.repeat(2, 1) * right if 2 * len(left) == len(right) else right.cos()).mean() * len(right)


@pytest.mark.parametrize("make", [Shorter, Longer, HalfOfBoth, AsManyAsOthers])
def test_what_torch_makes_of_two_counts(make: type[Together]) -> None:
    ours = train(make, "spmd", range(6, 7))
    assert_compiled(ours)
    assert_bitwise(ours, train(make, "auto", range(6, 7)))


class Singular(Counting):
    """Its gradient is computed in another way for fewer rows than columns, which no forward call shows."""

    def values(self, x: Tensor, mask: Tensor) -> Tensor:
        chosen = self.wide(x[mask])
        far_apart = torch.arange(6.0) * torch.arange(len(chosen))[:, None]
        return torch.linalg.svdvals(chosen + far_apart).sum()

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return self.values(x, mask) / 50 + self(x).mean()


class SingularWithHook(Singular):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        found = self.values(x, mask)
        found.register_hook(lambda gradient: gradient * 2)
        return found / 50 + self(x).mean()


class SingularInTheStep(Singular):
    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(self.values(x, mask), self.wide.weight)
        return (self.wide.weight * gradient).sum() / 50 + self(x).mean()


class SingularByHand(Singular):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class SingularBehindOthers(Singular):
    """A call that no symbols pass (``kron``) hides what comes before it in the backward pass."""

    def values(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.kron(super().values(x, mask)[None, None], torch.ones(2, 2)).sum() / 4


class SingularNowAndThen(Singular):
    """Steps that log less are beginnings of others, and the loss is now one and now another of the same results."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        plain = self(x).mean()
        found = self.values(x, mask) / 50 + plain
        number = int(1000 * float(y[0])) % 3
        if number:
            self.log("more", (x[mask] * 2).sum())
        return found if number < 2 else plain


@pytest.mark.parametrize(
    "make",
    [Singular, SingularWithHook, SingularInTheStep, SingularByHand, SingularBehindOthers, SingularNowAndThen],
)
def test_torch_decides_on_counts_in_the_backward_pass(make: type[Counting]) -> None:
    ours = train(make, "spmd", range(12, 13))
    assert_compiled(ours)
    assert_bitwise(ours, train(make, "auto", range(12, 13)))


def test_torch_decides_on_counts_and_sizes_in_the_backward_pass() -> None:
    ours = train(Singular, "spmd", range(2, 14))
    assert_compiled(ours)
    assert_bitwise(ours, train(Singular, "auto", range(2, 14)))


class OfAnotherLength(Counting):
    """A mask of more rows than there are is an error, also where it chooses none of those."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        mask = mask & (torch.arange(len(x)) < 3)
        try:
            return self.wide(x[:4][mask]).square().mean()
        except IndexError:
            return self(x).square().mean()


class WritesOfAnotherLength(Counting):
    """The same where it says what is written."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        few = x[:4].clone()
        try:
            few[mask & (torch.arange(len(x)) < 3)] = 0.0
        except IndexError:
            return self(x).square().mean()
        return self.wide(few).square().mean()


@pytest.mark.parametrize("make", [OfAnotherLength, WritesOfAnotherLength])
def test_a_mask_of_another_length_is_an_error(make: type[Counting]) -> None:
    assert_bitwise(train(make, "spmd", range(6, 7)), train(make, "auto", range(6, 7)))


class CutFromVarying(Counting):
    """As many as there is room for, which depends on how large the batch is."""

    def way(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        found = torch.nonzero(mask).squeeze(1)[: max(1, len(x) // 4)]
        return self.wide(x[found]).square().sum() / 10


def test_what_is_cut_off_depends_on_the_size_of_the_batch() -> None:
    ours = train(CutFromVarying, "spmd", range(4, 24))
    assert_compiled(ours)
    assert_bitwise(ours, train(CutFromVarying, "auto", range(4, 24)))


def _as_two_ranks_have_them() -> Any:
    all_rows = rows()
    batches = [all_rows[i : i + ROWS] for i in range(0, len(all_rows), ROWS)]
    return InOrder([row for batch in batches for row in (*batch[0::2], *batch[1::2])], ROWS)


@pytest.mark.parametrize("make", [Views, Positions, Padded, CutOff, Sampled, Windows, InFours, Edges])
def test_they_are_those_of_all_ranks(make: type[Counting], two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, make, "spmd", 2, max_epochs=2)
    assert_compiled(ours[0])
    assert_equals_one_device(ours, run(make, "auto", data=_as_two_ranks_have_them, max_epochs=2))


class Tokens(Quiet):
    """Sentences of several lengths, padded; a loss of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.wide = nn.Embedding(50, 6), nn.Linear(6, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_token = batch != 0
        hidden = torch.tanh(self.wide(self.embedding(batch))) * is_token[..., None]
        chosen = hidden[is_token]
        loss = chosen.view(len(chosen), 2, 3).square().sum() / batch.shape[1] + hidden.mean() * batch.shape[1]
        self.log("loss", loss)
        return loss + self(chosen).square().sum() / 50


def _sentences() -> InOrder:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6, 14, (12,), generator=generator).tolist()
    batches = [torch.randint(-20, 50, (ROWS, n), generator=generator).clamp(min=0) for n in lengths]
    return InOrder([row for batch in batches for row in batch], ROWS)


def test_lengths_vary_on_two_ranks(two_ranks: RankPool) -> None:
    ours = two_ranks.run(run, Tokens, "spmd", 2, data=_sentences, max_epochs=2)
    assert_compiled(ours[0])
    assert ours[0].captures <= 4
    assert_equals_one_device(ours, run(Tokens, "auto", data=_sentences, max_epochs=2))
