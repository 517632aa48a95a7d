"""What users do beside the common path: parameters held, tagged and hooked, optimizers exchanged, gradients read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_spmd import ConfigurationError
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import InOrder, Result, assert_compiled, assert_equals_one_device, fit
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, rows, run

PARTS = {"data_parallel": "zero3"}


def _on_ranks(pool: RankPool, make: Callable[[], L.LightningModule], strategy: Any = "spmd", **settings: Any) -> Any:
    return pool.run(run, make, strategy, 2, **settings)


def _equals_one_device(
    pool: RankPool, make: Callable[[], L.LightningModule], strategy: Any = "spmd", **settings: Any
) -> list[Result]:
    results = _on_ranks(pool, make, strategy, **settings)
    assert_compiled(*results)
    assert_equals_one_device(results, run(make, "auto", data=_in_order, **settings))
    return results


def _in_order() -> InOrder:
    return InOrder(rows(), ROWS)


# ---------------------------------------------------------------------- parameters that are known elsewhere too
class Tagged(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.no_decay = True  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        kinds: dict[bool, list[Tensor]] = {True: [], False: []}
        for parameter in self.parameters():
            kinds[getattr(parameter, "no_decay", False)].append(parameter)
        groups = [{"params": kinds[True], "weight_decay": 0.0}, {"params": kinds[False], "weight_decay": 1.0}]
        return torch.optim.SGD(groups, lr=0.1)


class TaggedAsBuilt(Tagged):
    def __init__(self) -> None:
        L.LightningModule.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "first"):
            torch.manual_seed(5)
            first = nn.Linear(6, 10)
            first.weight.no_decay = True  # type: ignore[assignment]
            self.first, self.dropout, self.last = first, nn.Identity(), nn.Linear(10, 3)


class MadeBefore(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def configure_optimizers(self) -> Any:
        return self.optimizer


class HeldInLists(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.groups = [list(self.first.parameters()), list(self.last.parameters())]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": self.groups[0]}, {"params": self.groups[1], "lr": 0.02}], lr=0.1)


@pytest.mark.parametrize("make", [Tagged, TaggedAsBuilt, MadeBefore, HeldInLists])
def test_parts_are_the_parameters_that_the_user_knew(two_ranks: RankPool, make: type[Quiet]) -> None:
    _equals_one_device(two_ranks, make, PARTS, max_epochs=1)


def _tags_after_fit() -> list[bool]:
    module = Tagged()
    fit(module, _in_order(), PARTS, 2, max_epochs=1)
    return [hasattr(p, "no_decay") for p in module.parameters()]


def test_tags_of_parts_are_there_after_fit(two_ranks: RankPool) -> None:
    assert two_ranks.run(_tags_after_fit) == [[True, False, False, False]] * 2


class HeldDetached(Quiet):
    """On one device it would follow the updates."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.first.weight.detach()

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * (self.held * self.first.weight).sum()


class Hooked(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)


class HookedLate(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)


class Scripted(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.jit.script(self.first)  # type: ignore[assignment]


class KeepsAView(Quiet):
    def loss(self, batch: Any) -> Tensor:
        self.kept = self.first.weight.t()
        return super().loss(batch)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (KeepsAView, ("aten.t.default at ", "test_attacked.py", ".clone()")),
        (HeldDetached, ("the step uses held", "that first.weight had before it was sharded", ".clone()")),
        (Hooked, ("hooks are registered on first.weight", "test_attacked.py")),
        (HookedLate, ("hooks are registered on first.weight", "test_attacked.py")),
        (Scripted, ("first is a torch.jit.ScriptModule", "data_parallel='replicate'")),
    ],
)
def test_what_cannot_follow_parts_is_named(two_ranks: RankPool, make: type[Quiet], words: tuple[str, ...]) -> None:
    with pytest.raises(RankError) as caught:
        _on_ranks(two_ranks, make, PARTS, max_epochs=1)
    assert caught.value.type_names == ["ConfigurationError"] * 2
    assert all(word in str(caught.value) for word in words)


