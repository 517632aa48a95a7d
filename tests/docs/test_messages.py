"""Messages that pages quote are those that the package prints."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.docs.pages import ROOT, blocks_of, page_names

_VALUE = "\0"


@cache
def _texts() -> str:
    """All texts in the source, what f-strings put in as one mark."""
    found: list[str] = []
    for file in sorted((ROOT / "lightning_spmd").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else _VALUE for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n\n".join(found)


def _pieces(message: str) -> list[str]:
    return [piece for part in message.split("...") if len(piece := part.strip(" :;,.")) > 3]


@pytest.mark.parametrize("page", [p for p in page_names() if any(b.word == "message" for b in blocks_of(p))])
def test_quoted_messages_are_in_the_source(page: str) -> None:
    missing = []
    for block in blocks_of(page):
        for number, message in enumerate(block.text.splitlines(), block.line) if block.word == "message" else ():
            missing += [f"{page}:{number}: nothing prints {p!r}" for p in _pieces(message) if p not in _texts()]
    assert not missing, "\n".join(missing)
