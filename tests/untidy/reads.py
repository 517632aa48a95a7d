"""Reads and branches: Python looks at values of tensors and goes on as they say."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.untidy.untidy import CLASSES, COLUMNS, WIDTH, Untidy


class WhileLarge(Untidy):
    """A loop goes on until a norm is small."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0]) * 2
        while h.norm() > 12:
            h = h * 0.9
            self.turns += 1
        return F.cross_entropy(self.head(h), batch[1])

    def kept(self) -> Any:
        return self.turns


class ForAsMany(Untidy):
    """The number of turns of a loop is a tensor's value."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.hidden(x)
        for i in range(int((x[:, 0].abs() * 2).max()) + 1):
            h = h + 0.1 * torch.tanh(h) * i
        return F.cross_entropy(self.head(h), y)


class EarlyExit(Untidy):
    """Layers are gone through until the net is sure enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.depths: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        for depth, layer in enumerate(self.layers):  # noqa: B007
            if self.head(h).softmax(1).amax(1).mean() > 0.42 + 0.005 * batch_idx:
                break
            h = h + torch.relu(layer(h))
        self.depths.append(depth)
        return F.cross_entropy(self.head(h), batch[1])

    def kept(self) -> Any:
        return self.depths


class Converges(Untidy):
    """A fixed point is iterated until torch says that it is close."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.turns: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        z = torch.zeros_like(h)
        for turn in range(8):  # noqa: B007
            after = torch.tanh(0.5 * self.inner(z) + h)
            if torch.allclose(after, z, atol=0.05):
                break
            z = after
        self.turns.append(turn)
        return F.cross_entropy(self.head(z), batch[1])

    def kept(self) -> Any:
        return self.turns


class RaisedAndCaught(Untidy):
    """An exception is raised on a value, with a text of it, and caught."""

    def __init__(self) -> None:
        super().__init__()
        self.caught: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        try:
            if loss > 1.2:
                raise ValueError(f"too large: {loss:.3f}")
        except ValueError as error:
            self.caught.append(str(error))
            loss = loss.clamp(max=1.2) + 0.01 * self.body.weight.square().sum()
        return loss

    def kept(self) -> Any:
        return self.caught


class MissingKeys(Untidy):
    """A key that is not there is caught; what happens in else and finally counts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.tries = {0: 0.5}, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        key = int(y[:3].sum())
        try:
            scale = self.table[key]
        except KeyError:
            scale = self.table[key] = 1.0 + 0.1 * len(self.table)
        else:
            self.table[key] = scale * 0.9
        finally:
            self.tries += 1
        return self.loss(x, y) * scale / self.tries**0.1

    def kept(self) -> Any:
        return self.table, self.tries


class BestSoFar(Untidy):
    """Patience: without a better loss for three steps the weight of the loss falls."""

    def __init__(self) -> None:
        super().__init__()
        self.best, self.bad, self.weight = math.inf, 0, 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        if (value := loss.item()) < self.best:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
            if self.bad >= 3:
                self.weight, self.bad = self.weight * 0.7, 0
        return loss * self.weight

    def kept(self) -> Any:
        return self.best, self.bad, self.weight


class IsTrue(Untidy):
    """A truth is compared by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        large = (loss > 1.2).item()
        self.answers.append(large)
        if large is True:
            return loss * 0.5
        return loss + 0.01 * self.head.weight.square().sum() if bool(loss < 1) is False else loss

    def kept(self) -> Any:
        return self.answers


class KindsOfNumbers(Untidy):
    """Numbers of tensors are asked for their class, and used as their class allows."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss, label = self.loss(x, y), y[0].item()
        weight = 1.0
        if type(loss.item()) is float and isinstance(label, int) and not isinstance(label, bool):
            weight = round(loss.item(), 2) + (label << 1) % 3 + (loss.item().is_integer() or 0.5)
        self.kinds.append(f"{type(label).__name__} {type(float(loss)).__name__} {label.bit_length()}")
        return loss * weight

    def kept(self) -> Any:
        return self.kinds


class NumbersOfMath(Untidy):
    """What Python computes of a value (math, divmod, round, comparisons in a chain) is the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        value = loss.item()
        whole, part = divmod(value * 3, 1)
        weight = math.sqrt(value) + math.floor(value * 4) / 10 + whole * round(part, 1)
        if 0.9 < value <= 1.3 and not math.isclose(value, 1.0, rel_tol=0.01):
            weight += math.exp(-value)
        self.parts.append(weight)
        return loss * weight

    def kept(self) -> Any:
        return self.parts


class Masked(Untidy):
    """Only rows that a mask leaves are trained on; there may be none."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        keep = (x[:, 0] > 0.4) & (y != 2)
        return self.loss(x[keep], y[keep]) if keep.any() else self(x).sum() * 0


class MaskedWrite(Untidy):
    """Rows below the mean are written over, and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0]).clone()
        low = h.norm(dim=1) < h.norm(dim=1).mean()
        h[low] = h[~low].mean(0)
        self.counts.append(int(low.sum()))
        return F.cross_entropy(self.head(h), batch[1])

    def kept(self) -> Any:
        return self.counts


class Experts(Untidy):
    """A mixture of experts in its plain form: a loop over the experts, and the rows of each by torch.where."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        shares, which = self.router(h).softmax(1).topk(2, dim=1)
        mixed = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            rows, places = torch.where(which == e)
            if rows.numel() == 0:
                continue
            mixed.index_add_(0, rows, expert(h[rows]) * shares[rows, places, None])
        return F.cross_entropy(self.head(torch.relu(mixed)), batch[1])


