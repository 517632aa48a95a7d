"""The loss in chunks: head, loss and their gradients in a loop over chunks of rows, so that scores never exist whole.

Before::

    scores = mm(h, w); p = log_softmax(scores); loss = nll(p, y)  ...
    dp = nll_backward(1, p, y); ds = log_softmax_backward(dp, p); dh = mm(ds, w.t); dw = mm(h.t, ds)

After, for each chunk of rows::

    h1 = h[a:b]; y1 = y[a:b]; scores = mm(h1, w); p = log_softmax(scores); loss1 = nll(p, y1)
    dp = nll_backward(1, p, y1); ds = log_softmax_backward(dp, p); dh1 = mm(ds, w.t); dw1 = mm(h1.t, ds)
    ...
    loss = loss1 + loss2 + ...; dh = cat([dh1, dh2, ...]); dw = dw1 + dw2 + ...

``SPMDStrategy(loss_chunks=8)`` makes 8 chunks; ``loss_chunks="256MiB"`` as many as it takes for what is made in the
loop to stay within that. Chunks are to rows what ranks are: the rules that split a batch over ranks split it here, over
time. So what the loss is made of does not matter (means, ignored targets, weights, smoothing, penalties on scores,
casts, biases, shifted labels, maxima for accuracy), as long as each row is worked on by itself up to a sum. What is
summed is summed in float32 at least, what there is for each row is put together.

Not bitwise: sums over rows are made in another order. A loss stays whole whose gradient depends on its value (its
square), whose scores the step returns, keeps or compares across rows, or draws random numbers for, and that has as many
rows as values choose (``h[mask]``, whose graph is one for all counts); that is said.

The same loop by hand is in Liger Kernel (arXiv:2410.10989) and Cut Cross-Entropy (arXiv:2411.09009).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.cost.memory import peak_bytes
from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.effects import draws_random, is_pure
from lightning_spmd.ir.layout import lies_as, memory_order
from lightning_spmd.ir.node_info import SUBJECT, Section, TensorSpec, info_of, named, spec_of
from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Shard, ShardAxis
from lightning_spmd.ir.reads import hands_over
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole, Signature
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import forget_writes, is_wait, stamp_writes
from lightning_spmd.stages.expand.axis_plan import AxisPlan
from lightning_spmd.stages.expand.emit import Emitter
from lightning_spmd.stages.expand.loss_chunks.row_chains import (
    IN_LOOP,
    Chain,
    NoChain,
    Writer,
    chain_of,
    counted_products,
    gradients_in_place,
    prepare,
    products,
    source_of,
)
from lightning_spmd.stages.expand.propagation.propagate import Propagation
from lightning_spmd.stages.expand.rewrites.ignored_rows import ignore_instead_of_cutting

aten = torch.ops.aten

NAME = "loss_chunks"
_GROUP = "chunks of rows"
_MIB = 2**20
_ATTEMPTS = 6
"""Products that are looked at."""
_USUAL = 8
"""How many chunks are proposed."""
_WORTH_A_WORD = 64 * _MIB
_SHARE = 0.1
"""What logits must take of the peak, and chunks save of it, to be proposed."""
_SUMMED_IN = torch.float32
_AT_ONCE = 3
"""Tensors as large as the scores that a chain keeps at once: these, their logarithms, their gradient."""
_LARGE = 2**16
"""Bytes from which on a sum is made in place."""
_REDUCTIONS = {"sum": aten.add.Tensor, "max": aten.maximum.default, "min": aten.minimum.default}


@dataclass(frozen=True)
class _RowPlan:
    """Rows are split, everything else is there for all chunks."""

    dim: int
    needs_graphs: bool = False
    shards_parameters: bool = False

    def input_placement(self, axis: ShardAxis, entry: GraphInput) -> Placement:
        return Shard(self.dim) if entry.role is InputRole.BATCH else REPLICATE

    def output_placement(self, axis: ShardAxis, entry: GraphOutput, current: Placement) -> Placement:
        return current

    def shards_state(self, axis: ShardAxis) -> bool:
        return False

    def splits_sequence(self, axis: ShardAxis) -> int | None:
        return self.dim


def chunk_losses(step: ShardedStep, wanted: int | None, budget: int | None = None) -> str:
    """Compute the rows of a step's losses in chunks, in place. Returns what was done, or why not.

    Args:
        step: this rank's step, before the passes.
        wanted: number of chunks.
        budget: instead, the bytes that one chunk may take.
    """
    if any(0 in axis.split for axis in step.axes):
        return "nothing is done where some rank has no row"
    graph = step.graph_module.graph
    found = products(graph)[:_ATTEMPTS]
    done, refused = list[str](), list[str]()
    while found:
        product, *found = found
        try:
            trial, copies, note = _attempt(graph, product, step.axes, wanted, budget)
        except NoChain as error:
            refused.append(f"{_loss_on(product)} stays whole: {error}")
            continue
        done.append(note)
        graph, found = trial, [copies[p] for p in found if p in copies]
    if not done:
        for counted in counted_products(graph)[-1:]:
            refused.insert(0, f"{_loss_on(counted)} stays whole: its number of rows is decided by values")
        return refused[0] if refused else "no layer has more than twice as many outputs per row as inputs"
    step.graph_module = private.GraphModule(step.graph_module, graph)
    return "; ".join(done)


def what_chunks_would_save(step: ShardedStep) -> str:
    """A message for users whose logits are the memory peak of a training step; otherwise empty."""
    graph = step.graph_module.graph
    wide = products(graph)[:1]
    if not wide or spec_of(wide[0]).bytes < _WORTH_A_WORD or not any(map(_is_backward, graph.nodes)):
        return ""
    whole = peak_bytes(graph)
    if spec_of(wide[0]).bytes < _SHARE * whole:
        return ""
    trial = ShardedStep(step.graph_module, step.signature, step.axes)
    chunk_losses(trial, _USUAL)
    ours = peak_bytes(trial.graph_module.graph)
    if ours > (1 - _SHARE) * whole:
        return ""
    return (
        f"logits are the peak; SPMDStrategy({NAME}={_USUAL}) would bring what a step keeps at once from "
        f"{whole / _MIB:.0f} to {ours / _MIB:.0f} MiB, with losses equal up to rounding"
    )


def _loss_on(product: fx.Node) -> str:
    where = info_of(product).module
    return f"the loss{f' on module {where!r}' if where else ''}"


def _is_backward(node: fx.Node) -> bool:
    return info_of(node).section is Section.BACKWARD


def _attempt(
    graph: fx.Graph, product: fx.Node, axes: Sequence[ShardAxis], wanted: int | None, budget: int | None
) -> tuple[fx.Graph, dict[fx.Node, fx.Node], str]:
    """(a copy of the graph in which what is made of a product is worked on in chunks, its nodes, what was done).

    Raises:
        NoChain: it cannot be.
    """
    source, _ = source_of(product)
    rows = [_fewest(source, dim, axes) for dim in range(len(spec_of(source).shape) - 1)]
    dims = sorted(range(len(rows)), key=lambda d: (-min(rows[d], wanted or rows[d]), d))
    refused: NoChain | None = None
    if min(rows, default=0) < 2 and not all(axis.is_even for axis in axes):  # a row is cut otherwise than several
        raise NoChain("some rank has one row, others have more")
    for dim in dims:
        if rows[dim] < 2:
            continue
        trial, copies = _copy(graph)
        try:
            note = _Loop(trial, copies[product], axes, dim).write(rows[dim], wanted, budget)
            stamp_writes(trial)
        except NoChain as error:
            refused = refused or error
        except Exception as error:  # the graph that is there is as good as ever
            refused = refused or NoChain(f"a defect of lightning_spmd, {type(error).__name__}: {error}")
        else:
            kept = set(trial.nodes)
            return trial, {old: new for old, new in copies.items() if new in kept}, note
    raise refused or NoChain("it has one row")


def _fewest(source: fx.Node, dim: int, axes: Sequence[ShardAxis]) -> int:
    """Size of a dimension on the rank that has least of it: all ranks must make as many chunks."""
    size = spec_of(source).shape[dim]
    for axis, placement in zip(axes, source.meta.get("placements", ()), strict=False):
        if isinstance(placement, Shard) and placement.dim == dim:
            size = size * min(axis.split) // axis.split[axis.rank]
    return size


def _copy(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    copies: dict[fx.Node, fx.Node] = {}
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, copies))
    return copy, copies


class _Loop:
    """Replaces a chain by a loop over chunks of its rows, in place.

    Args:
        graph: the graph.
        product: where the chain begins.
        axes: the mesh.
        dim: the dimension of its source that is split.
    """

    def __init__(self, graph: fx.Graph, product: fx.Node, axes: Sequence[ShardAxis], dim: int) -> None:
        self.graph, self.product, self.mesh, self.dim = graph, product, axes, dim
        self.size = spec_of(source_of(product)[0]).shape[dim]

    def write(self, most: int, wanted: int | None, budget: int | None) -> str:
        """Write the loop; gives what was done.

        Args:
            most: how many chunks there can be.
            wanted: how many there should be.
            budget: instead, how many bytes one may take.

        Raises:
            NoChain: it cannot be.
        """
        plan = _RowPlan(self.dim)
        axis = _axis(self.size, min(most, wanted or most))
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and not node.users and is_pure(node):
                self.graph.erase_node(node)
        if self.dim:
            ignore_instead_of_cutting(self.graph, (axis,), plan, in_place=True)
        whole = peak_bytes(_graph_of(chain_of(self.product, self.dim, axis))[0])
        prepare(self.product)
        gradients_in_place(self.product)
        chain = chain_of(self.product, self.dim, axis)
        inner, signature = _graph_of(chain)
        if wanted is None:
            axis = _axis(self.size, min(most, math.ceil(self._peak(inner) / (budget or 1))))
            if axis.size < 2:
                raise NoChain("it is within that already")
        longer = set[tuple[fx.Node, int]]() if all(a.is_even for a in self.mesh) else _AllPlaces()
        programs, placements = _programs(inner, signature, axis, plan, longer)
        moved = self._window(chain)
        self._write(chain, programs, placements, axis, moved)
        ours = max(program.peak for program in programs)
        return (
            f"{_loss_on(self.product)} is computed in {axis.size} chunks of rows, with {ours / _MIB:.1f} MiB at once "
            f"instead of {whole / _MIB:.1f}"
        )

    def _peak(self, inner: fx.Graph) -> int:
        """Bytes that the chain takes at once; where ranks have unequal numbers of rows, that of the largest on all."""
        for axis, placement in zip(self.mesh, self.product.meta.get("placements", ()), strict=False):
            if isinstance(placement, Shard) and not axis.is_even:
                mine = spec_of(self.product).bytes // axis.split[axis.rank]
                return _AT_ONCE * mine * max(axis.split)
        return peak_bytes(inner)

    # ------------------------------------------------------------------ where
    def _window(self, chain: Chain) -> list[fx.Node]:
        """What stands between the nodes of the chain and needs its results: it moves behind the loop.

        Raises:
            NoChain: that would change what it does.
        """
        order, inside = list(self.graph.nodes), set(chain.nodes)
        first, last = order.index(chain.nodes[0]), order.index(chain.nodes[-1])
        later = dict.fromkeys(chain.nodes)
        between = [node for node in order[first:last] if node not in inside]
        for node in order[first:last]:
            if any(operand in later for operand in node.all_input_nodes):
                later[node] = None
        moved = [node for node in between if node in later]
        kept = [node for node in between if node not in later]
        roots = storage_roots(self.graph)
        others = {roots[o] for node in (*kept, *chain.nodes) for o in node.all_input_nodes}
        written = {roots[o] for node in between if not is_wait(node) for o in written_arguments(node)}
        for node in moved:
            if any(roots[o] in written & others for o in node.all_input_nodes):
                raise NoChain(f"{named(node)} and what is made of it write into the same tensor")
        if any(map(_in_turn, moved)) and any(map(_in_turn, kept)):
            raise NoChain("random numbers are drawn, or values are read, between the loss and its gradient")
        return moved

    # ------------------------------------------------------------------ the loop
    def _write(
        self,
        chain: Chain,
        programs: Sequence[_Chunk],
        placements: Sequence[Placement],
        axis: ShardAxis,
        moved: Sequence[fx.Node],
    ) -> None:
        end = cursor = chain.nodes[-1]
        for node in moved:
            cursor.append(node)
            cursor = node
        backward = any(info_of(node).section is Section.BACKWARD for node in chain.nodes)
        is_uneven = any(not axis.is_even for axis in self.mesh)
        write = Writer(end, dataclasses.replace(info_of(self.product), section=Section.BACKWARD) if backward else None)
        results = [_Result(write, *pair, axis) for pair in zip(chain.results, placements, strict=True)]
        for chunk, program in enumerate(programs):
            start = sum(axis.split[:chunk])
            piece = write(aten.slice.Tensor, chain.source, self.dim, start, start + axis.split[chunk])
            if is_uneven or not lies_as(spec_of(piece), program.spec):
                piece = write(aten.clone.default, piece, memory_format=torch.contiguous_format)
            copies = dict(zip(program.inputs, (piece, *chain.inputs[1:]), strict=True))
            sums = {value: result for value, result in zip(program.outputs, results, strict=True) if result.is_sum}
            for node in program.nodes:
                if node in sums and sums[node].adds_product(node, copies):
                    continue
                copies[node] = new = end.graph.node_copy(node, copies.__getitem__)
                end.prepend(new)
                forget_writes(new)
                new.meta.pop("placements", None)
                origin = program.origins[node].meta
                new.meta.update((key, origin[key]) for key in ("placements", SUBJECT) if key in origin)
                new.meta[IN_LOOP] = True
                if is_uneven:
                    new.meta["rank_dependent"] = True
                if backward and info_of(new).section is Section.FORWARD:
                    new.meta["info"] = dataclasses.replace(info_of(new), section=Section.BACKWARD)
            for value, result in zip(program.outputs, results, strict=True):
                if value in copies:
                    result.add(copies[value], is_its_own=program.is_its_own(value))
        inside = set(chain.nodes)
        for result in results:
            new = result.whole()
            for key in ("info", "placements"):
                if key in result.node.meta:
                    new.meta[key] = result.node.meta[key]
            result.node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
        for node in reversed(chain.nodes):
            self.graph.erase_node(node)
        for node in reversed(chain.views):
            if not node.users:
                self.graph.erase_node(node)


class _Result:
    """What others read of a chain, as it comes together chunk by chunk.

    Args:
        write: writes into the graph, in front of the end of the loop.
        node: the node of the chain.
        placed: how it lies along the chunks.
        axis: the chunks.
    """

    def __init__(self, write: Writer, node: fx.Node, placed: Placement, axis: ShardAxis) -> None:
        self.write, self.node, self.placed, self.axis = write, node, placed, axis
        self.spec = spec_of(node)
        self.pieces: list[fx.Node] = []
        self.is_sum = placed == PARTIAL
        self._is_fresh = False

    def add(self, value: fx.Node, *, is_its_own: bool) -> None:
        """What the next chunk gives."""
        if isinstance(self.placed, Shard):
            self.pieces.append(value)
        elif not self.pieces:
            wide = self.is_sum and self.spec.dtype.is_floating_point and self.spec.dtype.itemsize < _SUMMED_IN.itemsize
            self.pieces = [self.write(aten._to_copy.default, value, dtype=_SUMMED_IN) if wide else value]
            self._is_fresh = wide or is_its_own
        elif isinstance(self.placed, Partial):
            op = _REDUCTIONS[self.placed.op]
            if op is aten.add.Tensor and self._is_fresh and self.spec.bytes >= _LARGE:
                op = aten.add_.Tensor
            self.pieces = [self.write(op, self.pieces[0], value)]
            self._is_fresh = True

    def adds_product(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> bool:
        """Let a product be made inside the sum, if it can be."""
        if node.target is not aten.mm.default or not self._is_fresh or spec_of(self.pieces[0]).dtype != self.spec.dtype:
            return False
        operands = [copies[operand] for operand in node.all_input_nodes]
        if self.spec.bytes < _LARGE or len(node.users) > 1 or len(operands) < 2:
            return False
        self.pieces = [self.write(aten.addmm_.default, self.pieces[0], *operands)]
        return True

    def whole(self) -> fx.Node:
        """The result for all rows."""
        value = self.pieces[0] if len(self.pieces) == 1 else self._joined()
        if spec_of(value).dtype != self.spec.dtype:
            value = self.write(aten._to_copy.default, value, dtype=self.spec.dtype)
        if not lies_as(spec_of(value), self.spec):
            empty = self.write(aten.new_empty_strided.default, value, list(self.spec.shape), list(self.spec.stride))
            value = self.write(aten.copy_.default, empty, value)
        return value

    def _joined(self) -> fx.Node:
        placed, order = self.placed, list(memory_order(self.spec))
        if not isinstance(placed, Shard) or not isinstance(placed.outer, int):
            raise NoChain(f"{named(self.node)} has rows of unequal blocks")
        dim, outer = placed.dim, placed.outer
        if outer != 1:
            shape = list(self.spec.shape)
            apart = [shape[:dim] + [outer, spec_of(p).shape[dim] // outer] + shape[dim + 1 :] for p in self.pieces]
            blocks = [self.write(aten.reshape.default, p, size) for p, size in zip(self.pieces, apart, strict=True)]
            return self.write(aten.view.default, self.write(aten.cat.default, blocks, dim + 1), shape)
        if order == sorted(order):
            return self.write(aten.cat.default, self.pieces, dim)
        pieces = [self.write(aten.permute.default, p, order) for p in self.pieces]
        return self.write(
            aten.permute.default,
            self.write(aten.cat.default, pieces, order.index(dim)),
            [order.index(d) for d in range(len(order))],
        )


# ---------------------------------------------------------------- a chunk's program
class _Emitter(Emitter):
    """One run over a chain for a chunk; ``origins`` says what became which nodes."""

    def __init__(self, graph: fx.Graph, plan: AxisPlan, axis: ShardAxis, longer: set[tuple[fx.Node, int]]) -> None:
        super().__init__(graph, [plan], (axis,), longer)
        self.origins: dict[fx.Node, fx.Node] = {}

    def _node(self, node: fx.Node) -> None:
        super()._node(node)
        for new in reversed(self.program.graph.nodes):
            if new in self.origins or new.op == "placeholder":
                break
            self.origins[new] = node


class _AllPlaces(set[tuple[fx.Node, int]]):
    """Where ranks have unequal numbers of rows: a form that one piece allows may be none for another rank's."""

    def __contains__(self, place: object) -> bool:
        return True


