"""Python in the backward pass of a step that is followed: functions with their own backward, hooks, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning import Callback
from torch import Tensor, autograd, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_spmd.stages.capture.follow import recorder
from tests.helpers.training import InOrder, fit
from tests.untidy.untidy import ROWS, WIDTH, Untidy, samples

STEPS = 6


class _Graphs(Callback):
    """Counts the steps that a graph ran."""

    count = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        accounts = getattr(trainer.strategy, "accounts", None)
        self.count += accounts is not None and accounts.ran.executable is not None


def _run(kind: type[Noted], strategy: str, **flags: Any) -> tuple[Any, list[Any], int]:
    graphs, data = _Graphs(), InOrder(samples(STEPS * ROWS), ROWS)
    torch.manual_seed(3)
    module = kind()
    result, _ = fit(module, data, strategy, 1, [graphs], max_epochs=1, **flags)
    return result, module.notes, graphs.count


def assert_same(kind: type[Noted], graphs: int | None = STEPS, **flags: Any) -> None:
    """Trained as without the strategy, bit for bit, and Python saw the same."""
    theirs, notes, _ = _run(kind, "auto", **flags)
    ours, our_notes, count = _run(kind, "spmd", **flags)
    assert ours.losses == theirs.losses
    assert all(torch.equal(ours.weights[name], weight) for name, weight in theirs.weights.items())
    assert our_notes == notes
    assert count == graphs if graphs is not None else count < STEPS


class Noted(Untidy):
    """Notes what Python sees, in order.

    Attributes:
        notes: that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []
        Noted.current = self.notes

    current: list[Any]

    def loss_of(self, h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(h), y)


def note(value: Any) -> None:
    """Note what Python sees."""
    Noted.current.append(value)


