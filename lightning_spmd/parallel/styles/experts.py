"""``experts``: whole experts. Each rank has some of a stack's, and multiplies the rows that are routed to them.

For modules with weights of shape (experts, in, out) or (experts, out, in): every parameter of the module's own with
that many entries, biases of shape (experts, out) included, is split by experts; anything else of it is whole.
"""

from __future__ import annotations

from lightning_spmd.parallel.styles.target import PlacementsByName, Target

STACK = 3
"""Dimensions of one matrix an expert."""


def place(target: Target) -> PlacementsByName:
    """Placements of all parameters by expert."""
    target.known_options()
    own = dict(target.module.named_parameters(recurse=False))
    stacks = {name: weight for name, weight in own.items() if weight.ndim == STACK}
    if not stacks:
        raise target.error(
            "it has no parameter of its own with one matrix an expert, shape (experts, in, out); choose the module "
            "that holds the stacked weights"
        )
    counts = {weight.shape[0] for weight in stacks.values()}
    if len(counts) > 1:
        shapes = ", ".join(f"{name!r} {list(weight.shape)}" for name, weight in stacks.items())
        raise target.error(f"its stacked weights are of different numbers of experts: {shapes}")
    (count,) = counts
    return {
        name: target.split(weight, 0, "experts")
        for name, weight in own.items()
        if weight.ndim > 1 and weight.shape[0] == count
    }
