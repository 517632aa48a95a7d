"""Optimizers that are none of torch's own, and clipping of one's own: Python behind ``training_step`` that runs."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_spmd import SPMDStrategy
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.strategy.support.detectors import Context
from lightning_spmd.strategy.support.feature import Mode
from lightning_spmd.strategy.support.matrix import classify
from tests.helpers import by_hand
from tests.helpers.modules import Lion
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import InOrder, Result
from tests.strategy.by_hand.test_followed_by_hand import Seen
from tests.strategy.hooks.test_overlap import SMALL
from tests.strategy.hooks.test_pauses import Deep, Six
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, rows, run

RUNS: list[int] = []


class Slow(torch.optim.SGD):
    """Lookahead: every third step the weights go half the way back; its counter and slow weights are its own."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.count, self.slow = 0, [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.count += 1
        RUNS.append(self.count)
        if self.count % 3 == 0:
            for p, slow in zip((p for g in self.param_groups for p in g["params"]), self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))
        return loss


class Sharp(torch.optim.Optimizer):
    """SAM as users write it: two forward and backward passes a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05, "lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        again = torch.enable_grad()(closure)
        loss = again()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        moved = [p.grad * (0.05 / (norm + 1e-12)) for p in params]
        for p, e in zip(params, moved, strict=True):
            p.add_(e)
        again()
        for p, e in zip(params, moved, strict=True):
            p.sub_(e).sub_(p.grad, alpha=0.1)
        return loss


class SharpIfItCan(Sharp):
    """Without a closure its step is that of SGD, silently."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            return super().step(closure)
        for p in (p for g in self.param_groups for p in g["params"]):
            p.sub_(p.grad, alpha=0.1)
        return None


class Ahead(torch.optim.SGD):
    """Gradients at the weights half a step ahead."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for g in self.param_groups for p in g["params"]]
        torch._foreach_mul_(params, 0.99)  # pyright: ignore[reportPrivateImportUsage]
        loss = torch.enable_grad()(closure)()
        for p in params:
            p.sub_(p.grad, alpha=0.1)
        return loss


class Polyak(torch.optim.Optimizer):
    """The loss is in its rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        loss = torch.enable_grad()(closure)()
        params = [p for g in self.param_groups for p in g["params"]]
        squares = torch.stack([p.grad.square().sum() for p in params]).sum()
        for p in params:
            p.sub_(p.grad * torch.clamp(loss / (squares + 1e-3), max=0.1))
        return loss


class Wrapper(torch.optim.Optimizer):
    """Shows by a property the groups of the optimizer that it wraps, and every third step averages their weights."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self.inner, self.defaults, self.state, self.count = inner, inner.defaults, defaultdict(dict), 0

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", p.clone())
            if self.count % 3 == 0:
                p.copy_(slow.lerp_(p, 0.5))
        return loss


def _of(kind: Any, base: type = Net) -> type[Net]:
    class Own(base):  # type: ignore[misc,valid-type]
        def configure_optimizers(self) -> Any:
            return kind(self.parameters())

    return Own


KINDS: dict[str, Any] = {
    "lookahead": lambda p: Slow(p, lr=0.1, momentum=0.9),
    "sam": Sharp,
    "sam if it can": SharpIfItCan,
    "ahead": lambda p: Ahead(p, lr=0.1),
    "wrapper": lambda p: Wrapper(torch.optim.Adam(p, lr=0.01)),
    "polyak": Polyak,
    "lion": Lion,
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", KINDS)
def test_an_optimizer_of_the_users_own_runs_in_every_step(name: str) -> None:
    RUNS.clear()
    ours = assert_as_eager(_of(KINDS[name]), mode="split")
    assert name != "lookahead" or RUNS[-len(ours.losses) :] == list(range(1, len(ours.losses) + 1))


@pytest.mark.parametrize("flags", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}], ids=str)
def test_what_comes_before_its_step_is_eagers(flags: dict[str, Any]) -> None:
    assert_as_eager(_of(KINDS["lookahead"]), mode="split", **flags)


def test_a_closure_is_not_called_in_parts() -> None:
    trainer = L.Trainer(strategy="spmd", accelerator="cpu", devices=1, logger=False)
    module = _of(KINDS["lbfgs"])()
    mode, findings = classify(Context(trainer, module, [module.configure_optimizers()], in_graphs=True))
    assert mode is Mode.EAGER
    assert "evaluates the closure itself" in str(findings[0])


def _on_ranks(name: str, devices: int, **flags: Any) -> Result:
    strategy = "spmd" if devices > 1 else "auto"
    return run(_of(KINDS[name], Quiet), strategy, devices, data=lambda: InOrder(rows(), ROWS), max_epochs=2, **flags)


@pytest.mark.parametrize("name", ["lookahead", "sam", "lbfgs"])
def test_on_two_ranks_it_is_one_devices(two_ranks: RankPool, name: str) -> None:
    theirs = _on_ranks(name, 1)
    for ours in two_ranks.run(_on_ranks, name, 2):
        assert ours.mode == "split"
        until = 5 if name == "lbfgs" else 12  # its line search amplifies what rounding makes of sums
        assert ours.losses[:until] == pytest.approx(theirs.losses[:until], rel=1e-4)
        assert name == "lbfgs" or all(
            torch.allclose(ours.weights[k], v, rtol=1e-4, atol=1e-6) for k, v in theirs.weights.items()
        )


class ReplacedLater(Net):
    """From the second epoch on the step of its optimizer is a function of the user's."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            optimizer: Any = self.trainer.optimizers[0]

            def step(closure: Any = None) -> Any:
                with torch.no_grad():
                    loss = None if closure is None else torch.enable_grad()(closure)()
                    for p in self.parameters():
                        p.sub_(0 if p.grad is None else p.grad, alpha=0.01)
                return loss

            optimizer.step = step


