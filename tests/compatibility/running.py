"""Trains rows on one process and on several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.compatibility.all_rows import row_named
from tests.compatibility.measure import Run, train
from tests.compatibility.result import Result
from tests.compatibility.rows import Row
from tests.helpers.ranks import RankError, RankPool


def train_named(name: str, ranks: int) -> Run:
    """Train a row with the strategy, in a worker."""
    return train(row_named(name), {}, ranks)


def results(rows: Iterable[Row], pool: RankPool) -> Iterator[Result]:
    """Train each on one process and on those of ``pool``."""
    for row in rows:
        eager, alone = train(row, "auto", 1), train(row, {}, 1)
        try:
            ranks = pool.run(train_named, row.name, pool.size, timeout=900)
        except RankError as error:
            ranks = [Run(error=str(error).strip())] * pool.size
        yield Result(row, eager, alone, ranks)
