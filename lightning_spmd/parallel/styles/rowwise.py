"""``rowwise``: input features are split. Each rank's product is a part of a sum, which is reduced once.

Options: ``parts`` and ``transposed`` as for ``colwise``, of the input features. The bias is whole and added once.
"""

from __future__ import annotations

from lightning_spmd.parallel.styles.target import PlacementsByName, Target


def place(target: Target) -> PlacementsByName:
    """Placement of the weight."""
    target.known_options("parts", "transposed")
    if getattr(target.module, "groups", 1) != 1:
        raise target.error("a grouped convolution does not sum over all its inputs; use 'colwise'")
    into, _ = target.features()
    return {"weight": target.split(target.weight, into, "input features")}