class _Chunk:
    """The program of one chunk, written."""

    def __init__(self, emitter: _Emitter) -> None:
        program = emitter.program
        nodes = list(program.graph.nodes)
        self.inputs = [n for n in nodes if n.op == "placeholder"]
        self.nodes = [n for n in nodes if n.op == "call_function"]
        self.outputs: list[fx.Node] = emitter.outputs
        self.spec: TensorSpec = spec_of(self.inputs[0])
        self.origins = emitter.origins
        self._roots = program.roots
        program.graph.output(tuple(self.outputs))
        self.peak = peak_bytes(program.graph)
        if program.attributes:
            raise NoChain("what it takes to cut it is more than slices")

    def is_its_own(self, value: fx.Node) -> bool:
        """Whether the memory of a value has no other reader."""
        return self._roots.get(value) is value and value.op == "call_function" and len(value.users) == 1


def _programs(
    inner: fx.Graph, signature: Signature, axis: ShardAxis, plan: _RowPlan, longer: set[tuple[fx.Node, int]]
) -> tuple[list[_Chunk], list[Placement]]:
    """(the program of every chunk, how the results lie along the chunks).

    Raises:
        NoChain: the chunks would need something of each other.
    """
    try:
        placed = Propagation(inner, signature, axis, plan, {}).run()
        for node in (*placed.replicated, *placed.gathered):
            raise NoChain(f"{named(node)} works across the rows")
        written = [_Emitter(inner, placed, dataclasses.replace(axis, rank=rank), longer) for rank in range(axis.size)]
        for emitter in written:
            emitter.write(signature)
    except ExpansionError as error:
        raise NoChain(str(error)) from error
    for emitter in written:
        for node in emitter.program.graph.nodes:
            if axis.group in node.args:
                raise NoChain(f"{named(emitter.origins[node])} needs a result of all rows to go on with each")
    return [_Chunk(emitter) for emitter in written], placed.results


