"""``replicate``: every rank has the whole module. For exceptions from an earlier pattern."""

from __future__ import annotations

from lightning_spmd.ir.placement import REPLICATE
from lightning_spmd.parallel.styles.target import PlacementsByName, Target


def place(target: Target) -> PlacementsByName:
    """Everything whole, said aloud: a tied parameter must not be split by another name."""
    target.known_options()
    return {name: REPLICATE for name, _ in target.module.named_parameters(recurse=False)}
