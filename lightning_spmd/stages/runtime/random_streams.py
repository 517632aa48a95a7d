"""Random numbers on several ranks: replicated values draw the same numbers everywhere, sharded ones different ones.

Each run of a graph is one *tick*. Before operators that draw for sharded values the default generators are seeded from
(seed, tick, coordinates of the shard), before those for replicated values from (seed, tick); so a run is reproducible
from ``seed_everything``, two integers resume it exactly, and nothing the user draws between steps changes a mask. On
one device none of this happens: the graph draws eager's own numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


class RandomStreams:
    """The two streams of one rank.

    Args:
        seed: the same on all ranks.
        coordinate: this rank's position among the shards.
    """

    def __init__(self, seed: int, coordinate: int) -> None:
        self.seed = seed
        self.coordinate = coordinate
        self.tick = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """One run of a graph; the user's generators are as before afterwards."""
        self.tick += 1
        host = torch.get_rng_state()
        device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        try:
            self.select("sharded", 0)
            yield
        finally:
            torch.set_rng_state(host)
            if device is not None:
                torch.cuda.set_rng_state(device)

    def select(self, kind: str, draw: int) -> None:
        """From now on draw from the ``"sharded"`` or the ``"replicated"`` stream; ``draw`` tells calls of a run apart."""
        parts = (self.seed, self.tick, draw, kind, self.coordinate if kind == "sharded" else -1)
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
        torch.manual_seed(int.from_bytes(digest, "big"))
