"""Tensors that are kept: banks, queues, averages, teachers, states that go on, tensors exchanged and written into."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import torch
from torch import Tensor, distributions
from torch.nn import functional as F

from tests.untidy.untidy import CLASSES, COLUMNS, ROWS, WIDTH, Untidy, plain


class MemoryBank(Untidy):
    """A bank in a buffer, with a pointer that is a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(40, WIDTH))
        self.pointer = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h, bank = self.hidden(batch[0]), self.get_buffer("bank")
        loss = F.cross_entropy(self.head(h), batch[1]) + 0.1 * (h @ bank.clone().t()).logsumexp(1).mean()
        end = min(self.pointer + ROWS, len(bank))
        bank[self.pointer : end] = F.normalize(h[: end - self.pointer].detach(), dim=1)
        self.pointer = end % len(bank)
        return loss

    def kept(self) -> Any:
        return self.pointer


class MomentumQueue(Untidy):
    """As in MoCo: a queue of keys, whose pointer is a tensor, and a slow copy of the layer that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.body).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(WIDTH, 48), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self, keys: Tensor) -> None:
        for slow, fast in zip(self.slow.parameters(), self.body.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        start = int(self.pointer)
        self.queue[:, start : start + ROWS] = keys.t()  # type: ignore[operator]
        self.pointer[0] = (start + ROWS) % 48  # type: ignore[operator]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        query = F.normalize(self.hidden(x), dim=1)
        with torch.no_grad():
            keys = F.normalize(torch.relu(self.slow(x + 0.01)), dim=1)
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.get_buffer("queue").clone()], 1)
        loss = F.cross_entropy(logits / 0.2, torch.zeros(ROWS, dtype=torch.long))
        self.follow(keys)
        return loss + F.cross_entropy(self.head(query), y)


class BankOfTensors(Untidy):
    """A deque of the last hidden means, stacked in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: deque[Tensor] = deque(maxlen=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        loss = F.cross_entropy(self.head(h), batch[1])
        if self.bank:
            loss = loss + 0.1 * (h.mean(0) - torch.stack(list(self.bank)).mean(0)).square().sum()
        self.bank.append(h.detach().mean(0))
        return loss

    def kept(self) -> Any:
        return plain(self.bank)


class ReplayBuffer(Untidy):
    """Old batches are kept in a list, replaced at random, and trained on again."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.loss(x, y)
        if len(self.buffer) >= 3:
            for old_x, old_y in random.sample(self.buffer, 2):
                loss = loss + 0.3 * self.loss(old_x, old_y)
        if len(self.buffer) < 6:
            self.buffer.append((x[:4].clone(), y[:4].clone()))
        else:
            self.buffer[random.randrange(6)] = x[4:8], y[4:8]
        return loss

    def kept(self) -> Any:
        return plain(self.buffer)


class Average(Untidy):
    """An average of the weights, in a list of tensors, is moved in the step and pulls at them."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [p.detach().clone() for p in self.body.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            for average, parameter in zip(self.average, self.body.parameters(), strict=True):
                average.mul_(0.9).add_(parameter, alpha=0.1)
        return self.loss(x, y) + F.mse_loss(F.linear(x, *self.average), self.body(x))

    def kept(self) -> Any:
        return plain(self.average)


class Teacher(Untidy):
    """A teacher that is no submodule follows the student in the step; its labels count from step 6 on."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [copy.deepcopy(self.body), copy.deepcopy(self.head)]
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.steps += 1
        momentum = min(0.95, 1 - 1 / (self.steps + 1))
        with torch.no_grad():
            for teacher, student in zip(self.teachers, (self.body, self.head), strict=True):
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 1 - momentum)
            target = self.teachers[1](torch.relu(self.teachers[0](x))).softmax(1)
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        return loss + F.kl_div(logits.log_softmax(1), target, reduction="batchmean") if self.steps > 6 else loss

    def kept(self) -> Any:
        return self.steps, [plain(teacher.state_dict()) for teacher in self.teachers]


class CarriedState(Untidy):
    """The state of a recurrent cell goes on from step to step, and is forgotten every eighth."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(WIDTH, WIDTH)
        self.state: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 8 == 0:
            self.state = None
        h = self.cell(self.hidden(batch[0]), self.state)
        self.state = h.detach()
        return F.cross_entropy(self.head(h), batch[1])

    def kept(self) -> Any:
        return plain(self.state)


class KeptWithHistory(Untidy):
    """The last hidden layer is kept with its history, read in the next step for its value alone."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.sums = torch.zeros(()), []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        before = self.last.detach().mean()
        self.last = h
        self.sums = [h.sum(), h.mean().detach(), h.requires_grad]
        return F.cross_entropy(self.head(h), batch[1]) + 0.1 * (h.mean() - before).square()

    def kept(self) -> Any:
        return plain(self.last), plain(self.sums), self.last.grad_fn is not None


class Outputs(Untidy):
    """Losses and logits are collected and put together when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[dict[str, Tensor]] = []
        self.summary: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.outputs.append({"loss": loss.detach(), "hits": (logits.argmax(1) == batch[1]).float().mean()})
        if len(self.outputs) > 4:  # what was collected is looked at
            loss = loss * torch.stack([output["loss"] for output in self.outputs[-4:]]).mean()
        return loss

    def on_train_epoch_end(self) -> None:
        self.summary = {name: torch.stack([o[name] for o in self.outputs]).tolist() for name in ("loss", "hits")}
        self.outputs.clear()

    def kept(self) -> Any:
        return self.summary


class DataAssigned(Untidy):
    """A parameter's data is assigned: weights are clipped, and at one step replaced."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.head.weight.data = self.head.weight.data.clamp(-0.3, 0.3)
        if batch_idx == 11:
            self.body.bias.data = torch.zeros(WIDTH)
        return self.loss(*batch)


class DataWritten(Untidy):
    """Parameters are written through .data, under no_grad and by copy_: norms of rows are held."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.body.weight.data.renorm_(2, 0, 1.0)
        with torch.no_grad():
            self.head.bias.sub_(self.head.bias.mean())
            self.head.weight.copy_(self.head.weight.clamp(-0.4, 0.4))
        return self.loss(*batch)


class DistributionKept(Untidy):
    """A distribution is made of the batch and set as an attribute; the next step asks it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: distributions.Normal | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        loss = F.cross_entropy(self.head(h), batch[1])
        if self.seen is not None:
            loss = loss - 0.01 * self.seen.log_prob(h).mean()
        self.seen = distributions.Normal(h.detach().mean(0), h.detach().std(0) + 0.1)
        return loss

    def kept(self) -> Any:
        assert self.seen is not None
        return plain([self.seen.mean, self.seen.stddev])


class KindsKept(Untidy):
    """A dtype, a size and a device are attributes that the step sets and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.size = torch.float32, torch.Size([1])
        self.place = torch.device("cpu")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.kind = torch.float64 if batch_idx % 5 == 4 else torch.float32
        h = self.hidden(x).to(self.place, self.kind)
        self.size = h[:, : batch_idx % 4 + 1].shape
        return F.cross_entropy(self.head(torch.tanh(h).float()), y) + 0.01 * torch.ones(self.size).sum().to(h.device)

    def kept(self) -> Any:
        return str(self.kind), list(self.size)


class TaggedTensors(Untidy):
    """Tensors get attributes: the batch a tag, a parameter a count."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.uses = 0  # type: ignore[assignment]

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        h.scale = x.scale  # type: ignore[attr-defined]
        return h

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x.scale = 1 / (1 + batch_idx)
        self.head.weight.uses += 1  # type: ignore[operator]
        h: Any = self.hidden(x)
        return F.cross_entropy(self.head(h) * (1 + h.scale), y) / self.head.weight.uses**0.25  # type: ignore[operator]

    def kept(self) -> Any:
        return self.head.weight.uses


class LateBuffer(Untidy):
    """A buffer is registered by the first step, a second one when the first has seen enough."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        if "center" not in self._buffers:
            self.register_buffer("center", h.detach().mean(0))
        center: Any = self.center
        center += 0.1 * (h.detach().mean(0) - center)
        if batch_idx == 9:
            self.register_buffer("spread", h.detach().std(0))
        spread = self._buffers.get("spread")
        h = (h - center) / (1 + spread if spread is not None else 1)
        return F.cross_entropy(self.head(h), batch[1])


class PingPong(Untidy):
    """Two tensors change places in each step: one is read, one is written."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.written = torch.zeros(WIDTH), torch.ones(WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read, self.written = self.written, self.read
        h = self.hidden(batch[0])
        self.written.copy_(h.detach().mean(0)).mul_(0.5)
        return F.cross_entropy(self.head(h + self.read), batch[1])

    def kept(self) -> Any:
        return plain([self.read, self.written])


class Prototypes(Untidy):
    """A mean of each class, in a dictionary, is moved by the rows of the class in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes: dict[int, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.hidden(x)
        loss = F.cross_entropy(self.head(h), y)
        for label in y.unique().tolist():
            mean = h[y == label].mean(0)
            if label in self.prototypes:
                loss = loss + 0.05 * (mean - self.prototypes[label]).square().sum()
            self.prototypes[label] = 0.8 * self.prototypes.get(label, mean.detach()) + 0.2 * mean.detach()
        return loss

    def kept(self) -> Any:
        return plain(dict(sorted(self.prototypes.items())))


class Snapshots(Untidy):
    """The state is copied when the loss is best, and loaded again where it got much worse."""

    def __init__(self) -> None:
        super().__init__()
        self.best, self.snapshot, self.loaded = float("inf"), copy.deepcopy(self.state_dict()), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        if loss < self.best:
            self.best, self.snapshot = loss.item(), copy.deepcopy(self.state_dict())
        elif loss > 1.3 * self.best:
            self.load_state_dict(self.snapshot)
            self.loaded += 1
            return self.loss(*batch)
        return loss

    def kept(self) -> Any:
        return self.best, self.loaded, plain(self.snapshot)


class PowerIteration(Untidy):
    """A spectral norm by hand: vectors are kept and iterated, a plain attribute and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.u = F.normalize(torch.ones(WIDTH), dim=0)
        self.register_buffer("v", F.normalize(torch.ones(COLUMNS), dim=0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.body.weight
        with torch.no_grad():
            for _ in range(2):
                self.v = F.normalize(weight.t() @ self.u, dim=0)
                self.u = F.normalize(weight @ self.v, dim=0)
        sigma = self.u @ weight @ self.v
        return F.cross_entropy(self.head(torch.relu(F.linear(batch[0], weight / sigma, self.body.bias))), batch[1])

    def kept(self) -> Any:
        return self.u.tolist()


class GrowingTensor(Untidy):
    """A tensor of all class counts so far grows by a row in each step, and is cut again."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.zeros(0, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.counts = torch.cat([self.counts, F.one_hot(y, CLASSES).sum(0, keepdim=True).float()])[-10:]
        return F.cross_entropy(self(x), y, weight=1 / (1 + self.counts.mean(0)))

    def kept(self) -> Any:
        return self.counts.tolist()


class GivenOut(Untidy):
    """Results come by ``out=`` into tensors that are empty before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        numbers = torch.arange(x.shape[0], out=y.new())
        total = torch.empty(0)
        given = torch.sum(x.detach(), 1, out=total)
        assert given is total
        assert total.shape == (x.shape[0],)
        weights = torch.softmax(total + numbers, 0)
        return (F.cross_entropy(self(x), y, reduction="none") * weights).sum()


CASES = (
    GivenOut,
    MemoryBank,
    MomentumQueue,
    BankOfTensors,
    ReplayBuffer,
    Average,
    Teacher,
    CarriedState,
    KeptWithHistory,
    Outputs,
    DataAssigned,
    DataWritten,
    DistributionKept,
    KindsKept,
    TaggedTensors,
    LateBuffer,
    PingPong,
    Prototypes,
    Snapshots,
    PowerIteration,
    GrowingTensor,
)
