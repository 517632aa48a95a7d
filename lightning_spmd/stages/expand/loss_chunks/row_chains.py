"""What is made of the rows of a wide product and ends in sums over the rows: a head, its loss, and their gradients.

::

    h ──mm(·, w)──► scores ──log_softmax──► ──nll──► sum over rows          the inside: a vocabulary a row
                                 └──────► gradient of the scores ──mm──► gradient of h, sum over rows of w's

The sharding rules say what is row-wise, asked as if a chunk of the rows were a rank's own: what they split stays
inside, what they leave as a partial sum ends there. So a chain is found whatever the loss is made of.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from lightning_spmd.ir.aliasing import aliased_argument, storage_roots, written_arguments
from lightning_spmd.ir.effects import draws_random, is_pure
from lightning_spmd.ir.node_info import NodeInfo, Section, TensorSpec, info_of, named, spec_of
from lightning_spmd.ir.placement import REPLICATE, Placement, Replicate, Shard, ShardAxis
from lightning_spmd.ir.reads import hands_over
from lightning_spmd.stages.expand.call import Layout, OpCall, is_tensor
from lightning_spmd.stages.expand.program.fakes import Fakes
from lightning_spmd.stages.expand.rules import layouts_of

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}
"""Products with a weight, and which argument has the rows."""
_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_NONE, _MEAN, _SUM = 0, 1, 2
_OF_A_SHAPE = {aten.ones_like.default: 1, aten.zeros_like.default: 0}
"""Operators that look at a tensor's shape and at none of its elements, and what they fill it with."""
_WIDER = 2
"""How much wider than its rows a product must be."""
_WIDE = 0.4
"""What has this share of the product's elements is wide; a shift by one position leaves a little less than all."""
_NARROW = 16
"""Numbers a row that are followed: maxima, sums of exponentials, the score of the target."""
IN_LOOP = "in_loop"
"""Key in ``node.meta`` of what a loop over chunks was written of."""
_COUNTED = "counted_rows"
"""Key in ``node.meta`` of a product with as many rows as values choose."""
_LONGEST = 400
"""Nodes of a chain, at most: what reaches through a network is none."""


class NoChain(Exception):
    """Why the rows of a product cannot be worked on chunk by chunk, for the user."""


@dataclass(frozen=True)
class Chain:
    """Operators that work row by row.

    Args:
        source: the value that has the rows, before the views that flatten them for the product.
        views: these views; others may read them too.
        nodes: the product and what follows it, in order.
        inputs: values that the chain reads from outside, ``source`` first.
        results: its values that other nodes read.
    """

    source: fx.Node
    views: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


