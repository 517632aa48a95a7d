"""Optimization by hand where the user's Python runs in every step: what is seen in the middle of a step is eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_spmd import messages
from tests.helpers.by_hand import Alone, Gan, assert_bitwise, fit, state_of

BATCHES = 12


class Seen(Alone):
    """Keeps what it sees, and counts its runs."""

    def make(self) -> None:
        super().make()
        self.numbers: list[Any] = []
        self.runs = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.runs += 1
        return self.act(batch, batch_idx, self.optimizers())

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        raise NotImplementedError

    def update(self, batch: Any, optimizer: Any) -> Tensor:
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)


class RateWithinTheStep(Seen):
    """Two steps with two rates, which are others in each batch; the group has a third one when the graph runs."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        group = optimizer.param_groups[0]
        for rate in (0.01 / (1 + batch_idx), 0.003):
            group["lr"] = rate
            self.update(batch, optimizer)
        group["lr"] = 7.0


class ReadsBetweenSteps(Seen):
    """Weights are read behind a step, and decide whether there is another one."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        self.update(batch, optimizer)
        self.numbers.append(self.net[0].weight.sum().item())
        if self.numbers[-1] * 1000 % 2 > 1:
            self.update(batch, optimizer)
            self.numbers.append(self.loss(batch).item())


class LooksAtState(Seen):
    """The optimizer's state behind its step."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        self.update(batch, optimizer)
        state = optimizer.state[self.net[0].weight]
        self.numbers.append((state["exp_avg"].norm().item(), state["step"].item()))


class LooksAtStateBefore(Seen):
    """The state is held since before the step, and looked at behind it."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        state = optimizer.state.get(self.net[0].weight, {})
        self.update(batch, optimizer)
        self.numbers.append({key: float(value.sum()) for key, value in state.items()})


class KeepsState(Seen):
    """The same of a tensor of the state that was kept in the batch before."""

    kept: Any = None

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        self.update(batch, optimizer)
        if self.kept is not None:
            self.numbers.append((self.kept * 2).sum().item())

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.kept = self.trainer.optimizers[0].state[self.net[0].weight]["exp_avg"]


class ResetsState(Seen):
    """The optimizer forgets its moments now and then, in the step."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        if batch_idx % 4 == 3:
            optimizer.state.clear()
        self.update(batch, optimizer)


class LoadsState(Seen):
    """The state of the first batch comes back behind a step."""

    saved: Any = None

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        self.update(batch, optimizer)
        if batch_idx == 3:
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.state[self.net[0].weight]["exp_avg"].zero_()


class Raises(Seen):
    """The step raises behind its update, and the caller goes on: the update has been."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return super().training_step(batch, batch_idx)
        except KeyError as error:
            self.numbers.append(str(error))

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        loss = self.update(batch, optimizer)
        if batch_idx % 3 == 1:
            raise KeyError("no such thing")
        return loss


class EndsEpochs(Seen):
    """StopIteration behind an update ends the step alone, by hand; the update has been."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        loss = self.update(batch, optimizer)
        if batch_idx == 4:
            raise StopIteration
        return loss


class SeveralLosses(Seen):
    """``torch.autograd.backward`` of two losses with weights, and of named inputs."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        x, z = batch
        found = self.net(x)
        losses = [(found - z).square().mean(), found.abs().mean()]
        optimizer.zero_grad()
        torch.autograd.backward(losses, [torch.tensor(0.5), torch.tensor(0.25)], retain_graph=True)
        losses[0].backward(inputs=[self.net[0].weight])
        optimizer.step()
        return losses[0]


class SecondBackward(Seen):
    """A graph that is gone: autograd's own error, which the step catches."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        loss = self.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        try:
            loss.backward()
        except RuntimeError as error:
            self.numbers.append(str(error)[:40])
        optimizer.step()
        return loss


