"""DTensor's registered strategies, for operators without a rule of ours (also a user's ``register_sharding``)."""

from __future__ import annotations

from lightning_spmd.stages.expand.call import Layout, OpCall


def registered_layouts(call: OpCall) -> list[Layout] | None:
    """Layouts from DTensor's registry, or None if it has none for this operator."""
    return None
