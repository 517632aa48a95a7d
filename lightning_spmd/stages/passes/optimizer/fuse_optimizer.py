"""Join the updates of single parameters into operators on lists of parameters, for any optimizer.

Before, as optimizers run on the host: a dozen operators for the first parameter, the same for the next one, ...::

    m1.mul_(beta); m1.add_(g1, alpha=a); p1.add_(m1, alpha=-lr); m2.mul_(beta); m2.add_(g2, alpha=a); ...

After::

    _foreach_mul_([m1, m2], beta); _foreach_add_([m1, m2], [g1, g2], alpha=a); _foreach_add_([p1, p2], [m1, m2], ...)

Nothing here knows an optimizer: what is joined are equal operators at equal distance from the beginning of the update,
with the same numbers (or a list of numbers where the operator takes one), on tensors of one dtype and device, in
clipping and in the optimizer. ``lr`` and all other hyper-parameters stay inputs. The arithmetic on Python numbers that
every parameter has of its own (``lr / (1 - beta ** step)``) is shared where it is the same, else done for the list.

Joined is only what has the same home (``homes``): waits for the same communication buckets, and fits with
the rest into the cache. Operators at equal distance cannot depend on one another, so joining them makes no cycle; then
the graph is put into the first order that all dependences allow, writes to shared memory included.

Bitwise: on the host torch's list operators are loops over the same kernels. On other devices they are kernels of their
own, which round otherwise in places, and torch's optimizers use them anyway; there this pass leaves the graph alone.
Does nothing to optimizers that are captured with list operators already, nor where every gradient has a collective of
its own (``bucket_collectives`` comes first), nor to graphs without an optimizer.

PyTorch's former ``torch.distributed._spmd`` fused what ``make_fx`` had taken apart from ``foreach`` Adam by matching
its operators one by one.
"""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import fx

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.aliasing import storage_regions
from lightning_spmd.ir.dependence import Dependences
from lightning_spmd.ir.node_info import NodeInfo, TensorSpec, info_of, spec_of, value_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import forget_writes, is_wait, starts_collective
from lightning_spmd.stages.passes.contract import GraphPass, PassState
from lightning_spmd.stages.passes.optimizer.homes import UPDATE, Homes, is_on_host
from lightning_spmd.stages.passes.optimizer.lists import (
    ITEM,
    Each,
    ListCall,
    is_number_call,
    list_call,
    list_operator,
    takes_one_tensor,
)

Group = list[fx.Node]
"""Nodes that become one, in the order of the graph."""


def fuse_optimizer(step: ShardedStep, state: PassState) -> None:
    """Join the operators of clipping and optimizer; see the module docstring for which, and when it does nothing."""
    joined = join_updates(step, is_on_host)
    if joined:
        state.notes["fuse_optimizer"] = joined


def join_updates(step: ShardedStep, allowed: Callable[[fx.Node], bool]) -> str:
    """Join operators of the update.

    Args:
        step: changed in place.
        allowed: which operators may be joined.

    Returns:
        what was done, in words; empty if nothing was.
    """
    graph = step.graph_module.graph
    before = len(graph.nodes)
    _share_numbers(graph)
    dependences = Dependences(graph)
    groups = _find_groups(step, dependences, allowed)
    if groups:
        writer = _Writer(graph)
        writer.write(_arranged(dependences, groups))
        _forget_writes_to(writer.written_twice, graph)
        _erase_unread(graph)
    after = len(graph.nodes)
    members = sum(len(group) for group in groups)
    return f"{members} operators became {len(groups)}: {before} to {after} nodes" if after < before else ""


def _forget_writes_to(written: Sequence[fx.Node], graph: fx.Graph) -> None:
    """Drop what was counted for readers of storages that two operators write now where one did."""
    if written:
        regions = storage_regions(graph)
        roots = {regions[node][0] for node in written}
        for node in graph.nodes:
            if any(regions[operand][0] in roots for operand in node.all_input_nodes):
                forget_writes(node)


def _share_numbers(graph: fx.Graph) -> None:
    """Let equal arithmetic on hyper-parameters be done once."""
    known: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if info_of(node).section not in UPDATE or not is_number_call(node) or node.target is ITEM:
            continue
        key = (node.target, *[_constant(a) for a in node.args])
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _constant(value: Any) -> Hashable:
    """A key that tells ``1`` from ``1.0`` and ``-0.0`` from ``0.0``."""
    return value if isinstance(value, fx.Node) else (type(value), repr(value))


# ---------------------------------------------------------------- what
def _find_groups(step: ShardedStep, dependences: Dependences, allowed: Callable[[fx.Node], bool]) -> list[Group]:
    """Equal operators of one home and one level: as many joinable operators come before each of them."""
    homes = Homes(step, dependences)
    kinds = _Kinds(step, homes)
    level: dict[fx.Node, int] = {}
    groups: dict[Hashable, Group] = defaultdict(list)
    for node in dependences.order:
        kind = kinds.of(node) if node in homes and allowed(node) else None
        level[node] = max((level[n] for n in dependences.before[node]), default=0) + (kind is not None)
        if kind is not None:
            groups[level[node], homes.of(node), kind].append(node)
    return [group for group in groups.values() if len(group) > 1]


