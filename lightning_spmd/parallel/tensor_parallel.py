"""Tensor parallelism by plan: module path patterns → styles → the placement of every parameter.

::

    {"model.blocks.*.qkv": {"style": "colwise", "parts": 3}, "model.blocks.*.proj": "rowwise", ...}
        │ resolve_plan(module, plan, size)            fnmatch, later patterns win; all errors before any graph is built
        ▼
    ResolvedPlan.placements: fqn → placement          for parameters and buffers, under every name of tied ones
        │ TensorParallelPlan(resolved)
        ▼
    expansion                                          asks by role

What is in no pattern is replicated. ``styles`` says what each style splits.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import REPLICATE, Placement, Replicate, Shard, ShardAxis
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole
from lightning_spmd.parallel.styles import STYLES, Target

StylePlan: TypeAlias = Mapping[str, str | Mapping[str, Any]]
"""Pattern on module paths → style name, or a mapping with ``style`` and its options."""

_SEQUENCE = Shard(1)
_STATE_INPUTS = (InputRole.PARAMETER, InputRole.BUFFER, InputRole.OPTIMIZER_STATE, InputRole.GRADIENT)
_STATE_OUTPUTS = (
    OutputRole.BUFFER, OutputRole.OPTIMIZER_STATE, OutputRole.GRADIENT, OutputRole.SHOWN_GRADIENT
)  # fmt: skip


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan applied to a model.

    Args:
        placements: of every parameter and buffer by fully qualified name; tied ones under every name.
        shapes: their global shapes.
        styles: module path → name of the style that was applied.
        sequence_parallel: whether activations between split layers are pieces of the sequence.
    """

    placements: Mapping[str, Placement]
    shapes: Mapping[str, tuple[int, ...]]
    styles: Mapping[str, str] = field(default_factory=dict[str, str])
    sequence_parallel: bool = False

    def __str__(self) -> str:
        split = {name: p for name, p in self.placements.items() if not isinstance(p, Replicate)}
        return "\n".join(f"{name:48} {list(self.shapes[name])!s:20} {p}" for name, p in split.items())


def resolve_plan(
    module: nn.Module, plan: StylePlan, size: int, *, sequence_parallel: bool = False, prefix: str = ""
) -> ResolvedPlan:
    """The placement of every parameter and buffer of ``module`` on a tensor axis of ``size`` ranks.

    Args:
        module: the model, perhaps on the meta device: only names and shapes are read.
        plan: the user's plan.
        size: number of ranks of the axis.
        sequence_parallel: keep activations between split layers as pieces of the sequence (dimension 1).
        prefix: prefix of every name, with its dot.

    Raises:
        ConfigurationError: a pattern matches nothing, a style is unknown or cannot be applied, tied parameters are
            wanted in different places.
    """
    modules = {prefix + path: child for path, child in module.named_modules(remove_duplicate=False) if path}
    chosen = _chosen_styles(modules, plan, size)
    wanted: dict[str, Placement] = {}
    for path, target in chosen.items():
        for name, placement in STYLES[target.style](target).items():
            wanted[f"{path}.{name}"] = placement
    tensors = _named_tensors(module, prefix)
    placements = _with_ties(tensors, wanted)
    styles = {path: target.style for path, target in chosen.items()}
    sequence = sequence_parallel or "sequence" in styles.values()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return ResolvedPlan(placements, shapes, styles, sequence)


def _chosen_styles(modules: Mapping[str, nn.Module], plan: StylePlan, size: int) -> dict[str, Target]:
    """Of every module that a pattern matches and that a style can mean: the last pattern's style."""
    chosen: dict[str, Target] = {}
    for pattern, entry in plan.items():
        style, options = _style_and_options(pattern, entry)
        found = [path for path in modules if fnmatch.fnmatchcase(path, pattern)]
        if not found:
            near = _near(pattern, list(modules))
            raise ConfigurationError(
                f"tensor_parallel_plan: no module matches {pattern!r}" + (f"; near: {', '.join(near)}" if near else "")
            )
        # A "*" matches dots as well: what holds no parameters of its own is meant only if nothing else is.
        own = [path for path in found if next(modules[path].parameters(recurse=False), None) is not None]
        for path in own or found:
            chosen[path] = Target(path, modules[path], style, size, options)
    return chosen


