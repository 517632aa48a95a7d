"""Which nodes share storage, and which write into it: read off operator schemas.

``aten.native_batch_norm`` and its CUDA variants update the running statistics although their schemas do not say so;
they are listed here. So is the wait for a collective: it returns the tensor it was given, and only then is the result
in it, so everybody who reads the storage is either before the collective or after the wait.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001 - an operator's public name
# operator -> (position of `training`, positions of the statistics that it then writes)
_UNDECLARED_WRITES: dict[Any, tuple[int, tuple[int, ...]]] = {
    _aten.native_batch_norm.default: (5, (3, 4)),
    _aten.cudnn_batch_norm.default: (5, (3, 4)),
    _aten.miopen_batch_norm.default: (5, (3, 4)),
}
# Views that their schemas call fresh: autograd may then write into them, storage is shared all the same.
_UNDECLARED_VIEWS = {
    _aten._unsafe_view.default,  # noqa: SLF001 - an operator's public name
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
}


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that ``node`` writes into."""
    undeclared = _UNDECLARED_WRITES.get(node.target)
    if undeclared is not None:
        training, positions = undeclared
        return [a for i in positions if node.args[training] and isinstance(a := node.args[i], fx.Node)]
    if node.target is _WAIT:
        return node.all_input_nodes
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found: list[fx.Node] = []
    for index, argument in enumerate(schema.arguments):
        if argument.name == "grads" and node.kwargs.get("grad_scale") is None:
            continue  # fused optimizers declare a write that they do only when they unscale
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            found.extend(v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, fx.Node))
    return found


def storage_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node, the node whose storage its value may share: itself if the value is fresh.

    A view, an in-place result and an item of a multi-output view share the root of the argument they come from.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _aliased_argument(node)
        roots[node] = node if source is None else roots[source]
    return roots


_DISJOINT = {
    _aten.split_with_sizes.default,
    _aten.split.Tensor,
    _aten.unbind.int,
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
}


def storage_regions(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, fx.Node | None]]:
    """(storage root, piece) of every node; piece None is the whole storage.

    The outputs of one split do not overlap (:func:`overlapping`): a write into one is no write into another. That is
    how the gradients of one communication bucket share a buffer.
    """
    roots = storage_roots(graph)
    pieces: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        source = _aliased_argument(node)
        inherited = None if source is None else pieces[source]
        parent = node.args[0] if node.target is operator.getitem else None
        if inherited is None and isinstance(parent, fx.Node) and parent.target in _DISJOINT:
            inherited = node
        pieces[node] = inherited
    return {node: (roots[node], pieces[node]) for node in graph.nodes}


def overlapping(one: fx.Node | None, other: fx.Node | None) -> bool:
    """Whether two pieces of one storage may share an element; those of two different splits may."""
    if one is None or other is None or one.args[0] is not other.args[0]:
        return True
    return bool(one.args[1] == other.args[1])


def _aliased_argument(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        parent = node.args[0]
        return _aliased_argument(parent) if isinstance(parent, fx.Node) else None
    if node.target is _WAIT or node.target in _UNDECLARED_VIEWS:
        return node.all_input_nodes[0]
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        # `reshape` and friends are recorded as the view or the copy they became
        return None
    for index, argument in enumerate(schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and isinstance(value, fx.Node):
            return value
    return None
