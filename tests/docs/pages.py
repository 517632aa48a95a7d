"""The pages of the documentation, and the blocks of code in them with the comment that says how each is run.

The head of this folder describes the comments.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,})(?P<language>[\w+-]*) *$")
_TAG = re.compile(r"^ *<!-- (?P<word>run|output|message|not run)(?::(?P<rest>.*))? -->$")
LANGUAGES = ("python", "bash", "yaml", "text")
KEYS = ("devices", "file", "given", "raises", "batches", "inside", "strategy", "under", "kind", "recipe")
_INDENTED = "<!-- indented blocks:"


class PageError(AssertionError):
    """A page is not written as the head of this folder says."""


@dataclass(frozen=True)
class Block:
    """A block of code between fences.

    Args:
        page: path of its page, from the repository's root.
        line: number of its first line of code.
        language: what follows the opening fence.
        word: ``run``, ``output``, ``message``, ``not run``, or nothing where no comment precedes it.
        options: what the comment says behind ``run:``.
        reason: what the comment says behind ``not run:``.
        text: the code.
    """

    page: str
    line: int
    language: str
    text: str
    word: str = ""
    options: dict[str, str] = field(default_factory=dict)
    reason: str = ""

    @property
    def place(self) -> str:
        """Page and line, as editors and terminals link them."""
        return f"{self.page}:{self.line}"

    @property
    def devices(self) -> tuple[int, ...]:
        """On how many devices it is run, one number a run."""
        return tuple(int(number) for number in self.options.get("devices", "1").split(","))


def page_names() -> list[str]:
    """All pages, from the repository's root."""
    return ["README.md", *sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))]


@cache
def lines_of(page: str) -> tuple[str, ...]:
    """The lines of a page."""
    return tuple((ROOT / page).read_text().splitlines())


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    """The fenced blocks of a page, in order."""
    return tuple(_blocks(page, lines_of(page)))


def _blocks(page: str, lines: tuple[str, ...]) -> Iterator[Block]:
    above = ""
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            above = lines[number] if lines[number].strip() else above
            number += 1
            continue
        end = _end_of(page, lines, number, fence["indent"] + fence["marks"])
        code = [line.removeprefix(fence["indent"]) for line in lines[number + 1 : end]]
        yield _block(page, number + 2, fence["language"], "\n".join(code) + "\n", above)
        above = ""
        number = end + 1


def _end_of(page: str, lines: tuple[str, ...], begin: int, fence: str) -> int:
    for number in range(begin + 1, len(lines)):
        if lines[number].rstrip() == fence:
            return number
    raise PageError(f"{page}:{begin + 1}: the block does not end")


def _block(page: str, line: int, language: str, text: str, above: str) -> Block:
    tag = _TAG.match(above)
    if tag is None:
        return Block(page, line, language, text)
    rest = (tag["rest"] or "").strip()
    if tag["word"] != "run":
        return Block(page, line, language, text, tag["word"], reason=rest)
    options = dict(part.partition("=")[::2] for part in shlex.split(rest))
    for key in options:
        if key not in KEYS:
            raise PageError(f"{page}:{line}: no block is run with {key!r}; known are {', '.join(KEYS)}")
    return Block(page, line, language, text, "run", options)


def complaint(block: Block) -> str | None:
    """Why a test would not know what to do with a block, and how to say it; None where all is well."""
    if block.language not in LANGUAGES:
        return f"{block.place}: say after the fence which of {', '.join(LANGUAGES)} it is, not {block.language!r}"
    if block.word == "not run" and len(block.reason.split()) < 2:
        return f"{block.place}: say why it is not run: <!-- not run: reason -->"
    if block.word in ("output", "message") and block.language != "text":
        return f"{block.place}: what is printed is `text`"
    if block.language == "text" and block.word == "run":
        return f"{block.place}: text cannot be run"
    return None


def indented_blocks(page: str) -> list[int]:
    """Lines at which code begins that is indented instead of fenced, which no comment says how to run.

    Lists' further lines are indented too; they follow a line of the list or are less than four spaces deep.
    """
    lines = lines_of(page)
    if any(line.startswith(_INDENTED) for line in lines):
        return []
    found, fenced = [], False
    for number, line in enumerate(lines):
        if _FENCE.match(line):
            fenced = not fenced
        starts = line.startswith("    ") and number > 0 and not lines[number - 1].strip()
        if starts and not fenced and line.strip():
            found.append(number + 1)
    return found