class Writer:
    """Writes calls in front of a node, with its facts.

    Args:
        before: the node.
        info: facts that differ from its.
    """

    def __init__(self, before: fx.Node, info: NodeInfo | None = None) -> None:
        self._before, self._fakes = before, Fakes(has_rows=True)
        self._info = info or info_of(before)

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Write one."""
        value, fake = self._fakes.result(op, args, kwargs)
        with self._before.graph.inserting_before(self._before):
            node = self._before.graph.call_function(op, args, kwargs)
        self._fakes.keep(node, fake)
        node.meta.update(val=value, info=self._info)
        placements = self._before.meta.get("placements")
        if placements is not None:
            node.meta["placements"] = placements
        return node


def products(graph: fx.Graph) -> list[fx.Node]:
    """Products that are much wider than their rows, the last ones of the forward pass first."""
    wide = [n for n in _wide(graph) if _COUNTED not in n.meta]
    largest = max((spec_of(n).bytes for n in wide), default=0)
    return [n for n in reversed(wide) if 2 * spec_of(n).bytes >= largest]


def counted_products(graph: fx.Graph) -> list[fx.Node]:
    """Such products with as many rows as values choose."""
    return [n for n in reversed(_wide(graph)) if _COUNTED in n.meta]


def mark_counted(graphs: Sequence[fx.Graph]) -> None:
    """Note in graphs of one step, each for other counts of what values choose, which products have other sizes.

    Chunks of such rows, and how many of them there are, would be others in each graph.
    """
    rows = [list(graph.nodes) for graph in graphs]
    if len({len(nodes) for nodes in rows}) > 1:  # no common form is found for them in any case
        return
    for nodes in zip(*rows, strict=True):
        if all(n.target in _PRODUCTS for n in nodes) and len({tuple(spec_of(n).shape) for n in nodes}) > 1:
            for node in nodes:
                node.meta[_COUNTED] = True


def _wide(graph: fx.Graph) -> list[fx.Node]:
    found = [n for n in graph.nodes if n.target in _PRODUCTS and info_of(n).section is Section.FORWARD]
    return [n for n in found if spec_of(n).numel >= _WIDER * spec_of(_rows_of(n)).numel]


def source_of(product: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """(the value that has a product's rows, the views that flatten them)."""
    views: list[fx.Node] = []
    node = _rows_of(product)
    while (base := aliased_argument(node)) is not None and is_pure(node) and is_tensor(base):
        if spec_of(base).numel != spec_of(node).numel:
            break
        views.insert(0, node)
        node = base
    return node, tuple(views)


def _rows_of(product: fx.Node) -> fx.Node:
    return product.args[_PRODUCTS[product.target]]  # type: ignore[return-value]


# ---------------------------------------------------------------- what is known before any row is
def prepare(product: fx.Node) -> None:
    """Remove nodes from a chain that seem to need all of its rows but do not.

    A gradient begins with ``ones_like(loss)``, which is a number. A mean over targets that are not ignored divides by
    their weight, which the loss operator returns beside the sum; it follows from the targets alone.
    """
    for node in _reached(product):
        spec, target = node.meta.get("val"), cast(Any, node.target)
        if target in _OF_A_SHAPE and isinstance(spec, TensorSpec) and not spec.shape:
            write = Writer(node)
            number = write(aten.full.default, [], _OF_A_SHAPE[target], dtype=spec.dtype, device=spec.device)
            node.replace_all_uses_with(number)
            node.graph.erase_node(node)
        elif target in _LOSSES and node.args[3] != _NONE:
            _weigh_by_targets(node)


def _weigh_by_targets(node: fx.Node) -> None:
    """``nll(scores, target, mean)`` becomes ``nll(scores, target, sum) / weight`` with the weight of the targets."""
    scores, target, weight, reduction, ignored = cast(Any, node.args)
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(items) != len(node.users):
        return
    write = Writer(node)
    unknown = write(aten.eq.Scalar, target, ignored)
    if weight is None:
        weights = write(aten.logical_not.default, unknown)
    else:
        known = write(aten.masked_fill.Scalar, target, unknown, 0)
        weights = write(aten.masked_fill.Scalar, _weights(write, weight, known), unknown, 0)
    total = write(aten.sum.default, weights, dtype=spec_of(scores).dtype)
    if 1 in items:
        items[1].replace_all_uses_with(total)
    if reduction == _MEAN and 0 in items:
        summed = write(operator.getitem, write(node.target, scores, target, weight, _SUM, ignored), 0)
        items[0].replace_all_uses_with(write(aten.div.Tensor, summed, total))
    for item in items.values():
        if not item.users:
            node.graph.erase_node(item)
    if not node.users:
        node.graph.erase_node(node)


def gradients_in_place(product: fx.Node) -> None:
    """Write the gradient of scores into the memory of their logarithms, which have no other reader.

    Before: ``d = nll_backward(g, p, y); s = log_softmax_backward(d, p)``, each as large as ``p``. After, with the slope
    ``k`` of each row, which follows from the targets: ``s = exp_(p) * k; s[row, y] -= k``.
    """
    order = {node: i for i, node in enumerate(product.graph.nodes)}
    roots = storage_roots(product.graph)
    for node in _reached(product):
        if node.target is not aten._log_softmax_backward_data.default:
            continue
        gradient, output, dim, dtype = cast(Any, node.args)
        if not _is_gradient_of_loss(gradient, output, dim):
            continue
        wide = spec_of(output).dtype in (torch.float32, torch.float64) and spec_of(output).dtype == dtype
        readers = [user for other in order if roots[other] is roots[output] for user in other.users]
        last = all(order[user] <= order[node] for user in readers)
        if not wide or not last or roots[output].op == "placeholder":
            continue
        write = Writer(node)
        slopes, target = _slopes(write, gradient)
        at = write(aten.unsqueeze.default, target, 1)
        value = write(aten.mul_.Tensor, write(aten.exp_.default, output), write(aten.unsqueeze.default, slopes, 1))
        down = write(aten.unsqueeze.default, write(aten.neg.default, slopes), 1)
        node.replace_all_uses_with(write(aten.scatter_add_.default, value, 1, at, down))
        node.graph.erase_node(node)
        node.graph.erase_node(gradient)


def _is_gradient_of_loss(gradient: fx.Node, output: fx.Node, dim: int) -> bool:
    if gradient.target not in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default):
        return False
    _, scores, target, *_ = cast(Any, gradient.args)
    alone = len(gradient.users) == 1 and dim % len(spec_of(output).shape) == 1
    return alone and scores is output and bool(spec_of(target).shape)


