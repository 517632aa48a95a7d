"""Numbers drawn: by ``random``, by NumPy's old and new generators, by torch, and by generators of one's own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributions
from torch.nn import functional as F

from tests.untidy.untidy import CLASSES, COLUMNS, ROWS, WIDTH, Untidy


class RandomFlips(Untidy):
    """``random`` says whether columns are turned round, and how many are cut."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if random.random() < 0.5:
            x = x.flip(-1)
        keep = random.randint(4, COLUMNS)
        return self.loss(x * (torch.arange(COLUMNS) < keep), y)


class RandomLists(Untidy):
    """A kept list is shuffled, sampled and chosen from."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(COLUMNS))
        self.names = ["body", "head"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        random.shuffle(self.order)
        rows = random.sample(range(ROWS), 12)
        layer = getattr(self, random.choice(self.names))
        return self.loss(x[:, self.order][rows], y[rows]) + 0.01 * layer.weight.square().sum()

    def kept(self) -> Any:
        return self.order


class MixUp(Untidy):
    """Mixup with NumPy's old beta and its permutation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        part, order = float(np.random.beta(0.4, 0.4)), torch.as_tensor(np.random.permutation(len(x)))
        logits = self(part * x + (1 - part) * x[order])
        return part * F.cross_entropy(logits, y) + (1 - part) * F.cross_entropy(logits, y[order])


class CutMix(Untidy):
    """CutMix: a box with drawn corners is pasted from other rows; what it covers weighs the labels."""

    draws = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        picture, order = x.view(-1, 2, 4).clone(), torch.randperm(len(x))
        top, left = np.random.randint(0, 2), np.random.randint(0, 4)
        bottom, right = min(top + np.random.randint(1, 3), 2), min(left + np.random.randint(1, 4), 4)
        picture[:, top:bottom, left:right] = picture[order, top:bottom, left:right]
        part = 1 - (bottom - top) * (right - left) / COLUMNS
        logits = self(picture.flatten(1))
        return part * F.cross_entropy(logits, y) + (1 - part) * F.cross_entropy(logits, y[order])


class NumpyGenerator(Untidy):
    """A Generator of NumPy of one's own draws noise, choices and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(7)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.from_numpy(self.rng.normal(size=x.shape).astype(np.float32))
        columns = self.rng.choice(COLUMNS, size=2, replace=False)
        x = x + 0.1 * noise
        x[:, columns] = 0
        return self.loss(x, y) * self.rng.uniform(0.5, 1.5)

    def kept(self) -> Any:
        return self.rng.bit_generator.state["state"]


class NewGenerator(Untidy):
    """Each step makes a generator of NumPy from the number of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        rng = np.random.default_rng(batch_idx)
        order = np.arange(COLUMNS)
        rng.shuffle(order)
        return self.loss(x[:, order] * float(rng.random()), y)


class NumpyShuffle(Untidy):
    """A kept array is shuffled in place by NumPy's old functions, and indexes the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.arange(COLUMNS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        np.random.shuffle(self.order)
        return self.loss(x[:, torch.from_numpy(self.order)] + np.random.randn(), y)

    def kept(self) -> Any:
        return self.order.tolist()


class TorchCoin(Untidy):
    """A number of torch's is drawn and decided by."""

    draws = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if torch.rand(1) < 0.5:
            x = x.roll(1, dims=1)
        return self.loss(x, y) * (torch.randint(1, 4, ()).item() / 2)


class TorchNoise(Untidy):
    """Noise of torch's on the batch and on a layer, weaker with each step."""

    draws = True

    def __init__(self) -> None:
        super().__init__()
        self.sigma = 0.3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.sigma *= 0.95
        h = self.hidden(x + self.sigma * torch.randn_like(x))
        h = h * torch.bernoulli(torch.full_like(h, 0.9)) + torch.empty_like(h).uniform_(-self.sigma, self.sigma)
        return F.cross_entropy(self.head(h), y)

    def kept(self) -> Any:
        return self.sigma


class OwnTorchGenerator(Untidy):
    """A torch.Generator of one's own draws noise and a permutation."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.randn(COLUMNS, generator=self.generator)
        order = torch.randperm(ROWS, generator=self.generator)[:10]
        return self.loss((x + 0.1 * noise)[order], y[order])

    def kept(self) -> Any:
        return self.generator.get_state().tolist()


class OwnRandom(Untidy):
    """A random.Random of one's own draws and is seeded again in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 12:
            self.random.seed("again")
        return self.loss(*batch) * self.random.uniform(0.5, 1) + 0.01 * self.random.gauss(0, 1)

    def kept(self) -> Any:
        return self.random.getstate()


class SeededStep(Untidy):
    """The step seeds torch for a part of it, and leaves the state as it was."""

    draws = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(batch_idx)
            mask = (torch.rand(COLUMNS) > 0.2).float()
        return self.loss(x * mask, y) * torch.rand(()).add(0.5)


