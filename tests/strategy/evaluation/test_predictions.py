"""What leaves predict_step of a graph: the rank's own rows, names as they came, in every shape of loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.ranks import RankPool
from tests.strategy.evaluations import (
    ROWS,
    ByLoader,
    Evaluation,
    Everything,
    joined,
    predict,
)
from tests.strategy.small import Quiet


@pytest.mark.parametrize("sizes", [(9,), (9, 20), (25, 9)])
def test_ranks_with_fewer_batches_to_predict_take_part_in_the_others_steps(
    two_ranks: RankPool, sizes: tuple[int, ...]
) -> None:
    """Of nine rows rank 0 has two batches, rank 1 one."""
    theirs = predict(ByLoader, False, sizes=sizes)
    results = two_ranks.run(predict, ByLoader, True, 2, sizes=sizes)
    assert [len(r.predicted[-1]) for r in results] == ([3, 3] if sizes[-1] == 20 else [2, 1])
    for ours in results:
        assert ours.captures > 0
        assert ours.eager_steps == 0
    torch.testing.assert_close(joined(results, None), joined([theirs], None), rtol=1e-5, atol=1e-6)


class WholeBatch(Everything):
    """Predictions that look at all rows: no rank can compute its own alone. A parameter of as many rows as a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(2.0 * ROWS).view(ROWS, 2))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"relative": logits.softmax(0), "index": torch.arange(len(logits)), "table": self.table * 2}


def test_rows_that_were_gathered_go_back_to_their_rank(two_ranks: RankPool) -> None:
    theirs = predict(WholeBatch, False)
    results = two_ranks.run(predict, WholeBatch, True, 2)
    assert [len(p["index"]) for p in results[0].predicted[0]] == [4, 4, 2]
    assert [len(p["table"]) for p in results[1].predicted[0]] == [8, 8, 8]
    by_rank = [torch.cat([p["relative"] for p in r.predicted[0]]) for r in results]
    assert sum(map(len, by_rank)) == 20
    # the sum over a global batch's rows is one; which rows a rank has is told by its loader
    for number, batch in enumerate(theirs.predicted[0]):
        parts = [r.predicted[0][number]["relative"] for r in results]
        torch.testing.assert_close(torch.cat(parts).sum(0), batch["relative"].sum(0))
        torch.testing.assert_close(sorted(torch.cat(parts).flatten()), sorted(batch["relative"].flatten()))


class WithNames(Quiet):
    """File names that nobody reads are returned with the predictions."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        names = [f"{x[0].item():.3f}.png" for x in batch[0]]
        return {"x": batch[0], "names": names, "set": "test"}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return [batch["names"], self(batch["x"]), batch]


@pytest.mark.parametrize("devices", [1, 2])
def test_names_in_the_batch_are_returned_as_they_came(two_ranks: RankPool, devices: int) -> None:
    sizes = (24,)
    pool = two_ranks.run(predict, WithNames, True, 2, sizes=sizes) if devices == 2 else []
    for ours in pool or [predict(WithNames, True, sizes=sizes)]:
        assert (ours.captures, ours.eager_steps) == (1, 0)
        for names, logits, batch in ours.predicted[0]:
            assert names == batch["names"] == [f"{x[0].item():.3f}.png" for x in batch["x"]]
            assert (len(logits), batch["set"]) == (len(names), "test")


class Hidden:
    """An object that is no container."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class ReturnsAnObject(Quiet):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return Hidden(self(batch[0]))


def test_tensors_in_an_object_of_any_kind_are_filled(two_ranks: RankPool) -> None:
    theirs = predict(ReturnsAnObject, False, sizes=(24,))
    for rank, ours in enumerate([predict(ReturnsAnObject, True, sizes=(24,)), *two_ranks.run(_seen, 24)]):
        assert (ours.captures, ours.eager_steps) == (1, 0)
        own = slice(None) if rank == 0 else slice(rank - 1, None, 2)
        rows = torch.cat([p.logits for p in ours.predicted[0]])
        torch.testing.assert_close(rows, torch.cat([p.logits for p in theirs.predicted[0]])[own])


def _seen(count: int) -> Evaluation:
    return predict(ReturnsAnObject, True, 2, sizes=(count,))
