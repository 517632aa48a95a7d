"""What is put into tensors where numbers may be symbols."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_spmd.stages.capture.follow.told import put_at_symbols, put_number

_INDICES: dict[str, Any] = {
    "a mask": torch.arange(12).view(4, 3) % 5 == 0,
    "rows that a tensor names": torch.tensor([2, 0]),
    "rows that a list names": [3, 1],
    "rows and a window": (torch.tensor([0, 2]), slice(1, 3)),
    "a row": 2,
    "a window": (slice(1, 3), slice(None, 2)),
    "everything": Ellipsis,
    "a flag": True,
}


@pytest.mark.parametrize("put", [put_at_symbols, put_number])
@pytest.mark.parametrize("value", [7, 2.5, torch.tensor(3.0)], ids=str)
@pytest.mark.parametrize("name", _INDICES)
def test_it_is_put_where_indexing_puts_it(name: str, value: Any, put: Any) -> None:
    ours, theirs = (torch.arange(12.0).view(4, 3) for _ in range(2))
    put(ours, _INDICES[name], value)
    theirs[_INDICES[name]] = value
    assert torch.equal(ours, theirs)