class _Kinds:
    """What nodes must have in common to be one operator on lists, and the nodes that their operands come from too.

    So ``1 - beta1 ** step`` and ``1 - beta2 ** step`` of one parameter do not meet in one list, and one list after the
    other has the same parameters in the same order.
    """

    def __init__(self, step: ShardedStep, homes: Homes) -> None:
        self._homes = homes
        self._numbers: dict[Hashable, int] = {}
        self._kind: dict[fx.Node, Hashable] = {}
        placeholders = [n for n in step.graph_module.graph.nodes if n.op == "placeholder"]
        for node, entry in zip(placeholders, step.signature.inputs, strict=True):
            self._kind[node] = (entry.role, entry.key[1:])

    def of(self, node: fx.Node) -> Hashable | None:
        """The kind of a node, to be asked in the order of the graph; None if it has no counterpart on lists."""
        key = self._number_call(node) if is_number_call(node) else self._tensor_call(node)
        if key is None:
            return None
        self._kind[node] = self._numbers.setdefault(key, len(self._numbers))
        return self._kind[node]

    def _number_call(self, node: fx.Node) -> Hashable | None:
        own = node.target is ITEM or any(self._is_own(a) for a in node.args)
        return ("number", node.target, *map(self._number, node.args)) if own else None

    def _tensor_call(self, node: fx.Node) -> Hashable | None:
        call = list_call(node)
        if call is None:
            return None
        one_number = not any(map(self._is_own, call.numbers))
        one_tensor = takes_one_tensor(call) and not self._is_own(call.tensors[1])
        possible = one_number if call.family == "clamp" else list_operator(call, one_number, one_tensor) is not None
        if not possible:
            return None
        tensors = [self._kind.get(n) for n in call.tensors]
        if one_tensor:
            tensors[1] = call.tensors[1]
        numbers = map(self._number, call.numbers)
        keywords = ((name, _constant(value)) for name, value in call.keywords)
        types = ((spec_of(n).dtype, spec_of(n).device) for n in (node, *call.tensors))
        return ("tensors", call.family, call.in_place, *tensors, *numbers, *keywords, *types)

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and value in self._homes.owners

    def _number(self, value: Any) -> Hashable:
        """Numbers of one parameter go into a list; others are the same for all."""
        return ("own", self._kind.get(value)) if self._is_own(value) else _constant(value)


