"""Chooses how keys travel in attention over pieces of a sequence.

=============  ===========================================  ====================================================
way            bytes that a rank sends, forward / backward  beside computation
=============  ===========================================  ====================================================
gathered       (N - 1) × own keys and values / twice that   nothing: no kernel starts before the gather is done
ring           the same / (2 N - 1) × own                   all of it while a block of scores takes longer than a hop
=============  ===========================================  ====================================================

The ring holds two ranks' keys where a gather holds all of them, but runs N kernels on smaller operands, and each hop
has a latency of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_spmd.cost.collectives import LINKS, Link, kind_of, seconds

HOP_NODES = 16
"""Operators of a hop of the ring besides the kernel: cutting, merging, packing."""
LARGEST_GATHER = 1 << 30
"""Bytes that all keys and values of a layer and their gradients may take: more ranks do not make them fewer."""


@dataclass(frozen=True)
class Machine:
    """A rank and its link to the others, as typical numbers.

    Args:
        link: between the ranks.
        arithmetic: floating-point operations a second in products.
        launch: seconds to start an operator.
    """

    link: Link
    arithmetic: float
    launch: float


MACHINES = {
    "cpu": Machine(LINKS["cpu"], arithmetic=1e11, launch=5e-6),
    "cuda": Machine(LINKS["cuda"], arithmetic=3e14, launch=5e-6),
}


def machine_of(device: torch.device) -> Machine:
    """A rank whose tensors live on ``device``; unknown accelerators count as CUDA devices."""
    return MACHINES[kind_of(device)]


@dataclass(frozen=True)
class AttentionShape:
    """Of one attention operator, over the whole mesh axis.

    Args:
        batch: sequences.
        heads: of the queries.
        groups: heads of keys and values.
        queries: positions that look.
        keys: positions that are looked at.
        size: of one head.
        itemsize: bytes of a number.
    """

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    size: int
    itemsize: int

    @property
    def key_bytes(self) -> int:
        """Bytes of all keys and values."""
        return 2 * self.batch * self.groups * self.keys * self.size * self.itemsize

    def operations(self, *, causal: bool, backward: bool) -> float:
        """Floating-point operations: two products forward, five backward, half of the scores with causality."""
        products = 5 if backward else 2
        whole = 2.0 * products * self.batch * self.heads * self.queries * self.keys * self.size
        return whole / 2 if causal else whole


def gathered_bytes(shape: AttentionShape, ranks: int, *, backward: bool) -> float:
    """Bytes that a rank sends: keys and values forward, these and their gradients backward."""
    return (2 if backward else 1) * (ranks - 1) * shape.key_bytes / ranks


def ring_bytes(shape: AttentionShape, ranks: int, *, backward: bool) -> float:
    """Bytes that a rank sends: N - 1 hops of keys and values; backward also N of their gradients."""
    return ((2 * ranks - 1) if backward else (ranks - 1)) * shape.key_bytes / ranks


def gathered_seconds(shape: AttentionShape, ranks: int, machine: Machine, *, causal: bool, backward: bool) -> float:
    """Time of the gather, the kernels, and the scatter of gradients: one after the other."""
    moved = seconds("all_gather", shape.key_bytes // ranks, ranks, machine.link)
    if backward:
        moved += seconds("reduce_scatter", shape.key_bytes, ranks, machine.link)
    kernels = 4 if causal else 1
    return moved + _computing(shape, ranks, machine, causal=causal, backward=backward) + kernels * machine.launch


def ring_seconds(shape: AttentionShape, ranks: int, machine: Machine, *, causal: bool, backward: bool) -> float:
    """Time of N blocks of scores, a hop beside each but the last; backward the last hop of gradients stands alone."""
    own, link = shape.key_bytes / ranks, machine.link
    block = _computing(shape, ranks, machine, causal=causal, backward=backward) / ranks + HOP_NODES * machine.launch
    hop = link.latency + (2 if backward else 1) * own / link.bandwidth
    last = link.latency + own / link.bandwidth if backward else 0.0
    return block + (ranks - 1) * max(block, hop) + last


def ring_is_better(shape: AttentionShape, ranks: int, machine: Machine, *, causal: bool, backward: bool) -> bool:
    """Whether keys should go from rank to rank rather than to all at once: where that is faster, or they are large."""
    if 2 * shape.key_bytes > LARGEST_GATHER:
        return True
    ring = ring_seconds(shape, ranks, machine, causal=causal, backward=backward)
    return ring < gathered_seconds(shape, ranks, machine, causal=causal, backward=backward)


def _computing(shape: AttentionShape, ranks: int, machine: Machine, *, causal: bool, backward: bool) -> float:
    return shape.operations(causal=causal, backward=backward) / ranks / machine.arithmetic
