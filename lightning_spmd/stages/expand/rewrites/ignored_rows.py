"""A loss over most positions of a sequence: the others are ignored, where the program cuts them away.

Before (a language model that shifts its own scores; to cut them, pieces would be put together, a vocabulary a row)::

    rows = scores[:, :-1].view(B * (S - 1), V);  loss = nll(log_softmax(rows), labels[:, 1:].view(-1), ignore=-100)

After::

    rows = scores.view(B * S, V);  loss = nll(log_softmax(rows), pad(labels[:, 1:], -100).view(-1), ignore=-100)

and the same backward, where an ignored row's gradient is exactly zero. Only where a plan splits sequences, for sums and
means (which count the rows that are not ignored), where at most half of the positions are cut away and nothing else
reads what the loss reads. The order of the sum may change, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_spmd._private_api import FakeTensorMode
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.node_info import TensorSpec, spec_of
from lightning_spmd.ir.placement import ShardAxis
from lightning_spmd.parallel.parallel_plan import ParallelPlan, sequence_dim
from lightning_spmd.stages.expand.call import bind_arguments

aten = torch.ops.aten

_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_GRADIENTS = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_SWAPS = {aten.transpose.int, aten.permute.default}
_COPIES = {aten.clone.default, aten._to_copy.default}
_LOG_SOFTMAX, _ITS_GRADIENT = aten._log_softmax.default, aten._log_softmax_backward_data.default
_ROW_WISE = {*_VIEWS, *_SWAPS, *_COPIES, _LOG_SOFTMAX}
_NONE = 0


@dataclass(frozen=True)
class _Cut:
    """A slice along a dimension of a tensor: ``kept`` of ``whole`` positions from ``start`` on."""

    node: fx.Node
    source: fx.Node
    dim: int
    start: int
    kept: int
    whole: int


@dataclass(frozen=True)
class _Loss:
    """What reads a cut: views, copies and the log-softmax, then the loss; and their gradients, up to the cut's."""

    cut: _Cut
    forward: tuple[fx.Node, ...]
    loss: fx.Node
    gradient: fx.Node | None
    backward: tuple[fx.Node, ...]
    whole_gradient: fx.Node | None


def ignore_instead_of_cutting(
    graph: fx.Graph, axes: Sequence[ShardAxis], plan: ParallelPlan, *, in_place: bool = False
) -> fx.Graph:
    """The graph, or a copy of it in which losses ignore rows; ``in_place``: no copy."""
    if all(sequence_dim(plan, axis) is None for axis in axes):
        return graph
    found = list(_losses(graph))
    if not found:
        return graph
    copies: dict[fx.Node, fx.Node] = {}
    copy = graph
    if in_place:
        copies.update((node, node) for node in graph.nodes)
    else:
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, copies))
    for loss in found:
        _Rewriting(copy, copies, loss).run()
    return copy


def _losses(graph: fx.Graph) -> Iterator[_Loss]:
    roots = storage_roots(graph)
    written = {roots[operand] for node in graph.nodes for operand in written_arguments(node)}
    for node in graph.nodes:
        if node.target in _LOSSES and (loss := _match(node)) is not None:
            used = (loss.cut.source, loss.cut.node, *loss.forward, *loss.backward)
            if written.isdisjoint(roots[n] for n in used):
                yield loss


def _match(node: fx.Node) -> _Loss | None:
    given = bind_arguments(node.target, node.args, node.kwargs)
    if given["reduction"] == _NONE:
        return None
    forward: list[fx.Node] = []
    at: fx.Node = given["self"]
    while at.target in _ROW_WISE:
        forward.insert(0, at)
        at = at.all_input_nodes[0]
    cut, logarithms = _cut(at), [n for n in forward if n.target is _LOG_SOFTMAX]
    if cut is None or len(logarithms) != 1:
        return None
    gradients = [user for user in _readers(given["self"]) if user.target in _GRADIENTS]
    if not gradients:
        found: _Loss | None = _Loss(cut, tuple(forward), node, None, (), None)
    else:
        found = _with_gradient(cut, tuple(forward), node, gradients[0])
    return found if found is not None and _is_read_by_nobody_else(found) else None


def _with_gradient(cut: _Cut, forward: tuple[fx.Node, ...], loss: fx.Node, gradient: fx.Node) -> _Loss | None:
    backward: list[fx.Node] = []
    at = gradient
    while len(at.users) == 1:
        (at,) = at.users
        if at.target is aten.slice_backward.default:
            given = bind_arguments(at.target, at.args, at.kwargs)
            sizes = given["input_sizes"]
            fits = given["dim"] % len(sizes) == cut.dim and sizes[cut.dim] == cut.whole
            return _Loss(cut, forward, loss, gradient, tuple(backward), at) if fits else None
        if at.target not in _ROW_WISE and at.target is not _ITS_GRADIENT:
            return None
        backward.append(at)
    return None


