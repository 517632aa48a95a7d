"""Element by element, with broadcasting: arithmetic, comparison, ``where``, casts, copies, masks, activations.

Every dimension of the result may be split; an operand of size 1 there is replicated. Linear operators pass partial sums
on: that is what lets a gradient travel as a partial sum up to its one reduction.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd._private_api import OpOverload
from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.placement import PARTIAL, REPLICATE, Chunk, Partial, Shard
from lightning_spmd.stages.expand.call import Layout, OpCall, Rule, Where, along, linear

aten = torch.ops.aten
prims = torch.ops.prims


def elementwise(call: OpCall) -> list[Layout]:
    """Split any dimension of the result, broadcast operands follow."""
    if not call.outputs or call.outputs[0] is None:
        return []
    shape = call.shape
    found: list[Layout] = []
    for dim in {p.dim + len(shape) - len(s.shape) for p, s in _split_operands(call)} | _forced(call):
        inputs: list[Where] = []
        for spec in call.specs:
            own = dim - (len(shape) - len(spec.shape))
            inputs.append(own if own >= 0 and spec.shape[own] == shape[dim] else None)
        if any(o is not None and len(o.shape) != len(shape) for o in call.outputs):
            continue
        found.extend(along(call, inputs, [None if o is None else dim for o in call.outputs]))
    return found


def _split_operands(call: OpCall) -> list[tuple[Shard | Chunk, Any]]:
    return [(p, s) for p, s in zip(call.current, call.specs, strict=True) if isinstance(p, (Shard, Chunk))]


def _forced(call: OpCall) -> set[int]:
    return {call.forced.dim} if isinstance(call.forced, Shard) else set()


def _unary_linear(call: OpCall) -> list[Layout]:
    return elementwise(call) + linear(call, range(len(call.operands)))


def _sum(call: OpCall) -> list[Layout]:
    """``a ± alpha * b``: linear only if both are tensors (a number would be added once a rank)."""
    both = len(call.operands) == 2
    return elementwise(call) + (linear(call, (0, 1)) if both else [])


def _product(call: OpCall) -> list[Layout]:
    """Linear in each factor while the other is replicated."""
    found = elementwise(call)
    for i in range(len(call.operands)):
        found += linear(call, (i,))
    return found


def _quotient(call: OpCall) -> list[Layout]:
    if call.get("rounding_mode") is not None:
        return elementwise(call)
    first = call.index("self") == 0
    return elementwise(call) + (linear(call, (0,)) if first else [])


def _cast(call: OpCall) -> list[Layout]:
    """A cast to less precision is not linear: every rank would round its own part.

    Gradients that an update widens are reduced first: they travel as they are.
    """
    source, target = call.specs[0].dtype, call.outputs[0].dtype
    widening = source.is_floating_point == target.is_floating_point and target.itemsize >= source.itemsize
    updating = info_of(call.node).section in (Section.CLIP, Section.OPTIMIZER) and target.itemsize > source.itemsize
    return elementwise(call) + (linear(call, (0,)) if widening and target != torch.bool and not updating else [])


def _where(call: OpCall) -> list[Layout]:
    found = elementwise(call)
    if len(call.operands) == 3:
        found += linear(call, (1, 2))
    return found


def _masked_fill(call: OpCall) -> list[Layout]:
    zero = call.get("value") == 0 and not isinstance(call.get("value"), torch.fx.Node)
    return elementwise(call) + (linear(call, (0,)) if zero else [])


def _copy(call: OpCall) -> list[Layout]:
    """``copy_(self, src)``: what ``self`` held does not matter."""
    found = elementwise(call)
    if call.current[1] == PARTIAL and call.specs[0].dtype.itemsize >= call.specs[1].dtype.itemsize:
        found += [Layout((p, PARTIAL), (PARTIAL,)) for p in (PARTIAL,)]
    return found


def like(call: OpCall) -> list[Layout]:
    """``zeros_like`` and the like: the shape of the operand matters, not its values."""
    found = elementwise(call)
    if isinstance(call.current[0], Partial):
        found.append(Layout((call.current[0],), (REPLICATE,)))
    return found


def is_pointwise(op: Any) -> bool:
    """Whether torch tags the operator as element-wise."""
    return isinstance(op, OpOverload) and torch.Tag.pointwise in op.tags


RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        [
            aten.neg,
            aten.clone,
            aten.positive,
            aten.contiguous,
            aten._pin_memory,
            aten.detach,
            aten.alias,
            aten.real,
            aten.imag,
            aten.conj,
        ],
        _unary_linear,
    ),
    **dict.fromkeys([aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor], _sum),
    **dict.fromkeys([aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar], _product),
    **dict.fromkeys([aten.div, aten.true_divide], _quotient),
    **dict.fromkeys([aten._to_copy, aten.to, prims.convert_element_type], _cast),
    aten.where.self: _where,
    **dict.fromkeys([aten.masked_fill.Scalar, aten.masked_fill_.Scalar], _masked_fill),
    aten.copy_: _copy,
    aten.copy: _copy,
    **dict.fromkeys([aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like], like),
    # not tagged as pointwise by torch, or not in every version
    **dict.fromkeys(
        [
            aten.gelu_backward,
            aten.threshold_backward,
            aten.silu_backward,
            aten.hardtanh_backward,
            aten.elu_backward,
            aten.leaky_relu_backward,
            aten.hardswish_backward,
            aten.hardsigmoid_backward,
            aten.softplus_backward,
            aten.sigmoid_backward,
            aten.tanh_backward,
            aten.mish_backward,
            aten.logit_backward,
            aten.leaky_relu,
            aten.elu,
            aten.celu,
            aten.selu,
            aten.hardtanh,
            aten.hardsigmoid,
            aten.hardswish,
            aten.softshrink_backward,
            aten.hardshrink_backward,
            aten.floor_divide,
            aten.rsub,
            aten.polar,
            aten.complex,
            aten.fill,
            aten.zero,
            aten.masked_fill,
            aten.clamp,
            aten.lerp,
            aten.nan_to_num,
            aten.where,
            aten.isnan,
            aten._prelu_kernel,
            aten._prelu_kernel_backward,
        ],
        elementwise,
    ),
}


def _glu(call: OpCall) -> list[Layout]:
    dim = call["dim"] % len(call.specs[0].shape)
    found: list[Layout] = []
    for d in range(len(call.specs[0].shape)):
        if d != dim:
            found += along(call, [d] * len(call.operands), [d])
    return found


RULES.update({aten.glu: _glu, aten.glu_backward: _glu})


def _log_sigmoid(call: OpCall) -> list[Layout]:
    """The last operand or result is a buffer, which is empty on GPUs."""
    found: list[Layout] = []
    for dim in range(len(call.outputs[0].shape)):
        where: list[Where] = [dim if spec.shape == call.outputs[0].shape else None for spec in call.specs]
        found += along(call, where, [dim if o.shape == call.outputs[0].shape else None for o in call.outputs])
    return found


RULES.update({aten.log_sigmoid_forward: _log_sigmoid, aten.log_sigmoid_backward: _log_sigmoid})


def _is_in(call: OpCall) -> list[Layout]:
    """Every element is looked for among all test elements."""
    elements = call.index("elements")
    if elements is None:
        return []
    found: list[Layout] = []
    for dim in range(len(call.shape)):
        inputs: list[Where] = [dim if i == elements else None for i in range(len(call.operands))]
        found += along(call, inputs, [dim])
    return found


RULES[aten.isin] = _is_in


def _prelu_backward(call: OpCall) -> list[Layout]:
    """The slope's gradient has the shape of the input here; the reduction follows as a sum."""
    return elementwise(call)


RULES[aten._prelu_kernel_backward] = _prelu_backward
