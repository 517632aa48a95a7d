"""Hooks that take parameters and gradients in parts for wholes: what they read, write and compute is one device's."""

from __future__ import annotations

import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

from lightning_spmd import ConfigurationError
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import InOrder, assert_equals_one_device, fit
from tests.strategy.small import ROWS, Quiet, rows, run

PLANS: dict[str, dict[str, Any]] = {
    "zero2": {"data_parallel": "zero2"},
    "zero3": {"data_parallel": "zero3"},
    "tp": {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise", "last": "rowwise"}},
}


class Sees(Quiet):
    """Logs all it sees in a hook. Ten features or seven outputs are parts of different sizes for two ranks, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(10, 7)
        self.seen = 0.0

    def see(self, *values: Any) -> None:
        """A number that depends on all of them."""
        for value in values:
            self.seen = 0.5 * self.seen + float(value)

    def on_train_batch_end(self, *_: Any) -> None:
        self.look()
        self.log("seen", self.seen)

    def look(self) -> None:
        """What the test is about."""


class Numbers(Sees):
    def look(self) -> None:
        w, v = self.first.weight, self.last.weight
        self.see(w.norm(), w.norm().item(), v.mean(), v.std(), self.last.bias.var(), w.max(), w.argmax())
        self.see(w[3, 4], (w > 0).sum(), w.isnan().any(), torch.allclose(w, w + 1), torch.equal(w, w.detach().clone()))
        self.see(*self.last.bias.tolist(), *v.detach().numpy()[6], *np.asarray(v.detach().cpu())[:, 1])
        self.see(torch.stack([p.norm() for p in self.parameters()]).sum(), max(p.abs().max() for p in (w, v)))


class Operators(Sees):
    """Some have no rule for parts."""

    def look(self) -> None:
        w, v = self.first.weight.detach(), self.last.weight
        self.see(torch.linalg.svdvals(w).sum(), torch.linalg.matrix_norm(v, 2), w.median(), torch.quantile(w, 0.3))
        self.see(w.flatten().topk(3).values.sum(), (v @ w).sum(), w.cumsum(0)[5].sum(), (w.T @ w).trace())
        self.see(torch.cat([p.flatten() for p in self.parameters()]).norm(), (w @ torch.ones(6)).sum())
        self.see(F.cosine_similarity(v[0], v[6], dim=0), sum(row.max() for row in w.unbind()))


class Rows(Sees):
    """Writes through views, across the cut and on either side of it."""

    def look(self) -> None:
        w, v = self.first.weight, self.last.weight
        with torch.no_grad():
            w[2] = 0.1
            w[:, 1].mul_(0.5)
            v.view(-1)[7] = 0.2
            self.last.bias[2:5].zero_()
            w[w.abs() < 0.05] = 0
        w.data[9] *= 0.9
        w.data.view(-1)[:13].fill_(0.01)
        v.detach().numpy()[6] *= 0.9


class KeptView(Sees):
    """A view is of what the weight is now."""

    def look(self) -> None:
        row = self.first.weight.data[8]
        with torch.no_grad():
            self.first.weight.mul_(0.5)
        self.see(row.sum())
        row.add_(0.1)
        self.see(self.first.weight.sum())


class Mixed(Sees):
    """Plain tensors beside parts."""

    def look(self) -> None:
        w, v = self.first.weight, self.last.weight
        with torch.no_grad():
            w.add_(torch.linspace(0, 0.1, 60).view(10, 6)).mul_((torch.arange(60).view(10, 6) % 3 != 0).float())
            self.last.bias.copy_(torch.linspace(-1, 1, 7))
            v.lerp_(torch.ones(7, 10), 0.1)
            v.div_(v.norm(dim=0, keepdim=True).clamp(min=1))


class Assigns(Sees):
    """``p.data = x``: of a computed value, and of others for a while."""

    def look(self) -> None:
        self.first.weight.data = F.normalize(self.first.weight.data, dim=1)
        self.last.weight.data = torch.full((7, 10), 0.01) + self.last.weight.data * 0.5
        saved = [p.data.clone() for p in self.parameters()]
        for p in self.parameters():
            p.data = torch.ones(p.shape)
        self.see(sum(float(p.sum()) for p in self.parameters()))
        for p, before in zip(self.parameters(), saved, strict=True):
            p.data = before


class Swaps(Sees):
    """Weights for a while, and back: who holds ``p.data`` has what it was."""

    def look(self) -> None:
        saved = [p.data for p in self.parameters()]
        for p in self.parameters():
            p.data = torch.zeros_like(p.data)
        self.see(sum(float(p.abs().sum()) for p in self.parameters()))
        for p, before in zip(self.parameters(), saved, strict=True):
            p.data = before
        computed = self.first.weight.data * 0.9
        self.first.weight.data = computed
        computed.add_(0.01)
        self.see(self.first.weight.sum())


class SwapsForSomeSteps(Sees):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.saved = [p.data for p in self.parameters()]
            for p in self.parameters():
                p.data = p.data * 0.5
        elif batch_idx == 4:
            for p, before in zip(self.parameters(), self.saved, strict=True):
                p.data = before


class Slow(Sees):
    """A slow copy in whole tensors, with which the weights are brought together (lookahead)."""

    def on_train_start(self) -> None:
        self.slow = [torch.zeros(p.shape) for p in self.parameters()]

    def look(self) -> None:
        with torch.no_grad():
            for slow, p in zip(self.slow, self.parameters(), strict=True):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


class Vector(Sees):
    def look(self) -> None:
        vector = nn.utils.parameters_to_vector(self.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.9, self.parameters())


class Calls(Sees):
    """The model itself, and gradients through it."""

    def look(self) -> None:
        x = torch.linspace(-1, 1, 24).view(4, 6)
        with torch.no_grad():
            self.see(self(x).sum())
        with torch.enable_grad():
            loss = self(x).square().mean()
            gradients = torch.autograd.grad(loss, [self.first.weight, self.last.bias])
        self.see(loss, gradients[0][3].sum(), *(g.sum() for g in gradients))
        with torch.no_grad():
            self.first.weight.sub_(gradients[0], alpha=0.1)


class Draws(Sees):
    """Drawn numbers are those of one device."""

    def look(self) -> None:
        nn.init.orthogonal_(self.first.weight)
        nn.init.kaiming_uniform_(self.last.weight)
        self.last.bias.data.uniform_(-1, 1)
        with torch.no_grad():
            self.first.weight.add_(torch.randn_like(self.first.weight) * 0.1)
        self.see(torch.rand(()))


MAKERS = [Numbers, Operators, Rows, KeptView, Mixed, Assigns, Swaps, SwapsForSomeSteps, Slow, Vector, Calls, Draws]


def _run(make: type[Quiet], strategy: Any, devices: int, **settings: Any) -> Any:
    return run(make, strategy, devices, data=lambda: InOrder(rows(), ROWS), max_epochs=1, **settings)


def _assert_as_one_device(pool: RankPool, make: type[Quiet], plan: str, **settings: Any) -> None:
    results = pool.run(_run, make, PLANS[plan], 2, **settings)
    assert_equals_one_device(results, _run(make, "auto", 1, **settings))


@pytest.mark.parametrize("plan", ["zero3", pytest.param("tp", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("make", MAKERS)
def test_parameters_in_parts_are_wholes_in_hooks(two_ranks: RankPool, make: type[Quiet], plan: str) -> None:
    _assert_as_one_device(two_ranks, make, plan)


class Gradients(Sees):
    """Of parts: read, scaled, replaced by whole tensors, written by rows."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see(*(p.grad.norm() for p in self.parameters() if p.grad is not None))
        for p in self.parameters():
            if p.grad is not None:
                p.grad = torch.sign(p.grad) * torch.full(p.shape, 0.01)
                p.grad.data = p.grad.data * 0.5
                p.grad += torch.ones(p.shape) * 0.01
        self.first.weight.grad[3] = 0
        self.first.weight.grad.mul_((torch.arange(60).view(10, 6) % 2).float())
        self.see(nn.utils.clip_grad_norm_(self.parameters(), 0.1))


@pytest.mark.parametrize("plan", list(PLANS))
def test_gradients_in_parts_are_wholes_in_hooks(two_ranks: RankPool, plan: str) -> None:
    _assert_as_one_device(two_ranks, Gradients, plan)


class OfACallback(L.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.first.weight.data[3] = 0.5
        pl_module.log("row", float(pl_module.last.weight[:, 4].sum()))


class Clips(Sees):
    """By a norm that is read, which keeps clipping out of the graph."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        norm = sum(float(p.grad.norm()) ** 2 for p in self.parameters() if p.grad is not None) ** 0.5
        self.see(norm)
        for p in self.parameters():
            if p.grad is not None:
                p.grad = p.grad * torch.full(p.shape, min(1.0, 0.1 / norm))


class AroundTheStep(Sees):
    """Before and behind the step, in the method that has it within."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        self.last.weight.data[2] = 0.1
        self.see(self.first.weight.norm())
        optimizer.step(closure=closure)
        self.see(self.first.weight.norm())
        self.first.weight.data = self.first.weight.data.clamp(-0.3, 0.3)

    def on_after_backward(self) -> None:
        self.see(*(p.grad.norm() for p in self.parameters() if p.grad is not None))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.see(self.last.weight.norm())
        optimizer.zero_grad()


class InTheScheduler(Sees):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.see(self.first.weight.norm())
        self.first.weight.data[2] = 0.1
        scheduler.step()


class ByWeights(Sees):
    """A rate that depends on a weight: a function of the user's in a scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + float(self.first.weight.norm())))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LightningsNorm(Sees):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


METHODS = [Clips, AroundTheStep, InTheScheduler, ByWeights, LightningsNorm]


@pytest.mark.parametrize("plan", ["zero3", *(pytest.param(p, marks=pytest.mark.matrix) for p in ("zero2", "tp"))])
@pytest.mark.parametrize("make", METHODS)
def test_parts_are_wholes_in_methods_around_the_step(two_ranks: RankPool, make: type[Quiet], plan: str) -> None:
    _assert_as_one_device(two_ranks, make, plan)


def _callbacks() -> list[L.Callback]:
    return [OfACallback()]


class InValidation(Sees):
    """Lightning runs these hooks in inference mode."""

    def val_dataloader(self) -> Any:
        return InOrder(rows(), ROWS)

    def on_validation_epoch_end(self) -> None:
        self.first.weight.data[3] = 0.25
        self.log("seen", self.first.weight.flatten()[:20].sum() + float(self.last.weight[5].norm()))


def test_parts_in_hooks_of_validation_and_of_callbacks(two_ranks: RankPool) -> None:
    _assert_as_one_device(two_ranks, InValidation, "zero3", callbacks=_callbacks)


class Reshapes(Sees):
    def look(self) -> None:
        self.first.weight.data = torch.zeros(3, 6)


def test_data_of_another_shape_is_an_error(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"test_parts_in_hooks.py:\d+\) assigns .data of shape \[3, 6\]") as error:
        two_ranks.run(_run, Reshapes, PLANS["zero3"], 2)
    assert error.value.type_names == [ConfigurationError.__name__] * 2


def _left_behind(plan: dict[str, Any]) -> bool:
    module = Numbers()
    run(lambda: module, plan, 2, data=lambda: InOrder(rows(), ROWS), max_epochs=1)
    return any(name.startswith("on_") for name in vars(module))


def test_hooks_are_the_users_own_after_the_run(two_ranks: RankPool) -> None:
    assert two_ranks.run(_left_behind, PLANS["zero3"]) == [False, False]


class GoesBackward(Sees):
    """On parts and on whole biases at once, before anybody has looked at gradients."""

    def on_after_backward(self) -> None:
        with torch.enable_grad():
            (self.last.weight.pow(2).sum() + self.last.bias.pow(2).sum() + self.first.bias.mean()).backward()


class GoesBackwardThroughGradients(Sees):
    def on_after_backward(self) -> None:
        with torch.enable_grad():
            loss = sum(p.pow(2).sum() for p in self.parameters())
            penalty = sum(g.sum() for g in torch.autograd.grad(loss, list(self.parameters()), create_graph=True))
            penalty.backward()
        self.see(penalty)


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("make", [GoesBackward, GoesBackwardThroughGradients])
def test_backward_passes_of_hooks_on_parts(two_ranks: RankPool, make: type[Quiet], plan: str) -> None:
    _assert_as_one_device(two_ranks, make, plan)


class CountsTotals(Sees):
    """How often ranks add up for the norm of all gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with CommDebugMode() as counted:
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.log("collectives", float(counted.get_total_counts()))


def _collectives(plan: dict[str, Any]) -> float:
    return run(CountsTotals, plan, 2, data=lambda: InOrder(rows(), ROWS), max_epochs=1).final["collectives"]


def test_the_norm_of_all_gradients_is_one_collective(two_ranks: RankPool) -> None:
    assert two_ranks.run(_collectives, PLANS["zero3"]) == [1.0, 1.0]


class SavesAverages(Sees):
    """A moving average takes the place of the weights in checkpoints."""

    def on_train_start(self) -> None:
        self.average = {key: value.detach().clone() for key, value in self.state_dict().items()}

    def look(self) -> None:
        for key, value in self.state_dict().items():
            self.average[key].lerp_(value, 0.3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {key: value.clone() for key, value in self.average.items()}


def _saved(strategy: Any, devices: int, path: str) -> dict[str, Any]:
    run(SavesAverages, strategy, devices, _saves_to(path), data=lambda: InOrder(rows(), ROWS), max_epochs=1)
    return torch.load(path, weights_only=False)["state_dict"]


class SavesAtTheEnd(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def _saves_to(path: str) -> Any:
    return lambda: [SavesAtTheEnd(path)]


def test_averages_in_parts_are_wholes_in_a_checkpoint(two_ranks: RankPool, tmp_path: Path) -> None:
    ours = two_ranks.run(_saved, PLANS["zero3"], 2, str(tmp_path / "ours.ckpt"))[0]
    theirs = _saved("auto", 1, str(tmp_path / "theirs.ckpt"))
    assert {key: type(value) for key, value in ours.items()} == dict.fromkeys(theirs, torch.Tensor)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6)


class SumsUp(Sees):
    """What is written into whole tensors beside parts is written once."""

    def on_train_start(self) -> None:
        self.sums = [torch.zeros(p.shape) for p in self.parameters()]

    def on_after_backward(self) -> None:
        for total, p in zip(self.sums, self.parameters(), strict=True):
            total.add_(p.grad.square() if p.grad is not None else 0.0)
        self.see(*(total.sum() for total in self.sums))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(torch.clamp(0.1 / norm, max=1.0))


@pytest.mark.parametrize("plan", list(PLANS))
def test_what_hooks_write_into_wholes_is_written_once(two_ranks: RankPool, plan: str) -> None:
    _assert_as_one_device(two_ranks, SumsUp, plan)


class CopiesItself(Sees):
    def on_train_batch_end(self, *_: Any) -> None:
        copied = copy.deepcopy(self)
        assert "on_gpu" not in vars(copied)


def test_a_module_may_copy_itself_in_a_hook(two_ranks: RankPool) -> None:
    results = two_ranks.run(_run, CopiesItself, {}, 2)
    assert_equals_one_device(results, _run(CopiesItself, "auto", 1))


class Normalized(Sees):
    """Batch norm whose statistics are in parts, called in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.BatchNorm1d(10)

    def look(self) -> None:
        with torch.no_grad():
            self.dropout(torch.linspace(-1, 2, 40).view(4, 10))
        self.see(self.dropout.running_mean.sum(), self.dropout.running_var.norm())


class SecondDerivatives(Sees):
    def look(self) -> None:
        x = torch.linspace(-1, 1, 24).view(4, 6)
        with torch.enable_grad():
            loss = self(x).square().mean()
            first = torch.autograd.grad(loss, [self.first.weight, self.last.weight], create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), [self.first.weight, self.last.bias])
        self.see(loss, *(g.sum() for g in (*first, *second)), second[0][7].sum())


class CopiesWithGradients(Sees):
    def on_after_backward(self) -> None:
        copied = copy.deepcopy(self.first)
        self.see(copied.weight.norm(), copy.deepcopy(self.last.weight.grad).norm())


OF_PARTS = {
    "zero3": PLANS["zero3"],
    "tp": {
        "tensor_parallel_size": 2,
        "tensor_parallel_plan": {**PLANS["tp"]["tensor_parallel_plan"], "dropout": "colwise"},
    },
}


def _on(plan: str, make: type[Quiet]) -> Any:
    return _run(make, OF_PARTS[plan] if make is Normalized else PLANS[plan], 2)


@pytest.mark.parametrize("plan", list(OF_PARTS))
@pytest.mark.parametrize("make", [Normalized, SecondDerivatives, CopiesWithGradients])
def test_what_operators_do_besides(two_ranks: RankPool, make: type[Quiet], plan: str) -> None:
    assert_equals_one_device(two_ranks.run(_on, plan, make), _run(make, "auto", 1))


class KeepsTheBest(Sees):
    """Copies on the host are taken on all ranks, and one writes them."""

    def on_train_epoch_end(self) -> None:
        best = {key: value.cpu().clone() for key, value in self.state_dict().items()}
        if self.trainer.is_global_zero:
            torch.save(best, io.BytesIO())
            self.see(*(value.norm() for value in best.values()))
        self.load_state_dict(best)


def test_one_rank_may_write_what_all_have_copied_to_the_host(two_ranks: RankPool) -> None:
    _assert_as_one_device(two_ranks, KeepsTheBest, "zero3")


class LeavesOut(Sees):
    """A frozen teacher and the optimizers' states are in no checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["last.bias"]
        for state in checkpoint["optimizer_states"][0]["state"].values():
            del state["momentum_buffer"]
        checkpoint["optimizer_states"] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["last.bias"] = torch.zeros(7)


def _resumed(strategy: Any, devices: int, path: str) -> Any:
    settings: dict[str, Any] = {"data": lambda: InOrder(rows(), ROWS)}
    run(LeavesOut, strategy, devices, _saves_to(path), max_epochs=1, **settings)
    L.seed_everything(11)
    return fit(LeavesOut(), InOrder(rows(), ROWS), strategy, devices, max_epochs=2, ckpt_path=path)[0]


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_entries_that_a_hook_leaves_out_of_a_checkpoint(two_ranks: RankPool, tmp_path: Path, plan: str) -> None:
    results = two_ranks.run(_resumed, PLANS[plan], 2, str(tmp_path / "ours.ckpt"))
    assert_equals_one_device(results, _resumed("auto", 1, str(tmp_path / "theirs.ckpt")))


class ReadsTheCheckpoint(Sees):
    """Which has values on one rank alone."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["norm"] = float(checkpoint["state_dict"]["last.bias"].norm())


def test_who_reads_a_checkpoint_in_a_hook_is_told_where_its_values_are(two_ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "ours.ckpt")
    with pytest.raises(RankError, match="in on_save_checkpoint read the module and its optimizers"):
        two_ranks.run(_saved_by, ReadsTheCheckpoint, path)


def _saved_by(make: type[Quiet], path: str) -> None:
    run(make, PLANS["zero3"], 2, _saves_to(path), max_epochs=1, data=lambda: InOrder(rows(), ROWS))


class WritesOtherwise(Sees):
    """Into ``out=``, by Python at each element, and into a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 5))

    def look(self) -> None:
        with torch.no_grad():
            torch.full((10, 6), 0.1, out=self.first.weight)
            torch.linspace(0, 1, 7, out=self.last.bias)
            nn.init.eye_(self.last.weight)
        self.first.bias.data.apply_(lambda x: 0.5 * x)
        self.see(nn.utils.parameters_to_vector(self.parameters()).norm(), self.none.flatten().numel())


class WritesIntoALeaf(Sees):
    """Which is an error of torch's, and the user's to catch."""

    def look(self) -> None:
        with torch.enable_grad(), contextlib.suppress(RuntimeError):
            self.first.weight.add_(1)
        with torch.enable_grad(), contextlib.suppress(RuntimeError):
            self.last.weight.add_(torch.ones(7, 10))


class CallsTheClosure(Sees):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        self.see(self.first.weight.norm())
        optimizer.step()


class LateHook(Sees):
    """A callback, and a hook of the module's, that come in the middle."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.callbacks.append(OfACallback())
            self.on_train_epoch_end = self._at_the_end  # type: ignore[method-assign]

    def _at_the_end(self) -> None:
        self.see(self.first.weight.norm())
        self.log("at_the_end", self.seen)


@pytest.mark.parametrize("plan", ["zero3", pytest.param("tp", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("make", [WritesOtherwise, WritesIntoALeaf, CallsTheClosure, LateHook])
def test_what_a_demanding_user_does(two_ranks: RankPool, make: type[Quiet], plan: str) -> None:
    _assert_as_one_device(two_ranks, make, plan)


class KeepsReferences(Sees):
    """Elastic weights: a step is held near what weights were, and far from what they were before."""

    def on_train_start(self) -> None:
        self.kept = {name: p.detach().clone() for name, p in self.named_parameters()}
        self.weights = [p.detach() ** 2 + 0.1 for p in self.parameters()]
        self.mean = sum(p.detach().mean() for p in self.parameters())
        self.counted: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        for (name, p), weight in zip(self.named_parameters(), self.weights, strict=True):
            loss = loss + 0.1 * (weight * (p - self.kept[name]).square()).sum()
        if batch_idx > 1:
            self.log("counted", self.counted.sum())
            self.log("kept", self.kept["first.weight"].norm() + self.kept["last.weight"][:, 3].max())
            self.log("read", float(self.kept["last.bias"].tolist()[4]) + self.mean)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.kept["last.weight"].lerp_(self.last.weight.detach(), 0.5)
        with torch.inference_mode():
            self.counted = self.last.bias.detach().clone() if self.counted is None else self.counted
            self.counted.add_(1)
        if self.global_step == 3:
            self.kept["first.weight"] = self.first.weight.detach().clone()
            self.weights[0].data = self.weights[0] * 2


class KeepsSums(Sees):
    """Numbers that the ranks have still to add up when a hook keeps them, and writes into later; and signs of zeros."""

    def on_train_start(self) -> None:
        self.norm = self.first.weight.detach().norm()
        self.sums = [p.detach().sum() for p in self.parameters()]
        self.zeros = torch.zeros_like(self.last.weight.detach())
        self.only_logged = self.first.weight.detach().norm()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("only_logged", self.only_logged)
        signs = torch.copysign(self.last.weight, self.zeros).sum()
        return super().training_step(batch, batch_idx) + (self.norm + self.sums[1]) * self.last.bias.sum() + signs

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        running = self.first.weight.grad.norm()  # type: ignore[union-attr]
        self.running = running if not hasattr(self, "running") else self.running.mul_(0.9).add_(running, alpha=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.norm.mul_(0.9)
        torch._foreach_add_(self.sums, 0.25)
        self.zeros.neg_()
        self.log("running", self.running)
        self.see(self.norm)


class KeepsALayer(Sees):
    """A frozen copy that is none of the module's, as of a teacher; its own parameters are in parts as well."""

    def on_train_start(self) -> None:
        self.old = [copy.deepcopy(self.first).requires_grad_(False)]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        far = (self.old[0](batch[0]) - self.first(batch[0])).square().mean()
        return super().training_step(batch, batch_idx) + far

    def on_train_batch_end(self, *_: Any) -> None:
        for old, new in zip(self.old[0].parameters(), self.first.parameters(), strict=True):
            old.data.mul_(0.9).add_(new.data, alpha=0.1)


class RegistersALayer(KeepsALayer):
    def on_train_start(self) -> None:
        super().on_train_start()
        self.teacher = self.old[0]


class AveragedTeacher(Sees):
    """Its weights are kept in a dictionary, and stand in for the module's in a call."""

    def on_train_start(self) -> None:
        self.teacher = {name: p.detach().clone() for name, p in self.last.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        taught = torch.func.functional_call(self.last, self.teacher, (torch.tanh(self.first(batch[0])),))
        return super().training_step(batch, batch_idx) + 0.1 * taught.square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for name, p in self.last.named_parameters():
            self.teacher[name].mul_(0.9).add_(p.detach(), alpha=0.1)
        self.see(self.teacher["weight"].norm())


class EvaluatesReferences(InValidation):
    """Distances from earlier weights in validation steps, of references that were taken in training or there."""

    def on_train_start(self) -> None:
        self.kept = nn.utils.parameters_to_vector(self.parameters()).detach().clone()

    def on_validation_epoch_start(self) -> None:
        self.then = [p.detach() * 2 for p in self.parameters()]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        far = (nn.utils.parameters_to_vector(self.parameters()) - self.kept).abs().sum()
        self.log("far", far + sum((p - t).norm() for p, t in zip(self.parameters(), self.then, strict=True)))


class ReferencesByHand(Sees):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_train_start(self) -> None:
        self.kept = [p.detach().clone() for p in self.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        far = sum(((p - k) ** 2).sum() for p, k in zip(self.parameters(), self.kept, strict=True))
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch) + 0.1 * far)
        self.optimizers().step()
        self.log("far", far)


class WritesPastCounters(Sees):
    """Averages of weights by the common idioms; of the last, one rank's part alone changes."""

    def on_train_start(self) -> None:
        self.kept = [p.detach().clone() for p in self.parameters()]
        self.fast = [p.detach().clone() for p in self.parameters()]
        self.rows = self.last.weight.detach().clone()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx) + (self.rows * self.last.weight).sum()
        for p, kept, fast in zip(self.parameters(), self.kept, self.fast, strict=True):
            loss = loss + (p - kept).square().sum() + (p * fast).mean()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        for kept, p in zip(self.kept, self.parameters(), strict=True):
            kept.data.mul_(0.9).add_(p.data, alpha=0.1)
        torch._foreach_lerp_(self.fast, [p.detach() for p in self.parameters()], 0.3)
        self.rows.numpy()[2] *= 0.5


