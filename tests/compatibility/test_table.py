"""Rows that were measured again take their places in an earlier table."""

from __future__ import annotations

from pathlib import Path

from tests.compatibility.all_rows import row_named
from tests.compatibility.measure import Run
from tests.compatibility.result import Result
from tests.compatibility.table import table

_DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_rows_that_were_not_measured_stay() -> None:
    before = _DOCUMENT.read_text()
    rows = [line for line in before.splitlines() if line.startswith("|")]
    assert [line for line in table([], before).splitlines() if line.startswith("|")] == rows
    assert len(rows) > 100


def test_a_row_is_replaced_with_its_note() -> None:
    before = _DOCUMENT.read_text()
    run = Run(losses=[1.0] * 5, mode="compiled", captures=7, seconds=1.5)
    row = row_named("ElectraForPreTraining")
    after = table([Result(row, run, run, [run, run])], before)
    assert "| `ElectraForPreTraining` | compiled | bitwise | 0e+00 | 0 | 7 | 1.5 | gathers embeddings: " in after
    assert len(after.splitlines()) == len(table([], before).splitlines())