class RaisesInBackward(Seen):
    """A hook or a function raises between two layers, and the step goes on: the layer behind it has its gradient."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        optimizer.zero_grad()
        hidden = self.net[:-1](batch[0])
        hidden.register_hook(lambda gradient: self.pass_on(gradient, batch_idx))
        try:
            self.manual_backward((self.net[-1](hidden) - batch[1]).square().mean())
        except KeyError as error:
            self.numbers.append(str(error))
            self.numbers.append([p.grad is None for p in self.net.parameters()])
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def pass_on(self, gradient: Tensor, batch_idx: int) -> Tensor:
        if batch_idx % 3 == 1:
            raise KeyError("no such thing")
        return gradient


class RaisesInEveryBackward(RaisesInBackward):
    def pass_on(self, gradient: Tensor, batch_idx: int) -> Tensor:
        raise KeyError("no such thing")


class EagerInBackward(RaisesInBackward):
    """A hook is where the step cannot be followed any more; the layer behind it has its gradient already."""

    def pass_on(self, gradient: Tensor, batch_idx: int) -> Tensor:
        with FlopCounterMode(display=False):
            return gradient * 2


class GradientsStay(Seen):
    """A hook reads gradients between batches; the step adds to them, and sees whether they are there."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        self.numbers.append([p.grad is None for p in self.net.parameters()])
        loss = self.loss(batch)
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.numbers.append([None if p.grad is None else p.grad.norm().item() for p in self.net.parameters()])


class FirstBackwardEver(Seen):
    """Gradients of a tensor that the step made, which is kept."""

    last: Any = None

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        x, z = batch
        shift = torch.zeros_like(x).requires_grad_()
        (self.net(x + shift) - z).square().mean().backward()
        self.numbers.append(None if self.last is None else self.last.grad.norm().item())
        self.last = shift
        assert shift.grad is not None
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.net(x + 0.1 * shift.grad.sign()), z)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Quasi(Seen):
    """LBFGS calls its closure as often as it likes."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=3)


class StepHooked(Seen):
    """A hook on steps that comes in the middle of a step, and one on a weight's gradient."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        if batch_idx == 3:
            optimizer.optimizer.register_step_pre_hook(self.halve)
        if batch_idx == 5:
            self.net[0].weight.register_hook(lambda gradient: 2 * gradient)
        return self.update(batch, optimizer)

    def halve(self, *_: Any) -> None:
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


class Thawing(Seen):
    """A layer is frozen for some batches, by the step, before or behind its first use."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        if batch_idx % 4 == 2:
            self.net[0].requires_grad_(False)
        loss = self.update(batch, optimizer)
        if batch_idx % 4 == 3:
            self.net[0].requires_grad_(True)
        return loss


class Deepens(Gan):
    """A rate that a tensor holds."""

    def configure_optimizers(self) -> Any:
        one, two = super().configure_optimizers()
        for group in one.param_groups:
            group["lr"] = torch.tensor(1e-3)
        return [one, two]


GRAPHS = [
    RateWithinTheStep,
    ReadsBetweenSteps,
    SeveralLosses,
    GradientsStay,
    FirstBackwardEver,
    Thawing,
]
OTHERS = [
    LooksAtState,
    LooksAtStateBefore,
    KeepsState,
    ResetsState,
    LoadsState,
    Raises,
    RaisesInBackward,
    RaisesInEveryBackward,
    EagerInBackward,
    EndsEpochs,
    SecondBackward,
    Quasi,
    StepHooked,
    Deepens,
]


def _run(make: Any, strategy: str) -> tuple[Any, Any]:
    module, trainer = fit(make, strategy, batches=BATCHES)
    return module, trainer


def _assert_same(ours: Any, theirs: Any) -> None:
    assert getattr(ours[0], "numbers", None) == getattr(theirs[0], "numbers", None)
    assert [p.requires_grad for p in ours[0].parameters()] == [p.requires_grad for p in theirs[0].parameters()]
    assert_bitwise(state_of(*ours), state_of(*theirs))


@pytest.mark.parametrize("make", GRAPHS)
def test_every_step_is_a_graph_with_the_bits_of_eager(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(messages, "rank_zero_info", lambda text, *_, **__: texts.append(text))
    theirs, ours = _run(make, "auto"), _run(make, "spmd")
    _assert_same(ours, theirs)
    assert ours[0].runs == theirs[0].runs
    assert ours[1].strategy.mode == "compiled"
    assert not [text for text in texts if "ran a step eagerly" in text]


@pytest.mark.parametrize("make", OTHERS)
def test_what_no_graph_can_show_has_the_bits_of_eager(make: Any) -> None:
    theirs, ours = _run(make, "auto"), _run(make, "spmd")
    _assert_same(ours, theirs)
