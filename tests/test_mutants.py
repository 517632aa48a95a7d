"""The list of faults in ``mutants.py`` fits the source, and the document lists them all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import DOCUMENT, MUTANTS, PACKAGE, ROOT, Mutant, table


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_fits_the_source(mutant: Mutant) -> None:
    text = (ROOT / PACKAGE / mutant.file).read_text()
    planted = mutant.applied(text)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))
    assert all(Path(ROOT, likely.partition("::")[0]).exists() for likely in mutant.likely)


def test_the_document_lists_every_fault() -> None:
    """``python -m tests.mutants --write`` brings it up to date."""
    assert table() in DOCUMENT.read_text()
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
