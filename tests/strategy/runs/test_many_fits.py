"""Many Trainers in one process: threads, sockets and texts of graphs stay what they were, whatever was done before.

Each worker function here runs on two ranks and gives back what the ranks found.
"""

from __future__ import annotations

import gc
import io
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx.graph_module import _loader
from torchmetrics.classification import MulticlassAccuracy

from lightning_spmd import SPMDStrategy
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.parallel.shared_groups import lease_groups, make_host_group
from tests.helpers.ranks import RankPool, free_port
from tests.helpers.training import QUIET, InOrder, fit, whole
from tests.strategy.small import ROWS, Quiet, rows

SHARED = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise", "last": "rowwise"}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "replicate": {},
    "zero2": {"data_parallel": "zero2"},
    "zero3": {"data_parallel": "zero3"},
    "tp2": SHARED,
    "zero3_tp2": {"data_parallel": "zero3", **SHARED},
}


class Stops(Quiet):
    """Raises in the middle of an epoch, on the ranks named."""

    ranks: tuple[int, ...] = (0, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if torch.is_grad_enabled() and self.trainer.global_step == 2 and self.trainer.global_rank in self.ranks:
            raise LookupError("the user's mistake")
        return loss


class StopsBetweenSteps(L.Callback):
    """Raises where the next thing that the ranks do together is their vote."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank in self.ranks:
            raise LookupError("the user's mistake")


def data() -> InOrder:
    return InOrder(rows(), ROWS)


def train(module: nn.Module | None = None, strategy: Any = None, **settings: Any) -> Any:
    L.seed_everything(7)
    module = Quiet() if module is None else module
    fit(module, data(), strategy or {}, 2, **{"max_epochs": 1, **settings})
    return module


def weights(module: Any) -> dict[str, Tensor]:
    return {name: whole(tensor.detach()) for name, tensor in module.state_dict().items()}


def trainer(strategy: str) -> L.Trainer:
    return L.Trainer(strategy=SPMDStrategy(**STRATEGIES[strategy]), devices=2, max_epochs=1, **QUIET)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """Ranks of their own: what other tests broke on purpose may hold groups until a collective's timeout."""
    pool = RankPool(2)
    yield pool
    pool.close()


def holds() -> tuple[int, int, int]:
    """Threads, open files and sockets, kept texts of graphs; once groups that were given up have ended."""
    gc.collect()
    deadline = time.monotonic() + 15  # less than the other ranks' patience
    while any(thread.name == "end of process groups" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "groups that nobody uses did not end"
        time.sleep(0.05)
        gc.collect()  # threads of the failed fit may have ended since
    found, before = held(), None
    while found != before:  # the system's threads end after Python's
        time.sleep(0.1)
        found, before = held(), found
    return found


def held() -> tuple[int, int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(_loader.eval_cache)


# ---------------------------------------------------------------------- nothing grows
def fits_that_raise(strategy: str) -> None:
    for settings in ({"module": Stops()}, {"callbacks": [StopsBetweenSteps(0, 1)]}):
        with pytest.raises((LookupError, ConfigurationError), match="the user's mistake"):
            train(strategy=STRATEGIES[strategy], **settings)


def evaluations(strategy: str) -> None:
    module = Quiet()
    for method in ("validate", "test", "predict"):
        getattr(trainer(strategy), method)(module, data(), **({} if method == "predict" else {"verbose": False}))


def one_trainer_several_times(strategy: str) -> None:
    ours, module = trainer(strategy), Quiet()
    ours.fit(module, data())
    ours.fit_loop.max_epochs = 2
    ours.fit(module, data())
    ours.validate(module, data(), verbose=False)


def one_module_several_trainers(strategy: str) -> None:
    module = train(strategy=STRATEGIES[strategy])
    train(module, {"data_parallel": "zero3"})
    train(module, STRATEGIES[strategy])


def nested(strategy: str) -> None:
    class Validates(L.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            trainer(strategy).validate(Quiet(), data(), verbose=False)

    train(strategy=STRATEGIES[strategy], callbacks=[Validates()])


DOINGS = (
    fits_that_raise,
    evaluations,
    one_trainer_several_times,
    one_module_several_trainers,
    nested,
)


def what_stays(strategy: str, times: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """What is held before and after everything is done ``times`` times, when it was done once already."""
    for doing in DOINGS:
        doing(strategy)
    found = {}
    for doing in DOINGS:
        before = holds()
        for _ in range(times):
            doing(strategy)
        found[doing.__name__] = (before, holds())
    return found


def assert_nothing_stays(ranks: RankPool, strategy: str, times: int) -> None:
    for found in ranks.run(what_stays, strategy, times, timeout=1200):
        assert {name: after for name, (_, after) in found.items()} == {
            name: before for name, (before, _) in found.items()
        }


def test_nothing_stays_of_a_trainer(two_ranks: RankPool) -> None:
    assert_nothing_stays(two_ranks, "zero3", times=1)


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_stays_of_ten_trainers(two_ranks: RankPool, strategy: str) -> None:
    assert_nothing_stays(two_ranks, strategy, times=10)


# ---------------------------------------------------------------------- what a Trainer leaves still works
def outlives_its_trainer() -> None:
    alone = {name: weights(train(strategy=strategy)) for name, strategy in STRATEGIES.items()}
    kept = {name: train(strategy=strategy) for name, strategy in STRATEGIES.items()}
    gc.collect()
    train()
    for name, module in kept.items():
        saved = io.BytesIO()
        torch.save(module.state_dict(), saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        for key, value in module.state_dict().items():
            assert torch.equal(whole(value), alone[name][key]), (name, key)
            assert torch.equal(whole(loaded[key]), alone[name][key]), (name, key)
            assert torch.equal(whole(value * 1), alone[name][key]), (name, key)
        assert any(isinstance(p, DTensor) for p in module.parameters()) == (name not in ("replicate", "zero2"))


def test_a_module_outlives_its_trainer(two_ranks: RankPool) -> None:
    two_ranks.run(outlives_its_trainer)


def has_own_groups() -> list[float]:
    """The user's groups are neither used nor ended."""
    begun = []
    if not dist.is_initialized():
        train(strategy=STRATEGIES["zero3"])
    own = dist.new_group(backend="gloo")
    before = own._get_sequence_number_for_group()
    train(strategy=STRATEGIES["zero3"])
    begun.append(own._get_sequence_number_for_group() - before)
    total = torch.ones(1)
    dist.all_reduce(total, group=own)
    dist.destroy_process_group(own)
    train(strategy=STRATEGIES["zero3"])
    return [*begun, float(total)]


def test_the_users_own_groups_are_left_alone(two_ranks: RankPool) -> None:
    assert two_ranks.run(has_own_groups) == [[0, 2.0]] * 2


def end_default_group(port: int) -> None:
    """The next one has a port of its own: in the store of this one ranks would find addresses that are gone."""
    os.environ["MASTER_PORT"] = str(port)
    dist.destroy_process_group()


def ends_the_default_group(*ports: int) -> None:
    """As a script does that goes on with something else; groups are numbered anew then, and names return."""
    if dist.is_initialized():  # what is held since earlier tests holds its groups, so begin with new ones
        end_default_group(ports[0])
    wanted = weights(train(strategy=STRATEGIES["zero3_tp2"]))
    module = train(strategy=STRATEGIES["zero3"])
    before = holds()
    end_default_group(ports[1])
    threads, files, _ = holds()
    assert threads < before[0]
    assert files < before[1]
    again = train(strategy=STRATEGIES["zero3_tp2"])
    assert all(torch.equal(value, wanted[name]) for name, value in weights(again).items())
    train(module, STRATEGIES["zero3"])  # its parameters lay on groups that have ended
    assert all(value.shape == wanted[name].shape for name, value in weights(module).items())


def test_the_default_group_may_end_between_trainers(two_ranks: RankPool) -> None:
    two_ranks.run(ends_the_default_group, free_port(), free_port())


# ---------------------------------------------------------------------- what hangs is not used again
def one_rank_fails(strategy: str) -> list[tuple[int, int, int]]:
    """One rank raises, the other waits for it in vain; what both do next is as if nothing had been."""
    short = {**STRATEGIES[strategy], "timeout": timedelta(seconds=1)}
    wanted = weights(train(strategy=STRATEGIES[strategy]))
    found = []
    for _ in range(2):
        module = Quiet()
        with pytest.raises((LookupError, RuntimeError)):
            train(module, short, callbacks=[StopsBetweenSteps(1)])
        again = train(strategy=STRATEGIES[strategy])
        assert all(torch.equal(value, wanted[name]) for name, value in weights(again).items())
        train(module, STRATEGIES[strategy])  # what the failed one left trains too
        assert all(torch.isfinite(value).all() for value in weights(module).values())
        del module, again
        found.append(holds())
    return found


@pytest.mark.parametrize("strategy", ["replicate", pytest.param("zero3_tp2", marks=pytest.mark.long)])
def test_after_one_rank_failed_alone(two_ranks: RankPool, strategy: str) -> None:
    for before, after in two_ranks.run(one_rank_fails, strategy):
        assert after == before


def one_rank_left_a_collective() -> list[float]:
    """A collective of which one rank alone began its part would add to the first one of the next Trainer."""
    wanted = weights(train())
    first = lease_groups({"host": make_host_group}, None)
    waiting = torch.full((1,), 100.0)
    if dist.get_rank() == 1:
        dist.all_reduce(waiting, group=first.owners[0].group, async_op=True)
    first.end()
    module = train()
    assert all(torch.equal(value, wanted[name]) for name, value in weights(module).items())
    second = lease_groups({"host": make_host_group}, None)
    total = torch.ones(1)
    dist.all_reduce(total, group=second.owners[0].group)
    return [float(total), second.owners[0] is first.owners[0], float(waiting)]


def test_a_collective_left_by_one_rank_meets_nobody(two_ranks: RankPool) -> None:
    assert two_ranks.run(one_rank_left_a_collective) == [[2.0, False, 100.0]] * 2


def one_rank_left_a_collective_on_the_mesh() -> bool:
    """The parameters lie on the mesh whose groups are replaced, and on its successor with the next collective."""
    module = train(strategy=STRATEGIES["zero3"])
    mesh = module.first.weight.device_mesh
    group = mesh.get_group()
    expected = weights(module)
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1), group=group, async_op=True)
    threads, files, _ = holds()
    wanted = train(strategy=STRATEGIES["zero3"])
    assert all(torch.equal(value, expected[name]) for name, value in weights(module).items())
    assert all(torch.equal(value, expected[name]) for name, value in weights(wanted).items())
    del group
    assert holds()[:2] == (threads, files)
    return module.first.weight.device_mesh is mesh is wanted.first.weight.device_mesh


def test_a_mesh_outlives_its_groups(two_ranks: RankPool) -> None:
    assert two_ranks.run(one_rank_left_a_collective_on_the_mesh) == [True, True]


def measured(strategy: str, module: Any) -> float:
    ours = trainer(strategy)
    found = ours.validate(module, data(), verbose=False)[0]["accuracy"]
    torch.save(module, io.BytesIO())
    return found


class Measures(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)


def metrics_of_several_trainers() -> list[float]:
    """Ranks that share layers add up no metric; the next Trainer's ranks do."""
    L.seed_everything(7)
    module = Measures()
    return [measured(strategy, module) for strategy in ("replicate", "tp2", "replicate")]


def test_a_metric_is_synced_as_each_trainer_needs(two_ranks: RankPool) -> None:
    for alone, shared, again in two_ranks.run(metrics_of_several_trainers):
        assert alone == pytest.approx(shared)
        assert alone == again


def timeouts() -> list[Any]:
    """A lease's timeout counts while it is the youngest; the last one stays."""

    def seconds(lease: Any) -> float:
        return float(lease.owners[0].group._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    outer = lease_groups({"host": make_host_group}, timedelta(seconds=50))
    inner = lease_groups({"host": make_host_group}, timedelta(seconds=40))
    found = [outer.owners[0] is inner.owners[0], seconds(inner)]
    inner.end()
    found.append(seconds(outer))
    outer.end()
    default = lease_groups({"host": make_host_group}, None)
    found.append(seconds(default))
    default.end()
    return found


def test_each_trainer_has_its_timeout(two_ranks: RankPool) -> None:
    assert two_ranks.run(timeouts) == [[True, 40.0, 50.0, 1800.0]] * 2


def different_layouts() -> None:
    lease_groups({f"host of rank {dist.get_rank()}": make_host_group}, None)


def test_ranks_that_want_different_groups_say_so(two_ranks: RankPool) -> None:
    with pytest.raises(Exception, match=ConfigurationError.__name__) as error:
        two_ranks.run(different_layouts)
    assert "different layouts" in str(error.value)
