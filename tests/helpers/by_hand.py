"""LightningModules that optimize by hand, in the ways in which users do it; each is one row of the tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

import lightning_spmd
from tests.helpers.training import QUIET

ROWS = 8


TWO_LAYERS = {
    f"{net}.{layer}": style for net in ("generator", "critic") for layer, style in ((0, "colwise"), (2, "rowwise"))
}
ONE_NET = {"net.0": "colwise", "net.2": "rowwise"}


class ByHand(L.LightningModule):
    """What all have in common: two networks, how ranks may share them, and what a run was like."""

    layers: dict[str, str] = TWO_LAYERS

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.make()
        self.seen: list[tuple[float, ...]] = []

    def make(self) -> None:
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def on_train_batch_end(self, *_: Any) -> None:
        logged = {k: float(v) for k, v in sorted(self.trainer.callback_metrics.items())}
        rates = [group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        self.seen.append((*logged.values(), self.global_step, *rates))

    def configure_optimizers(self) -> Any:
        make = torch.optim.Adam
        return [
            make(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
            make(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        ]

    def fool(self, x: Tensor, z: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.critic(self.generator(z)), x.new_ones(x.shape[0], 1))

    def tell_apart(self, x: Tensor, z: Tensor) -> Tensor:
        real = F.binary_cross_entropy_with_logits(self.critic(x), x.new_ones(x.shape[0], 1))
        fake = self.critic(self.generator(z).detach())
        return (real + F.binary_cross_entropy_with_logits(fake, x.new_zeros(x.shape[0], 1))) / 2


class Gan(ByHand):
    """Lightning's own example: the critic sees what the generator makes after its step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, z = batch
        generate, judge = self.optimizers()
        self.toggle_optimizer(generate)
        loss = self.fool(x, z)
        self.log("g_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        generate.step()
        generate.zero_grad()
        self.untoggle_optimizer(generate)
        self.toggle_optimizer(judge)
        loss = self.tell_apart(x, z)
        self.log("d_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)


class ZeroedFirst(ByHand):
    """Gradients are zeroed before they are made, and stay until the next batch; nothing is toggled."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, z = batch
        generate, judge = self.optimizers()
        judge.zero_grad()
        told = self.tell_apart(x, z)
        self.manual_backward(told)
        judge.step()
        generate.zero_grad()
        fooled = self.fool(x, z)
        self.manual_backward(fooled)  # leaves gradients in the critic
        generate.step()
        self.log_dict({"d_loss": told, "g_loss": fooled, "at": self.global_step * 1.0})
        return {"loss": fooled, "told": told}


class ZeroedInPlace(ZeroedFirst):
    """``zero_grad(set_to_none=False)``: the very tensors stay."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, z = batch
        generate, judge = self.optimizers()
        told = self.tell_apart(x, z)
        judge.zero_grad(set_to_none=False)
        told.backward()
        judge.step()
        fooled = self.fool(x, z)
        generate.zero_grad(set_to_none=False)
        fooled.backward()
        generate.step()
        return fooled.detach()


class Normalized(Gan):
    """Batch norm in both, spectral norm in the critic."""

    def make(self) -> None:
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
        norm = nn.utils.parametrizations.spectral_norm
        self.critic = nn.Sequential(norm(nn.Linear(6, 16)), nn.BatchNorm1d(16), nn.ReLU(), norm(nn.Linear(16, 1)))


class Penalized(ByHand):
    """WGAN-GP: a gradient of a gradient, and the generator's step in every fifth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, z = batch
        generate, judge = self.optimizers()
        with torch.no_grad():
            fake = self.generator(z)
        mix = torch.linspace(0, 1, x.shape[0], device=x.device)[:, None]
        between = (mix * x + (1 - mix) * fake).requires_grad_(True)
        found = self.critic(between)
        (slope,) = torch.autograd.grad(
            found, between, grad_outputs=torch.ones_like(found), create_graph=True, retain_graph=True
        )
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss = self.critic(fake).mean() - self.critic(x).mean() + 10 * penalty
        judge.zero_grad()
        self.manual_backward(loss)
        judge.step()
        self.log("d_loss", loss)
        if batch_idx % 5 == 0:
            generate.zero_grad()
            loss = -self.critic(self.generator(z)).mean()
            self.manual_backward(loss)
            generate.step()
            self.log("g_loss", loss)


class Alone(ByHand):
    """One network, one optimizer."""

    layers = ONE_NET

    def make(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def loss(self, batch: Any) -> Tensor:
        x, z = batch
        return F.mse_loss(self.net(x), z)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


class Accumulated(Alone):
    """Three batches a step, clipped, with a scheduler after each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch) / 3
        self.manual_backward(loss)
        self.log("loss", loss)
        if (batch_idx + 1) % 3 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)]


class SeveralSteps(Alone):
    """Three steps on one batch, by closures; the second reads what the first wrote."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        losses = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            losses.append(loss.detach())
            return loss

        for _ in range(3):
            optimizer.step(closure=closure)
        self.log("first", losses[0])
        self.log("last", losses[-1])
        self.log("at", self.trainer.global_step * 1.0)


class LooksAtGradients(Alone):
    """Norms of gradients are logged, and torch's own clipping is called."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for name, parameter in self.net.named_parameters():
            self.log(f"norm/{name}", parameter.grad.norm())
        self.log("total", nn.utils.clip_grad_norm_(self.net.parameters(), 0.2))
        self.log("after", torch.stack([p.grad.norm() for p in self.net.parameters()]).norm())
        optimizer.step()


