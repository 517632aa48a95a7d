"""Further modules that optimize by hand: what few users do, and what is easily done wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.by_hand import Accumulated, Alone, ByHand, Gan


class Retained(ByHand):
    """Two backward passes through one forward pass, for two optimizers."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        _, z = batch
        generate, judge = self.optimizers()
        generate.zero_grad()
        judge.zero_grad()
        made = self.generator(z)
        judged, size = self.critic(made).mean(), (made**2).mean()
        self.manual_backward(judged, retain_graph=True)
        self.manual_backward(size)
        generate.step()
        judge.step()
        self.log_dict({"judged": judged, "size": size})


class OfInputs(ByHand):
    """``backward(inputs=...)`` leaves the other parameters alone; ``torch.autograd.backward`` of a list."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, z = batch
        generate, judge = self.optimizers()
        generate.zero_grad()
        judge.zero_grad()
        self.fool(x, z).backward(inputs=list(self.generator.parameters()))
        generate.step()
        loss = self.tell_apart(x, z)
        torch.autograd.backward([loss])
        judge.step()
        self.log("loss", loss)


class OfData(Alone):
    """A penalty on the gradient of the batch itself, which asks for one in the step and so is a leaf of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        x = batch[0].requires_grad_(True)
        loss = self.loss([x, *batch[1:]])
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        optimizer.zero_grad()
        self.manual_backward(loss + 10 * (gradient**2).sum())
        optimizer.step()
        self.log("loss", loss)


class OfGradients(Alone):
    """A loss of gradients, ``create_graph=True`` in the backward pass itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch), create_graph=True)
        norm = torch.stack([(p.grad**2).sum() for p in self.net.parameters()]).sum()
        norm.backward()
        optimizer.step()
        self.log("norm", norm.detach())


class ChangesGradients(Alone):
    """Gradients are scaled in place, replaced and taken away; some stay for the next batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss)
        for parameter in self.net.parameters():
            parameter.grad.mul_(0.5)
            parameter.grad = parameter.grad + 0.01 * parameter.detach()
        self.net[0].bias.grad = None
        self.optimizers().step()
        self.log("loss", loss)
        if batch_idx % 3 == 2:
            self.zero_grad()


class Attacked(Alone):
    """FGSM: the gradient of the data, then a step on what it makes of them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, z = batch
        optimizer = self.optimizers()
        x = x.clone().requires_grad_(True)
        F.mse_loss(self.net(x), z).backward()
        attacked = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = F.mse_loss(self.net(attacked), z)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)


class Plain(Alone):
    """A step a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.before_step(optimizer)
        optimizer.step()
        self.log("loss", loss)
        self.after_step(loss, batch_idx)

    def before_step(self, optimizer: Any) -> None:
        pass

    def after_step(self, loss: Tensor, batch_idx: int) -> None:
        pass


class OneCycle(Plain):
    """A schedule of rate and momentum, logged before it moves."""

    def before_step(self, optimizer: Any) -> None:
        self.log("rate", self.lr_schedulers().get_last_lr()[0])
        self.log("same", optimizer.param_groups[0]["lr"])

    def after_step(self, loss: Tensor, batch_idx: int) -> None:
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=60)]


class Plateau(Plain):
    """A schedule that looks at the loss."""

    def after_step(self, loss: Tensor, batch_idx: int) -> None:
        self.lr_schedulers().step(loss.detach())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


class OncePerEpoch(Plain):
    """A schedule that moves after the last batch."""

    def after_step(self, loss: Tensor, batch_idx: int) -> None:
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class WarmsUp(Plain):
    """The learning rate is set by hand, from a counter."""

    def before_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (self.global_step + 1) / 60


class TwoRates(Alone):
    """Two steps a batch with two rates."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for rate in (0.01, 0.1):
            optimizer.param_groups[0]["lr"] = rate
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(f"loss of {rate}", loss)


class InHooks(Alone):
    """Hooks between batches zero gradients and step; ``p.grad`` is there to be read."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.log("loss", loss)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            self.optimizers().zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 1:
            self.optimizers().step()
        super().on_train_batch_end()


class NothingToStep(ByHand):
    """An optimizer whose parameters have no gradient; the optimizers are kept on the module."""

    def on_fit_start(self) -> None:
        self.kept = self.optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generate, judge = self.kept
        generate.step()
        loss = self.tell_apart(*batch)
        judge.zero_grad()
        self.manual_backward(loss)
        judge.step()
        self.log("loss", loss)


class Freezing(Gan):
    """A layer that is trained in the first epoch alone."""

    def on_train_epoch_start(self) -> None:
        self.critic[0].requires_grad_(self.current_epoch == 0)


class AccumulatedNorms(Accumulated):
    """Batch norm beside accumulation."""

    def make(self) -> None:
        super().make()
        self.net.insert(1, nn.BatchNorm1d(16))


class Checkpointed(Plain):
    """Activations that are computed again."""

    def loss(self, batch: Any) -> Tensor:
        x, z = batch
        return F.mse_loss(torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False), z)


RARE: dict[str, type[ByHand]] = {
    kind.__name__: kind
    for kind in (
        Retained, OfInputs, OfData, OfGradients, ChangesGradients, Attacked, OneCycle, Plateau, OncePerEpoch, WarmsUp,
        TwoRates, InHooks, NothingToStep, Freezing, AccumulatedNorms, Checkpointed,
    )
}  # fmt: skip
