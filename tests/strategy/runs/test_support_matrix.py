"""The document is what the code decides."""

from pathlib import Path

from lightning_spmd.report.support_matrix import support_matrix


def test_the_document_is_generated_from_the_table_that_decides() -> None:
    document = Path(__file__).parents[3] / "docs" / "support_matrix.md"
    assert document.read_text() == support_matrix(), (
        "python -m lightning_spmd.report.support_matrix > docs/support_matrix.md"
    )
