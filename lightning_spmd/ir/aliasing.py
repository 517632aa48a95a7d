"""Which nodes share storage, and which write into it: read off operator schemas.

``aten.native_batch_norm`` and its CUDA variants update the running statistics although their schemas do not say so;
they are listed here. So is the wait for a collective: it returns the tensor it was given, and only then is the result
in it, so everybody who reads the storage is either before the collective or after the wait.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from lightning_spmd._private_api import is_operator

_aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001 - an operator's public name
# operator -> (position of `training` if it has one, positions of the statistics that it then writes)
UNDECLARED_WRITES: dict[Any, tuple[int | None, tuple[int, ...]]] = {
    _aten.batch_norm_gather_stats_with_counts.default: (None, (3, 4)),
    _aten.native_batch_norm.default: (5, (3, 4)),
    _aten.cudnn_batch_norm.default: (5, (3, 4)),
    _aten.miopen_batch_norm.default: (5, (3, 4)),
}
# Views that their schemas call fresh: autograd may then write into them, storage is shared all the same.
UNDECLARED_VIEWS = {
    _aten._unsafe_view.default,  # noqa: SLF001 - an operator's public name
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
}


# (position, name) of an argument, as a schema numbers it
_Argument = tuple[int, str]


class _Facts(NamedTuple):
    """What the functions below ask of an operator, thousands of times for each graph."""

    target: Any
    undeclared: tuple[int | None, tuple[int, ...]] | None
    writes: tuple[_Argument, ...]
    aliases: tuple[_Argument, ...]
    returns_first: bool


_facts: dict[int, _Facts] = {}
"""By ``id``, which stays an operator's own since the facts hold it: torch computes an operator's hash in Python."""


def _facts_of(target: Any) -> _Facts:
    found = _facts.get(id(target))
    if found is None:
        found = _Facts(
            target,
            UNDECLARED_WRITES.get(target),
            _declared_writes(target),
            _declared_aliases(target),
            target is _WAIT or target in UNDECLARED_VIEWS,
        )
        if is_operator(target):  # a function of a run would keep all of the run
            _facts[id(target)] = found
    return found


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that ``node`` writes into."""
    target = node.target
    if target is _WAIT:
        return node.all_input_nodes
    facts = _facts_of(target)
    if not facts.writes and facts.undeclared is None:
        return []
    return [value for value in written_values(target, node.args, node.kwargs) if isinstance(value, fx.Node)]


def written_values(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes into."""
    facts = _facts_of(target)
    if facts.undeclared is not None:
        training, positions = facts.undeclared
        return [args[i] for i in positions] if training is None or args[training] else []
    found: list[Any] = []
    for argument in facts.writes:
        if argument[1] == "grads" and kwargs.get("grad_scale") is None:
            continue  # fused optimizers declare a write that they do only when they unscale
        value = _argument(args, kwargs, argument)
        found.extend(cast(Sequence[Any], value) if isinstance(value, (list, tuple)) else [value])
    return found


def aliased_values(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments with which an operator's schema says that its results share storage."""
    return [_argument(args, kwargs, argument) for argument in _facts_of(target).aliases]


def _declared_writes(target: Any) -> tuple[_Argument, ...]:
    """The arguments that an operator's schema says it writes into."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(
        (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


def _declared_aliases(target: Any) -> tuple[_Argument, ...]:
    """The arguments with which an operator's schema says that its result shares storage, the first tensor of them."""
    schema = getattr(target, "_schema", None)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        # `reshape` and friends are recorded as the view or the copy they became
        return ()
    return tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None)


@functools.cache
def gives_fresh_tensors(target: Any) -> bool:
    """Whether an operator writes into no argument, and its results share no storage with its arguments."""
    schema = target._schema  # noqa: SLF001 - how operators are described everywhere in torch
    if target in UNDECLARED_VIEWS or target in UNDECLARED_WRITES or schema.is_mutable:
        return False
    return all(r.alias_info is None for r in schema.returns)


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], argument: _Argument) -> Any:
    index, name = argument
    return args[index] if index < len(args) else kwargs.get(name)


def storage_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node, the node whose storage its value may share: itself if the value is fresh.

    A view, an in-place result and an item of a multi-output view share the root of the argument they come from.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = aliased_argument(node)
        roots[node] = node if source is None else roots[source]
    return roots


_DISJOINT = {
    _aten.split_with_sizes.default,
    _aten.split.Tensor,
    _aten.unbind.int,
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
}


Region = tuple[fx.Node, fx.Node | None]
"""A storage's root, and the piece of it; None is the whole."""


def storage_regions(graph: fx.Graph) -> dict[fx.Node, Region]:
    """(storage root, piece) of every node; piece None is the whole storage.

    The outputs of one split do not overlap (:func:`overlapping`): a write into one is no write into another. That is
    how the gradients of one communication bucket share a buffer.
    """
    regions: dict[fx.Node, Region] = {}
    for node in graph.nodes:
        source = aliased_argument(node)
        root, piece = (node, None) if source is None else regions[source]
        parent = node.args[0] if piece is None and node.target is operator.getitem else None
        if isinstance(parent, fx.Node) and parent.target in _DISJOINT:
            piece = node
        regions[node] = (root, piece)
    return regions


def overlapping(one: fx.Node | None, other: fx.Node | None) -> bool:
    """Whether two views of one storage may share an element."""
    if one is None or other is None or one.args[0] is not other.args[0]:
        return True
    return bool(one.args[1] == other.args[1])


class WritesSoFar:
    """How many writes each storage has seen, by piece, as a graph is walked.

    Args:
        regions: of the graph's nodes.
    """

    def __init__(self, regions: Mapping[fx.Node, Region]) -> None:
        self._regions = regions
        self._counts: dict[fx.Node, Counter[fx.Node | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def note(self, node: fx.Node) -> None:
        """The walk has come past a node."""
        for operand in written_arguments(node):
            root, piece = self._regions[operand]
            self._counts.setdefault(root, Counter())[piece] += 1

    def seen(self, value: fx.Node) -> int:
        """Writes into the value's storage, or into what of it may overlap with its piece."""
        root, piece = self._regions[value]
        counts = self._counts.get(root)
        if counts is None:  # most storages are never written
            return 0
        return sum(count for other, count in counts.items() if overlapping(piece, other))


def aliased_argument(node: fx.Node) -> fx.Node | None:
    """The argument whose storage a node's value may share; None if it is fresh."""
    if node.op != "call_function":
        return None
    target = node.target
    if target is operator.getitem:
        parent = node.args[0]
        return aliased_argument(parent) if isinstance(parent, fx.Node) else None
    facts = _facts_of(target)
    if facts.returns_first:
        return node.all_input_nodes[0]
    for argument in facts.aliases:
        value = _argument(node.args, node.kwargs, argument)
        if isinstance(value, fx.Node):
            return value
    return None
