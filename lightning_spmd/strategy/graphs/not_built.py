"""Why a step has no graph; all ranks raise these errors together."""

from __future__ import annotations

from lightning_spmd.stages.runtime.executor import Executable


class CannotBeBuilt(Exception):
    """Some rank could not capture or expand the step; all ranks raise this together."""


class OtherGradients(Exception):
    """On all ranks together: their own batches do not reach the same parameters, or not in the same order.

    Args:
        names: of all gradients, as their terms are called.
        built: what this rank built, for batches at which the others' reach as much.
    """

    def __init__(self, names: frozenset[str], difference: str) -> None:
        super().__init__(difference)
        self.names = names
        self.built: Executable | None = None
