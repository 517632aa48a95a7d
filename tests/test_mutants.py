"""The list of faults in ``mutants.py`` fits the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, PACKAGE, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_fits_the_source(mutant: Mutant) -> None:
    text = (ROOT / PACKAGE / mutant.file).read_text()
    planted = mutant.applied(text)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))
    assert all(Path(ROOT, likely.partition("::")[0]).exists() for likely in mutant.likely)


def test_every_fault_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
