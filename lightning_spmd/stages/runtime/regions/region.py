"""A region of a graph as a function of its own: what it reads, what it gives, what it is called.

A region gives fresh tensors only. A view that is read outside is made again outside, of what the region gives, so it
shares storage with whom it shared it; the result of an in-place operator is the value that it wrote into.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from lightning_spmd.ir.aliasing import aliased_argument
from lightning_spmd.ir.node_info import TensorSpec, info_of, spec_of
from lightning_spmd.ir.source import function_of
from lightning_spmd.stages.runtime.regions.eligible import is_free, owner


@dataclass
class Region:
    """Some consecutive nodes of a graph.

    Args:
        nodes: in order; items of their tuples that are taken later are among them.
        place: the node behind which the region has run.
        inputs: values from outside, in order of their first reader.
        outputs: values that are read outside and share storage with nothing else.
        kept: views and in-place results that are read outside; they stay in the graph.
    """

    nodes: list[fx.Node]
    place: fx.Node
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    kept: tuple[fx.Node, ...]

    @classmethod
    def of(cls, run: Sequence[fx.Node]) -> Region:
        """The region of a run of nodes."""
        nodes = [*run, *_items_taken_later(run)]
        inside = set(nodes)
        inputs = dict.fromkeys(o for n in nodes for o in n.all_input_nodes if o not in inside)
        needed = {n for n in nodes if any(user not in inside for user in n.users)}
        for node in reversed(nodes):  # what a kept view looks at is needed too
            if node in needed and aliased_argument(node) is not None:
                needed.update(o for o in _looked_at(node) if o in inside)
        outputs = tuple(n for n in nodes if n in needed and aliased_argument(n) is None)
        kept = tuple(n for n in nodes if n in needed and aliased_argument(n) is not None)
        return cls(nodes, run[-1], tuple(inputs), outputs, kept)

    @property
    def modules(self) -> str:
        """The modules that it covers, as a tag."""
        found = dict.fromkeys(info_of(n).module for n in self.nodes if not is_free(n))
        names = [name for name in found if name]
        return ", ".join(names if len(names) < 4 else [names[0], "...", names[-1]])

    @property
    def tag(self) -> str:
        """What a trace of the profiler calls it."""
        return f"{self.name} {info_of(self.nodes[0]).section} {self.modules}".rstrip()

    @property
    def name(self) -> str:
        """A name that depends on what is computed alone."""
        return f"region_{self.key[:10]}"

    @functools.cached_property
    def key(self) -> str:
        """A hash of what is computed, the same for regions that are alike."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @functools.cached_property
    def text(self) -> str:
        """What is computed, without names: operators, arguments, specs of inputs and outputs."""
        names = {node: f"i{n}" for n, node in enumerate(self.inputs)}
        lines = [f"{names[node]}: {_described(node)}" for node in self.inputs]
        for number, node in enumerate(self.nodes):
            names[node] = f"n{number}"
            arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda n: cast(Any, _Named(names[n])))
            lines.append(f"{names[node]} = {node.target}{arguments}")
        return "\n".join([*lines, *(f"return {names[node]}: {_described(node)}" for node in self.outputs)])

    @functools.cached_property
    def function(self) -> Callable[..., Sequence[Tensor]]:
        """The region as torch runs it: operator by operator, as in the graph."""
        return function_of(self.module)

    @functools.cached_property
    def module(self) -> fx.GraphModule:
        """The region as a graph of its own."""
        graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
        for number, node in enumerate(self.inputs):
            values[node] = graph.placeholder(f"input_{number}")
        for node in self.nodes:
            values[node] = graph.node_copy(node, lambda n: values[n])
        graph.output(tuple(values[node] for node in self.outputs))
        return fx.GraphModule(torch.nn.Module(), graph)

    def emit(self, graph: fx.Graph, values: dict[fx.Node, fx.Node], function: Callable[..., Any]) -> None:
        """Put a call of a function in place of the region's nodes.

        Args:
            graph: that is being made.
            values: its nodes by those of the graph that the region lies in.
            function: of the region's inputs, gives its outputs.
        """
        call = graph.call_function(function, tuple(values[node] for node in self.inputs))
        call.meta.update({"info": info_of(self.nodes[0]), "val": tuple(spec_of(node) for node in self.outputs)})
        for number, node in enumerate(self.outputs):
            values[node] = graph.call_function(operator.getitem, (call, number))
            values[node].meta.update(node.meta)
        for node in self.kept:
            written = owner(node)
            values[node] = values[written] if written is not None else graph.node_copy(node, lambda n: values[n])


def lowered_graph(
    graph: fx.Graph, regions: Mapping[int, Region], functions: Mapping[int, Callable[..., Any]]
) -> fx.Graph:
    """The graph with calls of functions in place of regions.

    Args:
        graph: stays as it is.
        regions: by number.
        functions: of regions, by their number.
    """
    inside = {node for region in regions.values() for node in region.nodes}
    ends = {region.place: number for number, region in regions.items()}
    made, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node not in inside:
            values[node] = made.node_copy(node, lambda n: values[n])
        if node in ends:
            regions[ends[node]].emit(made, values, functions[ends[node]])
    return made


# ---------------------------------------------------------------- pieces
class _Named:
    """A name that prints without quotes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def _described(node: fx.Node) -> str:
    spec = node.meta["val"]
    if not isinstance(spec, TensorSpec):
        return str(type(spec))
    return f"{spec.dtype} {list(spec.shape)} {list(spec.stride)} {spec.device}"


def _looked_at(node: fx.Node) -> list[fx.Node]:
    written = owner(node)
    return node.all_input_nodes if written is None else [written]


def _items_taken_later(run: Sequence[fx.Node]) -> list[fx.Node]:
    """Items of the run's fresh tuples that are taken behind its end."""
    inside = set(run)
    tuples = [n for n in run if not isinstance(n.meta.get("val"), TensorSpec) and aliased_argument(n) is None]
    return [u for n in tuples for u in n.users if u not in inside and u.target is operator.getitem]
