"""Recipes of this package by name: ``--config gpt_bytes`` works from any folder.

They are in ``recipes/`` of a checkout and in ``lightning_spmd/recipes/`` of an installed package (``pyproject.toml``).
An existing path comes before a recipe of its name.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_FLAGS = ("-c", "--config")
_OF_A_FOLDER = "recipe"
"""A recipe with code of its own is named after its folder."""


def recipe_folder() -> Path:
    """The folder of the package's recipes."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


@cache
def named_recipes() -> dict[str, Path]:
    """The package's recipes by name, sorted."""
    folder = recipe_folder()
    found: dict[str, Path] = {}
    for file in folder.rglob("*.yaml"):
        path = file.relative_to(folder).with_suffix("")
        found[(path.parent if path.name == _OF_A_FOLDER and path.parent.name else path).as_posix()] = file
    return dict(sorted(found.items()))


def recipe_named(name: str) -> Path | None:
    """The package's recipe with a name, which may end in ``.yaml``; None if there is none.

    Args:
        name: as the user wrote it.
    """
    plain = name.removesuffix(".yaml")
    return named_recipes().get(plain) or named_recipes().get(plain.removesuffix(f"/{_OF_A_FOLDER}"))


def near_recipes(name: str) -> list[str]:
    """Names of the package's recipes that were probably meant, the nearest first.

    Args:
        name: as the user wrote it, perhaps a path.
    """
    return difflib.get_close_matches(Path(name.removesuffix(f"/{_OF_A_FOLDER}.yaml")).stem, named_recipes())


def with_files_for_names(arguments: Sequence[str]) -> list[str]:
    """The arguments with files in place of the names of the package's recipes.

    Args:
        arguments: of the command.
    """
    given = list(arguments)
    for at, word in enumerate(given):
        flag, equals, value = word.partition("=")
        if equals and flag == "--config":
            given[at] = f"{flag}={_file_for(value)}"
        elif at > 0 and arguments[at - 1] in _FLAGS:
            given[at] = _file_for(word)
    return given


def _file_for(name: str) -> str:
    named = None if not name or Path(name).exists() else recipe_named(name)
    return name if named is None else str(named)
