"""Which layers the ranks of the tensor axis share, and which experts neighbours on the data axis.

Layers: the user's plan, or one found in the graph of the first batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.placement import REPLICATE
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.messages import tell, warn
from lightning_spmd.parallel.expert_parallel import checked_experts, stacks_of_experts
from lightning_spmd.parallel.tensor_parallel import ResolvedPlan, TensorParallelPlan, resolve_plan
from lightning_spmd.stages import find_plan


class LayerSharing:
    """The tensor-parallel plan of a run.

    Args:
        wanted: the user's plan, ``"auto"``, or None.
        size: number of ranks that share each layer.
        sequence: whether activations between shared layers are pieces of the sequence.
        experts: returns the names of the parameters that are split by expert over another axis.
    """

    def __init__(
        self,
        wanted: Mapping[str, Any] | str | None,
        size: int,
        sequence: bool,
        experts: Callable[[], Collection[str]] = tuple,
    ) -> None:
        if isinstance(wanted, str) and wanted != "auto":
            raise ConfigurationError(f"tensor_parallel_plan={wanted!r}: give patterns on module paths, or 'auto'")
        if size > 1 and wanted is None:
            raise ConfigurationError(
                f"tensor_parallel_size={size} needs a tensor_parallel_plan: patterns on module paths to styles, or "
                "'auto'"
            )
        if size == 1 and wanted is not None:
            warn("tensor_parallel_plan is not used: tensor_parallel_size is 1, so every rank has whole layers")
        elif size == 1 and sequence:
            warn("sequence_parallel is not used: tensor_parallel_size is 1, so no layers are shared")
        self.wanted = wanted
        self.size = size
        self.sequence = sequence
        self.experts = experts
        self.found: dict[str, Any] | None = None
        self._found_in: weakref.ref[nn.Module] | None = None
        self._resolved: ResolvedPlan | None = None

    @property
    def is_sought(self) -> bool:
        """Whether a plan is still to be found in the first batch's graph."""
        return self.wanted == "auto" and self.found is None

    def resolve(self, module: nn.Module) -> None:
        """Apply the plan to a model; until one is found everything is on every rank.

        Raises:
            ConfigurationError: naming the pattern or module that does not fit.
        """
        if self._found_in is not None and self._found_in() is not module:  # a Trainer may fit one after the other
            self.found = self._found_in = None
        plan: Any = self.found or {} if self.wanted == "auto" else self.wanted or {}
        resolved = resolve_plan(module, plan, self.size, sequence_parallel=self.sequence and bool(plan))
        if self.size == 1:
            return  # a plan that is kept for more devices is read all the same: a mistake shows here, not there
        twice = [name for name in self.experts() if resolved.placements[name] != REPLICATE]
        if twice:
            raise ConfigurationError(
                f"tensor_parallel_plan splits {twice[0]!r}, which expert_parallel_size splits by expert already: leave "
                "its module out of one of tensor_parallel_plan and expert_parallel_plan"
            )
        self._resolved = resolved

    def find(self, captured: CapturedStep, module: nn.Module, agree: Callable[[Any], Any]) -> None:
        """Find the plan in a graph; ``agree`` gives every rank rank 0's plan.

        Raises:
            ConfigurationError: no layer of the graph can be shared.
        """
        found = find_plan(captured, self.size)
        owners = {name.rpartition(".")[0] for name in self.experts()}
        self.found = agree({path: style for path, style in found.items() if path not in owners})
        if not self.found:
            raise ConfigurationError(
                f"tensor_parallel_plan='auto' found no layers that {self.size} ranks can share; give patterns, or "
                "tensor_parallel_size=1"
            )
        self._found_in = weakref.ref(module)
        tell(f"strategy='spmd' shares layers: {self.found}")
        self.resolve(module)

    def plan(self) -> TensorParallelPlan:
        """The plan of the tensor axis."""
        if self._resolved is None:
            return TensorParallelPlan(ResolvedPlan({}, {}))
        return TensorParallelPlan(self._resolved, self.is_sought)


class ExpertSharing:
    """The experts of a run: the user's patterns, or what looks like a stack of experts.

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
