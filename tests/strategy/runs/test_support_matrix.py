"""The page has what the code decides, and each of its rows a test."""

import importlib
import re
from pathlib import Path

from lightning_spmd.strategy.support.feature import Mode
from lightning_spmd.strategy.support.matrix import FEATURES

PAGE = Path(__file__).parents[3] / "docs" / "support_matrix.md"
ROWS = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in PAGE.read_text().splitlines() if "|" in line]


def test_rows_are_unique_and_in_the_order_of_modes() -> None:
    names, modes, *_ = zip(*ROWS[2:], strict=True)
    assert len(set(names)) == len(names) > 20
    assert [Mode(mode) for mode in modes] == sorted(map(Mode, modes), key=list(Mode).index)


def test_rows_that_decide_at_run_time_are_on_the_page() -> None:
    on_page = {(name, mode, note) for name, mode, note, _ in ROWS}
    assert [f.name for f in FEATURES if (f.name, str(f.mode), f.note) not in on_page] == []


def test_every_row_has_its_test() -> None:
    for name, _, _, test in ROWS[2:]:
        found = re.fullmatch(r"`(\w+)` in `([\w/]+)\.py`", test)
        assert found is not None, name
        assert callable(getattr(importlib.import_module(f"tests.{found[2].replace('/', '.')}"), found[1])), name
