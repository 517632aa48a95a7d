"""Writes this rank's program from the placements that propagation chose, one global node after the other.

Every value may exist in several versions, one a placement tuple. A version is made once and used by all later readers;
writing into a value drops its other versions and those of everything that shares its storage.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.aliasing import overlapping, storage_regions, written_arguments
from lightning_spmd.ir.effects import draws_random
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import TensorSpec, info_of, named
from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Chunk, Own, Placement, Replicate, Shard, ShardAxis
from lightning_spmd.ir.reads import hands_over
from lightning_spmd.ir.signature import InputRole, OutputRole, Signature
from lightning_spmd.parallel.pieces import local_shape, local_spec
from lightning_spmd.stages.expand.axis_plan import AxisPlan
from lightning_spmd.stages.expand.call import Layout, LocalCall, axis_of_pieces, flatten_values, is_tensor
from lightning_spmd.stages.expand.collectives.redistribute import cost, redistribute
from lightning_spmd.stages.expand.program.local_program import LocalProgram
from lightning_spmd.stages.expand.program.memory_order import as_captured, looks_at_memory
from lightning_spmd.stages.expand.program.storage import Storages, reads_by_place
from lightning_spmd.stages.expand.propagation.own_batches import subject_of
from lightning_spmd.stages.expand.rows.chosen import is_chosen, is_same_along
from lightning_spmd.stages.expand.rules import LOCALIZERS, lookup

Placements = tuple[Placement, ...]
_KEPT = (OutputRole.GRADIENT, OutputRole.SHOWN_GRADIENT, OutputRole.OPTIMIZER_STATE, OutputRole.BUFFER)


class EmissionError(ExpansionError):
    """The local program of one node does not fit: a rule is wrong for this call. ``node`` is the global node."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{named(node)}: {reason}")
        self.node = node


