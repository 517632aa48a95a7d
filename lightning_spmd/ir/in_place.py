"""Results that may lie in the memory of an operand that nothing needs any more.

Autograd's engine adds gradients so, and writes the rows of an index's gradient into zeros that it has just made; a
captured graph has a result of its own for each. Which memory a value has alone is seen in the graph's first run.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.aliasing import gives_fresh_tensors, storage_roots
from lightning_spmd.ir.effects import draws_random
from lightning_spmd.ir.layout import is_dense
from lightning_spmd.ir.node_info import TensorSpec, value_of
from lightning_spmd.ir.same_value import same_tensor

ALONE = "alone"
"""Key in ``node.meta``: the first run has seen that nothing else has the memory of the node's value."""
ALIKE = "alike"
"""Key in ``node.meta``: for each of :func:`orders_of`, whether what writes gave the same in the first run."""
_MOST_BYTES = 1 << 28
"""Of larger operands the first run makes no copy, to see that."""


def in_place(graph: fx.Graph) -> dict[fx.Node, tuple[Any, tuple[Any, ...]]]:
    """The operators that do the same as some nodes', with their arguments, and write the result into the first of them.

    Args:
        graph: whose nodes run in this order, and whose values nobody else reads.
    """
    roots = storage_roots(graph)
    last: dict[fx.Node, fx.Node] = {}
    """The last reader of a storage."""
    is_others: set[fx.Node] = set()
    """Storages that something reads which is no operator of torch's: a collective, a region, Python."""
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            root = roots[operand]
            last[root] = node
            if not _is_torchs(node):
                is_others.add(root)

    def is_free(operand: Any, node: fx.Node) -> bool:
        if not isinstance(operand, fx.Node):
            return False
        root = roots[operand]
        # an operator of others may keep its result, the same tensor: no count of its memory's holders tells
        is_dead = last[root] is node and root not in is_others and ALONE in root.meta and _is_of_torchs(root)
        uses = sum(roots[each] is root for each in _operands(node))
        return is_dead and uses == 1 and _are_alike(node, operand) and _has_all_of(operand, root)

    found: dict[fx.Node, tuple[Any, tuple[Any, ...]]] = {}
    for node in graph.nodes:
        alike = node.meta.get(ALIKE, ()) if roots[node] is node else ()
        fitting = [args for args, same in zip(orders_of(node), alike, strict=False) if same and is_free(args[0], node)]
        if fitting:
            found[node] = written_by(node.target), fitting[0]
    return found


def orders_of(node: fx.Node) -> list[tuple[Any, ...]]:
    """The arguments with which an operator that writes into the first of them may do the same as a node's."""
    if not node.args or not private.is_operator(node.target) or draws_random(node) or not written_by(node.target):
        return []
    commutes = node.target in _COMMUTE and len(node.args) == 2 and not node.kwargs
    return [node.args, (node.args[1], node.args[0])] if commutes else [node.args]


_COMMUTE = {torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor}


def writes_alike(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether the operator that writes into its first operand gives the same as another one, as these values show.

    Not all do: torch rounds ``x.mul_(0.3)`` of bfloat16 otherwise than ``x * 0.3``, and quotients of complex numbers.

    Args:
        target: the other operator.
        args: its arguments.
        kwargs: likewise.
        result: what it gave.
    """
    first = args[0]
    if not isinstance(first, Tensor) or not isinstance(result, Tensor) or result.dtype.is_complex:
        return False
    if private.is_immutable(first):  # a gradient that is known to be 0
        return False
    if (first.shape, first.dtype, first.stride()) != (result.shape, result.dtype, result.stride()):
        return False
    if result.dtype.itemsize == 2 and result.dtype.is_floating_point:  # and what these values show may be zeros
        others = (*args, *kwargs.values())
        if not all(isinstance(other, Tensor) and other.dtype is result.dtype for other in others):
            return False
    return first.nbytes <= _MOST_BYTES and same_tensor(written_by(target)(first.clone(), *args[1:], **kwargs), result)


@functools.cache
def written_by(target: Any) -> Any:
    """The operator that does the same as another, and writes into its first operand; None: there is none."""
    if target.namespace != "aten" or not gives_fresh_tensors(target):
        return None
    packet = getattr(torch.ops.aten, f"{target._schema.name.partition('::')[2]}_", None)  # noqa: SLF001 - as everywhere
    found = getattr(packet, target._overloadname, None)  # noqa: SLF001 - as everywhere in torch
    if found is None:
        return None
    mine, its = (each._schema.arguments for each in (target, found))  # noqa: SLF001 - as everywhere in torch
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in its]
    same = [(a.name, str(a.type)) for a in mine] == [(a.name, str(a.type)) for a in its]
    return found if same and writes[0] and not any(writes[1:]) else None


def _is_torchs(node: fx.Node) -> bool:
    return node.target is operator.getitem or (private.is_operator(node.target) and node.target.namespace == "aten")  # type: ignore[union-attr]


def _is_of_torchs(node: fx.Node) -> bool:
    """Whether a value was made by an operator of torch's."""
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return _is_torchs(node)


def _operands(node: fx.Node) -> list[fx.Node]:
    """Each operand as often as it is one."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    mine, its = value_of(one), value_of(other)
    if not isinstance(mine, TensorSpec) or not isinstance(its, TensorSpec) or not is_dense(mine):
        return False
    if (mine.dtype, mine.device, len(mine.shape)) != (its.dtype, its.device, len(its.shape)):
        return False
    numbers = zip((*mine.shape, *mine.stride), (*its.shape, *its.stride), strict=True)
    return all(a == b and getattr(a, "formula", None) == getattr(b, "formula", None) for a, b in numbers)


def _has_all_of(view: fx.Node, root: fx.Node) -> bool:
    """Whether a view is as large as its storage: a small one would keep a large one alive."""
    mine, whole = value_of(view), value_of(root)
    return isinstance(mine, TensorSpec) and isinstance(whole, TensorSpec) and mine.bytes == whole.bytes
