"""Where pages point to: other pages with their headings, files of the repository, and paths in code marks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT, blocks_of, lines_of, page_names

_LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"`(?P<text>[^`]+)`")
_PATH = re.compile(r"^\.?[\w.-]+(/[\w.-]+)*\.(py|md|yaml|sh|toml)$|^[\w.-]+/([\w.-]+/)+$")
_PREFIXES = ("", "lightning_spmd", "docs", "tests", "lightning_spmd/stages", "lightning_spmd/stages/passes")
"""Folders from which paths in prose are given."""


def outside_fences(page: str) -> Iterator[tuple[int, str]]:
    """The lines of prose with their numbers."""
    fenced = False
    for number, line in enumerate(lines_of(page), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def wrong_links(page: str) -> list[str]:
    """Links to files or headings that do not exist. The network is not asked."""
    wrong = []
    for number, line in outside_fences(page):
        for link in _LINK.finditer(re.sub(r"`[^`]*`", "`", line)):
            target, _, heading = link["target"].partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = (ROOT / page).parent / target if target else ROOT / page
            if not file.exists():
                wrong.append(f"{page}:{number}: there is no {target}")
            elif heading and heading not in anchors(str(file.resolve())):
                wrong.append(f"{page}:{number}: {target or page} has no heading #{heading}")
    return wrong


def wrong_paths(page: str) -> list[str]:
    """Paths in code marks that are no files of the repository; a name alone may be a file of any folder."""
    wrong = []
    for number, line in outside_fences(page):
        for code in _CODE.finditer(line):
            text = code["text"].partition("::")[0]
            if _PATH.match(text) and not _exists(text):
                wrong.append(f"{page}:{number}: there is no file {text}")
    return wrong


def _exists(path: str) -> bool:
    if "/" in path.rstrip("/"):
        return any((ROOT / prefix / path).exists() for prefix in _PREFIXES) or path.rstrip("/") in _folders()
    return path.rstrip("/") in _names()


@cache
def _names() -> frozenset[str]:
    """Files of the repository, and those that pages write."""
    written = (block.options.get("file", "") for page in page_names() for block in blocks_of(page))
    return frozenset([*(file.name for file in _files()), *written])


@cache
def _folders() -> frozenset[str]:
    """Ends of folders' paths of two parts."""
    return frozenset("/".join(file.parts[-2:]) for file in _files())


@cache
def _files() -> tuple[Path, ...]:
    tops = [ROOT / name for name in ("lightning_spmd", "tests", "docs", "recipes", ".ci")]
    return (
        *ROOT.glob("*"),
        *tops,
        *(file for top in tops for file in top.rglob("*") if "__pycache__" not in file.parts),
    )


@cache
def anchors(file: str) -> frozenset[str]:
    """The headings of a page as GitHub names them in links."""
    found, fenced = [], False
    for line in Path(file).read_text().splitlines():
        fenced ^= line.lstrip().startswith("```")
        heading = re.match(r"#{1,6} (.*)", line)
        if heading and not fenced:
            found.append(re.sub(r"[^\w\- ]", "", heading[1].strip().lower()).replace(" ", "-"))
    return frozenset(found)
