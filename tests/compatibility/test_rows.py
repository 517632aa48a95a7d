"""Models that nobody here wrote equal one device: a few here, the rest by ``python -m tests.compatibility``."""

from __future__ import annotations

import pytest

from tests.compatibility.all_rows import all_rows
from tests.compatibility.running import results
from tests.helpers.ranks import RankPool

_ROWS = {row.name: row for row in all_rows() if row.needs == "transformers"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if row.fast else [pytest.mark.long]) for name, row in _ROWS.items()]
)
def test_a_model_is_what_one_device_makes_of_it(name: str, two_ranks: RankPool) -> None:
    (result,) = results([_ROWS[name]], two_ranks)
    assert result.faults() == []
