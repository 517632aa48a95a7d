"""``docs/passes.md`` has a row for each pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.report.pass_docs import with_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "passes.md"


def test_the_document_has_the_present_table() -> None:
    text = DOCUMENT.read_text()
    assert with_table(text) == text, "python -m lightning_spmd.report.pass_docs docs/passes.md"


def test_a_document_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no <!-- passes -->"):
        with_table("# Passes\n")