def _slopes(write: Writer, gradient: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(minus the gradient of a row's loss by the logarithm of its target, the target or 0 where it is ignored)."""
    slopes, _, target, weight, reduction, ignored, total = cast(Any, gradient.args)
    if reduction == _MEAN:
        slopes = write(aten.div.Tensor, slopes, total)
    unknown = write(aten.eq.Scalar, target, ignored)
    known = write(aten.masked_fill.Scalar, target, unknown, 0)
    if weight is not None:
        slopes = write(aten.mul.Tensor, _weights(write, weight, known), slopes)
    elif reduction != _NONE:
        slopes = write(aten.expand.default, slopes, list(spec_of(known).shape))
    return write(aten.masked_fill.Scalar, slopes, unknown, 0), known


def _weights(write: Writer, weight: fx.Node, target: fx.Node) -> fx.Node:
    """The weight of each target's class."""
    flat = write(aten.index_select.default, weight, 0, write(aten.reshape.default, target, [-1]))
    return write(aten.reshape.default, flat, list(spec_of(target).shape))


def _reached(product: fx.Node) -> list[fx.Node]:
    """What depends on a node, in order."""
    reached = {product}
    for node in product.graph.nodes:
        if any(operand in reached for operand in node.all_input_nodes):
            reached.add(node)
    return [node for node in product.graph.nodes if node in reached]


# ---------------------------------------------------------------- the chain
def chain_of(product: fx.Node, dim: int, axis: ShardAxis) -> Chain:
    """The chain that begins with a product.

    Args:
        product: the product.
        dim: the dimension of its source that is split.
        axis: the chunks, as an axis.

    Raises:
        NoChain: there is none.
    """
    source, views = source_of(product)
    return _Following(product, source, views, dim, axis).chain()


class _Following:
    def __init__(
        self, product: fx.Node, source: fx.Node, views: tuple[fx.Node, ...], dim: int, axis: ShardAxis
    ) -> None:
        self.product, self.source, self.views, self.axis = product, source, views, axis
        self.order = list(product.graph.nodes)
        self.size = spec_of(product).numel
        self.rows = self.size // max(spec_of(product).shape[-1], 1)
        self.known: dict[fx.Node, tuple[Placement, ...]] = {source: (Shard(dim),)}
        self.wide: set[fx.Node] = set()
        self.readers: dict[fx.Node, None] = {}

    def chain(self) -> Chain:
        for node in (*self.views, self.product):
            self._place(node)
        self.wide.add(self.product)
        self._follow()
        nodes = self._inside()
        self._check(nodes)
        inside = set(nodes)
        outside = [o for n in (*self.views, *nodes) for o in n.all_input_nodes if o not in inside]
        inputs = dict.fromkeys([self.source, *(o for o in outside if o not in self.views)])
        results = [n for n in nodes if any(user not in inside for user in n.users)]
        return Chain(self.source, self.views, nodes, tuple(inputs), tuple(results))

    def _follow(self) -> None:
        followed = {self.product}
        for node in self.order[self.order.index(self.product) + 1 :]:
            operands = [o for o in node.all_input_nodes if o in followed]
            if not operands:
                continue
            if node.target is operator.getitem:
                at: Any = node.args[1]
                placements = self.known[operands[0]][at : at + 1]
                if placements:
                    self.known[node] = placements
                    if self._continues(node):
                        followed.add(node)
                continue
            sees_all = [o for o in operands if o in self.wide]
            if sees_all:
                self.readers[node] = None
            if node.op != "call_function" or hands_over(node) or not self._place(node):
                if sees_all:
                    raise NoChain(self._why_whole(node))
                continue
            if self._continues(node):
                followed.add(node)

    def _why_whole(self, node: fx.Node) -> str:
        if node.op == "output":
            return "the step returns or keeps what is made of it for every row"
        if draws_random(node):
            return f"{named(node)} draws random numbers for it"
        return f"{named(node)} reads all rows of what is made of it at once"

    def _continues(self, node: fx.Node) -> bool:
        """Whether what is made of a result is followed; notes what is wide."""
        specs = node.meta.get("val")
        if isinstance(specs, (tuple, list)):
            return True
        if not isinstance(specs, TensorSpec) or not isinstance(self.known[node][0], Shard):
            return False
        if specs.numel >= _WIDE * self.size:
            self.wide.add(node)
            return True
        return specs.numel <= _NARROW * self.rows

    def _place(self, node: fx.Node) -> bool:
        """Place a node's results as its operands lie; whether a rule can."""
        if not hasattr(node.target, "_schema") or draws_random(node):
            return False
        call = OpCall(node, self.axis, lambda n: self.known.get(n, (REPLICATE,))[0])
        fitting = [layout for layout in layouts_of(call) or () if _keeps(call, layout)]
        if fitting:
            self.known[node] = fitting[0].outputs
        return bool(fitting)

    def _inside(self) -> tuple[fx.Node, ...]:
        """What is wide, what reads it, and what lies between."""
        found = self.wide | set(self.readers)
        below = set(found)
        for node in self.order:
            if any(o in below for o in node.all_input_nodes):
                below.add(node)
        above = set(found)
        for node in reversed(self.order):
            if node in above:
                above.update(node.all_input_nodes)
        found |= below & above
        sizes = {spec_of(node).numel for node in self.wide}
        for node in reversed(self.order):  # what is as wide and made for the chain alone: smoothed targets
            spec = node.meta.get("val")
            alike = node.op == "call_function" and isinstance(spec, TensorSpec) and spec.numel in sizes
            alike = alike and _is_split(node) == _is_split(self.product)  # a weight may be as large on one of the ranks
            if alike and node.users and node.target not in _PRODUCTS and is_pure(node) and found.issuperset(node.users):
                found.add(node)
        for node in self.order:  # results of operators that have several
            if node.target is operator.getitem and node.args[0] in found:
                found.add(node)
        if len(found) > _LONGEST or any(self._goes_on(node) for node in found):
            raise NoChain("what is made of it for every row is read by further layers")
        return tuple(n for n in self.order if n in found)

    def _goes_on(self, node: fx.Node) -> bool:
        """Whether a node is of another layer, or of another loop."""
        further = node.target in _PRODUCTS and info_of(node).section is Section.FORWARD and node is not self.product
        return further or IN_LOOP in node.meta

    def _check(self, nodes: Iterable[fx.Node]) -> None:
        roots, inside = storage_roots(self.product.graph), set(nodes)
        seen: dict[fx.Node, list[fx.Node]] = {}
        for node in inside:
            seen.setdefault(roots[node], []).append(node)
            if draws_random(node):
                raise NoChain(self._why_whole(node))
            if any(roots[o] not in inside for o in written_arguments(node)):
                raise NoChain(f"{named(node)} writes what is made of it into something else")
        for node in self.order:
            for operand in () if node in inside else written_arguments(node):
                others = [n for n in seen.get(roots[operand], ()) if n is not operand]
                if any(user not in inside for other in others for user in other.users):
                    raise NoChain(f"{named(node)} writes into what is made of it")


def _is_split(node: fx.Node) -> bool:
    """Whether ranks have pieces of a value."""
    return any(isinstance(placement, Shard) for placement in node.meta.get("placements", ()))


def _keeps(call: OpCall, layout: Layout) -> bool:
    """Whether what is split stays so; what is whole may be cut."""
    return all(
        now == then or (isinstance(now, Replicate) and isinstance(then, Shard))
        for now, then in zip(call.current, layout.inputs, strict=True)
    )
