"""Sharding rules, one operator family a file.

Each file has ``RULES``: operator (an overload, or a packet for all its overloads) → rule, and may have ``LOCALIZERS``:
operator → function that gives the arguments that must change with local shapes (sizes). An in-place operator without an
entry uses its functional form's. To add an operator, add an entry to its family. ``registered`` asks DTensor where
there is no rule; ``synchronized_batch_norm`` is the program of a layout of ``batch_norm``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lightning_spmd._private_api import OpOverload
from lightning_spmd.stages.expand.call import Layout, Localizer, OpCall, Rule
from lightning_spmd.stages.expand.rules import (
    attention,
    batch_norm,
    collectives,
    convolution,
    cross_entropy,
    embedding,
    expert_rows,
    factories,
    foreach,
    indexing,
    joins,
    losses,
    matmul,
    norms,
    pointwise,
    random,
    recurrent,
    reductions,
    spatial,
    transforms,
    views,
)

_FAMILIES = (
    pointwise, views, joins, factories, random, reductions, matmul, embedding, convolution, norms, batch_norm,
    attention, recurrent, losses, cross_entropy, spatial, indexing, foreach, transforms,
    collectives, expert_rows,
)  # fmt: skip

RULES: dict[Any, Rule] = {op: rule for family in _FAMILIES for op, rule in family.RULES.items()}
LOCALIZERS: dict[Any, Localizer] = {
    op: localizer for family in _FAMILIES for op, localizer in getattr(family, "LOCALIZERS", {}).items()
}

T = TypeVar("T")


def lookup(table: dict[Any, T], op: Any) -> T | None:
    """The entry of an operator: its overload's, its packet's, or that of the functional form."""
    found = table.get(op)
    if found is not None or not isinstance(op, OpOverload):
        return found
    packet = op.overloadpacket
    found = table.get(packet)
    if found is None and packet.__name__.endswith("_") and not packet.__name__.endswith("__"):
        base = getattr(getattr(torch.ops, op.namespace), packet.__name__[:-1], None)
        found = None if base is None else table.get(base)
    return found


def rule_of(op: Any) -> Rule | None:
    """The sharding rule of an operator; element-wise ones need no entry."""
    return lookup(RULES, op) or (pointwise.elementwise if pointwise.is_pointwise(op) else None)


@functools.cache
def _tensors_written_as_result(op: Any) -> int:
    """How many tensors an ``out=`` form of an operator is given for its results; they come last."""
    schema = getattr(op, "_schema", None)
    return 0 if schema is None else sum(a.is_out for a in schema.arguments)


def layouts_of(call: OpCall, on_error: Callable[[Exception], None] = lambda _error: None) -> list[Layout] | None:
    """What an operator's rule says of a call; None without a rule, and with one that fails.

    Args:
        call: the call.
        on_error: told of what the rule raised. A call that no rule foresees runs on whole tensors, like an operator
            without a rule.
    """
    rule = rule_of(call.op)
    if rule is None:
        return None
    given = _tensors_written_as_result(call.op)
    try:
        found = rule(call)
    except Exception as error:
        if not given:
            on_error(error)
        return None
    if given:  # rules speak of the operator's other forms
        found = [dataclasses.replace(c, inputs=(*c.inputs[:-given], *c.outputs[:given])) for c in found]
    return found