class Emitter:
    """One run over the global graph.

    Args:
        graph: the global graph.
        plans: the result of propagation, one entry per mesh axis.
        axes: the mesh axes, with the coordinates of the rank whose program is written.
        longer: places where some rank cannot use the shorter form of the program.
    """

    def __init__(
        self,
        graph: fx.Graph,
        plans: Sequence[AxisPlan],
        axes: tuple[ShardAxis, ...],
        longer: set[tuple[fx.Node, int]],
    ) -> None:
        self.graph = graph
        self.plans = plans
        self.axes = axes
        self.program = LocalProgram(self.axes, longer)
        self.versions: dict[fx.Node, dict[Placements, fx.Node]] = {}
        self.items: dict[fx.Node, Sequence[fx.Node | None]] = {}
        self.numbers: dict[fx.Node, fx.Node] = {}
        self.inputs: dict[fx.Node, fx.Node] = {}
        self.outputs: list[Any] = []
        regions = storage_regions(graph)
        roots = {node: root for node, (root, _) in regions.items()}
        self.pieces = {node: piece for node, (_, piece) in regions.items()}
        self.aliases: dict[fx.Node, list[fx.Node]] = {}
        for node, root in roots.items():
            self.aliases.setdefault(root, []).append(node)
        self.roots = roots
        mutated = {roots[operand] for node in graph.nodes for operand in written_arguments(node)}
        self.mutated = mutated
        self.storages = Storages(self.program, roots, mutated)

    def write(self, signature: Signature) -> Emitter:
        """Write the whole graph."""
        inputs = iter(signature.inputs)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._input(node, first(inputs, "input in the signature").value)
            elif node.op == "output":
                self._output(node, signature)
            else:
                self._node(node)
        return self

    def graph_module(self) -> fx.GraphModule:
        """The program."""
        return self.program.finish(self.outputs)

    # ------------------------------------------------------------------ pieces
    def _placements(self, node: fx.Node, index: int = 0) -> Placements:
        return tuple(plan.outputs[node][index] for plan in self.plans)

    def _input(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, TensorSpec):
            placements = self._placements(node)
            new = self.program.add_input(node, local_spec(value, placements, self.axes), placements)
            self.versions[node] = {placements: new}
            self.inputs[node] = new
            self.storages.note(node, new, placements, ())
        else:
            self.numbers[node] = self.program.add_input(node, value, (REPLICATE,) * len(self.axes))

    def _node(self, node: fx.Node) -> None:
        self.program.begin(node)
        try:
            if node.target is operator.getitem:
                self._getitem(node)
            elif any(node in plan.layouts for plan in self.plans):
                self._operator(node)
            elif hands_over(node):
                self._hand_over(node)
            else:
                new = self.program.call(
                    node.target, *fx.map_arg(node.args, self._number), **fx.map_arg(node.kwargs, self._number)
                )
                new.meta["val"] = node.meta["val"]
                new.meta["placements"] = (REPLICATE,) * len(self.axes)
                self.numbers[node] = new
        except EmissionError:
            raise
        except Exception as error:
            raise EmissionError(node, f"{type(error).__name__}: {error}") from error

    def _hand_over(self, node: fx.Node) -> None:
        """Python is handed whole values, the same on all ranks; on a batch of each rank's own, those of that."""
        everywhere = (REPLICATE,) * len(self.axes)
        values = [
            self._version(operand, tuple(p if isinstance(p, Own) else REPLICATE for p in self._placements(operand)))
            for operand in node.all_input_nodes
        ]
        arguments = [values[node.all_input_nodes.index(a)] for a in node.args]  # type: ignore[arg-type]
        target: Any = node.target
        by_rank = sorted({position for plan in self.plans for counted, position in plan.chosen if counted is node})
        for position in by_rank:
            parts = [PARTIAL if (node, position) in plan.chosen else REPLICATE for plan in self.plans]
            arguments.append(self._version(node.args[position], tuple(parts)))  # type: ignore[arg-type]
        new = self.program.call(target.counting_by_rank(by_rank) if by_rank else target, *arguments)
        new.meta["val"], new.meta["placements"] = node.meta["val"], everywhere
        self.numbers[node], self.items[node] = new, [None] * len(node.meta["val"])

    def _number(self, node: fx.Node) -> fx.Node:
        return self.numbers[node]

    def _getitem(self, node: fx.Node) -> None:
        parent, index = node.args
        item = self.items[parent][index]  # type: ignore[index]
        if item is None:
            item = self.program.call(operator.getitem, self.numbers[parent], index)  # type: ignore[index]
        if isinstance(node.meta["val"], TensorSpec):
            self._bind(node, item, self._placements(node))
        elif isinstance(parent, fx.Node) and hands_over(parent):
            item.meta["val"], item.meta["placements"] = node.meta["val"], (REPLICATE,) * len(self.axes)
            self.numbers[node] = item
        else:
            self._bind_outputs(node, item)

    def _bind(self, node: fx.Node, new: fx.Node, placements: Placements) -> None:
        expected = local_shape(node.meta["val"].shape, placements, self.axes)
        if self.program.shape(new) != expected:
            raise EmissionError(
                node, f"local shape is {self.program.shape(new)}, placements {placements} say {expected}"
            )
        new.meta["placements"] = placements
        self.versions[node] = {placements: new}

    def _operator(self, node: fx.Node) -> None:
        layouts = [plan.layouts[node] for plan in self.plans]
        operands = self.plans[0].operands[node]
        local = [self._version(o, tuple(layout.inputs[i] for layout in layouts)) for i, o in enumerate(operands)]
        written = written_arguments(node)
        if looks_at_memory(node):
            local = [self._as_captured(node, layouts, i, new) for i, new in enumerate(local)]
        for operand, new in zip(operands, local, strict=True):
            if operand in written:
                self._written(operand, new)
        if isinstance(node.meta["val"], (bool, int, float)):  # fake tensors hold no value to read
            self.numbers[node] = self.program.number(node.target, local, node.meta["val"])
            self.numbers[node].meta["placements"] = (REPLICATE,) * len(self.axes)
            return
        call = LocalCall(self.program, node, layouts, local, self.numbers)
        emits = {layout.emit for layout in layouts if layout.emit is not None}
        if len(emits) > 1:
            raise EmissionError(node, "two mesh axes need different local programs")
        if emits:
            self._bind_items(node, emits.pop()(call))
            return
        if reads_by_place(node.target):
            self._read_by_place(call)
        new = self._own_operator(call)
        if draws_random(node):
            split = [
                (axis, layout.outputs)
                for axis, layout in zip(self.axes, layouts, strict=True)
                if any(isinstance(p, (Shard, Chunk, Own)) for p in layout.outputs)
            ]
            new.meta["random"] = tuple(axis_of_pieces(axis, outputs).name for axis, outputs in split)
        self._bind_outputs(node, new)
        if isinstance(node.meta["val"], TensorSpec):
            self.storages.note(node, new, self._placements(node), list(zip(operands, local, strict=True)))

    def _read_by_place(self, call: LocalCall) -> None:
        """Let ``as_strided`` find its operand's storage as it lay at capture."""
        operand: fx.Node = call.globals["self"]
        placements = tuple(layout.inputs[0] for layout in call.layouts)
        everywhere = (REPLICATE,) * len(self.axes)
        call.replace(
            "self",
            self.storages.as_captured(operand, call["self"], placements, lambda n: self._version(n, everywhere)),
        )

    def _own_operator(self, call: LocalCall) -> fx.Node:
        """The operator on local operands. A view of what lies in another order here than at capture takes a copy.

        Kernels lay results out as they find their operands, and a gathered operand is dense. A copy is no view: nothing
        may write into the storage.
        """
        if call.op is not torch.ops.aten.view.default or self.roots[call.node] in self.mutated:
            return call.default(**self._local_sizes(call))
        view = call.default_if_possible(**self._local_sizes(call))
        if view is not None:
            return view
        dense = self.program.call(torch.ops.aten.clone.default, call["self"], memory_format=torch.contiguous_format)
        call.replace("self", dense)
        return call.default(**self._local_sizes(call))

    def _local_sizes(self, call: LocalCall) -> dict[str, Any]:
        localizer = lookup(LOCALIZERS, call.node.target)
        split = any(isinstance(p, Shard) for layout in call.layouts for p in (*layout.inputs, *layout.outputs))
        return localizer(call) if localizer is not None and split else {}

    def _bind_outputs(self, node: fx.Node, new: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, TensorSpec):
            self._bind(node, new, self._placements(node))
        elif isinstance(value, (tuple, list)):
            self.numbers[node] = new
            self.items[node] = [None] * len(value)
            new.meta["placements"] = tuple(self._placements(node, i) for i, _ in enumerate(flatten_values(value)))
        else:
            self.numbers[node] = new
            new.meta["placements"] = (REPLICATE,) * len(self.axes)

    def _bind_items(self, node: fx.Node, items: list[fx.Node | None]) -> None:
        if isinstance(node.meta.get("val"), TensorSpec):
            if items[0] is None:
                raise EmissionError(node, "the emitter gave no output")
            self._bind(node, items[0], self._placements(node))
        else:
            self.items[node] = items

    # ------------------------------------------------------------------ versions
    def _version(self, node: fx.Node, want: Placements) -> fx.Node:
        versions = self.versions[node]
        if want in versions:
            return versions[want]
        if not versions:
            raise ExpansionError(
                f"what {named(node)} returns is a view of a tensor that is written later, and is read or kept after "
                "that, and on the ranks it is a copy; keep a copy (`.clone()`)"
            )
        spec, section = node.meta["val"], info_of(node).section

        def distance(have: Placements) -> float:
            return sum(cost(spec, h, w, section, a) for h, w, a in zip(have, want, self.axes, strict=True))

        have = min(versions, key=distance)
        for source, target in zip(have, want, strict=True):
            if source != target and is_chosen(target) and not self._is_same_along(node, target.dim):  # type: ignore[union-attr]
                raise ExpansionError(f"{node.name} is not the same for all rows of those that values choose")
        self.program.subject = subject_of(node)
        versions.update(redistribute(self.program, versions[have], spec, have, want))
        if want not in versions:
            raise ExpansionError(f"no way from {have} to {want} for {node.name}")
        return versions[want]

    def _is_same_along(self, node: fx.Node, dim: int) -> bool:
        return is_same_along(node, dim, lambda n: self.roots[n] in self.mutated)

    def _as_captured(self, node: fx.Node, layouts: Sequence[Layout], index: int, local: fx.Node) -> fx.Node:
        """Operand ``index`` of ``node``, which is ``local`` here, laid out as at capture; later readers take it too."""
        operand = self.plans[0].operands[node][index]
        placements = tuple(layout.inputs[index] for layout in layouts)
        new = as_captured(self.program, operand, local, placements, node)
        if new is not local:
            if operand in written_arguments(node) and self.roots[operand] is not operand:
                raise EmissionError(node, f"{operand.name} is written through a view that lies otherwise on this rank")
            self.versions[operand][placements] = new
        return new

    def _written(self, node: fx.Node, new: fx.Node) -> None:
        """``node`` is about to be written through its version ``new``: what lies in other storages is stale.

        So are wholes of which ``new`` is a piece: their other pieces are written on other ranks.
        """
        whole = [isinstance(p, Replicate) for p in new.meta["placements"]]
        for alias in self.aliases[self.roots[node]]:
            if alias not in self.versions or not overlapping(self.pieces[node], self.pieces[alias]):
                continue
            self.versions[alias] = {
                placements: version
                for placements, version in self.versions[alias].items()
                if self.program.roots[version] is self.program.roots[new]
                and all(w or not isinstance(p, Replicate) for w, p in zip(whole, placements, strict=True))
            }

    def _restore_inputs(self, signature: Signature) -> None:
        """An input that was written in another placement, or in a copy of it, comes to be up to date where it lies."""
        tensors = (entry for entry in signature.inputs if isinstance(entry.value, TensorSpec))
        for (node, local), entry in zip(self.inputs.items(), tensors, strict=True):
            versions, placements = self.versions[node], self._placements(node)
            gone = not versions and entry.role in (InputRole.BATCH, InputRole.SHARED_BATCH)  # the next step has another
            held = versions.get(placements)
            if node not in self.mutated or gone or (held is not None and self.program.roots[held] is local):
                continue
            self.program.begin(node)
            self.program.info = info_of(next(iter(versions.values()), local))
            self.program.call(torch.ops.aten.copy_.default, local, self._version(node, placements))

    def _output(self, node: fx.Node, signature: Signature) -> None:
        self._restore_inputs(signature)
        outputs: list[Any] = []
        for i, (value, entry) in enumerate(zip(node.args[0], signature.outputs, strict=True)):  # type: ignore[arg-type]
            if is_tensor(value):
                self.program.begin(value)
                placements = tuple(plan.results[i] for plan in self.plans)
                local = self._version(value, placements)
                kept = entry.role in _KEPT
                # what is kept is an input of other graphs, which take it to lie as it did at capture
                outputs.append(as_captured(self.program, value, local, placements, node) if kept else local)
            else:
                outputs.append(self.numbers[value] if isinstance(value, fx.Node) else value)
        self.outputs = outputs
