"""A hash that is equal in every process, unlike Python's."""

from __future__ import annotations

import hashlib
from typing import Any


def stable_hash(value: Any) -> int:
    """A 62-bit hash of ``repr(value)`` that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 2
