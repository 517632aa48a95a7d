"""On a batch of each rank's own the user's Python runs in every step, once, on that batch."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.molecules import MoleculeNet
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.training import InOrder, Result, assert_equals_one_device
from tests.strategy.local_cases import Chemist, by_hand, fit, weights
from tests.strategy.small import ROWS, Quiet, rows, run


class Counting(Chemist):
    """Reads values of its own batch, keeps Python's state, and logs numbers."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__(MoleculeNet, steps)
        self.runs = 0
        self.kept: list[Any] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.runs += 1
        self.log("runs", self.runs, batch_size=batch["y"].shape[0])
        loss = super().training_step(batch, batch_idx)
        return self.more(loss, batch)

    def more(self, loss: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return loss


class Reading(Counting):
    def more(self, loss: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.kept.append(loss.item())
        scale = 2.0 if batch["y"].max().item() > 1e6 else 1.0
        self.kept.append(loss * 1.0)
        return loss * scale


class EagerInTurn(Counting):
    """Each rank has a step that can be no graph, at another time; all ranks run it eagerly."""

    def more(self, loss: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self.runs in (3, 5) and self.trainer.global_rank == self.runs // 4:
            loss.detach().untyped_storage()
        return loss


class Gathering(Counting):
    """Two steps exchange what is no part of the graph, by a function with a backward of its own."""

    def more(self, loss: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self.runs in (2, 4):
            losses: Any = self.all_gather(loss.detach())
            assert losses.shape == (2,)
        return loss


def _fit(make: type[Counting], steps: int, **options: Any) -> Any:
    module = make(steps)
    trainer, said = fit(module, {"batch": "local", **options})
    kept = [float(k) for k in module.kept]
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return module.losses, weights(module), module.runs, kept, metrics, said


CASES = [(Reading, "replicate"), (EagerInTurn, "zero2"), (Gathering, "replicate"), (Counting, "zero3")]


@pytest.mark.parametrize(("make", "plan"), CASES)
def test_python_runs_in_every_step(make: type[Counting], plan: str, two_ranks: RankPool) -> None:
    losses, wanted = by_hand(steps=8)
    for ours, trained, runs, kept, metrics, said in two_ranks.run(_fit, make, 8, data_parallel=plan):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(trained, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert runs == 8
        assert kept[::2] == pytest.approx(kept[1::2], rel=1e-6)
        assert metrics["runs"] == 8
        assert not [text for text in said if "trains eagerly" in text]


def test_a_read_where_parameters_are_in_parts_is_named(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"each rank's own batch.*test_followed_local_batches.py:\d+"):
        two_ranks.run(_fit, Reading, 2, data_parallel="zero3")


RUNS: list[Any] = []


class Bag(dict[str, Any]):
    """An object of which nobody knows what it holds: no mapping to those who take batches apart."""

    is_tree_leaf = True


class Named(Quiet):
    """With what is each rank's own in the batch; at the third step rank 0 looks at it."""

    look: Any = staticmethod(lambda _: None)

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.kept: list[Any] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        names = [f"{float(v):.4f}" for v in x[:, 0]]
        return {"x": x, "y": y, "names": names, "count": len(x), "bag": Bag(x=x)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.runs += 1
        loss = super().training_step((batch["x"], batch["y"]), batch_idx)
        if self.runs == 3 and self.trainer.global_rank == 0:
            type(self).look(batch)
        self.kept.append(batch["names"])
        return {"loss": loss, "names": batch["names"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["names"] == batch["names"]
        assert type(outputs["names"]) is list

    def on_train_end(self) -> None:
        RUNS[:] = [self.runs, [len(names) for names in self.kept]]


class LooksAtNames(Named):
    look = staticmethod(lambda batch: print(batch["names"]))


class LooksAtACount(Named):
    look = staticmethod(lambda batch: batch["count"] + 1)


class LooksIntoAnObject(Named):
    look = staticmethod(lambda batch: batch["bag"]["x"].sum().item())


def _named(make: type[Named], *args: Any, **flags: Any) -> tuple[Result, list[Any]]:
    result = run(make, *args, **flags)
    return result, list(RUNS)


@pytest.mark.parametrize("make", [Named, LooksAtNames, LooksAtACount, LooksIntoAnObject])
def test_what_is_a_ranks_own(make: type[Named], two_ranks: RankPool) -> None:
    flags = {"data": lambda: InOrder(rows(), ROWS), "max_epochs": 1}
    reference, (runs, _) = _named(make, "auto", **flags)
    answers = two_ranks.run(_named, make, "spmd", 2, max_epochs=1)
    assert_equals_one_device([result for result, _ in answers], reference)
    for _, (ran, kept) in answers:
        assert ran == runs + (make is not Named)
        assert set(kept) == {ROWS // 2}
    told = [text for text in answers[0][0].warnings if "local batches" in text]
    assert len(told) == (make is not Named)
    for text in told:
        assert "test_followed_local_batches.py:" in text
        assert "of this rank" in text or "this rank's" in text or "this rank alone" in text


class Sized(MutableMapping[str, Any]):
    """A container that knows the size of its batch, and takes nothing of another, as a TensorDict."""

    def __init__(self, items: dict[str, Any], batch_size: Any) -> None:
        self.items_of, self.batch_size = {}, torch.Size(batch_size)
        for key, value in items.items():
            self[key] = value

    def __copy__(self) -> Sized:
        return type(self)(self.items_of, self.batch_size)

    def __getitem__(self, key: str) -> Any:
        return self.items_of[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if value.shape[:1] != self.batch_size:
            raise RuntimeError("batch dimension mismatch")
        self.items_of[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)

    def to(self, *_: Any, **__: Any) -> Sized:
        """What Lightning asks for."""
        return self


class Stubborn(Sized):
    """It can be made in no other way than its own."""

    def __init__(self, items: dict[str, Any], batch_size: Any, key: str = "") -> None:
        assert key == "mine"
        super().__init__(items, batch_size)

    def __copy__(self) -> Stubborn:
        return type(self)(self.items_of, self.batch_size, "mine")


class InContainers(Quiet):
    stubborn = False

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        made = Stubborn({"y": y}, y.shape, "mine") if self.stubborn else Sized({"y": y}, y.shape)
        return {"x": x, "rest": made}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch["rest"].batch_size == batch["rest"]["y"].shape
        assert type(batch["rest"]) is (Stubborn if self.stubborn else Sized)
        return super().training_step((batch["x"], batch["rest"]["y"]), batch_idx)


class InStubbornOnes(InContainers):
    stubborn = True


@pytest.mark.parametrize("make", [InContainers, InStubbornOnes])
def test_containers_that_know_their_size(make: type[InContainers], two_ranks: RankPool) -> None:
    reference = run(make, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=1)
    results = two_ranks.run(run, make, "spmd", 2, max_epochs=1)
    assert_equals_one_device(results, reference)
    told = [text for text in results[0].warnings if "local batches" in text]
    assert len(told) == (make is InStubbornOnes)
    assert all("cannot have the rows of all ranks" in text for text in told)