def test_a_step_that_is_replaced_in_mid_run_runs() -> None:
    assert_as_eager(ReplacedLater, mode="split")


class Scheduled(Net):
    """Its optimizer's ``step`` counts for a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.runs += 1
        COUNTS.append(self.runs)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Hooked(Scheduled):
    def on_after_backward(self) -> None:
        gradient = self.first.weight.grad
        assert gradient is not None
        self.log("norm", gradient.norm())


class Clips(Scheduled):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05 / (1 + self.runs % 3), gradient_clip_algorithm="norm")


COUNTS: list[int] = []


@pytest.mark.parametrize(("make", "mode"), [(Scheduled, "compiled"), (Hooked, "split"), (Clips, "split")])
def test_python_runs_once_in_each_step(make: type[Net], mode: str) -> None:
    COUNTS.clear()
    ours = assert_as_eager(make, mode=mode)
    assert list(range(1, len(ours.losses) + 1)) * 2 == COUNTS


def _paused(does: str) -> tuple[Any, list[int]]:
    COUNTS.clear()
    module, hook = CountedDeep(), Six(does)
    trainer: Any = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, callbacks=[hook], enable_model_summary=False,
        strategy=SPMDStrategy(overlap_iterations=True, bucket_size_mb=SMALL),
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    data: Any = torch.randn(2 * 16, 32, generator=torch.Generator().manual_seed(4))
    trainer.fit(module, DataLoader(data, batch_size=2))
    return trainer.strategy.mode.value, COUNTS


class CountedDeep(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        COUNTS.append(batch_idx)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("does", "mode"), [("read", "compiled"), ("replace", "split")])
def test_python_runs_once_where_graphs_pause(two_ranks: RankPool, does: str, mode: str) -> None:
    for found, counts in two_ranks.run(_paused, does):
        assert (found, counts) == (mode, list(range(8)))


# ---------------------------------------------------------------------- by hand
class ByHand(Seen):
    """Its optimizer's step is followed as the rest of the step is."""

    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        self.update(batch, optimizer)

    def configure_optimizers(self) -> Any:
        return Lion(self.net.parameters(), lr=1e-3)


class SlowByHand(ByHand):
    def configure_optimizers(self) -> Any:
        return Slow(self.net.parameters(), lr=0.1, momentum=0.9)


class WrapperByHand(ByHand):
    def configure_optimizers(self) -> Any:
        return Wrapper(torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9))


class SharpByHand(ByHand):
    def act(self, batch: Any, batch_idx: int, optimizer: Any) -> Any:
        def closure() -> Any:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return Sharp(self.net.parameters())


@pytest.mark.parametrize("make", [ByHand, SlowByHand, WrapperByHand, SharpByHand])
def test_by_hand_it_is_followed(make: Any) -> None:
    theirs, ours = (by_hand.fit(make, strategy, batches=12) for strategy in ("auto", "spmd"))
    by_hand.assert_bitwise(by_hand.state_of(*ours), by_hand.state_of(*theirs))
    assert (ours[1].strategy.mode, ours[0].runs) == ("compiled", theirs[0].runs)
    assert 0 < ours[1].strategy.captures <= 3


@pytest.mark.parametrize(("make", "plan"), [(SlowByHand, "replicate"), (ByHand, "zero2")])
def test_by_hand_on_two_ranks(two_ranks: RankPool, make: Any, plan: str) -> None:
    wanted = by_hand.state_of(*by_hand.fit(make, "auto", precision="64-true"))
    for state, mode, captures in two_ranks.run(by_hand.fit_on_ranks, make, {"data_parallel": plan}, 2):
        assert (mode, captures > 0) == ("compiled", True)
        by_hand.assert_close(state["weights"], wanted["weights"])
        by_hand.assert_close(state["optimizers"], wanted["optimizers"])


