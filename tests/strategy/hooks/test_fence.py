"""Hooks between batches, with iterations that overlap: whoever looks sees what a run without overlap has there."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_spmd import SPMDStrategy
from lightning_spmd import _private_api as private
from lightning_spmd.strategy.user_hooks.fence import Fence, FencedHooks
from lightning_spmd.strategy.user_hooks.overlap import data_that_knows
from tests.helpers.modules import samples
from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, Result, TrainingCase, assert_bitwise, fit
from tests.strategy.hooks.test_overlap import SMALL, deferring

HOOKS = ("on_train_batch_start", "on_train_batch_end")


# ---------------------------------------------------------------------- ways to look
class Pending:
    """A layer with an update that is still to be done: all of its values become 1."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 4)
        self.other = torch.zeros(4, 4)
        self.alias = self.net.weight.detach()
        self.times = 0
        self.targets: list[Any] = [self.net.weight, 0.5, [torch.ones(1)]]
        self.fence = Fence(lambda: self.targets, lambda: self.net.weight is self.weight, self.finish)
        self.weight = self.net.weight

    def finish(self) -> None:
        self.times += 1
        self.weight.data.fill_(1.0)
        self.targets = []


LOOKS: dict[str, Callable[[Pending], Any]] = {
    "an operator": lambda p: p.net.weight + 0,
    "every parameter": lambda p: [q.norm() for q in p.net.parameters()],
    "state_dict": lambda p: p.net.state_dict()["weight"].clone(),
    ".data": lambda p: p.net.weight.data.clone(),
    ".numpy()": lambda p: p.net.weight.detach().numpy().copy(),
    ".data_ptr()": lambda p: p.net.weight.data_ptr(),
    ".tolist()": lambda p: p.net.weight.tolist(),
    "an alias from before": lambda p: p.alias.sum(),
    "a list operator": lambda p: torch._foreach_norm(list(p.net.parameters())),
    "a write": lambda p: p.net.weight.data.mul_(1),
    "other data": lambda p: setattr(p.net.weight, "data", torch.full((4, 4), 2.0)),
    "deepcopy": lambda p: copy.deepcopy(p.net),
    "torch.save": lambda p: torch.save(p.net.weight, io.BytesIO()),
    "pickle": lambda p: pickle.dumps(p.net.weight),
    "repr": lambda p: repr(p.net.weight),
    "float": lambda p: float(p.net.weight[0, 0]),
    "forward": lambda p: p.net(torch.zeros(1, 4)),
    "dlpack": lambda p: torch.utils.dlpack.to_dlpack(p.net.weight.detach()),
    "as source of a copy": lambda p: p.other.copy_(p.net.weight),
    "in no_grad": lambda p: torch.no_grad()(lambda: p.net.weight * 2)(),
    "in a dictionary": lambda p: torch.utils._pytree.tree_map(torch.sum, {"a": [p.net.weight]}),
}


@pytest.mark.parametrize("way", LOOKS)
def test_whoever_looks_finds_it_done(way: str) -> None:
    pending = Pending()
    pending.fence.call(LOOKS[way], (pending,), {})
    assert pending.times == 1
    expected = 2.0 if way == "other data" else 1.0
    assert torch.equal(pending.net.weight.detach(), torch.full((4, 4), expected))


NO_LOOKS: dict[str, Callable[[Pending], Any]] = {
    "nothing": lambda p: None,
    "shapes": lambda p: (p.net.weight.shape, p.alias.size(0), p.net.weight.numel(), p.net.weight.dtype, len(p.alias)),
    "gradients": lambda p: [q.grad for q in p.net.parameters()],
    "names": lambda p: {q: n for n, q in p.net.named_parameters()},
    "something else": lambda p: (p.other + 1, p.net.bias.sum(), torch.randn(3)),
}


@pytest.mark.parametrize("way", NO_LOOKS)
def test_who_does_not_look_leaves_it_for_later(way: str) -> None:
    pending = Pending()
    pending.fence.call(NO_LOOKS[way], (pending,), {})
    assert pending.times == 0


