"""All rows of the table."""

from __future__ import annotations

from tests.compatibility import hugging_face, lightning_examples, packages
from tests.compatibility.rows import Row


def all_rows() -> list[Row]:
    """In the order of the table."""
    return [*hugging_face.rows(), *packages.rows(), *lightning_examples.rows()]


def row_named(name: str) -> Row:
    """The row with a name."""
    return {row.name: row for row in all_rows()}[name]
