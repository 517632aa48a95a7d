"""The page is made of what is kept; models that were measured again take their places there."""

from __future__ import annotations

from pathlib import Path

from tests.compatibility.all_rows import row_named
from tests.compatibility.measure import Run
from tests.compatibility.result import Result
from tests.compatibility.table import line, page, read_lines, write_lines

_DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_page_is_what_was_measured(tmp_path: Path) -> None:
    lines = read_lines()
    write_lines(lines, tmp_path / "again.csv")
    assert read_lines(tmp_path / "again.csv") == lines
    made, kept = (text.partition(" models: ")[2] for text in (page(list(lines.values())), _DOCUMENT.read_text()))
    assert made == kept
    assert all(f"`{name}`" in kept for name in lines)
    assert len(lines) > 100


def test_a_model_that_was_measured_again_is_in_its_place_with_its_note() -> None:
    before = read_lines()
    run = Run(losses=[1.0] * 5, mode="compiled", captures=7, seconds=1.5)
    after = before | {"ElectraForPreTraining": line(Result(row_named("ElectraForPreTraining"), run, run, [run, run]))}
    assert list(after) == list(before)
    text = page(list(after.values()))
    assert (
        "`DebertaV2ForSequenceClassification`, `ElectraForPreTraining` (0e+00, 0 to 3 collectives, 1 to 7 graphs"
        in text
    )