class UniqueLabels(Untidy):
    """A loop over the classes that are in the batch, with the rows of each."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.hidden(x)
        labels, counts = y.unique(return_counts=True)
        loss = F.cross_entropy(self.head(h), y)
        for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
            if count > 1:
                rows = h[y == label]
                loss = loss + 0.02 * (rows - rows.mean(0)).square().sum() / (count - 1)
        return loss


class Matched(Untidy):
    """A match statement on a label, with guards on the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        match batch[1][:2].tolist():
            case [0, _]:
                way, loss = "zero first", loss * 0.5
            case [first, second] if first == second:
                way, loss = "alike", loss * 2
            case [int(), 3] if loss > 1:
                way, loss = "three second", loss.sqrt()
            case _:
                way = "other"
        self.taken.append(way)
        return loss

    def kept(self) -> Any:
        return self.taken


class SkipsSteps(Untidy):
    """The step returns None where the loss is large, and counts that."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(*batch)
        if not torch.isfinite(loss) or loss > 1.33:
            self.skipped += 1
            return None
        return loss

    def kept(self) -> Any:
        return self.skipped


class Curriculum(Untidy):
    """The batch is cut to a length that grows with the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if batch_idx % 4 == 3 and self.length < COLUMNS:
            self.length += 1
        x = x[:, : self.length]
        return F.cross_entropy(self.head(torch.relu(F.linear(x, self.body.weight[:, : self.length]))), y)

    def kept(self) -> Any:
        return self.length


class CurriculumByValue(Untidy):
    """Only as many rows, the easiest first, as the last loss allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.counts = 6, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        loss = losses.sort().values[: self.count].mean()
        self.count = min(16, self.count + 1) if loss < 0.9 else max(4, self.count - 1)
        self.counts.append(self.count)
        return loss

    def kept(self) -> Any:
        return self.counts


class IndexesLists(Untidy):
    """A tensor is the index into a Python list, and the bounds of a range."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.names = [1.0, 0.8, 0.6, 0.4], []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.names.append("abcd"[y[0]])
        self.scales[y[1]] *= 0.95
        return self.loss(x, y) * self.scales[y[2]] + 0.01 * sum(range(y[3]))

    def kept(self) -> Any:
        return self.names, self.scales


class ListOfValues(Untidy):
    """Numbers of a tensor as a list: filtered, summed, tested by any and all."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        values = losses.tolist()
        large = [value for value in values if value > 1.5]
        weight = 1 + sum(large) / (1 + len(large)) if any(value > 2 for value in values) else 1.0
        return losses.mean() * weight + (0.1 * losses.max() if all(value < 3 for value in values) else 0)


class Asserts(Untidy):
    """The step asserts what it believes of values, as debugging leaves it behind."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        assert y.max() < CLASSES, f"bad labels: {y}"
        assert (y >= 0).all()
        h = self.hidden(x)
        assert not torch.isnan(h).any()
        loss = F.cross_entropy(self.head(h), y)
        assert loss.item() == loss.detach().item()
        assert torch.equal(h, h.clone()), "a tensor is itself"
        return loss


def halved(x: Tensor, depth: int = 0) -> tuple[Tensor, int]:
    """Halve the columns until their mean is large; gives the depth, too."""
    if x.shape[1] == 1 or x.mean() > 0.85:
        return x.mean(1) / (1 + depth), depth
    middle = x.shape[1] // 2
    return halved(x[:, :middle] + x[:, middle:].flip(1) * 0.5, depth + 1)


class Recursion(Untidy):
    """A function calls itself as deep as the values say."""

    def __init__(self) -> None:
        super().__init__()
        self.depths: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        small, depth = halved(h)
        self.depths.append(depth)
        return F.cross_entropy(self.head(h), batch[1]) + 0.1 * small.square().mean()

    def kept(self) -> Any:
        return self.depths


class ReadsWhatItWrote(Untidy):
    """A buffer is written, read, written again and read again in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))
        self.levels: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        level: Any = self.level
        level.mul_(0.8).add_(loss.detach(), alpha=0.2)
        if level.item() > 0.8:
            level.fill_(0.5)
        self.levels.append(level.item())
        return loss + level * 0.1 * self.head.weight.norm()

    def kept(self) -> Any:
        return self.levels


class SeveralReads(Untidy):
    """Five branches on five values in one step: more ways than any run has steps."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h, way = x, ""
        for column in range(5):
            up = bool(x[:, column].mean() > 0)
            way += "ud"[up]
            h = h.roll(1, 1) if up else h * 1.05
        self.ways.append(way)
        return self.loss(h, y)

    def kept(self) -> Any:
        return self.ways


CASES = (
    WhileLarge,
    ForAsMany,
    EarlyExit,
    Converges,
    RaisedAndCaught,
    MissingKeys,
    BestSoFar,
    IsTrue,
    KindsOfNumbers,
    NumbersOfMath,
    Masked,
    MaskedWrite,
    Experts,
    UniqueLabels,
    Matched,
    SkipsSteps,
    Curriculum,
    CurriculumByValue,
    IndexesLists,
    ListOfValues,
    Asserts,
    Recursion,
    ReadsWhatItWrote,
    SeveralReads,
)