def _style_and_options(pattern: str, entry: object) -> tuple[str, dict[str, Any]]:
    options = {"style": entry} if isinstance(entry, str) else dict(entry) if isinstance(entry, Mapping) else {}
    style = options.pop("style", None)
    if not isinstance(style, str) or style not in STYLES:
        near = difflib.get_close_matches(str(style), STYLES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(
            f"tensor_parallel_plan[{pattern!r}]: unknown style {style!r}; the styles are {', '.join(STYLES)}{hint}"
        )
    return style, options


def _near(pattern: str, paths: list[str]) -> list[str]:
    """Paths like the pattern; where its wildcards stand for indices, one path an ending is enough."""
    shapes = {_generic(path): path for path in reversed(paths)}
    return [repr(shapes[g]) for g in difflib.get_close_matches(_generic(pattern), list(shapes), 3, 0.5)]


def _generic(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _named_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {prefix + name: tensor for name, tensor in [*parameters, *buffers]}


def _with_ties(tensors: Mapping[str, Tensor], wanted: Mapping[str, Placement]) -> dict[str, Placement]:
    """Every tensor's placement; names of one tensor share what is said about any of them."""
    said: dict[int, str] = {}
    for name, placement in wanted.items():
        first = said.setdefault(id(tensors[name]), name)
        if wanted[first] != placement:
            raise ConfigurationError(
                f"tensor_parallel_plan: {first!r} and {name!r} are one tied parameter, but the plan places it as "
                f"{wanted[first]} and as {placement}; give both modules styles that agree (embedding and loss do)"
            )
    return {name: wanted[said[id(t)]] if id(t) in said else REPLICATE for name, t in tensors.items()}


@dataclass(frozen=True)
class TensorParallelPlan:
    """Placements on the tensor axis; a ``parallel_plan.ParallelPlan`` that also plans activations.

    The batch is on every rank. Optimizer state and gradients with a parameter's shape are placed like the parameter.
    Everything else is replicated, including all values that Python reads.

    Args:
        resolved: the placements of parameters.
        is_sought: whether the graph of the first batch will say which layers are split.
    """

    resolved: ResolvedPlan
    is_sought: bool = False

    @property
    def needs_graphs(self) -> bool:
        """No rank can compute a split layer alone, nor one that will be split in the middle of the first step."""
        return self.shards_parameters or self.is_sought

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank stores less than all of the parameters."""
        return any(not isinstance(p, Replicate) for p in self.resolved.placements.values())

    def input_placement(self, axis: ShardAxis, entry: GraphInput) -> Placement:
        """State as its parameter, the rest on every rank."""
        return self._state(entry) if entry.role in _STATE_INPUTS else REPLICATE

    def output_placement(self, axis: ShardAxis, entry: GraphOutput, current: Placement) -> Placement:
        """As the inputs of the same role."""
        return self._state(entry) if entry.role in _STATE_OUTPUTS else REPLICATE

    def shards_state(self, axis: ShardAxis) -> bool:
        """State is split where its parameter is; nothing else is."""
        return False

    def between_blocks(self, axis: ShardAxis) -> Placement | None:
        """Whole activations, or pieces of the sequence."""
        return _SEQUENCE if self.resolved.sequence_parallel else REPLICATE

    def _state(self, entry: GraphInput | GraphOutput) -> Placement:
        name = entry.key[0] if entry.key else None
        same = isinstance(entry.value, TensorSpec) and entry.value.shape == self.resolved.shapes.get(str(name))
        return self.resolved.placements.get(str(name), REPLICATE) if same else REPLICATE