def test_a_replaced_parameter_is_not_the_one_that_was_to_be_updated() -> None:
    pending = Pending()
    new = nn.Parameter(torch.zeros(4, 4))
    pending.fence.call(lambda: setattr(pending.net, "weight", new), (), {})
    assert pending.times == 1
    assert (float(new.sum()), float(pending.weight.sum())) == (0.0, 16.0)


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def hook(self, step: int = 1) -> int:
        self.calls += step
        return self.calls


def test_hooks_are_themselves_again_and_copies_have_their_own() -> None:
    pending, owner, plain, fenced = Pending(), Owner(), Owner(), FencedHooks()
    plain.hook = own = lambda: 7  # type: ignore[method-assign, assignment]
    for each in (owner, plain):
        fenced.put(pending.fence.call, each, "hook")
    twin, unpickled = copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))
    assert [o.hook(2) for o in (owner, twin, unpickled)] == [2, 2, 2]
    assert [o.calls for o in (owner, twin, unpickled)] == [2, 2, 2]
    assert plain.hook() == 7
    fenced.take_away()
    assert "hook" not in vars(owner)
    assert plain.hook is own


def test_fences_around_one_hook_are_both_there() -> None:
    """And Lightning, which looks through one wrapper, sees the user's method."""

    class Notes:
        def __init__(self) -> None:
            self.calls = 0

        def call(self, hook: Any, args: Any, kwargs: Any) -> Any:
            self.calls += 1
            return hook(*args, **kwargs)

    owner, inner, outer, inner_hooks, outer_hooks = Owner(), Notes(), Notes(), FencedHooks(), FencedHooks()
    inner_hooks.put(inner.call, owner, "hook")
    outer_hooks.put(outer.call, owner, "hook")
    assert owner.hook(2) == 2
    assert (inner.calls, outer.calls) == (1, 1)
    assert owner.hook.__wrapped__.__code__ is Owner.hook.__code__  # type: ignore[attr-defined]
    outer_hooks.take_away()
    assert owner.hook(3) == 5
    assert (inner.calls, outer.calls) == (2, 1)
    inner_hooks.take_away()
    assert "hook" not in vars(owner)


# ---------------------------------------------------------------------- real runs
class Hooked(L.Callback):
    """A callback's hooks between batches; in those named it takes the norm of weights, on every rank or the first."""

    def __init__(self, reads: tuple[str, ...] = (), first_only: bool = False, every: int = 1) -> None:
        self.reads, self.first_only, self.every = reads, first_only, every
        self.seen: list[tuple[str, int, float]] = []

    def look(self, hook: str, trainer: Any, module: Any) -> None:
        due = trainer.fit_loop.batch_idx % self.every == 0
        if hook in self.reads and due and (trainer.is_global_zero or not self.first_only):
            self.seen.append((hook, trainer.global_step, sum(float(p.norm()) for p in module.parameters())))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.look("on_train_batch_start", trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.look("on_train_batch_end", trainer, pl_module)


def trained(overlap: Any, callback: Hooked, **flags: Any) -> tuple[Result, list[Any], int]:
    """What came of it, what the callback saw, and how many graphs deferred work."""
    case = TrainingCase("gpt", "adamw", scheduler="one_cycle")
    data = InOrder(samples("gpt", 16 * 8), 16)
    strategy = {"overlap_iterations": overlap, "bucket_size_mb": SMALL}
    result, trainer = fit(case.module(), data, strategy, 2, [callback], max_epochs=1, **flags)
    assert not [hook for hook in HOOKS if hook in vars(callback)], "the callback is the user's own again"
    return result, callback.seen, deferring(trainer)


@pytest.mark.parametrize(
    ("reads", "first_only", "every", "flags"),
    [
        ((), False, 1, {}),
        (HOOKS, False, 1, {}),
        (("on_train_batch_end",), False, 3, {}),
        (("on_train_batch_start",), True, 1, {}),  # one rank finishes alone, the other goes on with it pending
        (HOOKS, True, 2, {"accumulate_grad_batches": 2}),
    ],
    ids=["no look", "all look", "every third", "one rank", "one rank, accumulated"],
)
def test_hooks_see_what_they_would_without_overlap(
    two_ranks: RankPool, reads: tuple[str, ...], first_only: bool, every: int, flags: dict[str, Any]
) -> None:
    plain, ours = (
        two_ranks.run(trained, overlap, Hooked(reads, first_only, every), **flags) for overlap in (False, True)
    )
    for (result, seen, deferred), (expected, wanted, undeferred) in zip(ours, plain, strict=True):
        assert (deferred > 0, undeferred) == (True, 0)
        assert seen == wanted
        assert_bitwise(result, expected)
    assert bool(plain[0][1]) == bool(reads)
    assert bool(plain[1][1]) == (bool(reads) and not first_only)


class Forgets(Hooked):
    """After some steps the optimizer's momentum is other tensors, which nobody computed from the old ones."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.fit_loop.batch_idx % 3 == 2:
            for state in trainer.optimizers[0].state.values():
                state["exp_avg"] = torch.zeros(state["exp_avg"].shape)


def test_what_takes_a_tensors_place_is_not_updated_in_its_stead(two_ranks: RankPool) -> None:
    plain, ours = (two_ranks.run(trained, overlap, Forgets()) for overlap in (False, True))
    for (result, _, deferred), (expected, _, _) in zip(ours, plain, strict=True):
        assert deferred > 0
        assert_bitwise(result, expected)


# ---------------------------------------------------------------------- what is no hook
class Looked(L.LightningModule):
    """Six layers; something between batches takes the sum of a weight, and training depends on it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.seen = where, list[float]()
        self.net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))

    def look(self) -> float:
        self.seen.append(float(private.local_tensor(self.net[0].weight.detach()).sum()))
        return self.seen[-1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.where != "scheduler":
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 + 0.1 * abs(self.look()))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Rows(Dataset):  # type: ignore[type-arg]
    def __init__(self, module: Looked) -> None:
        self.module = module if module.where == "data" else None
        self.rows = torch.randn(48, 32, generator=torch.Generator().manual_seed(4))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] if self.module is None else self.rows[index] + 1e-3 * self.module.look()


