"""User files that a recipe names and Python cannot import: reported with file and line."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

from lightning_spmd.errors import own_line

_PATHS = re.compile(r"class_path'?(?:: |=)'([\w.]+)'")
_GIVEN = re.compile(r"Given value: ([A-Za-z_]\w*(?:\.\w+)+)\s*$", re.MULTILINE)
_OF_CLASS = re.compile(r"Problem with given class_path '([\w.]+)'")


def broken_module(key: str, message: str) -> str | None:
    """Find the class named by a message of jsonargparse whose file cannot be imported, and the reason.

    Args:
        key: of the recipe.
        message: of jsonargparse.

    Returns:
        one line; None if every file can be imported, or does not exist.
    """
    for class_path in dict.fromkeys(_class_paths(message)):
        module = class_path.rpartition(".")[0]
        if not module:
            continue  # a class by its name alone
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            continue  # of the module itself or of one that it wants: told with where it was looked for
        except Exception as error:
            said = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
            line = own_line(error)
            place = "" if line is None else f" at {line}"
            return f"{key}.class_path: {class_path}: {module} cannot be imported: {type(error).__name__}: {said}{place}"
    return None


def _class_paths(message: str) -> Iterator[str]:
    for pattern in (_PATHS, _OF_CLASS, _GIVEN):
        yield from pattern.findall(message)