# ---------------------------------------------------------------- in which order
def _arranged(dependences: Dependences, groups: Sequence[Group]) -> list[Group]:
    """The nodes in an order in which each group is at one place: the first node that may come next does."""
    units: list[Group] = [*groups]
    unit_of = {node: index for index, group in enumerate(groups) for node in group}
    for node in dependences.order:
        if node not in unit_of:
            unit_of[node] = len(units)
            units.append([node])
    before = [{unit_of[n] for node in unit for n in _predecessors(dependences, node)} for unit in units]
    after: dict[int, list[int]] = defaultdict(list)
    for index, earlier in enumerate(before):
        earlier.discard(index)
        for other in earlier:
            after[other].append(index)
    missing = [len(earlier) for earlier in before]
    ready = [(dependences.position[units[i][0]], i) for i, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order: list[Group] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(units[index])
        for other in after[index]:
            missing[other] -= 1
            if missing[other] == 0:
                heapq.heappush(ready, (dependences.position[units[other][0]], other))
    if len(order) != len(units):
        raise VerificationError("fuse_optimizer joined operators that depend on one another")
    return order


def _predecessors(dependences: Dependences, node: fx.Node) -> set[fx.Node]:
    """What must come before a node; if it was behind the end of a collective that it follows, it stays there."""
    found = set(dependences.before[node])
    for start in filter(starts_collective, dependences.before[node]):
        found |= {n for n in start.users if is_wait(n) and dependences.position[n] < dependences.position[node]}
    return found


# ---------------------------------------------------------------- how
class _Writer:
    """Rewrites the graph in the new order; what groups replace is erased at the end."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.end: fx.Node = graph.output_node()
        self.written_twice: list[fx.Node] = []
        self._columns: dict[fx.Node, tuple[fx.Node, int]] = {}
        self._lengths: dict[fx.Node, int] = {}

    def write(self, order: Sequence[Group]) -> None:
        """Place single nodes and write groups, in this order."""
        for unit in order:
            if len(unit) == 1:
                if unit[0] is not self.end:
                    self.end.prepend(unit[0])
                continue
            with self.graph.inserting_before(self.end):
                if is_number_call(unit[0]):
                    self._write_numbers(unit)
                else:
                    self._write_tensors(unit)
            for node in unit:
                self.graph.erase_node(node)

    def _write_numbers(self, group: Group) -> None:
        shared = [_all_same([n.args[i] for n in group]) for i in range(len(group[0].args))]
        if group[0].target is ITEM:
            shared = [False]
        arguments = [
            a if same else self._column([n.args[i] for n in group])
            for i, (a, same) in enumerate(zip(group[0].args, shared, strict=True))
        ]
        made = self._call(Each(group[0].target), group, [value_of(n) for n in group], *arguments)
        self._items(made, group)

    def _write_tensors(self, group: Group) -> None:
        calls = [call for node in group if (call := list_call(node)) is not None]
        first = calls[0]
        one_tensor = takes_one_tensor(first) and _all_same([c.tensors[1] for c in calls])
        lists: list[Any] = [list(column) for column in zip(*[c.tensors for c in calls], strict=True)]
        if one_tensor:
            lists[1] = first.tensors[1]
        if first.family == "clamp":
            self._write_clamp(group, first, lists[0])
            return
        same = not first.numbers or _all_same([c.numbers[0] for c in calls])
        numbers = [first.numbers[0] if same else self._column([c.numbers[0] for c in calls])] if first.numbers else []
        again = dataclasses.replace(first, in_place=True)
        if list_operator(again, same, one_tensor) is not None and self._is_spent(group, lists[0]):
            first = again
        target = list_operator(first, same, one_tensor)
        values = None if first.in_place else [value_of(n) for n in group]
        made = self._call(target, group, values, *lists, *numbers, **dict(first.keywords))
        self._finish(made, group, lists[0], first.in_place)

    def _is_spent(self, group: Group, operands: Sequence[fx.Node]) -> bool:
        """Whether nothing but the group reads these entries of a list, so that the results may take their memory."""
        pairs = zip(group, operands, strict=True)
        return all(o in self._columns and list(o.users) == [n] and value_of(o) == value_of(n) for n, o in pairs)

    def _write_clamp(self, group: Group, call: ListCall, tensors: list[fx.Node]) -> None:
        low, high = call.numbers
        lower, upper = (
            ListCall("clamp_min", call.in_place, call.tensors, (low,)),
            ListCall("clamp_max", True, call.tensors, (high,)),
        )
        values = None if call.in_place else [value_of(n) for n in group]
        made = self._call(list_operator(lower, True, False), group, values, tensors, low)
        results = tensors if call.in_place else self._items(made, group)
        self._call(list_operator(upper, True, False), group, None, results, high)
        if call.in_place:
            self.written_twice += tensors
            self._finish(made, group, tensors, True)

    def _finish(self, made: fx.Node, group: Group, written: Sequence[fx.Node], in_place: bool) -> None:
        """Let readers read the results: what was written into, or the entries of the new list."""
        if not in_place:
            self._items(made, group)
            return
        for node, result in zip(group, written, strict=True):
            for reader in node.users:
                forget_writes(reader)  # counted from the in-place operator on, which is about to go
            node.replace_all_uses_with(result)

    def _items(self, made: fx.Node, group: Group) -> list[fx.Node]:
        items: list[fx.Node] = []
        for index, node in enumerate(group):
            item = self.graph.call_function(operator.getitem, (made, index))
            item.meta.update({k: v for k, v in node.meta.items() if k in ("val", "info", "placements")})
            node.replace_all_uses_with(item)
            items.append(item)
            self._columns[item] = (made, index)
        self._lengths[made] = len(group)
        return items

    def _column(self, values: Sequence[Any]) -> Any:
        """A list of numbers: the result of one operator as it is where it is just that, else its entries.

        Tensors are always listed one by one: who writes into one is told by its node.
        """
        made, _ = self._columns.get(values[0], (None, 0))
        if made is None or isinstance(value_of(values[0]), TensorSpec):
            return list(values)
        whole = [(made, i) for i in range(self._lengths[made])]
        return made if [self._columns.get(v) for v in values] == whole else list(values)

    def _call(self, target: Any, group: Group, value: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        facts = info_of(group[0])
        modules = {info_of(n).module for n in group}
        node.meta.update(
            val=value, info=NodeInfo(facts.section, facts.module if len(modules) == 1 else "", facts.source)
        )
        return node


def _all_same(values: Sequence[Any]) -> bool:
    return len({_constant(v) for v in values}) == 1


def _erase_unread(graph: fx.Graph) -> None:
    """Entries of lists that are read as a whole."""
    for node in reversed(list(graph.nodes)):
        if node.target is operator.getitem and not node.users and info_of(node).section in UPDATE:
            graph.erase_node(node)


PASS = GraphPass(
    "fuse_optimizer",
    fuse_optimizer,
    after=frozenset({"bucket_collectives", "split_optimizer"}),
)
