"""Every block of code of README.md and docs/ is run, parsed or marked as what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import python_blocks, shell_blocks, yaml_blocks
from tests.docs.pages import ROOT, Block, PageError, blocks_of, complaint, indented_blocks, page_names
from tests.helpers.ranks import RankPool


def _with(language: str) -> list[str]:
    return [page for page in page_names() if any(_checked(block, language) for block in blocks_of(page))]


def _checked(block: Block, language: str) -> bool:
    return block.language == language and block.word != "not run"


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The page's folder: its files, and the repository's recipes."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    python_blocks.write_files(request.getfixturevalue("page"), tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", page_names())
def test_every_block_says_how_it_is_run(page: str) -> None:
    complaints = [said for block in blocks_of(page) if (said := complaint(block)) is not None]
    complaints += [f"{page}:{line}: put the indented code between fences" for line in indented_blocks(page)]
    assert not complaints, "\n".join([*complaints, "tests/docs/__init__.py says how"])


@pytest.mark.parametrize("page", [page for page in page_names() if python_blocks.has_blocks(page, 1)])
def test_python_runs(page: str, folder: Path) -> None:
    python_blocks.run_page(page, 1, str(folder))


@pytest.mark.parametrize("page", [page for page in page_names() if python_blocks.has_blocks(page, 2)])
def test_python_runs_on_two_ranks(page: str, folder: Path, two_ranks: RankPool) -> None:
    two_ranks.run(python_blocks.run_page, page, 2, str(folder))


@pytest.mark.parametrize("page", _with("bash"))
def test_commands_take_their_options(page: str, folder: Path) -> None:
    for block in blocks_of(page):
        if _checked(block, "bash"):
            shell_blocks.check(block, folder)


@pytest.mark.parametrize("page", _with("yaml"))
def test_yaml_is_read(page: str, folder: Path) -> None:
    for block in blocks_of(page):
        if _checked(block, "yaml"):
            yaml_blocks.check(block, folder)


class TestWhatIsWrongIsFound:
    """The checks themselves: each fault is one that a page has had or could have."""

    @pytest.mark.parametrize(
        ("command", "message"),
        [
            ("lightning-spmd fit --config recipes/gpt_bytes.yaml --trainer.device 2", "device"),
            ("lightning-spmd fit --config recipes/none.yaml", "none.yaml"),
            ("lightning-spmd plan --config recipes/gpt_bytes.yaml --device-type h1000", "h100"),
            ("python -m tests.no_module", "no module"),
            ("python -m tests.mutants --not-an-option", "not-an-option"),
            ("python train.py", "no train.py"),
            (".ci/none", "no such command"),
            ("pip install '.[none]'", "none"),
            ("make all", "no test knows"),
            ("cd folder && make all", "no test knows"),
            ("srun --ntasks 2 python train.py", "no train.py"),
        ],
    )
    def test_in_commands(self, command: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(PageError, match=message):
            shell_blocks.check_command(command, tmp_path)

    def test_a_block_without_a_language(self) -> None:
        assert "say after the fence" in str(complaint(Block("README.md", 1, "", "x")))

    def test_a_block_that_is_not_run_without_a_reason(self) -> None:
        assert "say why" in str(complaint(Block("README.md", 1, "python", "x", "not run")))
