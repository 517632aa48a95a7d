# pyright: basic
# (this module walks arguments of any type; every access follows a check that pyright cannot see)
"""A captured step for batches of many sizes, and the step of any of them without a look at the user's code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.signature import Signature
from lightning_spmd.ir.sizes import Formula, Size, SizeFloat, Sizes, mapped, plain, sized
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.ir.tree import map_leaves


@dataclass(frozen=True)
class Family:
    """The captured steps of batches that differ in size.

    Args:
        step: the traced step; numbers that follow from sizes have formulas.
        sizes: the open sizes.
        seen: the sizes in that trace.
        places: the open sizes themselves. Independent ones stand for themselves, the others are formulas of them, or a
            number if the step uses the size itself.
        fixed: for each size by position, the place in user code that uses the number itself.
    """

    step: CapturedStep
    sizes: Sizes
    seen: tuple[int, ...]
    places: tuple[Formula | int, ...]
    fixed: dict[int, str]

    def at(self, values: Sequence[int], *, marked: bool = False) -> CapturedStep:
        """The captured step of a batch of these sizes.

        Args:
            values: sizes for which ``sizes`` holds.
            marked: numbers in arguments keep their formulas.
        """

        def number(value: Size | SizeFloat) -> Any:
            now = self.sizes.evaluate(value.formula, values)
            return sized(now, value.formula, self.sizes) if marked else now

        return rebuilt(self.step, lambda value: mapped(number, value), marked=marked)

    def formulas(self) -> list[Formula]:
        """Every formula in the step."""
        found: dict[Formula, None] = {}

        def note(value: Any) -> Any:
            mapped(lambda number: found.setdefault(number.formula), value)
            return value

        rebuilt(self.step, note)
        return list(found)


def rebuilt(step: CapturedStep, change: Callable[[Any], Any], *, marked: bool = False) -> CapturedStep:
    """A copy of a step with other numbers.

    Args:
        step: the step.
        change: maps a number to its replacement, and returns anything else unchanged.
        marked: whether the replacements have formulas; those in specs are left out.
    """

    def spec(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            shape, stride = tuple(map(final, value.shape)), tuple(map(final, value.stride))
            return TensorSpec(shape, stride, value.dtype, value.device)
        if isinstance(value, (list, tuple)):
            return type(value)(map(spec, value))
        return final(value)

    def final(value: Any) -> Any:
        return plain(change(value)) if marked else change(value)

    def argument(value: Any) -> Any:
        return map_aggregate(value, change)

    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    result: Any = graph.graph_copy(step.graph_module.graph, made)
    for node in graph.nodes:
        node.args, node.kwargs = argument(node.args), argument(node.kwargs)
        node.meta["val"] = spec(node.meta.get("val"))
    graph.output(argument(result)).meta["val"] = None
    inputs = tuple(dataclasses.replace(entry, value=spec(entry.value)) for entry in step.signature.inputs)
    outputs = tuple(dataclasses.replace(entry, value=spec(entry.value)) for entry in step.signature.outputs)
    return dataclasses.replace(
        step,
        graph_module=private.GraphModule(step.graph_module, graph),
        signature=Signature(inputs, outputs),
        returned=map_leaves(lambda _, leaf: change(leaf), step.returned),
    )
