"""``next`` with a default: Lightning's loops would take a StopIteration for the end of the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from lightning_spmd.errors import VerificationError

T = TypeVar("T")


def first(items: Iterable[T], wanted: str) -> T:
    """The first item.

    Args:
        items: where to look.
        wanted: description of the item, for the message.

    Raises:
        VerificationError: there is none.
    """
    for item in items:
        return item
    raise VerificationError(f"there is no {wanted} where one must be: a defect of lightning_spmd")