class ReplayedState(Untidy):
    """The state of torch's generator is read and set again: two passes with one mask."""

    draws = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        state = torch.get_rng_state()
        first = F.dropout(self.hidden(x), 0.2)
        torch.set_rng_state(state)
        second = F.dropout(self.hidden(x.flip(1)), 0.2)
        return F.cross_entropy(self.head(first), y) + 0.1 * (first - second).square().mean()


class StatesOfRandom(Untidy):
    """States of random and NumPy are read and set: every third step draws what the one before drew."""

    def __init__(self) -> None:
        super().__init__()
        self.states: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 3 == 2:
            random.setstate(self.states[0])
            np.random.set_state(self.states[1])
        self.states = random.getstate(), np.random.get_state()
        return self.loss(*batch) * random.uniform(0.5, 1) * np.random.uniform(0.5, 1)


class Prioritized(Untidy):
    """Rows are chosen by NumPy with probabilities that are the losses."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        share = losses.detach().double().numpy()
        rows = np.random.choice(ROWS, size=8, p=share / share.sum())
        return losses[torch.from_numpy(rows)].mean()


class StochasticDepth(Untidy):
    """A layer is left out when a drawn number says so."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.used: list[int] = []

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        for depth, layer in enumerate(self.middle):
            if random.random() < 0.7:
                self.used.append(depth)
                h = h + torch.tanh(layer(h))
        return h

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def kept(self) -> Any:
        return self.used


class MaskedColumns(Untidy):
    """As masked words are: some columns are masked, some of these replaced by noise, the rest stays."""

    draws = True

    def __init__(self) -> None:
        super().__init__()
        self.back = torch.nn.Linear(WIDTH, COLUMNS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        chosen = torch.rand(x.shape) < 0.3
        replaced = chosen & (torch.rand(x.shape) < 0.8)
        noisy = chosen & ~replaced & (torch.rand(x.shape) < 0.5)
        masked = x.masked_fill(replaced, 0.0)
        masked[noisy] = torch.randn(int(noisy.sum()))
        h = self.hidden(masked)
        return F.cross_entropy(self.head(h), y) + F.mse_loss(self.back(h)[chosen], x[chosen])


class Policy(Untidy):
    """REINFORCE: an action is drawn, its log-probability weighed with its reward and a moving baseline."""

    draws = True

    def __init__(self) -> None:
        super().__init__()
        self.baseline = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        policy = distributions.Categorical(logits=self(x))
        action = policy.sample()
        reward = (action == y).float()
        self.baseline = 0.9 * self.baseline + 0.1 * reward.mean().item()
        return -(policy.log_prob(action) * (reward - self.baseline)).mean() - 0.01 * policy.entropy().mean()

    def kept(self) -> Any:
        return self.baseline


class Reparametrized(Untidy):
    """A variational layer: distributions check what they are given, and draw by reparametrization."""

    draws = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.hidden(x)
        latent = distributions.Normal(h, F.softplus(self.scale(h)) + 1e-3, validate_args=True)
        prior = distributions.Normal(torch.zeros(WIDTH), torch.ones(WIDTH))
        rate = min(1.0, batch_idx / 10)
        divergence = distributions.kl_divergence(latent, prior).mean()
        return F.cross_entropy(self.head(latent.rsample()), y) + 0.1 * rate * divergence


class DrawnMixture(Untidy):
    """A Beta and a Dirichlet of torch's, read and not read."""

    draws = True

    def __init__(self) -> None:
        super().__init__()
        self.beta = distributions.Beta(0.5, 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        part = self.beta.sample().item()
        shares = distributions.Dirichlet(torch.ones(3)).sample()
        h = self.hidden(part * x + (1 - part) * x.flip(1))
        views = shares[0] * h + shares[1] * torch.tanh(h) + shares[2] * h.square()
        return F.cross_entropy(self.head(views), y)


class Gumbel(Untidy):
    """A hard Gumbel softmax picks one of the classes, its temperature falls; multinomial picks rows."""

    draws = True

    def __init__(self) -> None:
        super().__init__()
        self.tau = 2.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.tau = max(0.5, self.tau * 0.95)
        logits = self(x)
        picked = F.gumbel_softmax(logits, tau=self.tau, hard=True)
        rows = torch.multinomial(torch.ones(ROWS), 8)
        reached = (picked * F.one_hot(y, CLASSES)).sum(1)
        return F.cross_entropy(logits[rows], y[rows]) - 0.1 * reached.mean()

    def kept(self) -> Any:
        return self.tau


CASES = (
    RandomFlips,
    RandomLists,
    MixUp,
    CutMix,
    NumpyGenerator,
    NewGenerator,
    NumpyShuffle,
    TorchCoin,
    TorchNoise,
    OwnTorchGenerator,
    OwnRandom,
    SeededStep,
    ReplayedState,
    StatesOfRandom,
    Prioritized,
    StochasticDepth,
    MaskedColumns,
    Policy,
    Reparametrized,
    DrawnMixture,
    Gumbel,
)
