"""Numbers in a batch that count its rows: a loader counts those of its own rank, and the step sees those of all.

``{"x": ..., "count": len(samples)}`` divides a sum by too little on every device, alike, and nothing would show it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator

from torch import Tensor

from lightning_spmd.stages.capture.batch import Batch

_ENTRY = re.compile(r"^(.*)\[\d+\]$")


def counts_of_rows(batch: Batch, read: Collection[str], rows: int) -> Iterator[str]:
    """What may count the rows of this rank although the step sees more of them.

    Args:
        batch: this rank's.
        read: paths of the leaves that are no tensors and that the step looks at.
        rows: those of the batch that the step sees.

    Yields:
        a sentence for each.
    """
    own = batch.rows()
    if own == rows:
        return
    for path, value in zip(batch.paths, batch.values, strict=True):
        if _is_number(value) and (isinstance(value, Tensor) or path in read) and value == own:
            yield (
                f"batch{path} is {own}, which is the number of rows of this rank's batch; training_step sees the "
                f"{rows} rows of all ranks. If it counts rows, take the size of a tensor instead (x.shape[0])"
            )


def lists_of_rows(batch: Batch, rows: int) -> Iterator[str]:
    """Lists with an entry for each of this rank's rows.

    Args:
        batch: this rank's.
        rows: those of the batch that the step sees.

    Yields:
        a sentence for each.
    """
    own = batch.rows()
    if own == rows:
        return
    lists = [_list_of(path) for path, value in zip(batch.paths, batch.values, strict=True) if _is_plain(value)]
    for path, count in Counter(path for path in lists if path is not None).items():
        if count == own:
            yield (
                f"batch{path} is a list of {own}, one for each row of this rank; training_step sees the {rows} rows of "
                "all ranks in tensors, and of the list this rank's entries alone. Do not take its length"
            )


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype.is_signed and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_plain(value: object) -> bool:
    return value is not None and not isinstance(value, Tensor)


def _list_of(path: str) -> str | None:
    found = _ENTRY.match(path)
    return None if found is None else found[1]
