"""Errors for a step that has no graph. All ranks raise them together."""

from __future__ import annotations

from lightning_spmd.stages.runtime.executor import Executable


class CannotBeBuilt(Exception):
    """A rank could not capture or expand the step. All ranks raise this together."""


class OtherGradients(Exception):
    """The ranks' local batches reach different parameters, or in a different order. All ranks raise this together.

    Args:
        names: of all gradients.
        built: what this rank built. It fits batches that reach the same parameters on all ranks.
    """

    def __init__(self, names: frozenset[str], difference: str) -> None:
        super().__init__(difference)
        self.names = names
        self.built: Executable | None = None