class OwnLogger(Logger):
    name, version = "own", 0

    def __init__(self, module: Looked) -> None:
        super().__init__()
        self.module = module

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, *_: Any, **__: Any) -> None:
        self.module.look()


def looked(where: str, overlap: bool) -> tuple[list[float], list[Tensor], int]:
    L.seed_everything(5, verbose=False)
    module = Looked(where)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, log_every_n_steps=1,
        strategy=SPMDStrategy(overlap_iterations=overlap, bucket_size_mb=SMALL),
        logger=OwnLogger(module) if where == "logger" else False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Rows(module), batch_size=4))
    return module.seen, [p.detach() for p in module.parameters()], deferring(trainer)


@pytest.mark.parametrize("where", ["scheduler", "logger", "data"])
def test_what_looks_between_batches_and_is_no_hook_sees_the_same(two_ranks: RankPool, where: str) -> None:
    ours, plain = (two_ranks.run(looked, where, overlap) for overlap in (True, False))
    for (seen, weights, deferred), (expected, wanted, _) in zip(ours, plain, strict=True):
        assert seen == expected
        assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True))
        assert bool(deferred) == (where != "data"), "where the data knows the module nothing overlaps"
    assert plain[0][0]


def test_a_weight_is_found_in_data_wherever_it_is_kept() -> None:
    module = Looked("nowhere")
    weight = module.net[0].weight
    ways: list[Any] = [
        [module], {"a": weight}, functools.partial(print, weight), functools.partial(print, of=weight.detach()[0]),
        lambda batch: batch + weight, module.look, copy.copy(module.net),
    ]  # fmt: skip
    for kept in ways:
        rows = Rows(module)
        rows.kept = kept
        assert data_that_knows(module, DataLoader(rows)) == "Rows"
    assert data_that_knows(module, {"one": DataLoader(Rows(module)), "two": [DataLoader([1, 2])]}) is None
    for collate in (lambda batch: weight, functools.partial(lambda weight, batch: batch, weight)):
        name = data_that_knows(module, DataLoader([1, 2], collate_fn=collate)) or ""
        assert re.fullmatch(r"test_a_weight_is_found.*<lambda> \(.*test_fence.py:\d+\)", name)
