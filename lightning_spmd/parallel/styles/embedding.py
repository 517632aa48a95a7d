"""``embedding``: the rows of a table are split (vocabulary parallelism).

The result of the lookup is reduced once, the table's gradient never.
"""

from __future__ import annotations

from lightning_spmd.parallel.styles.target import PlacementsByName, Target


def place(target: Target) -> PlacementsByName:
    """Placement of the table."""
    target.known_options()
    weight = target.weight
    if weight.ndim != 2:
        raise target.error(f"its weight has shape {list(weight.shape)}, which is no table")
    if getattr(target.module, "max_norm", None) is not None or getattr(target.module, "scale_grad_by_freq", False):
        raise target.error("max_norm and scale_grad_by_freq need the whole table on every rank")
    return {"weight": target.split(weight, 0, "rows")}
