"""Which experts neighbours on the data axis share: the user's patterns, or what looks like a stack of experts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_spmd.parallel.expert_parallel import checked_experts, stacks_of_experts


class ExpertSharing:
    """The experts of a run.

    Args:
        wanted: patterns on module paths, or ``"auto"``.
        size: number of ranks among which experts are split.
    """

    def __init__(self, wanted: object, size: int) -> None:
        self.wanted = checked_experts(wanted, size)
        self.size = size
        self._shapes: dict[str, tuple[int, ...]] = {}

    def resolve(self, module: nn.Module) -> None:
        """Find the experts of a model; until then there are none.

        Raises:
            ConfigurationError: naming the pattern or module that does not fit.
        """
        if self.size > 1:
            self._shapes = stacks_of_experts(module, self.wanted, self.size)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parameters with one entry an expert, by name."""
        return self._shapes
