"""Autograd inside of the step: penalties, functions and hooks of one's own, checkpoints, gradients of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.untidy.untidy import CLASSES, WIDTH, Untidy


class GradientPenalty(Untidy):
    """The norm of the gradient by the data is part of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        logits = self(x)
        (gradient,) = autograd.grad(logits.square().sum(), x, create_graph=True)
        return F.cross_entropy(logits, batch[1]) + 0.1 * (gradient.norm(dim=1) - 1).square().mean()


class PenaltyNowAndThen(Untidy):
    """The penalty is lazy: every fourth step, with a weight that follows a mean of its lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_length = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if batch_idx % 4:
            return self.loss(x, y)
        x = x.requires_grad_()
        logits = self(x)
        (gradient,) = autograd.grad(logits.sum(), x, create_graph=True)
        length = gradient.square().sum(1).sqrt().mean()
        self.mean_length += 0.3 * (length.item() - self.mean_length)
        return F.cross_entropy(logits, y) + (length - self.mean_length).square()

    def kept(self) -> Any:
        return self.mean_length


class Adversarial(Untidy):
    """The batch is moved against its gradient, twice, and trained on so."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        moved = x.clone()
        for _ in range(2):
            moved = moved.detach().requires_grad_()
            (gradient,) = autograd.grad(self.loss(moved, y), moved)
            moved = moved + 0.05 * gradient.sign()
        return 0.5 * self.loss(x, y) + 0.5 * self.loss(moved.detach(), y)


class InnerLoop(Untidy):
    """As in MAML: an inner step on half of the rows, the loss behind it on the others."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        fast = [self.head.weight, self.head.bias]
        h = self.hidden(x)
        for _ in range(1 + batch_idx % 2):
            inner = F.cross_entropy(F.linear(h[::2], *fast), y[::2])
            fast = [p - 0.1 * g for p, g in zip(fast, autograd.grad(inner, fast, create_graph=True), strict=True)]
        return F.cross_entropy(F.linear(h[1::2], *fast), y[1::2])


class StraightThrough(autograd.Function):
    """Rounds forward, is the identity backward within a bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bound = bound
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < ctx.bound), None


class OwnFunction(Untidy):
    """An autograd.Function of the user's with a number that changes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h: Any = StraightThrough.apply(self.hidden(batch[0]), 0.5 + 0.05 * batch_idx)
        return F.cross_entropy(self.head(h), batch[1])


class Reversed(autograd.Function):
    """Turns gradients round, and counts how often: Python runs in the backward pass."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        Reversed.backwards += 1
        return -ctx.strength / Reversed.backwards * gradient, None


