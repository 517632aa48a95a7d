"""What pages point to is there: pages, headings, files, the commands and modules in running text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.links import anchors, outside_fences, wrong_links, wrong_paths
from tests.docs.pages import ROOT, PageError, page_names
from tests.docs.shell_blocks import check_command

_COMMAND = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:python -m \S|\.ci/\w|pip install|lightning-spmd \w+ --config \S)[^`]*)`")


@pytest.mark.parametrize("page", page_names())
def test_links_lead_somewhere(page: str) -> None:
    assert not (wrong := wrong_links(page)), "\n".join(wrong)


@pytest.mark.parametrize("page", page_names())
def test_files_in_running_text_exist(page: str) -> None:
    assert not (wrong := wrong_paths(page)), "\n".join(wrong)


@pytest.mark.parametrize("page", page_names())
def test_commands_in_running_text_take_their_options(page: str, tmp_path: Path) -> None:
    for number, line in outside_fences(page):
        for command in _COMMAND.findall(line):
            if "..." in command or "RECIPE" in command:
                continue
            try:
                check_command(re.sub(r"[\[\]]", "", command) if " [-" in command else command, tmp_path)
            except PageError as error:
                raise PageError(f"{page}:{number}: {command}: {error}") from error


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [page for page in page_names() if page != "README.md" and f"]({page}" not in readme]
    assert not missing


def test_headings_are_named_as_github_names_them() -> None:
    assert "the-users-python-in-every-step" in anchors(str(ROOT / "docs" / "benchmarks.md"))
