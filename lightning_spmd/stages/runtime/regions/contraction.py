"""In which regions a product and a sum may be one instruction that rounds once, as GPUs do it.

It saves the host a good part of the time of polynomials. A product that is rounded no more may differ from its equal
that is: ``x * x - y`` is then not 0 where ``y`` is that square, and its root no number. So this is for regions alone in
which nothing depends on such a zero: operators whose results change little with their inputs, and no difference in
which a product is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.geometry import is_view
from lightning_spmd.stages.runtime.regions.region import Region

_aten = torch.ops.aten

_PRODUCTS = {_aten.mul, _aten.mul_, _aten.square, _aten.pow}
_SEEN_THROUGH = {_aten.neg, _aten.div, _aten.div_, _aten.clone, _aten._to_copy}  # noqa: SLF001
"""What is done to a product, and leaves it one."""
_SUMS = {_aten.add, _aten.add_, _aten.sub, _aten.sub_, _aten.rsub}
_SMOOTH = {
    *_PRODUCTS, *_SUMS, _aten.neg, _aten.div, _aten.div_, _aten.sum, _aten.mean,
    _aten.gelu, _aten.gelu_backward, _aten.silu, _aten.silu_backward, _aten.tanh, _aten.tanh_backward,
    _aten.sigmoid, _aten.sigmoid_backward, _aten.exp,
    _aten.native_layer_norm, _aten.native_layer_norm_backward, _aten.native_group_norm,
    _aten.native_group_norm_backward, _aten._softmax, _aten._softmax_backward_data,  # noqa: SLF001
    _aten.clone, _aten.copy_, _aten._to_copy, _aten.zeros_like, _aten.ones_like, _aten.full_like,  # noqa: SLF001
}  # fmt: skip
"""Operators whose results change little with their inputs; quotients and powers if the other operand is a number."""


def may_contract(region: Region) -> bool:
    """Whether products and sums of a region may be rounded once.

    Args:
        region: of the host.
    """
    return all(_is_smooth(node) and not _takes_a_product(node) for node in region.nodes)


def _is_smooth(node: fx.Node) -> bool:
    if node.target is operator.getitem or is_view(node):
        return True
    kind = _kind(node)
    if kind in (_aten.div, _aten.div_):
        return not isinstance(node.args[1], fx.Node) and not node.kwargs.get("rounding_mode")
    if kind is _aten.pow:
        exponent = node.args[1]
        return isinstance(exponent, (int, float)) and exponent > 0 and float(exponent).is_integer()
    return kind in _SMOOTH


def _takes_a_product(node: fx.Node) -> bool:
    """A difference that would be rounded once with a product in it."""
    if _kind(node) not in _SUMS or not any(_is_product(term) for term in node.all_input_nodes):
        return False
    adds = _kind(node) in (_aten.add, _aten.add_) and node.kwargs.get("alpha", 1) == 1
    return not adds or any(_is_negative(term) for term in node.all_input_nodes)


def _is_product(node: fx.Node) -> bool:
    while is_view(node) or _kind(node) in _SEEN_THROUGH:
        node = node.all_input_nodes[0]
    return _kind(node) in _PRODUCTS


def _is_negative(value: Any) -> bool:
    """Whether a value was negated."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float)) and value < 0
    if _kind(value) is _aten.neg:
        return True
    passes_on = is_view(value) or _kind(value) in _SEEN_THROUGH | _PRODUCTS
    return passes_on and any(_is_negative(operand) for operand in value.args if _kind(value) is not _aten.pow)


def _kind(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)