class Scaled(autograd.Function):
    """Two results, one of which has no gradient; saves what it was given, what it made, and numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float, name: str) -> Any:
        note(("forward", name, tuple(ctx.needs_input_grad)))
        made = torch.tanh(x * weight) * factor
        mask = made > 0
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(x, weight, made)
        ctx.factor, ctx.name_of_it = factor, name
        return made, mask

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient, _ = gradients
        x, weight, made = ctx.saved_tensors
        note(("backward", ctx.name_of_it, made.shape))
        inner = gradient * ctx.factor * (1 - (made / ctx.factor).square())
        return inner * weight, (inner * x).sum(0) if ctx.needs_input_grad[1] else None, None, None


class TwoFunctions(Noted):
    """In one step, one above the other; only one weight trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("fixed", torch.ones(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h, mask = Scaled.apply(self.body(x), self.weight, 0.5 + batch_idx, "first")
        g, _ = Scaled.apply(h * mask, self.fixed, 2.0, "second")
        return self.loss_of(g + 0.1 * h, y)


class WithSetup(autograd.Function):
    """The form with ``setup_context`` and a default; its backward may be once differentiable."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor, power: int = 2) -> Tensor:  # type: ignore[override]
        return (x + bias).pow(power)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, bias, ctx.power = inputs
        ctx.save_for_backward(x, bias)
        ctx.set_materialize_grads(False)

    @staticmethod
    @autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, bias = ctx.saved_tensors
        inner = gradient * ctx.power * (x + bias).pow(ctx.power - 1)
        return inner, inner.sum(0), None


class SetUp(Noted):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h: Any = WithSetup.apply(self.body.weight.new_ones(ROWS, WIDTH) * batch[0].mean(), self.body.bias)
        return self.loss_of(h + self.hidden(batch[0]), batch[1])


class InPlace(autograd.Function):
    """Writes into what it is given, and gives another input back as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Any:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x, other

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2, gradients[1] * 3


class Dirty(Noted):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.body(batch[0])
        doubled, other = InPlace.apply(h, h.sigmoid())
        assert doubled is h
        return self.loss_of(h + other, batch[1])


class DependsOnTheStep(autograd.Function):
    """Its backward decides by what it reads of the gradient, and by a counter."""

    count = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        DependsOnTheStep.count += 1
        length = gradient.norm().item()
        note(length)
        if DependsOnTheStep.count % 3 == 0:
            return gradient.clamp(-0.01, 0.01)
        return gradient / length if length > 0.1 else gradient


class Branches(Noted):
    def __init__(self) -> None:
        super().__init__()
        DependsOnTheStep.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h: Any = DependsOnTheStep.apply(self.hidden(batch[0]))
        return self.loss_of(h, batch[1])


class CannotFollow(autograd.Function):
    """Its backward saves the gradient's memory in the third step, which is none of a graph's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: int) -> Tensor:  # type: ignore[override]
        ctx.index = index
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        doubled = gradient * 2
        if ctx.index == 2:
            note(doubled.data_ptr() != 0)
            note(doubled.sum().item())
        return doubled, None


class EagerInTheMiddle(Noted):
    """A step goes on eagerly in the middle of its backward pass, behind one function and before another."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h: Any = DependsOnTheStep.apply(self.hidden(batch[0]))
        g: Any = CannotFollow.apply(h, batch_idx)
        f: Any = DependsOnTheStep.apply(g)
        return self.loss_of(f, batch[1])


class Hooks(Noted):
    """Two hooks on one tensor, of which one is taken away, and a retained gradient, which is behind them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        h.retain_grad()
        h.register_hook(lambda gradient: gradient * 2)
        handle = h.register_hook(lambda gradient: note("never"))
        h.register_hook(lambda gradient: note(float(gradient.abs().sum())))
        handle.remove()
        if hasattr(self, "last"):
            assert self.last.grad is not None
            note(self.last.grad.sum().item())
        self.last = h
        return self.loss_of(h, batch[1])


class OfBoth(Noted):
    """A gradient penalty through a function that knows its own derivative, whose backward is differentiated again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        h: Any = Squared.apply(self.body(x))
        (gradient,) = autograd.grad(h.sum(), x, create_graph=True)
        return self.loss_of(h, batch[1]) + gradient.square().mean()


class Squared(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        note("backward")
        (x,) = ctx.saved_tensors
        return gradient * 2 * x


class ForBackwardAlone(Noted):
    """Feedback alignment: a buffer that the forward pass does not use is given to a function for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("feedback", torch.linspace(-1, 1, 16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h: Any = Feedback.apply(self.hidden(batch[0]), self.feedback)
        return self.loss_of(h, batch[1])


class Feedback(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, feedback: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(feedback)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        note("backward")
        (feedback,) = ctx.saved_tensors
        return gradient * feedback, None


@pytest.mark.parametrize("kind", [TwoFunctions, SetUp, Dirty, Branches, Hooks, OfBoth, ForBackwardAlone])
def test_python_in_the_backward_pass_runs_once_and_is_a_graph(kind: type[Noted]) -> None:
    assert_same(kind)


def test_a_step_may_go_on_eagerly_in_the_middle_of_its_backward_pass() -> None:
    DependsOnTheStep.count = 0
    assert_same(EagerInTheMiddle, None)


@pytest.mark.parametrize("kind", [TwoFunctions, EagerInTheMiddle])
def test_gradients_may_be_accumulated(kind: type[Noted]) -> None:
    assert_same(kind, STEPS if kind is TwoFunctions else None, accumulate_grad_batches=2)


class Checkpointed(Noted):
    """A part that draws and counts its runs; what it computes again is computed as at first."""

    reentrant, parts = False, 2

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.runs = nn.Linear(WIDTH, WIDTH), 0

    def part(self, h: Tensor, factor: float) -> Any:
        self.runs += 1
        note((self.runs, torch.is_grad_enabled()))
        dropped = F.dropout(torch.tanh(self.middle(h)), 0.2) * factor
        return torch.sigmoid(dropped), h.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.hidden(batch[0])
        g: Any
        for _ in range(self.parts):
            g, total = checkpoint(self.part, h, 1 / (1 + batch_idx), use_reentrant=self.reentrant)
            h = F.dropout(g + 0.01 * total, 0.1)
        return self.loss_of(h, batch[1])


class Reentrant(Checkpointed):
    reentrant = True


class OnePart(Reentrant):
    parts = 1


class Nested(Checkpointed):
    """A checkpointed part in a checkpointed part, and a function with a backward of its own in it."""

    def part(self, h: Tensor, factor: float) -> Any:
        inner: Any = checkpoint(lambda t: torch.tanh(self.middle(t)).exp(), h, use_reentrant=False)
        squared: Any = Squared.apply(inner * factor)
        return torch.sigmoid(squared), h.sum()


class OnTheHost(Noted):
    """What is saved is kept elsewhere, and counted."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def pack(tensor: Tensor) -> Any:
            note(tuple(tensor.shape))
            return tensor.half() if tensor.shape == (ROWS, WIDTH) else tensor

        with autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.float() if kept.dtype is torch.half else kept):
            h: Any = Squared.apply(self.hidden(batch[0]))
        with autograd.graph.save_on_cpu():
            h = h.tanh().sigmoid()
        return self.loss_of(h, batch[1])


class CompressesResults(Noted):
    """What is saved is compressed, unless it is a leaf; the function looks at more than shapes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def pack(tensor: Tensor) -> Any:
            note(
                (tensor.is_leaf, tensor.requires_grad, tensor.is_contiguous(), tensor.stride(), tensor.grad_fn is None)
            )
            return tensor if tensor.is_leaf or not tensor.is_floating_point() else tensor.bfloat16()

        with autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.float() if kept.is_floating_point() else kept):
            return self.loss_of(self.hidden(batch[0]).tanh().t().sigmoid().t(), batch[1])


class EagerInThePart(Checkpointed):
    """A step goes on eagerly where a part is computed again, and another one where it is computed at first."""

    def part(self, h: Tensor, factor: float) -> Any:
        found = super().part(h, factor)
        if self.runs in (6, 13):
            note(found[1].detach().untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant, Nested, OnTheHost, CompressesResults])
def test_what_autograd_saves_may_be_kept_otherwise_or_not_at_all(kind: type[Noted]) -> None:
    assert_same(kind)


def test_a_step_may_go_on_eagerly_in_a_checkpointed_part() -> None:
    assert_same(EagerInThePart, None)


def test_gradients_of_checkpointed_parts_may_be_accumulated() -> None:
    assert_same(OnePart, accumulate_grad_batches=2)


class Transforms(Noted):
    """Gradients of each row, of which the loss is made; a product with a Jacobian; and what is mapped has a history."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h, weights = self.hidden(x), dict(self.head.named_parameters())

        def loss_of(weights: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
            note(row.shape)
            logits: Any = torch.func.functional_call(self.head, weights, (row[None],))
            return F.cross_entropy(logits, label[None])

        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(weights, h, y)
        _, moved = torch.func.jvp(torch.tanh, (h,), (h.detach() * (0.1 + batch_idx),))
        penalty = each["weight"].flatten(1).norm(dim=1).mean() + 0.01 * moved.square().mean()
        return self.loss_of(h, y) + 0.1 * penalty


class Curvature(Noted):
    """Second derivatives forward over reverse, of layers with a bias: torch asks for sizes on the meta device."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        note(batch_idx)
        curved = torch.func.vmap(torch.func.hessian(lambda row: self(row).logsumexp(-1)))(x[:2])
        return self.loss_of(self.hidden(x), y) + 0.01 * curved.square().mean()


class Resized(Noted):
    """Results that become views of themselves, one of which is kept."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.hidden(x) * 1.5
        doubled = (h * 2).unsqueeze_(0)
        turned = doubled.squeeze_().t_()
        note((h.unsqueeze_(1).shape, doubled.shape, turned.stride()))
        self.last = turned.detach()
        note(turned.mean().item() if batch_idx % 2 else batch_idx)
        return self.loss_of(turned.transpose_(0, 1), y) + 0.1 * h.square().mean()


@pytest.mark.parametrize("kind", [Transforms, Curvature, Resized])
def test_transforms_of_torch_func_are_followed_below_them(kind: type[Noted]) -> None:
    assert_same(kind)


class SparseInTransform(Noted):
    """What cannot be followed, within a transform: it would hold tensors without values."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        chosen = torch.eye(len(x)).to_sparse()

        def energy(x: Tensor) -> Tensor:
            return torch.sparse.mm(chosen, self.hidden(x)).square().sum()

        return self.loss_of(self.hidden(x), y) + 0.01 * torch.func.grad(energy)(x).norm()


def test_a_step_that_goes_on_eagerly_in_a_transform_runs_again() -> None:
    assert_same(SparseInTransform, 0)


class OfItsOwnLeaf(Noted):
    """An own function is given what the step has made a leaf, as those of gpytorch are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.body(x)
        for _ in range(3):
            made, _ = Scaled.apply(h.detach().requires_grad_(), self.head.weight[0], 2.0, "leaf")
            h = h + made * 0.1
        return self.loss_of(h, y)


def test_known_steps_are_not_recorded_to_say_what_asks_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    begin = recorder.Recording.__init__

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal made
        made += 1
        begin(self, *args, **kwargs)

    monkeypatch.setattr(recorder.Recording, "__init__", counting)
    assert_same(OfItsOwnLeaf)
    assert made == 1