def _average(kind: str) -> Sequence[L.Callback]:
    return [EMAWeightAveraging(decay=0.9) if kind == "ema" else StochasticWeightAveraging(0.01, swa_epoch_start=1)]


def _averaged(kind: str) -> Result:
    return run(Quiet, PARTS, 2, callbacks=lambda: _average(kind))


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_weight_averaging_of_parts_is_refused(two_ranks: RankPool, kind: str) -> None:
    with pytest.raises(RankError, match=r"WeightAveraging, with parameters in parts.*'zero2'") as caught:
        two_ranks.run(_averaged, kind)
    assert caught.value.type_names == ["ConfigurationError"] * 2


class ComputesWithData(torch.utils.data.Dataset[Any]):
    """Which is no hook."""

    def __init__(self, module: Quiet) -> None:
        self.module, self.rows = module, rows()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        with torch.no_grad():
            self.module(torch.zeros(2, 6))
        return self.rows[index]


def _fit_on_own_data() -> Any:
    module = Quiet()
    return run(lambda: module, PARTS, 2, data=lambda: InOrder(ComputesWithData(module), ROWS), max_epochs=1)


def test_a_forward_outside_of_hooks_says_how_to_get_whole_parameters(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="strategy.full_parameters()"):
        two_ranks.run(_fit_on_own_data)


