"""Parts of a batch that count or list this rank's rows, and are no tensors of rows.

``{"x": ..., "names": [...], "count": len(samples)}``: a step sees the rows of all ranks in tensors, but only its own
rank's entries of a list. A loss divided by ``len(names)`` or ``count`` would be too large by the number of ranks, on
all of them alike, and nothing would show it. A step that looks at such a value cannot be captured.
"""

from __future__ import annotations

from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lightning_spmd.ir.tree import leaves, map_leaves
from lightning_spmd.messages import the_step

_PLAIN = (str, bytes, bool, int, float, complex, type, Enum, FunctionType, torch.dtype, torch.device)
_FIX = "Take sizes from a tensor (x.shape[0])"


def rows_of(tensors: list[Tensor]) -> int | None:
    """The common first dimension of tensors, or None."""
    sizes = {t.shape[0] for t in tensors if t.ndim > 0}
    return sizes.pop() if len(sizes) == 1 else None


def lists_of_rows(tree: Any, rows: int) -> list[Any]:
    """The outermost lists and tuples in a batch that have one entry per row.

    What holds tensors with dimensions is none: these are split along dimension 0, so ``[x, y]`` is a list of two things
    however many rows there are.
    """
    found: list[Any] = []

    def is_one(value: Any) -> bool:
        if type(value) not in (list, tuple) or len(value) != rows or _holds_rows(value):
            return False
        found.append(value)
        return True

    map_leaves(lambda _, leaf: leaf, tree, ends_at=is_one)
    return found


def lists_of_tensors(tree: Any, rows: int) -> list[str]:
    """Paths of lists inside a batch with as many tensors as there are rows, all of one shape with that many rows."""
    found: list[str] = []

    def note(path: str, value: Any) -> Any:
        if type(value) in (list, tuple):
            found.append(path)
        return value

    def is_one(value: Any) -> bool:
        if value is tree or type(value) not in (list, tuple) or len(value) != rows or rows < 2:
            return False
        return all(isinstance(v, Tensor) and v.shape[:1] == (rows,) and v.shape == value[0].shape for v in value)

    map_leaves(note, tree, ends_at=is_one)
    return found


def is_count(value: Any, rows: int) -> bool:
    """Whether a number, or a tensor that is one, is the number of rows."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype.is_signed and not value.is_complex() and bool(value == rows)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == rows


def about_list(path: str, rows: int) -> str:
    """Why a step may not look at a list of rows."""
    return (
        f"{the_step()} looks at batch{path}, a list with an entry for each of this rank's {rows} rows, while its "
        f"tensors have the rows of all ranks. {_FIX}, give what the entries say as a tensor; or keep on the "
        "module what is the same for every sample"
    )


def about_number(path: str, rows: int) -> str:
    """Why a step may not read a number that counts rows."""
    return (
        f"{the_step()} reads batch{path}, which is {rows}, the number of this rank's rows, while its tensors have the "
        f"rows of all ranks. {_FIX}; or, if it counts something else, keep it on the module"
    )


def about_object(path: str, value: Any) -> str:
    """Why a step may not look at an object of unknown content."""
    return (
        f"{the_step()} looks at batch{path}, a {type(value).__name__}, which may hold rows of this rank alone, while "
        "the tensors of the batch have the rows of all ranks. Give what it holds as tensors, or keep it on the module"
    )


def is_plain(value: Any) -> bool:
    """Whether a value beside the tensors of a batch holds no rows."""
    return value is None or isinstance(value, _PLAIN) or type(value).__module__ == "numpy" and value.ndim == 0


def about_tensors(path: str, rows: int) -> str:
    """The message about a list of tensors that may be one for each row."""
    return (
        f"batch{path} is a list of {rows} tensors, as many as this rank has rows; each of them is taken for rows of "
        "the batch along its dimension 0, of which the step sees those of all ranks. If the list has a tensor for each "
        "row, stack them in the collate function"
    )


def _holds_rows(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.ndim > 0 for _, leaf in leaves(value))
