"""Tensors of a batch that are the same for every sample, though they have as many entries as a rank has rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_spmd.errors import BatchError, CaptureError
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.strategy.steps.shared_leaves import check_shared, find_shared
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET
from tests.strategy.small import loader_of

WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0])


class Beside:
    """The control plane of a rank beside which another one holds another batch."""

    def __init__(self, mine: Batch, other: Batch) -> None:
        self.mine, self.other = mine, other

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, bool):
            return [value, value]
        digests = dict(zip(self.other.tensors, self.other.digests(), strict=True))
        if isinstance(value, dict):
            return [value, {self.other.paths[i]: digests[i] for i in self.other.tensors if self.other.is_shared(i)}]
        return [value, [digests[i] for i in self.other.tensors if not self.other.is_shared(i)]]


def batch(seed: int, **more: Tensor) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(4, 4, generator=generator), torch.arange(4)
    return Batch({"x": x, "y": y, "w": WEIGHTS, **more})


def tracing(step: Callable[[Callable[[str], Tensor]], Any]) -> Callable[[Collection[str]], None]:
    """As capture does it: whatever is not shared has the rows of both ranks."""

    def trace(shared: Collection[str]) -> None:
        whole = batch(0)
        leaves = dict(zip(whole.paths, whole.values, strict=True))
        named = {p.strip("['\"]"): v if p in shared else torch.cat([v, v]) for p, v in leaves.items()}
        try:
            step(named.__getitem__)
        except (RuntimeError, IndexError, ValueError) as error:
            raise CaptureError(str(error)) from error

    return trace


def found(step: Callable[[Callable[[str], Tensor]], Any]) -> set[str]:
    mine = batch(0)
    return {p.strip("['\"]") for p in find_shared(Beside(mine, batch(1)), mine, tracing(step))}  # type: ignore[arg-type]


def test_what_fits_only_as_a_whole_is_a_whole() -> None:
    assert found(lambda b: F.cross_entropy(b("x"), b("y"), weight=b("w"))) == {"w"}
    assert found(lambda b: (b("x") * b("w"))[b("y") > 0]) == {"w"}


def test_where_either_of_two_fits_none_is_taken() -> None:
    """Four rows a rank make eight: weights and targets multiply if one of them is cut short."""

    def step(b: Callable[[str], Tensor]) -> Tensor:
        if b("y").shape == b("w").shape:
            raise RuntimeError("both alike")
        return b("x").sum()

    assert found(step) == set()


def test_what_fits_only_as_rows_is_rows(recwarn: pytest.WarningsRecorder) -> None:
    assert found(lambda b: (F.cross_entropy(b("x"), b("y"), reduction="none") * b("w")).sum()) == set()
    assert not recwarn.list


def test_what_fits_both_ways_is_rows_and_said_so() -> None:
    with pytest.warns(UserWarning, match=r"batch\S*w\S* is the same on all ranks .* keep it on the module"):
        assert found(lambda b: F.cross_entropy(b("x"), b("y")) * b("w").sum()) == set()


def test_the_same_mask_of_one_sequence_a_rank_is_no_doubt(recwarn: pytest.WarningsRecorder) -> None:
    mine, other = (Batch({"x": torch.full((1, 3), v), "mask": torch.ones(1, 3)}) for v in (1.0, 2.0))
    assert find_shared(Beside(mine, other), mine, lambda _: None) == set()  # type: ignore[arg-type]
    assert not recwarn.list


def test_zeros_of_other_shapes_are_not_the_same() -> None:
    assert Batch([torch.zeros(2, 3)]).digest() != Batch([torch.zeros(3, 3)]).digest()


def test_nothing_is_suspected_where_ranks_hold_the_same_batch() -> None:
    mine = batch(0)
    assert find_shared(Beside(mine, batch(0)), mine, pytest.fail) == set()  # type: ignore[arg-type]


def test_what_belongs_to_no_sample_must_be_the_same() -> None:
    ours, theirs = batch(0, scale=torch.tensor(1.0)), batch(1, scale=torch.tensor(-1.0))
    assert ours.shared_values() != theirs.shared_values()
    with pytest.raises(BatchError, match=r"batch\S*scale\S* .*it has no dimension.* ranks 0 and 1 it differs"):
        check_shared(Beside(ours, theirs), ours)  # type: ignore[arg-type]
    check_shared(Beside(ours, ours), ours)  # type: ignore[arg-type]


class Weighted(L.LightningModule):
    """Class weights travel with the batch; its last batch leaves one rank fewer rows than classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)
        self.runs = 0

    def training_step(self, batch: Any) -> Tensor:
        self.runs += 1
        return F.cross_entropy(self.layer(batch["x"]), batch["y"], weight=batch["w"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Checked(Weighted):
    """Python looks at what tells weights from rows before torch does."""

    def training_step(self, batch: Any) -> Tensor:
        loss = self.layer(batch["x"]).sum() * 0
        if batch["w"].shape[0] != 4:
            self.runs += 1
            raise ValueError("four classes")
        return loss + super().training_step(batch)


def _collate(items: list[Any]) -> dict[str, Tensor]:
    x, y = (torch.stack(parts) for parts in zip(*items, strict=True))
    return {"x": x, "y": y, "w": WEIGHTS}


class InTurn(L.LightningDataModule):
    """Ranks take every N-th sample of one order."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        generator, ranks = torch.Generator().manual_seed(3), self.trainer.world_size
        data = [(torch.randn(4, generator=generator), torch.randint(4, (), generator=generator)) for _ in range(22)]
        return loader_of(data[self.trainer.global_rank :: ranks], self.rows // ranks, collate_fn=_collate)


def _trained(make: type[Weighted], rows: int, devices: int) -> tuple[list[Tensor], int]:
    module, strategy = make(), "spmd" if devices > 1 else "auto"
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=2, use_distributed_sampler=False, **QUIET)
    trainer.fit(module, InTurn(rows))
    return [p.detach() for p in module.parameters()], module.runs


@pytest.mark.parametrize("make", [Weighted, Checked])
def test_class_weights_in_the_batch_equal_one_device(make: type[Weighted], two_ranks: RankPool) -> None:
    wanted, runs = _trained(make, 8, 1)
    for got, ran in two_ranks.run(_trained, make, 8, 2):
        assert ran == runs, "the first step runs again, and what it did before was undone"
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
