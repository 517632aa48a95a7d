"""Which nodes a compiler may take: those that compute, elsewhere than in products, and do nothing else.

Pointwise operators, reductions, norms, softmax, casts, copies and views. Not: products, convolutions and attention,
whose own kernels are better; random draws, collectives, arithmetic on host numbers, lists of tensors (foreach and fused
updates), gathers and scatters by index (but for the loss of classes on a GPU), and writes into what was not born in the
region. What is not known here is not taken.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from lightning_spmd._private_api import OpOverload
from lightning_spmd.ir.aliasing import aliased_argument, written_arguments
from lightning_spmd.ir.effects import draws_random
from lightning_spmd.ir.geometry import is_view
from lightning_spmd.ir.node_info import TensorSpec

_aten = torch.ops.aten

_OTHERS = {
    _aten.native_layer_norm, _aten.native_layer_norm_backward,
    _aten.native_group_norm, _aten.native_group_norm_backward,
    _aten._softmax, _aten._softmax_backward_data, _aten._log_softmax, _aten._log_softmax_backward_data,  # noqa: SLF001
    _aten._to_copy, _aten.cat, _aten.stack, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.full,  # noqa: SLF001
    _aten.mse_loss, _aten.mse_loss_backward, _aten.slice_backward, _aten.select_backward, _aten.masked_fill,
}  # fmt: skip
"""Operators that are neither tagged as pointwise nor as reductions, and are made of both."""
_WRITERS = {_aten.copy_, _aten.fill_, _aten.zero_}
"""Operators that write into a value and are not tagged as pointwise."""
_ON_GPUS = {_aten.nll_loss_forward, _aten.nll_loss_backward}
"""Operators that look up an index: a wrong one ends a GPU's process anyway. On the host torch raises an error, and
threads of compiled code end the process."""
_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.int32}


def may_be_lowered(node: fx.Node) -> bool:
    """Whether a compiler may take a node, provided that it writes only into tensors of its region."""
    if node.op != "call_function" or draws_random(node):
        return False
    if node.target is operator.getitem:
        parent = node.args[0]
        return isinstance(parent, fx.Node) and may_be_lowered(parent)
    return (
        isinstance(node.target, OpOverload)
        and (is_view(node) or _computes(node.target) or _is_for_gpus(node))
        and not _takes_back_a_cast(node)
        and all(_is_plain(value) for value in _values((node, *node.all_input_nodes)))
        and len({spec.device for spec in _specs((node, *node.all_input_nodes))}) == 1
    )


def _takes_back_a_cast(node: fx.Node) -> bool:
    """A cast of what was cast to fewer bits: the compiler would leave out both, and the rounding with them."""
    if node.target is not _aten._to_copy.default:  # noqa: SLF001 - how casts are called
        return False
    source = node.all_input_nodes[0]
    while is_view(source):
        source = source.all_input_nodes[0]
    return source.target is _aten._to_copy.default  # noqa: SLF001


def is_free(node: fx.Node) -> bool:
    """Whether a node computes nothing: it looks at a value, or takes it out of a tuple."""
    return node.target is operator.getitem or is_view(node)


def owner(node: fx.Node) -> fx.Node | None:
    """The value that a node writes into; None if it writes nowhere."""
    written = written_arguments(node)
    return written[0] if written else None


def _is_for_gpus(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return packet in _ON_GPUS and all(spec.device.type == "cuda" for spec in _specs((node,)))


@functools.cache
def _computes(target: Any) -> bool:
    if target.namespace != "aten" or not _is_of_known_kind(target):
        return False
    schema = target._schema  # noqa: SLF001 - how operators are described everywhere in torch
    if any(a.is_out for a in schema.arguments):
        return False
    if not schema.is_mutable:
        return all(r.alias_info is None for r in schema.returns)
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    return written == [0] and len(schema.returns) == 1


def _is_of_known_kind(target: Any) -> bool:
    tagged = torch.Tag.pointwise in target.tags or torch.Tag.reduction in target.tags
    named = {*_OTHERS, *_WRITERS}
    return tagged or target.overloadpacket in named


def _values(nodes: Iterable[fx.Node]) -> Iterable[Any]:
    for node in nodes:
        value = node.meta.get("val")
        yield from value if isinstance(value, (tuple, list)) else (value,)


def _specs(nodes: Iterable[fx.Node]) -> Iterable[TensorSpec]:
    return (value for value in _values(nodes) if isinstance(value, TensorSpec))


def _is_plain(value: Any) -> bool:
    """A tensor that a compiler has an idea of; numbers of the host are not."""
    return isinstance(value, TensorSpec) and value.dtype in _DTYPES and value.numel > 0


def storage_in(node: fx.Node, region: set[fx.Node]) -> fx.Node:
    """The value whose storage a node shares, followed as far as it lies in a region; items of a tuple are values."""
    source = aliased_argument(node)
    while source is not None and node in region:
        node, source = source, aliased_argument(source)
    return node