class CountsBackwards(Untidy):
    """A domain head behind a reversed gradient, whose function counts in its backward."""

    def __init__(self) -> None:
        super().__init__()
        Reversed.backwards = 0
        self.domain = nn.Linear(WIDTH, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.hidden(x)
        turned: Any = Reversed.apply(h, 0.1 + 0.02 * batch_idx)
        return F.cross_entropy(self.head(h), y) + F.cross_entropy(self.domain(turned), y % 2)

    def kept(self) -> Any:
        return Reversed.backwards


class Checkpointed(Untidy):
    """A checkpointed part that draws, counts its calls, and is called once more in the backward pass."""

    draws = True

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def part(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(torch.tanh(self.body(x)), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h: Any = checkpoint(self.part, batch[0], use_reentrant=False)
        return F.cross_entropy(self.head(h), batch[1]) * (1 + 0.01 * self.calls)

    def kept(self) -> Any:
        return self.calls


class ReentrantCheckpoint(Untidy):
    """The older kind of checkpoint, above a layer that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h: Any = checkpoint(lambda t: torch.tanh(self.middle(t)), self.hidden(batch[0]), use_reentrant=True)
        return F.cross_entropy(self.head(h), batch[1])


class HookOnATensor(Untidy):
    """A hook on a hidden tensor scales its gradient by a number of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        factor = 1 / (1 + batch_idx)
        h.register_hook(lambda gradient: gradient * (0.5 + factor))
        return F.cross_entropy(self.head(h), batch[1])


class HookThatNotes(Untidy):
    """A hook notes the norm of a gradient; the next step's loss is weighed with it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def note(self, gradient: Tensor) -> None:
        self.norms.append(gradient.norm().item())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        h.register_hook(self.note)
        weight = 1 + sum(self.norms[-3:])
        return F.cross_entropy(self.head(h), batch[1]) * weight

    def kept(self) -> Any:
        return self.norms


class RetainedGradient(Untidy):
    """The gradient of a hidden tensor is retained, and read in the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        h.retain_grad()
        loss = F.cross_entropy(self.head(h), batch[1])
        if self.last is not None and self.last.grad is not None:
            loss = loss + (self.last.grad.abs().sum(0) * h.mean(0)).sum()
        self.last = h
        return loss

    def kept(self) -> Any:
        return self.last is not None and self.last.grad is not None and self.last.grad.tolist()


class GradNorm(Untidy):
    """Two losses are weighed by the norms of their gradients at a shared layer, which are read."""

    def __init__(self) -> None:
        super().__init__()
        self.back, self.weights = nn.Linear(WIDTH, 8), [1.0, 1.0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.hidden(x)
        losses = [F.cross_entropy(self.head(h), y), F.mse_loss(self.back(h), x)]
        norms = [autograd.grad(loss, self.body.weight, retain_graph=True)[0].norm().item() for loss in losses]
        mean = sum(norms) / 2
        self.weights = [0.8 * w + 0.2 * mean / (norm + 1e-6) for w, norm in zip(self.weights, norms, strict=True)]
        return self.weights[0] * losses[0] + self.weights[1] * losses[1]

    def kept(self) -> Any:
        return self.weights


class PerSample(Untidy):
    """Gradients of each row by vmap and grad; the norm of the largest weighs the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.hidden(x)
        weights = {name: p.detach() for name, p in self.head.named_parameters()}

        def loss_of(weights: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
            logits: Any = torch.func.functional_call(self.head, weights, (row[None],))
            return F.cross_entropy(logits, label[None])

        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(weights, h.detach(), y)
        largest = each["weight"].flatten(1).norm(dim=1).max()
        return F.cross_entropy(self.head(h), y) * (1 + 0.1 * largest)


class SharpnessByProduct(Untidy):
    """A Hessian-vector product, whose curvature is kept as a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.curvature = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        vector = self.head.weight.detach().sign()
        (gradient,) = autograd.grad(loss, self.head.weight, create_graph=True)
        (product,) = autograd.grad((gradient * vector).sum(), self.head.weight, retain_graph=True)
        self.curvature = 0.9 * self.curvature + 0.1 * float((product * vector).sum())
        return loss + 0.05 * gradient.square().sum() + 0.01 * self.curvature

    def kept(self) -> Any:
        return self.curvature


class SwitchedOff(Untidy):
    """Gradients are switched off and on by a number, for a part of the step; inference mode for another."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.set_grad_enabled(batch_idx % 3 != 2):
            h = self.hidden(x)
        with torch.inference_mode():
            sure = self.head(h).softmax(1).amax(1).mean().item()
        loss = F.cross_entropy(self.head(h), y)
        return loss * (1 + sure) if h.requires_grad else loss


class AsksForHistory(Untidy):
    """The step asks tensors for requires_grad, grad_fn and is_leaf, and goes by the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        if batch_idx % 2:
            h = h.detach()
        self.answers.append([h.requires_grad, h.is_leaf, h.grad_fn is None, self.body.weight.is_leaf])
        loss = F.cross_entropy(self.head(h), batch[1])
        return loss + 0.1 * h.square().mean() if h.requires_grad else loss * 0.5

    def kept(self) -> Any:
        return self.answers


class SavedTensorsPacked(Untidy):
    """Hooks on saved tensors keep them in another dtype, and count them."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = 0

    def pack(self, tensor: Tensor) -> Any:
        self.packed += 1
        return (tensor.double(), True) if tensor.is_floating_point() else (tensor, False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept[0].float() if kept[1] else kept[0]):
            h = torch.tanh(self.body(batch[0]).sigmoid())
        return F.cross_entropy(self.head(h), batch[1]) * (1 + 0.001 * self.packed)

    def kept(self) -> Any:
        return self.packed


class InnerBackward(Untidy):
    """The step calls backward for a prompt of its own, and moves that by its .grad."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = torch.zeros(WIDTH, requires_grad=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.hidden(x).detach()
        F.cross_entropy(F.linear(h + self.prompt, self.head.weight.detach()), y).backward()
        with torch.no_grad():
            assert self.prompt.grad is not None
            self.prompt -= 0.5 * self.prompt.grad
        self.prompt.grad = None
        return F.cross_entropy(self.head(self.hidden(x) + self.prompt.detach()), y)

    def kept(self) -> Any:
        return self.prompt.tolist()


class Focal(Untidy):
    """A focal loss whose exponent follows the hit rate, which is a read."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = 2.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        log_p = self(x).log_softmax(1)
        reached = F.one_hot(y, CLASSES).mul(log_p).sum(1)
        self.gamma = 3 - 2 * (log_p.argmax(1) == y).float().mean().item()
        return -((1 - reached.exp()) ** self.gamma * reached).mean()

    def kept(self) -> Any:
        return self.gamma


CASES = (
    GradientPenalty,
    PenaltyNowAndThen,
    Adversarial,
    InnerLoop,
    OwnFunction,
    CountsBackwards,
    Checkpointed,
    ReentrantCheckpoint,
    HookOnATensor,
    HookThatNotes,
    RetainedGradient,
    GradNorm,
    PerSample,
    SharpnessByProduct,
    SwitchedOff,
    AsksForHistory,
    SavedTensorsPacked,
    InnerBackward,
    Focal,
)