def _is_read_by_nobody_else(loss: _Loss) -> bool:
    own = {loss.loss, loss.gradient, *loss.forward, *loss.backward}
    return all(user in own for node in loss.forward for user in _readers(node))


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a value, also by the name that autograd keeps of it."""
    names = [node, *_names(node)]
    return [user for name in names for user in name.users if user not in names]


def _names(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is aten.detach.default]


def _cut(node: fx.Node) -> _Cut | None:
    if node.target is not aten.slice.Tensor:
        return None
    given = bind_arguments(node.target, node.args, node.kwargs)
    shape, kept = spec_of(given["self"]).shape, spec_of(node).shape
    dim = given["dim"] % len(shape)
    start, whole = given["start"] or 0, shape[dim]
    start = start + whole if start < 0 else start
    if given["step"] != 1 or not whole / 2 <= kept[dim] < whole:
        return None
    return _Cut(node, given["self"], dim, start, kept[dim], whole)


class _Rewriting:
    """One loss in a copy of the graph.

    Args:
        graph: the copy.
        copies: node of the graph → its copy.
        loss: what to rewrite.
    """

    def __init__(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node], loss: _Loss) -> None:
        self.graph, self.copies, self.loss, self.cut = graph, copies, loss, loss.cut
        self.mode = FakeTensorMode()

    def run(self) -> None:
        """Write the loss of all rows in front of the loss of some, and let everybody read that one."""
        self._write()
        self._forget()

    def _forget(self) -> None:
        """Erase what nothing reads any more; the cut itself may have other readers."""
        loss = self.loss
        names = [name for node in loss.forward for name in _names(node)]
        old = [loss.cut.node, *loss.forward, *names, loss.loss, loss.gradient, *loss.backward, loss.whole_gradient]
        for node in reversed(old):
            if node is not None and not self.copies[node].users:
                self.graph.erase_node(self.copies[node])

    def _write(self) -> None:
        loss, cut = self.loss, self.cut
        value = self.copies[cut.source]
        before = math.prod(spec_of(cut.source).shape[: cut.dim])
        logarithms = value
        for node in loss.forward:
            value, before = self._again(node, value, before)
            logarithms = value if node.target is _LOG_SOFTMAX else logarithms
        given = {"self": value, "target": self._padded(loss.loss, before)}
        self.copies[loss.loss].replace_all_uses_with(self._replaced(loss.loss, given))
        if loss.gradient is None or loss.whole_gradient is None:
            return
        own = self._replaced(loss.gradient, given)
        for node in loss.backward:
            if node.target is _ITS_GRADIENT:
                own = self._replaced(node, {"grad_output": own, "output": logarithms})
            else:
                own, before = self._again(node, own, before)
        self.copies[loss.whole_gradient].replace_all_uses_with(own)

    def _again(self, node: fx.Node, value: fx.Node, before: int) -> tuple[fx.Node, int]:
        """A view or a copy of all rows, and how many consecutive blocks of positions it has."""
        shape = spec_of(node).shape
        if node.target in _VIEWS:
            at = _holder_of(shape, before, self.cut.kept)
            sizes = [n // self.cut.kept * self.cut.whole if d == at else n for d, n in enumerate(shape)]
            return self._call(node, value, sizes), before
        new = self._call(node, value, *node.args[1:])
        if node.target in _SWAPS:
            before = math.prod(shape[: shape.index(self.cut.kept)])
        return new, before

    def _padded(self, node: fx.Node, before: int) -> fx.Node:
        """The targets, with rows to be ignored where scores had been cut away."""
        given = bind_arguments(node.target, node.args, node.kwargs)
        target, cut = self.copies[given["target"]], self.cut
        shape, scores = spec_of(given["target"]).shape, spec_of(given["self"]).shape
        if _holder_of(scores, before, cut.kept) > 1:  # behind the classes, which targets have not
            before //= scores[1]
        after = math.prod(shape) // before // cut.kept
        at = _holder_of(shape, before, cut.kept)
        sizes = [n // cut.kept * cut.whole if d == at else n for d, n in enumerate(shape)]
        like = self.copies[node]
        blocks = self._insert(like, aten.view.default, target, [before, cut.kept, after])
        ends = [0, 0, cut.start, cut.whole - cut.start - cut.kept]
        padded = self._insert(like, aten.constant_pad_nd.default, blocks, ends, given["ignore_index"])
        return self._insert(like, aten.view.default, padded, sizes)

    def _replaced(self, node: fx.Node, values: dict[str, Any]) -> fx.Node:
        given = {**bind_arguments(node.target, node.args, node.kwargs), **values}
        return self._call(node, *(self._copied(v) for v in given.values()))

    def _copied(self, value: Any) -> Any:
        # a node of the copy already, where it was replaced
        return self.copies.get(value, value) if isinstance(value, fx.Node) else value

    def _call(self, like: fx.Node, *args: Any) -> fx.Node:
        return self._insert(self.copies[like], like.target, *args, **like.kwargs)

    def _insert(self, like: fx.Node, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(like):
            node = self.graph.call_function(op, args, kwargs)
        node.meta.update(like.meta)
        with self.mode:
            result = op(*fx.map_arg(args, self._fake), **fx.map_arg(kwargs, self._fake))
        node.meta["val"] = _described(result)
        return node

    def _fake(self, node: fx.Node) -> Any:
        value = node.meta["val"]
        if not isinstance(value, TensorSpec):
            return value
        with self.mode:
            return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)


def _holder_of(shape: Sequence[int], before: int, kept: int) -> int:
    """The dimension that has the positions, alone or merged with what stands before or behind them."""
    prefix = 1
    for dim, size in enumerate(shape):
        if prefix <= before and prefix * size >= before * kept and size % kept == 0:
            return dim
        prefix *= size
    raise ValueError(f"no dimension of {tuple(shape)} has {before} blocks of {kept} positions")


def _described(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_described, value))
    return TensorSpec.of(value) if isinstance(value, torch.Tensor) else value
