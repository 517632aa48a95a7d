"""Modules under sharding plans: built in parts, seen whole where code asks, evaluated, with layers that keep lists."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_spmd import SPMDStrategy
from lightning_spmd.parallel import staged_init
from tests.helpers.modules import SmallModule, samples
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import (
    QUIET,
    InOrder,
    TrainingCase,
    deviation,
    fit,
    whole,
)


class BuiltInHook(SmallModule):
    """A model that exists only after ``configure_model``; initialised twice, as many language models are."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        self.net = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Sequential(nn.Linear(30, 30), nn.Tanh()))
        self.head = nn.Linear(30, 5)
        self.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)
            module.bias.data.zero_()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.net(batch["x"])), batch["y"])
        self.log("loss", loss)
        return loss


class WritesThroughAView(BuiltInHook):
    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight[0].zero_()


def _train(kind: type[SmallModule], strategy: Any, devices: int, meta: bool = False) -> tuple[list[float], Any, bool]:
    """Losses, weights, and whether every weight was in parts before the Trainer set anything up."""
    in_parts: list[bool] = []

    class Look(L.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            look = trainer.strategy.setup
            trainer.strategy.setup = lambda t: (in_parts.extend(map(_in_parts, pl_module.parameters())), look(t))

    L.seed_everything(5)
    module = kind(eps=1e-5)
    if meta:
        with torch.device("meta"):
            module.configure_model()
    data = InOrder(samples("mlp", 64), 16)
    result, _ = fit(module, data, strategy, devices, [Look()], max_epochs=2)
    return result.losses, result.weights, all(in_parts)


def _in_parts(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor)


@pytest.mark.parametrize("plan", ["replicate", "zero2", "zero3"])
def test_configure_model_gives_the_values_of_one_device(two_ranks: RankPool, plan: str) -> None:
    losses, weights, _ = _train(BuiltInHook, "auto", 1)
    for ours, theirs, staged in two_ranks.run(_train, BuiltInHook, {"data_parallel": plan}, 2):
        assert staged == (plan == "zero3")
        assert ours == pytest.approx(losses, rel=1e-5)
        assert all(torch.allclose(theirs[k], v, atol=1e-5) for k, v in weights.items())


def test_a_lost_write_is_refused(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="view of a parameter that is already sharded"):
        two_ranks.run(_train, WritesThroughAView, {"data_parallel": "zero3"}, 2)


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_parameters_on_the_meta_device_get_values(two_ranks: RankPool, plan: str) -> None:
    results = two_ranks.run(_train, BuiltInHook, {"data_parallel": plan}, 2, True)
    assert results[0][0][-1] < results[0][0][0]
    assert all(torch.equal(results[0][1][k], v) for k, v in results[1][1].items())


def test_a_module_that_cannot_initialise_itself_is_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    with pytest.raises(Exception, match=r"'1' \(Scale\)"):
        staged_init.materialize(model, torch.device("cpu"), None)


def _largest_allocation(devices: int) -> tuple[int, int]:
    """Elements of all parameters, and the most that this rank held in parameters while building."""
    L.seed_everything(1)
    trainer = L.Trainer(strategy=SPMDStrategy(data_parallel="zero3"), devices=devices, max_epochs=1, **QUIET)
    most = 0

    class Deep(BuiltInHook):
        def configure_model(self) -> None:
            nonlocal most
            self.layers = nn.ModuleList()
            for _ in range(20):
                self.layers.append(nn.Linear(50, 50))
                held = [p.to_local() if isinstance(p, DTensor) else p for p in self.layers.parameters()]
                most = max(most, sum(p.untyped_storage().nbytes() // 4 for p in held))
            self.net, self.head = nn.Linear(12, 30), nn.Linear(30, 5)

    module = Deep()
    trainer.fit(module, InOrder(samples("mlp", 16), 16))
    return sum(p.numel() for p in module.parameters()), most


def test_a_rank_never_holds_the_whole_model(two_ranks: RankPool) -> None:
    for total, most in two_ranks.run(_largest_allocation, 2):
        assert most <= total / 2 + 50 * 51


class Recurrent(SmallModule):
    """A recurrent layer keeps a list of its weights beside its parameters."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.rnn, self.head = nn.LSTM(6, 7, batch_first=True), nn.Linear(7, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out, _ = self.rnn(batch["x"].unflatten(1, (2, 6)))
        return nn.functional.cross_entropy(self.head(out[:, -1]), batch["y"])


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_recurrent_layers(two_ranks: RankPool, plan: str) -> None:
    losses = _train(Recurrent, "auto", 1)[0]
    for ours, _, _ in two_ranks.run(_train, Recurrent, {"data_parallel": plan}, 2):
        assert ours == pytest.approx(losses, rel=1e-5)


class Solves(SmallModule):
    """The last step's solution has a history in autograd, which holds the matrix; its columns lie one by one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.head = nn.Linear(12, 5)
        self.mixing = nn.Parameter((torch.randn(12, 12) + 4 * torch.eye(12)).t())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.linalg.solve(self.mixing, batch["x"].mT).mT
        return nn.functional.cross_entropy(self.head(x), batch["y"]) - 0.1 * torch.linalg.slogdet(self.mixing)[1]


def test_solutions_with_matrices_in_parts(two_ranks: RankPool) -> None:
    losses = _train(Solves, "auto", 1)[0]
    for ours, _, _ in two_ranks.run(_train, Solves, {"data_parallel": "zero3"}, 2):
        assert ours == pytest.approx(losses, rel=1e-5)


def _evaluate(plan: str, devices: int) -> list[Any]:
    case = TrainingCase("gpt_tied", "adamw", dropout=0.0, eps=1e-5)
    module = case.module()
    data = InOrder(samples(case.model, 64), 16)
    strategy: Any = "auto" if devices == 1 else SPMDStrategy(data_parallel=plan)  # type: ignore[arg-type]
    trainer = L.Trainer(strategy=strategy, devices=devices, **{**QUIET, "max_epochs": 1})
    trainer.fit(module, data)
    fitted = float(trainer.callback_metrics["val_loss"])
    tested = trainer.test(module, data, verbose=False)[0]["val_loss"]
    predicted = torch.cat(trainer.predict(module, data))  # type: ignore[arg-type]
    alone = predicted
    if devices > 1:
        with trainer.strategy.full_parameters():  # type: ignore[attr-defined]
            tokens = next(iter(data.predict_dataloader()))[0]
            alone = module(tokens).argmax(-1)
    return [fitted, tested, predicted, alone]


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_evaluation_under_every_plan(two_ranks: RankPool, plan: str) -> None:
    fitted, tested, predicted, _ = _evaluate("", 1)
    for rank, (f, t, p, alone) in enumerate(two_ranks.run(_evaluate, plan, 2)):
        # where parameters are whole, each rank evaluates its own rows, and logs its own mean unless told to sync
        tolerance = 1e-5 if plan == "zero3" else 0.1
        assert f == pytest.approx(fitted, rel=tolerance)
        assert t == pytest.approx(tested, rel=tolerance)
        assert torch.equal(p, predicted[rank::2])
        assert torch.equal(alone, p[: len(alone)])


def _hooks_see_gradients(plan: str, model: str, devices: int) -> Any:
    class Norms(L.Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            grads = [whole(p.grad) for p in pl_module.parameters()]
            self.seen.append(float(torch.stack([g.norm() for g in grads]).norm()))

    norms = Norms()
    case = TrainingCase(model, "adamw", "clip_norm", batches=4, dropout=0.0, eps=1e-5)
    strategy: Any = "auto" if devices == 1 else {"data_parallel": plan}
    result, _ = fit(
        case.module(),
        InOrder(samples(case.model, 96), 16),
        strategy,
        devices,
        [norms],
        **{**case.flags()} | {"max_steps": 4},
    )
    return norms.seen, result


@pytest.mark.parametrize(("plan", "model"), [("zero2", "conv"), ("zero3", "gpt_tied")])
def test_hooks_see_gradients(two_ranks: RankPool, plan: str, model: str) -> None:
    """Split mode: ``p.grad`` is there, sharded where the parameter is, clipped by Lightning, applied in a graph."""
    norms, reference = _hooks_see_gradients("", model, 1)
    for seen, result in two_ranks.run(_hooks_see_gradients, plan, model, 2):
        assert result.mode == "split"
        assert seen == pytest.approx(norms, rel=1e-4)
        assert deviation(result, reference).weights <= 1e-4


class Normalizes(L.Callback):
    """Writes into parameters between steps, in ways that a tensor's version shows and does not show."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        around = getattr(trainer.strategy, "full_parameters", contextlib.nullcontext)
        with around(), torch.no_grad():
            first, *others = pl_module.parameters()
            first.data.div_(first.norm().clamp(min=1.0))
            for other in others:
                other.mul_(0.99)


def _normalized(settings: dict[str, Any] | None, devices: int) -> list[float]:
    case = TrainingCase("gpt_tied", "adamw", batches=6, dropout=0.0, eps=1e-5)
    strategy: Any = "auto" if settings is None else settings
    data = InOrder(samples(case.model, 96), 16)
    result, _ = fit(case.module(), data, strategy, devices, [Normalizes()], **case.flags())
    return result.losses


@pytest.mark.parametrize(
    "settings",
    [{"data_parallel": "zero3"}, {"data_parallel": "zero3", "overlap_iterations": True, "bucket_size_mb": 0.0005}],
    ids=["zero3", "overlaps"],
)
def test_what_is_written_into_full_parameters_stays(two_ranks: RankPool, settings: dict[str, Any]) -> None:
    theirs = _normalized(None, 1)
    for ours in two_ranks.run(_normalized, settings, 2):
        assert ours == pytest.approx(theirs, rel=1e-5)
