"""``sequence``: the module (a norm, dropout) works on its piece of the sequence; its parameters are whole.

One such module is enough: between split layers *all* activations then lie as pieces of the sequence (arXiv:2205.05198),
as with ``sequence_parallel=True``.
"""

from __future__ import annotations

from lightning_spmd.ir.placement import REPLICATE
from lightning_spmd.parallel.styles.target import PlacementsByName, Target


def place(target: Target) -> PlacementsByName:
    """Parameters are whole; their gradients are sums over the pieces of the sequence."""
    target.known_options()
    return {name: REPLICATE for name, _ in target.module.named_parameters(recurse=False)}