# ---------------------------------------------------------------------- optimizers and gradients
class ChangesOptimizer(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 7 and batch_idx % 2:  # in the middle of an accumulation, with two batches a step
            self.trainer.optimizers = [torch.optim.Adam(self.parameters(), lr=0.01)]


class ChangesOptimizerQuietly(ChangesOptimizer):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Identity()  # type: ignore[assignment]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_another_optimizer_in_mid_run(accumulate: int) -> None:
    result = assert_as_eager(ChangesOptimizer, accumulate_grad_batches=accumulate, max_epochs=4)
    assert any("exp_avg" in name for name in result.optimizer_state)


@pytest.mark.parametrize("plan", ["replicate", "zero2", "zero3"])
def test_another_optimizer_in_mid_run_on_ranks(two_ranks: RankPool, plan: str) -> None:
    _equals_one_device(two_ranks, ChangesOptimizerQuietly, {"data_parallel": plan}, max_epochs=2)


class LossOfAThread(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(self.loss, batch).result()


def test_a_loss_of_another_thread_trains() -> None:
    assert_as_eager(LossOfAThread, "eager", max_epochs=1)


def test_two_fits_in_two_threads() -> None:
    """Each is eager's, though torch's hooks on all modules are the process's."""
    found: dict[str, list[Tensor]] = {}
    for strategy in ("auto", "spmd"):
        modules = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            modules.append(Quiet())
        flags: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        with ThreadPoolExecutor(2) as executor:
            trainers = [L.Trainer(strategy=strategy, accelerator="cpu", max_epochs=2, **flags) for _ in modules]
            for done in [executor.submit(t.fit, m, _in_order()) for t, m in zip(trainers, modules, strict=True)]:
                done.result()
        found[strategy] = [p.detach() for module in modules for p in module.parameters()]
    assert all(map(torch.equal, found["auto"], found["spmd"]))


class Sparse(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.never, self.last = (
            nn.Embedding(9, 4, sparse=True),
            nn.Embedding(3, 4, sparse=True),
            nn.Linear(4, 3),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kinds = batch[0][:, 0].abs().mul(3).long().clamp(max=8)
        return F.cross_entropy(self.last(self.table(kinds)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sparse_gradients_are_averaged_over_ranks(two_ranks: RankPool) -> None:
    results = _on_ranks(two_ranks, Sparse, max_epochs=1)
    reference = run(Sparse, "auto", data=_in_order, max_epochs=1)
    assert all(result.mode == "eager" for result in results)
    for name, value in reference.weights.items():
        torch.testing.assert_close(results[0].weights[name], value, rtol=1e-4, atol=1e-5)
        assert results[0].weights[name].equal(results[1].weights[name])


def _sparse_in_parts(devices: int) -> Result:
    return run(Sparse, {"data_parallel": "zero2"}, devices, data=_in_order, max_epochs=1, max_steps=2)


def test_sparse_gradients_of_single_steps_update_state_in_parts(two_ranks: RankPool) -> None:
    reference = run(Sparse, "auto", data=_in_order, max_epochs=1, max_steps=2)
    for result in two_ranks.run(_sparse_in_parts, 2):
        for name, value in reference.weights.items():
            torch.testing.assert_close(result.weights[name], value, rtol=1e-4, atol=1e-5)


class SparseByHand(Sparse):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_sparse_gradients_by_hand_are_named() -> None:
    ours = run(SparseByHand, max_epochs=1)
    assert any("backward makes a sparse gradient (torch.sparse_coo), which" in text for text in ours.warnings)


# ---------------------------------------------------------------------- modules
class Lazy(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LazyLinear(3)


def test_lazy_parameters_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"last\.weight, last\.bias has no shape yet.*configure_model"):
        run(Lazy)


def test_a_scripted_submodule_trains_eagerly() -> None:
    assert_as_eager(Scripted, "eager", max_epochs=1)


# ---------------------------------------------------------------------- backward passes inside of backward passes
class Reentrant(Quiet):
    """Only the data asks for gradients below the checkpoint."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = checkpoint(lambda t: torch.tanh(self.first(t)), x.clone().requires_grad_(), use_reentrant=True)
        return F.cross_entropy(self.last(hidden), y)


class ReentrantAboveFrozen(Reentrant):
    """As a frozen embedding whose output is told to ask for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(6, 6).requires_grad_(False)
        self.table.register_forward_hook(lambda _, __, output: output.requires_grad_())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = checkpoint(lambda t: torch.tanh(self.first(t)), self.table(x), use_reentrant=True)
        return F.cross_entropy(self.last(hidden), y)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class OwnFunction(Quiet):
    """A function of one's own that parameters are behind is part of the graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden: Any = Doubled.apply(self.first(x))
        return F.cross_entropy(self.last(hidden), y)


@pytest.mark.parametrize("make", [Reentrant, ReentrantAboveFrozen])
def test_a_backward_that_only_data_is_behind_is_not_left_out(make: type[Quiet]) -> None:
    assert_compiled(assert_as_eager(make))


def test_a_function_of_ones_own_stays_in_the_graph() -> None:
    assert_compiled(assert_as_eager(OwnFunction))


# ---------------------------------------------------------------------- what autograd has saved below a transform
class Transformed(Quiet):
    """torch.func differentiates with respect to the batch, and the loss with respect to the weights."""

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        weights = dict(self.named_parameters())
        slopes = vmap(jacrev(lambda row: functional_call(self, weights, (row,))))(x)
        _, moved = jvp(lambda rows: functional_call(self, weights, (rows,)), (x,), (torch.ones_like(x),))
        return super().loss(batch) + 0.1 * slopes.square().mean() + 0.1 * moved.square().mean()


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_transforms_keep_no_views_of_parts(two_ranks: RankPool, plan: str) -> None:
    _equals_one_device(two_ranks, Transformed, {"data_parallel": plan}, max_epochs=1)


# ---------------------------------------------------------------------- views of buffers in steps that end eagerly
class KeepsNewest(Quiet):
    """A queue of features, of which a view is kept; each step takes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self(batch[0])
        for _ in range(self.global_step):
            hidden = hidden.tanh()
        loss = F.cross_entropy(hidden, batch[1]) + (hidden - self.queue.mean()).square().mean()
        self.queue.add_(hidden.detach().mean(0))
        self.newest = self.queue[1:]
        self.log("newest", self.newest.sum())
        return loss


def test_a_view_of_a_written_buffer_is_kept_where_a_step_takes_a_way_that_none_took() -> None:
    assert_as_eager(KeepsNewest, max_epochs=2)
