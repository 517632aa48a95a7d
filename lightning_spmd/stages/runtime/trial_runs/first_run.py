"""The first run of a graph checks the memory layout of each kernel's result, which capture could only assume.

Shapes come from torch's shape functions, and some of these disagree with the kernels about strides (batch norm of a
transposed input, a padding's gradient). A captured ``view`` may then be impossible, and a fused optimizer that
walks gradient and parameter side by side would be silently wrong. So the first run executes node by node. If a result
has another layout, a copy into the expected layout is inserted behind its node, in all later runs too.

It also sees which results have their memory alone, whatever schemas say: others may lie there later (``in_place.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.in_place import ALIKE, ALONE, orders_of, writes_alike
from lightning_spmd.ir.layout import has_layout, in_layout
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.signature import GraphInput, Signature
from lightning_spmd.ir.sizes import SizedInterpreter, in_this_step
from lightning_spmd.ir.unify import UNCHECKED

_aten = torch.ops.aten


class LayoutCheck(SizedInterpreter):
    """Runs a graph node by node and notes the fresh values whose layout is not the expected one.

    Args:
        graph_module: the graph.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.repairs: list[fx.Node] = []
        self.seen: dict[str, dict[str, Any]] = {}
        """By the name of a node, what ``in_place.py`` asks of it in ``node.meta``."""
        self._roots = storage_roots(graph_module.graph)
        self._written: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and repair its result if needed."""
        self._written.update(self._roots[o] for o in written_arguments(n))  # also by a kernel that then fails
        value = super().run_node(n)
        spec = n.meta.get("val")
        if (
            n.op != "call_function"
            or not isinstance(value, Tensor)
            or not isinstance(spec, TensorSpec)
            or UNCHECKED in n.meta
        ):
            return value
        if self._roots[n] is n:
            self._look_at(n, value)
        spec = in_this_step(spec)
        if self._roots[n] is not n or value.shape != spec.shape or has_layout(value, spec):
            return value  # of another shape is what a kernel keeps for its backward (cuDNN's reserve): nobody else's
        self.repairs.append(n)
        return in_layout(value, spec)

    def _look_at(self, n: fx.Node, value: Tensor) -> None:
        """Whether a value has its memory alone, and could have been written into an operand's."""
        seen = self.seen.setdefault(n.name, {})
        if private.is_memory_its_own(value):
            seen[ALONE] = True
        if orders := orders_of(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            given = [args, args[::-1]][: len(orders)]
            seen[ALIKE] = tuple([writes_alike(n.target, each, kwargs, value) for each in given])

    def written_inputs(self, signature: Signature) -> list[GraphInput]:
        """The inputs that operators wrote into so far."""
        placeholders = self.module.graph.find_nodes(op="placeholder")  # type: ignore[union-attr]
        pairs = zip(placeholders, signature.inputs, strict=True)
        return [entry for node, entry in pairs if node in self._written]


def insert_repairs(graph_module: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Insert a copy into the expected layout behind each of the nodes."""
    graph = graph_module.graph
    for node in nodes:
        spec, readers = node.meta["val"], list(node.users)
        with graph.inserting_after(node):
            empty = graph.call_function(_aten.new_empty_strided.default, (node, list(spec.shape), list(spec.stride)))
        with graph.inserting_after(empty):
            copy = graph.call_function(_aten.copy_.default, (empty, node))
        for new in (empty, copy):
            new.meta.update({k: v for k, v in node.meta.items() if k in ("val", "info", "placements")})
        for reader in readers:
            reader.replace_input_with(node, copy)
    graph_module.recompile()
