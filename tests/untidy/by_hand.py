"""Optimization by hand: the step calls backward and the optimizers itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.untidy.untidy import WIDTH, Untidy, plain


class ByHand(Untidy):
    """Shared by cases: no automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @property
    def optimizer(self) -> Any:
        """The one optimizer."""
        return self.optimizers()


class Sharpness(ByHand):
    """SAM: weights go up along the gradient, the gradient there is applied where they were."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.optimizer.zero_grad()
        self.manual_backward(loss)
        with torch.no_grad():
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            scale = 0.05 / (torch.stack([g.norm() for g in gradients]).norm() + 1e-12)
            moved = [(p, p.grad * scale) for p in self.parameters() if p.grad is not None]
            for parameter, step in moved:
                parameter.add_(step)
        self.optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        with torch.no_grad():
            for parameter, step in moved:
                parameter.sub_(step)
        self.optimizer.step()
        return loss


class TwoOptimizers(ByHand):
    """A net and its critic in turn; the critic steps up to three times where it is behind."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(WIDTH, 1)
        self.extra = 0

    def configure_optimizers(self) -> Any:
        net = [*self.body.parameters(), *self.head.parameters()]
        return torch.optim.SGD(net, lr=0.05), torch.optim.Adam(self.critic.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        net, critic = self.optimizers()  # type: ignore[misc]
        labels = (y[:, None] % 2).float()
        for _ in range(3):
            judged = F.binary_cross_entropy_with_logits(self.critic(self.hidden(x).detach()), labels)
            critic.zero_grad()
            self.manual_backward(judged)
            critic.step()
            if judged < 0.69:
                break
            self.extra += 1
        h = self.hidden(x)
        loss = F.cross_entropy(self.head(h), y) - 0.1 * self.critic(h).sigmoid().mean()
        net.zero_grad()
        self.manual_backward(loss)
        net.step()
        self.log("judged", judged)

    def kept(self) -> Any:
        return self.extra


class ClippedByValue(ByHand):
    """The norm of the gradients is read, kept, and clipped where it is above the mean of the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.optimizer.zero_grad()
        self.manual_backward(loss)
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm().item()
        self.norms.append(norm)
        limit = sum(self.norms[-5:]) / len(self.norms[-5:])
        if norm > limit:
            torch.nn.utils.clip_grad_norm_(self.parameters(), limit)
        self.optimizer.step()
        return loss

    def kept(self) -> Any:
        return self.norms


class SkipsBadSteps(ByHand):
    """The optimizer steps only where the loss is not much above its mean; the rate follows by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.skipped = 1.4, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        if loss.item() > 1.01 * self.mean:
            self.skipped += 1
        else:
            self.optimizer.zero_grad()
            self.manual_backward(loss)
            self.optimizer.step()
        self.mean = 0.8 * self.mean + 0.2 * loss.item()
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, self.mean)
        return loss

    def kept(self) -> Any:
        return self.mean, self.skipped


class AccumulatedByHand(ByHand):
    """Gradients are added up in a dictionary of the user's, and applied every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.optimizer.zero_grad()
        self.manual_backward(loss)
        for name, parameter in self.named_parameters():
            assert parameter.grad is not None
            self.sums[name] = self.sums.get(name, 0) + parameter.grad.clone() / 3
        if batch_idx % 3 == 2:
            for name, parameter in self.named_parameters():
                parameter.grad = self.sums.pop(name)
            self.optimizer.step()
        return loss

    def kept(self) -> Any:
        return plain(self.sums)


class Surgery(ByHand):
    """PCGrad: gradients of two losses that are against one another are projected, which is a read."""

    def __init__(self) -> None:
        super().__init__()
        self.back, self.against = nn.Linear(WIDTH, 8), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.hidden(x)
        losses = [F.cross_entropy(self.head(h), y), F.mse_loss(self.back(h), x)]
        both = [torch.autograd.grad(loss, self.body.weight, retain_graph=True)[0] for loss in losses]
        product = (both[0] * both[1]).sum()
        if product < 0:
            self.against += 1
            both[0] = both[0] - product / both[1].square().sum() * both[1]
        self.optimizer.zero_grad()
        self.manual_backward(losses[0] + losses[1])
        self.body.weight.grad = both[0] + both[1]
        self.optimizer.step()
        return losses[0]

    def kept(self) -> Any:
        return self.against


class NoisyGradients(ByHand):
    """Gradients are changed in place: centered, made noisy, some set to zero."""

    draws = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.optimizer.zero_grad()
        self.manual_backward(loss)
        for parameter in self.parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
                parameter.grad.add_(torch.randn(parameter.shape), alpha=0.01 / (1 + batch_idx))
        if batch_idx % 4 == 3:
            self.head.bias.grad = None
        self.optimizer.step()
        return loss


class Lookahead(ByHand):
    """Slow weights that are no optimizer's; every fifth step the fast ones go back to them."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = [p.detach().clone() for p in self.parameters()]
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.optimizer.zero_grad()
        self.manual_backward(loss)
        self.optimizer.step()
        self.steps += 1
        if self.steps % 5 == 0:
            for slow, fast in zip(self.slow, self.parameters(), strict=True):
                slow.lerp_(fast.detach(), 0.5)
                fast.data.copy_(slow)
        return loss

    def kept(self) -> Any:
        return self.steps, plain(self.slow)


class OwnUpdate(ByHand):
    """No optimizer of torch's: sign descent with states in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.momenta: dict[Tensor, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.zero_grad()
        self.manual_backward(loss)
        with torch.no_grad():
            for parameter in self.parameters():
                momentum = self.momenta.get(parameter, torch.zeros_like(parameter))
                assert parameter.grad is not None
                self.momenta[parameter] = momentum = 0.9 * momentum + 0.1 * parameter.grad
                parameter -= 0.003 * momentum.sign()
        return loss

    def kept(self) -> Any:
        return [self.momenta[p].tolist() for p in self.parameters()]


class Scheduled(ByHand):
    """A scheduler of torch's steps by hand, told the loss; the rate it made is logged and printed."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.optimizer.zero_grad()
        self.manual_backward(loss)
        self.optimizer.step()
        scheduler: Any = self.lr_schedulers()
        scheduler.step(loss.item())
        rate = self.optimizer.param_groups[0]["lr"]
        self.log("rate", rate)
        print(f"{batch_idx}: rate {rate:.4f}")
        return loss


class SeveralSteps(ByHand):
    """As PPO does: several steps on parts of one batch, until the policy has moved too far."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        before = self(x).log_softmax(1).detach()
        for turn in range(4):
            rows = slice(4 * turn, 4 * turn + 8)
            self.optimizer.zero_grad()
            self.manual_backward(self.loss(x[rows], y[rows]))
            self.optimizer.step()
            with torch.no_grad():
                moved = F.kl_div(self(x).log_softmax(1), before, log_target=True, reduction="batchmean")
            if moved > 0.004:
                break
        self.turns.append(turn)
        self.log("moved", moved)

    def kept(self) -> Any:
        return self.turns


CASES = (
    Sharpness,
    TwoOptimizers,
    ClippedByValue,
    SkipsBadSteps,
    AccumulatedByHand,
    Surgery,
    NoisyGradients,
    Lookahead,
    OwnUpdate,
    Scheduled,
    SeveralSteps,
)
