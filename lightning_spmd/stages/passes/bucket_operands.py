"""Operands of collectives, for ``bucket_collectives``: their shape, and which of them are gradients."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.node_info import info_of, spec_of
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.passes.flat_buffers import Memory, aten, origin_spec
from lightning_spmd.stages.passes.optimizer.homes import UPDATE

_WAIT = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001 - the namespace of functional collectives
_UNDOING = (aten.slice.Tensor, aten.permute.default)
_SHAPING = (aten.constant_pad_nd.default, aten.permute.default, aten.clone.default)
"""How expansion makes the operand of a collective, and its result of what the collective gives."""
_CAST = aten._to_copy.default  # noqa: SLF001 - an operator's public name


def loosen(graph: fx.Graph, kinds: Collection[Any]) -> None:
    """Permute and pad operands of collectives of these kinds as soon as they exist; undo it at their first reader.

    Expansion writes pad, collective, wait and cut side by side; in that place the cut of one gradient would be read
    before the next one is padded, so that none could share a bucket. Padded inputs move with their bucket.
    """
    memory = Memory(graph)
    for index, node in enumerate(memory.order):
        wait = next(iter(node.users), None)
        if node.target not in kinds or wait is None or wait.target is not _WAIT:
            continue
        source, steps = shaping(node.all_input_nodes[0])
        begun = memory.position[steps[0]] if steps else index
        made = max(memory.position[source], memory.last_write(source, begun))
        if source.target is not _WAIT and memory.order[made].op != "placeholder":
            move_behind(after_getitems(memory.order[made]), steps)
        undoing = [wait]
        while len(undoing[-1].users) == 1 and all(user.target in _UNDOING for user in undoing[-1].users):
            undoing += undoing[-1].users
        if undoing[1:] and undoing[-1].users:
            reader = min(undoing[-1].users, key=memory.position.__getitem__)
            for view in undoing[1:]:
                reader.prepend(view)


def shaping(value: fx.Node, *, casts: bool = False) -> tuple[fx.Node, list[fx.Node]]:
    """The value behind a collective's operand, and the operators that only shape it: permute, copy, pad.

    Args:
        value: the operand.
        casts: look through a cast, too; expansion casts parameters before it gathers them.
    """
    kinds = (*_SHAPING, _CAST) if casts else _SHAPING
    steps = list[fx.Node]()
    while value.target in kinds and len(value.users) == 1 and len(value.all_input_nodes) == 1:
        steps.insert(0, value)
        value = value.all_input_nodes[0]
    return value, steps


def move_behind(anchor: fx.Node, nodes: Sequence[fx.Node]) -> fx.Node:
    """Move nodes behind ``anchor``, in order, and return the last one."""
    for node in nodes:
        anchor.append(node)
        anchor = node
    return anchor


def after_getitems(node: fx.Node) -> fx.Node:
    """The last node of the block that makes a value: getitems of a multi-output operator belong to it."""
    while node.next.target is operator.getitem:
        node = node.next
    return node


def is_gradient(step: ShardedStep, memory: Memory, start: fx.Node, wait: fx.Node) -> bool:
    """Whether it is made before the update, and only clipping, the optimizer or ``p.grad`` see the result.

    One number stays as it is: it may be a norm or a loss, and a cast would save nothing.
    """
    made = _before_update(shaping(start.all_input_nodes[0])[0])
    if made is None or spec_of(made).numel == 1 or not spec_of(made).dtype.is_floating_point:
        return False
    todo, read = [wait], False
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.op == "output":
                values: Any = user.args[0]
                roles = {e.role for v, e in zip(values, step.signature.outputs, strict=True) if v is node}
                if not roles <= {OutputRole.GRADIENT, OutputRole.SHOWN_GRADIENT}:
                    return False
            elif info_of(user).section not in UPDATE:
                if memory.roots[user] is not memory.roots[wait]:
                    return False
                todo.append(user)
                continue
            read = True
    return read


def _before_update(value: fx.Node) -> fx.Node | None:
    """What the update's own arithmetic on one tensor (a sign turned) started from; None if it is other arithmetic."""
    while info_of(value).section in UPDATE and value.op == "call_function":
        made: Any = value.args[0] if value.target is operator.getitem else value
        lists = [a for a in made.args if isinstance(a, (list, tuple)) and isinstance(next(iter(a), None), fx.Node)]
        index: Any = value.args[1] if made is not value else 0
        sources = [lists[0][index]] if made is not value and len(lists) == 1 else value.all_input_nodes
        sources = [n for n in sources if origin_spec(n) is not None]
        if len(sources) != 1 or spec_of(sources[0]).numel != spec_of(value).numel:
            return None
        value = sources[0]
    return value
