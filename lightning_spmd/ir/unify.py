# pyright: basic
# (this module walks arguments of any type; every access follows a check that pyright cannot see)
"""One graph of several that were made for batches of different sizes: what differs becomes a formula of the sizes.

What makes final graphs works on integers. So it is run for a few sizes of the batch; where the graphs are the same node
for node, a number that is not the same in all of them must be a formula of the sizes. A number for which there is none
means that the graphs have no common form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor, fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec, info_of
from lightning_spmd.ir.same_value import same_plain, same_tensor, shown
from lightning_spmd.ir.sizes import Formula, Size, SizeFloat, Sizes, plain, sized
from lightning_spmd.ir.steps import ShardedStep

UNCHECKED = "unchecked"
"""In ``node.meta`` of a tensor whose shape or strides are known for one sample only."""


_OF_COUNTS: tuple[tuple[str, Callable[[float], float], Callable[[int], float], int], ...] = (
    ("(1 / ({0}) if ({0}) else float('inf'))", lambda v: 1 / v, lambda n: 1 / n, 0),
    ("(({0}) / (({0}) - 1) if ({0}) != 1 else float('inf'))", lambda v: v / (v - 1), lambda n: n / (n - 1), 0),
    ("float(max({0}, 0))", float, float, 0),  # degrees of freedom
    ("float(max(({0}) - 1, 0))", float, float, 1),
    ("(2 / ({0}) if ({0}) else float('inf'))", lambda v: 2 / v, lambda n: 2 / n, 0),
    ("(2 / (({0}) - 1) if ({0}) != 1 else float('inf'))", lambda v: 2 / v, lambda n: 2 / n, 1),
)
"""Floats of counts: Python of one, the whole number in it, the float of that, and what makes it the count."""


class Apart(Exception):
    """The graphs have no common form; says why."""


def joined(steps: Sequence[ShardedStep], fits: Fits) -> ShardedStep:
    """The first of several graphs, with formulas in the place of the numbers in which they differ.

    Args:
        steps: graphs of one captured step.
        fits: finds the formulas.

    Raises:
        Apart: they have no common form.
    """
    return _Unification(steps, fits).step()


class Fits:
    """Finds the formula of a number, given its value in each sample.

    Args:
        sizes: on which it depends.
        samples: these, with which the graphs were made.
        search: finds that of a whole number, or why there is none.
    """

    def __init__(
        self,
        sizes: Sizes,
        samples: Sequence[tuple[int, ...]],
        search: Callable[[tuple[int, ...]], Formula | str],
    ) -> None:
        self.sizes, self.samples, self._of_integers = sizes, samples, search
        self._found: dict[tuple[Any, ...], Formula | str] = {}

    def agrees(self, formula: Formula, values: Sequence[Any]) -> bool:
        """Whether a formula gives these values."""
        return all(self.sizes.evaluate(formula, s) == v for s, v in zip(self.samples, values, strict=True))

    def formula(self, values: tuple[Any, ...]) -> Formula:
        """The one that gives these values.

        Raises:
            Apart: there is none.
        """
        if values not in self._found:
            self._found[values] = self._search(values)
        found = self._found[values]
        if isinstance(found, str):
            raise Apart(found)
        return found

    def _search(self, values: tuple[Any, ...]) -> Formula | str:
        return self._of_integers(values) if all(type(v) is int for v in values) else self._of_a_count(values)

    def _of_a_count(self, values: tuple[Any, ...]) -> Formula | str:
        """The formula of a float: those of means and variances, and of their gradients."""
        reason = f"numbers that are not whole depend on sizes: {shown(values)}"
        if not all(type(v) is float and v not in (0.0, 1.0) and abs(v) < 1e9 for v in values):
            return reason
        for shape, count_in, back, added in _OF_COUNTS:
            counts = tuple(round(count_in(v)) for v in values)
            if all(n > 1 and back(n) == v for n, v in zip(counts, values, strict=True)) and len(set(counts)) > 1:
                found = self._search(tuple(n + added for n in counts))
                if not isinstance(found, str):
                    return Formula(shape.format(found))
                reason = found
        return reason


class _Unification:
    """Walks the graphs side by side."""

    def __init__(self, steps: Sequence[ShardedStep], fits: Fits) -> None:
        self.steps, self.fits = steps, fits
        self.numbers: dict[fx.Node, int] = {}
        self.made: dict[fx.Node, fx.Node] = {}

    def step(self) -> ShardedStep:
        """The common form."""
        first = self.steps[0]
        if any(_roles(step) != _roles(first) for step in self.steps):
            raise Apart("the graphs have other inputs or outputs")
        rows = [list(step.graph_module.graph.nodes) for step in self.steps]
        if len({len(nodes) for nodes in rows}) > 1:
            raise Apart("other operators are chosen for other sizes")
        graph = fx.Graph()
        for number, nodes in enumerate(zip(*rows, strict=True)):
            self.numbers.update(dict.fromkeys(nodes, number))
            self.made[nodes[0]] = self._node(graph, nodes)
        module = private.GraphModule(first.graph_module, graph)
        return dataclasses.replace(first, graph_module=module)

    def _node(self, graph: fx.Graph, nodes: tuple[fx.Node, ...]) -> fx.Node:
        first = nodes[0]
        by_name = all(node.op == "get_attr" for node in nodes)
        if any(node.op != first.op or not (by_name or same_target(node.target, first.target)) for node in nodes[1:]):
            raise Apart(f"other operators are chosen for other sizes{_place(first)}")
        if first.op == "get_attr":
            self._same_attribute(nodes)
        try:
            args, kwargs = self._joined([(node.args, node.kwargs) for node in nodes])
        except Apart as error:
            raise Apart(f"{error}, in {first.target}{_place(first)}") from None
        node = graph.node_copy(first, lambda operand: self.made[operand])
        node.args, node.kwargs = args, kwargs
        specs = [spec for n in nodes if isinstance(spec := n.meta.get("val"), TensorSpec)]
        if len(specs) == len(nodes):
            try:
                shape, stride = self._joined([(spec.shape, spec.stride) for spec in specs])
                node.meta["val"] = TensorSpec(shape, stride, specs[0].dtype, specs[0].device)
            except Apart:
                node.meta[UNCHECKED] = True
        return node

    def _same_attribute(self, nodes: tuple[fx.Node, ...]) -> None:
        values = [getattr(s.graph_module, str(n.target)) for s, n in zip(self.steps, nodes, strict=True)]
        if not all(isinstance(v, Tensor) and same_tensor(v, values[0]) for v in values):
            raise Apart("a constant of the graph depends on sizes")

    def _joined(self, parts: Sequence[Any]) -> Any:
        first = parts[0]
        if isinstance(first, fx.Node):
            if any(not isinstance(p, fx.Node) or self.numbers[p] != self.numbers[first] for p in parts):
                raise Apart("an operand is another one for other sizes")
            return self.made[first]
        if isinstance(first, (Size, SizeFloat)) or type(first) in (int, float):
            return self._number(parts)
        for kind in (list, tuple, dict, slice):
            if isinstance(first, kind) and not all(isinstance(p, kind) for p in parts):
                raise Apart("an argument is of another kind for other sizes")
        if isinstance(first, slice):
            return slice(*self._joined([(p.start, p.stop, p.step) for p in parts]))
        if isinstance(first, dict):
            if any(list(p) != list(first) for p in parts):
                raise Apart("an operator has other arguments for other sizes")
            return {key: self._joined([p[key] for p in parts]) for key in first}
        if isinstance(first, (list, tuple)):
            if len({len(p) for p in parts}) > 1:
                raise Apart("an operator has more or fewer operands for other sizes")
            joined = [self._joined(entries) for entries in zip(*parts, strict=True)]
            return joined if isinstance(first, list) else tuple(joined)
        if not all(same_plain(p, first) for p in parts[1:]):
            raise Apart(f"{shown(first)} is another one for other sizes")
        return first

    def _number(self, parts: Sequence[Any]) -> Any:
        first, values = parts[0], tuple(plain(p) for p in parts)
        if any(type(v) is not type(values[0]) for v in values):
            raise Apart("a number is of another kind for other sizes")
        if isinstance(first, (Size, SizeFloat)) and self.fits.agrees(first.formula, values):
            return first
        if len(set(values)) == 1 or all(v != v for v in values):  # NaN
            return values[0]
        return sized(values[0], self.fits.formula(values), self.fits.sizes)


def _roles(step: ShardedStep) -> list[Any]:
    entries = (*step.signature.inputs, *step.signature.outputs)
    return [(entry.role, entry.key, entry.placements) for entry in entries]


def same_target(one: Any, other: Any) -> bool:
    """Whether two nodes call the same."""
    return same_plain(one, other) if isinstance(one, FunctionType) else one is other or one == other


def _place(node: fx.Node) -> str:
    info = info_of(node)
    return (f" in module {info.module!r}" if info.module else "") + (f" at {info.source}" if info.source else "")
