"""Containers: what lists, deques, heaps, dictionaries, sets and iterators remember from step to step."""

from __future__ import annotations

import array
import bisect
import collections
import heapq
import itertools
import queue
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.untidy.untidy import CLASSES, ROWS, Untidy, plain


class RecentLosses(Untidy):
    """The mean of the last losses, in a deque, sets the weight of this one."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: collections.deque[float] = collections.deque(maxlen=5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.recent.append(loss.item())
        return loss * (sum(self.recent) / len(self.recent))

    def kept(self) -> Any:
        return list(self.recent)


class HardestRows(Untidy):
    """A heap of the hardest rows so far, which are trained on once more."""

    def __init__(self) -> None:
        super().__init__()
        self.heap: list[tuple[float, int, Tensor, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        for i, value in enumerate(losses.tolist()):
            heapq.heappush(self.heap, (value, batch_idx * ROWS + i, x[i], y[i]))
            if len(self.heap) > 8:
                heapq.heappop(self.heap)
        hard = sorted(self.heap, key=lambda entry: entry[1])
        again = self.loss(torch.stack([entry[2] for entry in hard]), torch.stack([entry[3] for entry in hard]))
        return losses.mean() + 0.2 * again

    def kept(self) -> Any:
        return sorted((value, place) for value, place, *_ in self.heap)


class Nested(Untidy):
    """Dictionaries of lists of dictionaries are filled, read and changed below."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"layers": [{"calls": 0, "scale": 1.0}, {"calls": 0, "scale": 0.5}], "log": {}}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        layer = self.state["layers"][batch_idx % 2]
        layer["calls"] += 1
        layer["scale"] *= 0.97
        self.state["log"].setdefault(batch_idx // 8, []).append(layer["calls"])
        return self.loss(*batch) * layer["scale"]

    def kept(self) -> Any:
        return self.state


class ClassCounts(Untidy):
    """A Counter of the classes seen weighs the classes of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[int] = collections.Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.counts.update(y.tolist())
        total = sum(self.counts.values())
        weight = torch.tensor([total / (CLASSES * max(self.counts[c], 1)) for c in range(CLASSES)])
        return F.cross_entropy(self(x), y, weight=weight)

    def kept(self) -> Any:
        return dict(self.counts), self.counts.most_common(2)


class DefaultDict(Untidy):
    """A defaultdict grows a key with each new remainder."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[int, list[float]] = collections.defaultdict(list)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sums = self.sums[batch_idx % 5]
        sums.append(0.1 * (len(sums) + 1))
        return self.loss(*batch) * (1 + sum(sums))

    def kept(self) -> Any:
        return dict(self.sums)


class LastUsed(Untidy):
    """An OrderedDict keeps the four keys used last, made of the batch's values."""

    def __init__(self) -> None:
        super().__init__()
        self.used: collections.OrderedDict[int, int] = collections.OrderedDict()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        key = int(x[:, 0].argmax())
        self.used[key] = self.used.get(key, 0) + 1
        self.used.move_to_end(key)
        if len(self.used) > 4:
            self.used.popitem(last=False)
        return self.loss(x, y) / self.used[key]

    def kept(self) -> Any:
        return list(self.used.items())


class SeenPairs(Untidy):
    """A set of pairs of classes; the loss of a step that shows a new pair counts twice."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, int]] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        pair = (int(batch[1][0]), int(batch[1][1]))
        if pair not in self.seen:
            self.seen.add(pair)
            loss = loss * 2
        return loss

    def kept(self) -> Any:
        return sorted(self.seen)


def weights(start: float) -> Iterator[float]:
    """A weight for each step, for ever; it goes back to the start when it is small."""
    weight = start
    while True:
        yield weight
        weight = weight * 0.9 if weight > 0.4 else start


class Generators(Untidy):
    """A generator function that is in the middle of its loop gives the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.taken = weights(1.0), []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = next(self.weights)
        self.taken.append(weight)
        return self.loss(*batch) * weight

    def kept(self) -> Any:
        return self.taken, next(self.weights)


class Iterators(Untidy):
    """A cycle, a count and a zip of both are advanced by the step."""

    def __init__(self) -> None:
        super().__init__()
        self.cycle, self.count = itertools.cycle((1.0, 0.5, 0.25)), itertools.count(2)
        self.pairs = zip(self.cycle, self.count, strict=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor, divisor = next(self.pairs)
        if batch_idx % 6 == 0:
            factor += next(self.cycle)
        return self.loss(*batch) * factor / divisor**0.5

    def kept(self) -> Any:
        return next(self.cycle), next(self.count)


class SortedRows(Untidy):
    """The rows with the largest losses, sorted in Python by value, are the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        hard = sorted(range(len(losses)), key=lambda i: -losses[i].item())[:6]
        return losses[hard].mean()


class SortedTensors(Untidy):
    """Tensors themselves are sorted, and the largest found, by comparing them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        parts = [self.loss(x[i : i + 4], y[i : i + 4]) for i in range(0, ROWS, 4)]
        low, *_, high = sorted(parts)
        return high + 0.5 * low + 0.1 * max(parts, key=lambda part: (part - 1).abs())


class KeyedByValue(Untidy):
    """A dictionary's key is made of a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        key = f"class{int(x.sum(1).argmax()) % 3}"
        self.seen[key] = self.seen.get(key, 0) + 1
        return self.loss(x, y) / self.seen[key]

    def kept(self) -> Any:
        return self.seen


class KeyedByParameter(Untidy):
    """A dictionary has a moving mean for each parameter, under the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.means: dict[Tensor, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pulled: Any = 0.0
        for parameter in self.parameters():
            mean = self.means.setdefault(parameter, parameter.detach().clone())
            mean.lerp_(parameter.detach(), 0.1)
            pulled = pulled + (parameter - mean).square().sum()
        return self.loss(*batch) + pulled

    def kept(self) -> Any:
        return [self.means[parameter].tolist() for parameter in self.parameters()]


class Pointer(Untidy):
    """A list is a ring: a pointer says which loss is replaced next."""

    def __init__(self) -> None:
        super().__init__()
        self.ring, self.next = [1.0] * 6, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        weight = min(self.ring)
        self.ring[self.next] = loss.item()
        self.next = (self.next + 1) % len(self.ring)
        return loss * weight

    def kept(self) -> Any:
        return self.ring, self.next


class Queues(Untidy):
    """A queue of the last hidden means; an array and a bytearray count."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: queue.Queue[Tensor] = queue.Queue(maxsize=3)
        self.numbers, self.bytes = array.array("d"), bytearray(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        loss = F.cross_entropy(self.head(h), batch[1])
        if self.queue.full():
            loss = loss + 0.1 * (h.mean(0) - self.queue.get()).square().sum()
        self.queue.put(h.detach().mean(0))
        self.numbers.append(1 / (1 + batch_idx))
        self.bytes[batch_idx % 4] += 1
        return loss * (1 + self.numbers[-1]) + 0.01 * self.bytes[0]

    def kept(self) -> Any:
        return list(self.numbers), list(self.bytes), [self.queue.get().tolist() for _ in range(self.queue.qsize())]


class SameList(Untidy):
    """Two names are one list: what is appended to one is seen by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []
        self.alias = {"log": self.log}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log.append(batch_idx)
        if batch_idx == 12:
            self.log = [*self.log]  # from here on they are two
        return self.loss(*batch) * (1 + 0.05 * len(self.alias["log"]))

    def kept(self) -> Any:
        return self.log, self.alias


class RunningMedian(Untidy):
    """Losses are inserted in order; those above the median count more."""

    def __init__(self) -> None:
        super().__init__()
        self.ordered: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        place = bisect.bisect(self.ordered, loss.item())
        self.ordered.insert(place, loss.item())
        return loss * 1.5 if place > len(self.ordered) // 2 else loss

    def kept(self) -> Any:
        return self.ordered


class AttributeDict(dict[str, Any]):
    """A dictionary whose items are attributes, as configurations have."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class AttributeDicts(Untidy):
    """A dictionary's subclass is changed by attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.options = AttributeDict(scale=1.0, best=None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch) * self.options.scale
        if self.options.best is None or loss < self.options.best:
            self.options.best = float(loss)
            self.options.scale *= 1.02
        return loss

    def kept(self) -> Any:
        return dict(self.options)


class Pair(tuple[Any, ...]):
    """A tuple that refuses to say how long it is, as some libraries' results do."""

    __slots__ = ()

    def __len__(self) -> int:
        raise TypeError("a pair has no length")


class NoLength(Untidy):
    """A tuple's subclass whose length raises is made, kept and looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair((0, 1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.pair = Pair((self.pair[0] + 1, self.pair[1] * 0.98))
        return self.loss(*batch) * self.pair[1]

    def kept(self) -> Any:
        return [self.pair[0], self.pair[1]]


class TensorsInContainers(Untidy):
    """Tensors lie in lists in dictionaries, are replaced, removed and read two steps later."""

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, list[Tensor]] = {"means": [], "norms": []}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        self.store["means"].append(h.detach().mean(0))
        self.store["norms"].insert(0, h.detach().norm())
        if len(self.store["means"]) > 3:
            self.store["means"].pop(0)
            del self.store["norms"][-1]
        old = self.store["means"][0]
        return F.cross_entropy(self.head(h), batch[1]) + 0.05 * (h - old).square().mean() / self.store["norms"][-1]

    def kept(self) -> Any:
        return plain(self.store)


CASES = (
    RecentLosses,
    HardestRows,
    Nested,
    ClassCounts,
    DefaultDict,
    LastUsed,
    SeenPairs,
    Generators,
    Iterators,
    SortedRows,
    SortedTensors,
    KeyedByValue,
    KeyedByParameter,
    Pointer,
    Queues,
    SameList,
    RunningMedian,
    AttributeDicts,
    NoLength,
    TensorsInContainers,
)