class Sharpness(Alone):
    """SAM: a step up, the gradient there, back, and a step with it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        parameters = list(self.net.parameters())
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            ups = [p.grad * (0.05 / (norm + 1e-12)) for p in parameters]
            for p, up in zip(parameters, ups, strict=True):
                p.add_(up)
        optimizer.zero_grad()
        sharp = self.loss(batch)
        self.manual_backward(sharp)
        with torch.no_grad():
            for p, up in zip(parameters, ups, strict=True):
                p.sub_(up)
        optimizer.step()
        optimizer.zero_grad()
        self.log_dict({"loss": loss, "sharp": sharp})


class Averaged(Alone):
    """A mean teacher: its weights follow inside the step, and the student learns from it in the next batch."""

    def make(self) -> None:
        super().make()
        self.teacher = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch) + F.mse_loss(self.net(batch[0]), self.teacher(batch[0]))
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            self.log("gap", F.mse_loss(self.net(batch[0]), self.teacher(batch[0])))
        self.log("loss", loss)


class Toggled(ByHand):
    """``toggle_model`` around closures, as Lightning's documentation has it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, z = batch
        generate, judge = self.optimizers()
        last = batch_idx % 2 == 1

        def fool() -> None:
            loss = self.fool(x, z)
            self.manual_backward(loss)
            self.log("g_loss", loss)

        def tell_apart() -> None:
            loss = self.tell_apart(x, z)
            self.manual_backward(loss)
            self.log("d_loss", loss)

        with generate.toggle_model(sync_grad=last):
            generate.step(closure=fool)
            if last:
                generate.zero_grad()
        with judge.toggle_model(sync_grad=last):
            judge.step(closure=tell_apart)
            if last:
                judge.zero_grad()


class Joint(ByHand):
    """One backward pass, two optimizers of different kinds with schedulers of their own, stepped in the end."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, z = batch
        loss = self.tell_apart(x, z) + self.fool(x, z)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        one = torch.optim.RMSprop(self.generator.parameters(), lr=1e-3)
        two = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9), torch.optim.lr_scheduler.StepLR(two, 3)]
        return [one, two], schedulers


MODULES: dict[str, type[ByHand]] = {
    kind.__name__: kind
    for kind in (
        Gan, ZeroedFirst, ZeroedInPlace, Normalized, Penalized, Accumulated, SeveralSteps, LooksAtGradients, Sharpness,
        Averaged, Toggled, Joint,
    )
}  # fmt: skip


def data(count: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randn(count, 4, generator=generator))


def _rows_of(rank: int, ranks: int, count: int) -> list[int]:
    """Of each batch of ROWS rows this rank's block: together they are the batch, in order."""
    mine = ROWS // ranks
    return [i for i in range(count) if i % ROWS // mine == rank]


def fit(
    make: Callable[[], ByHand], strategy: Any, ranks: int = 1, batches: int = 12, layers: int = 1, **flags: Any
) -> Any:
    """Train; gives the module and its Trainer. ``ranks`` share batches of ROWS rows, ``layers`` of them each part."""
    torch.manual_seed(7)
    module = make()
    samples = data()
    rank, parts = (int(os.environ["RANK"]) // layers if ranks > 1 else 0), ranks // layers
    loader = DataLoader(samples, batch_size=ROWS // parts, sampler=_rows_of(rank, parts, len(samples)))
    flags = {"max_epochs": 2, "limit_train_batches": batches // 2, "use_distributed_sampler": False, **flags}
    trainer = L.Trainer(strategy=strategy, devices=ranks, **QUIET, **flags)
    trainer.fit(module, loader)
    return module, trainer


def state_of(module: Any, trainer: Any) -> dict[str, Any]:
    """All that training changes."""
    optimizers = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"weights": module.state_dict(), "optimizers": optimizers, "gradients": gradients, "seen": module.seen}


def fit_on_ranks(
    make: type[ByHand], options: dict[str, Any], ranks: int, **flags: Any
) -> tuple[dict[str, Any], str, int]:
    """On one of several ranks: the whole state in the end, how training ran, and how many graphs that took."""
    layers = options.get("tensor_parallel_size", 1)
    plan = {"tensor_parallel_plan": make.layers} if layers > 1 else {}
    strategy = lightning_spmd.SPMDStrategy(**options, **plan)
    module, trainer = fit(make, strategy, ranks, layers=layers, precision="64-true", **flags)
    state = pytree.tree_map_only(DTensor, lambda t: t.full_tensor().detach(), state_of(module, trainer))
    return state, str(strategy.mode), strategy.captures


def assert_close(ours: Any, theirs: Any) -> None:
    """As equal as sums in another order are, in double precision."""
    mine, spec = pytree.tree_flatten(ours)
    others, other_spec = pytree.tree_flatten(theirs)
    assert spec == other_spec
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def assert_bitwise(ours: Any, theirs: Any) -> None:
    """The same structure, the same bits."""
    mine, spec = pytree.tree_flatten(ours)
    others, other_spec = pytree.tree_flatten(theirs)
    assert spec == other_spec
    for one, other in zip(mine, others, strict=True):
        same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert same, f"{one} is not {other}"
