"""Expert parallelism: which parameters are stacks of experts, of which every rank of the data axis holds some.

::

    "auto", or ["*mlp.experts", ...]
        │ stacks_of_experts(module, patterns, size)      all errors before any graph is built
        ▼
    name → shape of each parameter with one entry an expert
        │ parallel_plan.ExpertParallelPlan
        ▼
    expansion (stages/expand/experts)                    rows go to the ranks of their experts and come back

The ranks among which experts are split are neighbours on the data axis; they have batches of their own. State of
experts lies in chunks over them, as with ZeRO, and so do checkpoints.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Literal

from torch import nn

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.parallel.styles import Target, experts

Wanted = Sequence[str] | Literal["auto"]

_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
"""Layers whose weights have three dimensions and are no stack."""


def stacks_of_experts(module: nn.Module, wanted: Wanted, size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters with one entry an expert, by name; tied ones under every name.

    Args:
        module: the model; only names and shapes are read.
        wanted: patterns on module paths; ``"auto"``: every module with a three-dimensional parameter of its own that
            ``size`` divides.
        size: number of ranks among which experts are split.

    Raises:
        ConfigurationError: a pattern matches nothing, a module has no stacked weights, their number is not divisible.
    """
    modules = {path: child for path, child in module.named_modules(remove_duplicate=False) if path}
    paths = _found(modules, size) if wanted == "auto" else _matching(modules, wanted)
    if not paths:
        raise ConfigurationError(
            f"expert_parallel_size={size}: the model has no module with stacked expert weights, shape (experts, in, "
            f"out), that {size} ranks can share; experts in a list are no stack. Remove the option, or name modules in "
            "expert_parallel_plan"
        )
    chosen = {
        id(dict(modules[path].named_parameters(recurse=False))[name])
        for path in paths
        for name in experts.place(Target(path, modules[path], "experts", size, axis="expert_parallel"))
    }
    named = module.named_parameters(remove_duplicate=False)
    return {name: tuple(parameter.shape) for name, parameter in named if id(parameter) in chosen}


def _matching(modules: dict[str, nn.Module], patterns: Sequence[str]) -> list[str]:
    found: list[str] = []
    for pattern in patterns:
        matches = [path for path in modules if fnmatch.fnmatchcase(path, pattern)]
        own = [path for path in matches if next(modules[path].parameters(recurse=False), None) is not None]
        if not own:
            raise ConfigurationError(
                f"expert_parallel_plan: no module with parameters of its own matches {pattern!r}; choose the module "
                "that holds the stacked weights of experts, or 'auto'"
            )
        found += own
    return found


def _found(modules: dict[str, nn.Module], size: int) -> list[str]:
    """Modules whose stacked weights can be split; any that are none are only gathered before they are read."""

    def is_stack(child: nn.Module) -> bool:
        counts = {p.shape[0] for p in child.parameters(recurse=False) if p.ndim == experts.STACK}
        return len(counts) == 1 and counts.pop() % size == 0 and not isinstance(child, _CONVOLUTIONS)

    return [path for path, child in modules.items() if is_stack(child)]


def checked_experts(wanted: object, size: int) -> Wanted:
    """The user's choice of modules with experts.

    Raises:
        ConfigurationError: it is neither ``"auto"`` nor a list of patterns, or there is nothing to choose.
    """
    if wanted == "auto":
        return "auto"
    if not isinstance(wanted, (list, tuple)) or not wanted or not all(isinstance(p, str) for p in wanted):
        raise ConfigurationError(f"expert_parallel_plan={wanted!r}: give a list of patterns on module paths, or 'auto'")
    if size == 1:
        raise ConfigurationError(
            f"expert_parallel_plan={wanted!r} has no effect with expert_parallel_size=1: set the number of ranks among "
            "which experts are split"
        )
    return list(wanted)