# ---------------------------------------------------------------------- in parts
class Scaled(torch.optim.Optimizer):
    """A rate that is an attribute, which somebody changes between steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.scale = [1.0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * self.scale[0], alpha=self.param_groups[0]["lr"])
        return loss


class Rescaled(Quiet):
    def configure_optimizers(self) -> Any:
        return Scaled(self.parameters())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        optimizer.scale[0] = 1.0 if self.global_step < 9 else 0.5


def _in_parts(make: Any, devices: int) -> Result:
    strategy: Any = {"data_parallel": "zero2"} if devices > 1 else "auto"
    return run(make, strategy, devices, data=lambda: InOrder(rows(), ROWS), max_epochs=2)


def test_an_attribute_of_an_optimizer_in_parts_is_seen(two_ranks: RankPool) -> None:
    theirs = _in_parts(Rescaled, 1)
    for ours in two_ranks.run(_in_parts, Rescaled, 2):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
        assert ours.mode == "compiled"


class Counted(Quiet):
    def configure_optimizers(self) -> Any:
        return Slow(self.parameters(), lr=0.1)


def test_an_optimizer_in_parts_that_counts_by_itself_is_an_error(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"Slow.step \(.*\) changes count of its optimizer"):
        two_ranks.run(_in_parts, Counted, 2)


class InBF16(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch[0].bfloat16(), batch[1]), batch_idx)


@pytest.mark.parametrize("name", ["sam", "sam if it can", "ahead"])
def test_gradients_at_other_weights_are_refused_where_the_step_is_in_a_graph(name: str) -> None:
    strategy = SPMDStrategy(bf16_updates="master")
    with pytest.raises(ConfigurationError, match=r"\w+\.step \(.*\) evaluates its closure again, .*manual"):
        run(_of(KINDS[name], InBF16), strategy, precision="bf16-true")


class SharpIfInParts(Quiet):
    def configure_optimizers(self) -> Any:
        return SharpIfItCan(self.parameters())


class PolyakInParts(Quiet):
    def configure_optimizers(self) -> Any:
        return Polyak(self.parameters())


def test_gradients_at_other_weights_are_refused_in_parts(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"SharpIfItCan\.step .*evaluates its closure again"):
        two_ranks.run(_in_parts, SharpIfInParts, 2)


def test_a_closure_returns_the_loss_in_parts(two_ranks: RankPool) -> None:
    theirs = _in_parts(PolyakInParts, 1)
    for ours in two_ranks.run(_in_parts, PolyakInParts, 2):
        assert ours.mode == "compiled"
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)


def _shared(make: Any, devices: int) -> Result:
    strategy: Any = {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"} if devices > 1 else "auto"
    return run(make, strategy, devices, data=lambda: InOrder(rows(), ROWS), max_epochs=1)


class LionByHand(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return Lion(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("make", [PolyakInParts, LionByHand])
def test_layers_that_are_shared_in_the_first_step_are_updated_in_it(two_ranks: RankPool, make: Any) -> None:
    theirs = _shared(make, 1)
    for ours in two_ranks.run(_shared, make, 2):
        assert ours.mode == "compiled"
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)


class Backward(Quiet):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def test_no_layers_are_shared_in_eager_training(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"Backward.backward is overridden.* use tensor_parallel_size=1"):
        two_ranks.run(_shared, Backward, 2)


class SharpIfByHand(SharpByHand):
    def configure_optimizers(self) -> Any:
        return SharpIfItCan(self.net.parameters())


class PolyakByHand(SharpByHand):
    def configure_optimizers(self) -> Any:
        return Polyak(self.net.parameters())


def test_by_hand_gradients_at_other_weights_are_refused_in_parts(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"SharpIfItCan\.step .*evaluates its closure again"):
        two_ranks.run(by_hand.fit_on_ranks, SharpIfByHand, {"data_parallel": "zero2"}, 2)


def test_by_hand_a_closure_returns_the_loss_in_parts(two_ranks: RankPool) -> None:
    wanted = by_hand.state_of(*by_hand.fit(PolyakByHand, "auto", precision="64-true"))
    for state, mode, captures in two_ranks.run(by_hand.fit_on_ranks, PolyakByHand, {"data_parallel": "zero2"}, 2):
        assert (mode, captures > 0) == ("compiled", True)
        by_hand.assert_close(state["weights"], wanted["weights"])


class Converges(SharpByHand):
    """Each step has another number of evaluations, hundreds of calls each."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.net.parameters(), lr=0.1)


def test_by_hand_what_evaluates_until_it_converges_runs_eagerly() -> None:
    theirs, ours = (by_hand.fit(Converges, strategy, batches=12) for strategy in ("auto", "spmd"))
    by_hand.assert_bitwise(by_hand.state_of(*ours), by_hand.state_of(*theirs))
    assert ours[1].strategy.captures == 0
