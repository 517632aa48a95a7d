"""Terminals, files and recipes where the locale's encoding is not UTF-8."""

from __future__ import annotations

import io
import locale
import sys
from pathlib import Path

import pytest

from lightning_spmd.cli.encodings import write_whatever_comes
from lightning_spmd.cli.recipe_files import mistake_in_recipes
from lightning_spmd.strategy.notices.start_table import as_text


@pytest.mark.parametrize(("encoding", "errors"), [("ascii", "surrogateescape"), ("iso-8859-1", "strict")])
def test_the_command_writes_what_the_encoding_has(monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding, errors=errors))
    with pytest.raises(UnicodeEncodeError):
        sys.stdout.write("8 × h100 █")
    write_whatever_comes()
    sys.stdout.write("8 × h100 █")
    sys.stdout.flush()
    assert out.getvalue() == "8 × h100 █".encode(encoding, "replace")


def test_output_in_utf_8_and_streams_without_encodings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    monkeypatch.setattr(sys, "stderr", None)
    write_whatever_comes()
    assert sys.stdout.errors == "strict"


def test_the_table_of_a_run_on_a_terminal_without_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    text = as_text({"mesh": "data_parallel 2", "note 1": "größer"}, width=60)
    assert text.isascii()
    assert "+-" in text
    assert "gr??er" in text


@pytest.mark.parametrize("encoding", ["ascii", "ISO-8859-1"])
def test_a_recipe_that_the_locale_would_misread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model:\n  path: größe\n", encoding="utf-8")
    arguments = ["fit", "--config", str(recipe)]
    assert mistake_in_recipes(arguments) is None
    monkeypatch.setattr(locale, "getpreferredencoding", lambda _: encoding)
    said = f"line 2 has \\xf6 in UTF-8, and the locale reads files as {encoding}: set PYTHONUTF8=1"
    assert mistake_in_recipes(arguments) == f"--config {recipe}: {said}"
    recipe.write_text("model:\n  path: size\n", encoding="utf-8")
    assert mistake_in_recipes(arguments) is None