def _graph_of(chain: Chain) -> tuple[fx.Graph, Signature]:
    """The chain as a graph of its own, and its signature: ``source`` is the batch."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[GraphInput] = []
    for i, node in enumerate(chain.inputs):
        copies[node] = new = graph.placeholder(f"input_{i}")
        new.meta["val"] = node.meta["val"]
        inputs.append(GraphInput(InputRole.BUFFER if i else InputRole.BATCH, (i,), node.name, node.meta["val"]))
    for node in (*chain.views, *chain.nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        forget_writes(copies[node])
    graph.output(tuple(copies[node] for node in chain.results))
    outputs = [GraphOutput(OutputRole.STEP_OUTPUT, (i,), n.name, spec_of(n)) for i, n in enumerate(chain.results)]
    return graph, Signature(tuple(inputs), tuple(outputs))


def _axis(size: int, chunks: int) -> ShardAxis:
    """The chunks of a number of rows, as an axis. If rows do not divide evenly, the first chunks have one more."""
    rows, longer = divmod(size, chunks)
    return ShardAxis(_GROUP, chunks, 0, _GROUP, tuple(rows + (chunk < longer) for chunk in range(chunks)))


def _in_turn(node: fx.Node) -> bool:
    """Whether it matters what runs before a node and what behind it."""
    return draws_random(node) or hands_over(node)