class WritesIntoAReference(KeepsReferences):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.kept["first.bias"].mul_(0.5)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("plan", ["zero3", pytest.param("tp", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "make",
    [
        KeepsReferences,
        WritesPastCounters,
        KeepsSums,
        KeepsALayer,
        AveragedTeacher,
        EvaluatesReferences,
        ReferencesByHand,
    ],
)
def test_references_in_parts_are_wholes_in_steps(two_ranks: RankPool, make: type[Quiet], plan: str) -> None:
    _assert_as_one_device(two_ranks, make, plan)


def test_a_step_that_writes_into_a_reference_in_parts_says_so(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"mul_ writes into a tensor in parts .*test_parts_in_hooks.py:\d+"):
        two_ranks.run(_run, WritesIntoAReference, PLANS["zero3"], 2)


def test_a_layer_in_parts_that_the_plan_does_not_name(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"teacher.weight, teacher.bias came into the module .* in parts"):
        two_ranks.run(_run, RegistersALayer, PLANS["tp"], 2)


class EvaluatesEagerly(InValidation):
    """A validation step that writes into a reference runs eagerly, on whole ones."""

    def on_validation_epoch_start(self) -> None:
        self.kept = [p.detach().clone() for p in self.parameters()]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for kept in self.kept:
            kept.mul_(0.5)
        far = sum((p - kept).square().sum() for p, kept in zip(self.parameters(), self.kept, strict=True))
        self.log("far", far)


@pytest.mark.parametrize("plan", ["zero3", "tp"])
def test_evaluation_that_writes_into_a_reference(two_ranks: RankPool, plan: str) -> None:
    _assert_as_one_device(two_ranks, EvaluatesEagerly, plan)
