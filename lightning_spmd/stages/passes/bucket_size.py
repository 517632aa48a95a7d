"""How large buckets of ``bucket_size_mb="auto"`` grow: by the cost model, the same on all ranks and in all runs."""

from __future__ import annotations

from lightning_spmd.cost.collectives import Kind, Link, wire_bytes

MIB = 1 << 20
LARGEST_BUCKET = 25 * MIB
PIECES = 16
"""Into how many buckets all bytes of a step are cut where nothing speaks against it.

Enough of them that the first is under way early in the backward pass and that single ones can run beside the next
iteration's layers.
"""
LATENCY_SHARE = 0.1
"""How much of a bucket's time may be latency."""


def bucket_bytes(kind: Kind, total: int, ranks: int, link: Link) -> int:
    """How large a bucket of a step that moves ``total`` bytes should grow.

    A 16th of all bytes, but so many that latency stays a small share of the bucket's time, at least 1 MiB and at most
    25 MiB. Gathers and scatters are copied into and out of their bucket, which reductions are not: they grow only as
    long as the copies cost less than the latency that a bucket saves.

    Args:
        kind: of the collectives.
        total: bytes of all of them, in the sense of ``cost.collectives``.
        ranks: of their process group.
        link: between the ranks.
    """
    for_latency = link.latency * link.bandwidth * (1 / LATENCY_SHARE - 1) / max(wire_bytes(kind, 1, ranks), 1e-9)
    size = min(max(total / PIECES, for_latency, MIB), LARGEST_BUCKET)
    if kind != "all_reduce":
        copies = (1 + ranks) if kind == "all_gather" else 1
        size = min(size, link.latency * link.memory / copies)
    return int(size)
