"""Cut deferred tails out of an iteration: ``setup`` is the iteration without them, ``cleanup`` is they alone.

Before::

    r1 = all_reduce(g1); ...; w1 = wait(r1); update(p1, w1, lr); return loss

After::

    setup(p1, lr, batch):        r1 = all_reduce(g1); ...; return loss, [r1, lr]
    cleanup(p1, [r1, lr]):       w1 = wait(r1); update(p1, w1, lr)

What crosses is handed on as *pending* values: results of this iteration and numbers as they are now (a scheduler
changes ``lr`` before the next one). Parameters and state are read anew: nothing but the tail writes them in between.
Tensors travel in boxes (lists of one) and are taken out by their tail: the caller of a graph holds on to its arguments
until the end, and a step would need room for two sets of gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.aliasing import written_arguments
from lightning_spmd.ir.dependence import Tail
from lightning_spmd.ir.node_info import TAIL, NodeInfo, Section, TensorSpec, info_of
from lightning_spmd.ir.placement import REPLICATE, Placement
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole, Signature
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import forget_writes, verify_sharded
from lightning_spmd.stages.phases.touch import LIVE, Touches


def split(step: ShardedStep, deferred: Sequence[Tail]) -> tuple[ShardedStep, ShardedStep]:
    """(setup, cleanup) of a step; the step itself stays as it is.

    Raises:
        VerificationError: a graph broke an invariant.
    """
    cut = _Cut(step, deferred)
    cleanup = cut.cleanup()
    setup = cut.setup()
    for part in (setup, cleanup):
        verify_sharded(part, stamp=True)
        part.graph_module.recompile()
    return setup, cleanup


class _Cut:
    def __init__(self, step: ShardedStep, deferred: Sequence[Tail]) -> None:
        self.step = step
        self.deferred = deferred
        self.touches = Touches(step)
        graph = step.graph_module.graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self.entries = dict(zip(placeholders, step.signature.inputs, strict=True))
        self.moved = {node for tail in deferred for node in tail.nodes}
        self.crossing: dict[fx.Node, None] = {}
        self.live: dict[fx.Node, None] = {}

    # ------------------------------------------------------------------ cleanup
    def cleanup(self) -> ShardedStep:
        """The deferred tails alone."""
        for node in (n for tail in self.deferred for n in tail.nodes):
            for operand in node.all_input_nodes:
                if operand not in self.moved:
                    self._need(operand)
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        inputs: list[GraphInput] = []
        for node in self.live:
            made[node] = graph.node_copy(node)
            inputs.append(self.entries[node])
        boxes: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(self.crossing):
            value, boxed = node.meta.get("val"), self._boxed(node)
            made[node] = graph.placeholder(f"pending_{index}")
            made[node].meta["val"] = value
            if boxed:
                boxes[node] = made.pop(node)
            inputs.append(
                GraphInput(InputRole.PENDING, (index, boxed), node.name, value, False, self._placements(node))
            )
        for index, tail in enumerate(self.deferred):
            local = dict(made)
            for node in tail.nodes:
                for operand in node.all_input_nodes:
                    if operand in boxes and operand not in local:
                        local[operand] = _take(graph, boxes[operand], operand, index)
                _copy(graph, node, local, index)
        graph.output(())
        signature = Signature(tuple(inputs), ())
        return ShardedStep(private.GraphModule(self.step.graph_module, graph), signature, self.step.axes)

    def _boxed(self, node: fx.Node) -> bool:
        """Tensors that one tail reads: it takes them out of a box, so that they are freed after their last use."""
        readers = {i for i, tail in enumerate(self.deferred) if any(node in n.all_input_nodes for n in tail.nodes)}
        return len(readers) == 1 and isinstance(node.meta.get("val"), TensorSpec)

    def _need(self, node: fx.Node) -> None:
        root = self.touches.root(node)
        entry = self.entries.get(root)
        if entry is None or entry.role not in LIVE or not isinstance(entry.value, TensorSpec):
            self.crossing[node] = None
            return
        self.live[root] = None  # and views of it are made again

    # ------------------------------------------------------------------ setup
    def setup(self) -> ShardedStep:
        """The iteration without the deferred tails."""
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        result: Any = ()
        for node in self.step.graph_module.graph.nodes:
            if node.op == "output":
                result = node.args[0]
            elif node not in self.moved:
                made[node] = graph.node_copy(node, made.__getitem__)
        handed = [self._handed_on(graph, node, made[node]) for node in self.crossing]
        outputs = fx.map_arg(result, made.__getitem__)
        graph.output((*outputs, *handed))
        pending = [
            GraphOutput(
                OutputRole.PENDING, (index, self._boxed(node)), node.name, node.meta.get("val"), self._placements(node)
            )
            for index, node in enumerate(self.crossing)
        ]
        signature = dataclasses.replace(self.step.signature, outputs=(*self.step.signature.outputs, *pending))
        module = private.GraphModule(self.step.graph_module, graph)
        return dataclasses.replace(self.step, graph_module=module, signature=signature)

    def _handed_on(self, graph: fx.Graph, node: fx.Node, copied: fx.Node) -> fx.Node:
        """The value as it is now: inputs that something may write into before the next iteration are copied."""
        if self.touches.root(node) not in self.entries or not isinstance(node.meta.get("val"), TensorSpec):
            return copied
        clone = graph.call_function(torch.ops.aten.clone.default, (copied,))
        clone.meta.update(val=node.meta["val"], info=NodeInfo(Section.OPTIMIZER, "", info_of(node).source))
        return clone

    def _placements(self, node: fx.Node) -> tuple[Placement, ...]:
        return node.meta.get("placements") or (REPLICATE,) * len(self.step.axes)


def take(box: list[Any]) -> Any:
    """The value in a box that a pending input is; afterwards the box holds nothing."""
    return box.pop()


def _take(graph: fx.Graph, box: fx.Node, node: fx.Node, tail: int) -> fx.Node:
    taken = graph.call_function(take, (box,))
    taken.meta.update({key: node.meta[key] for key in ("val", "info", "placements") if key in node.meta})
    taken.meta.setdefault("info", NodeInfo(Section.OPTIMIZER))
    taken.meta[TAIL] = tail
    return taken


def _copy(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node], tail: int) -> None:
    """Copy a node of a tail. Views of live state are made again; results of writes into it are the state as it is."""
    for operand in node.all_input_nodes:
        _copy_operand(graph, operand, made, tail)
    made[node] = graph.node_copy(node, made.__getitem__)
    made[node].meta[TAIL] = tail
    forget_writes(made[node])  # the writes of setup are not in this graph


def _copy_operand(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node], tail: int) -> None:
    """Copy a value for a tail. The result of several writes in a row is the tensor that the first wrote into."""
    if node in made:
        return
    written = written_arguments(node)
    if written:
        _copy_operand(graph, written[0], made, tail)
        made[node] = made[written[0]]
    else:
        _copy(graph, node, made, tail)
