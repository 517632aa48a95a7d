"""Makes files beside a recipe and in the working directory importable.

``python -m`` looks in the working directory and an installed console script does not, so a recipe would work with one
and not with the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_spmd.cli.recipe_files import recipes_of


@contextmanager
def classes_beside(arguments: Sequence[str]) -> Iterator[None]:
    """While open, Python looks for modules beside the recipes first, then in the working directory.

    Args:
        arguments: of the command.
    """
    before = list(sys.path)
    folders = dict.fromkeys(
        [str(file.resolve().parent) for file in map(Path, recipes_of(arguments))] + [str(Path.cwd())]
    )
    sys.path[:0] = [folder for folder in folders if folder not in before]
    try:
        yield
    finally:
        sys.path[:] = before
