"""``docs/passes.md`` says what the passes' docstrings say."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.report.pass_docs import with_docstrings

DOCUMENT = Path(__file__).parents[2] / "docs" / "passes.md"


def test_the_document_says_what_the_docstrings_say() -> None:
    text = DOCUMENT.read_text()
    assert with_docstrings(text) == text, "python -m lightning_spmd.report.pass_docs docs/passes.md"


def test_a_pass_without_a_place_is_named() -> None:
    text = DOCUMENT.read_text()
    with pytest.raises(ConfigurationError, match="places for"):
        with_docstrings(text.replace("<!-- docstring of dead_code -->", ""))
