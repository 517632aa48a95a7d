"""Attention kernels on parts of queries and keys, and how results of the parts are merged.

A kernel returns its output and the logsumexp of its scores, row by row. With both, results for parts of the keys can be
merged (:func:`merged`). The backward kernel, given the output and the logsumexp over all keys, computes each part's
share of the gradients (FlashAttention, arXiv:2205.14135; ring attention, arXiv:2310.01889).

Kernels differ in their arguments and in the shape of the logsumexp; :class:`Kernel` describes them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.stages.expand.call import LocalCall, OpCall, bind_arguments
from lightning_spmd.stages.expand.program.local_program import LocalProgram

aten = torch.ops.aten

_FAMILY = [
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
]
KERNELS: list[Any] = [
    getattr(aten, name + suffix) for name in _FAMILY for suffix in ("", "_backward") if hasattr(aten, name + suffix)
]
MASKS = ("attn_mask", "attn_bias")
_LOGARITHMS = 1
"""Position of the logarithms among the outputs of every kernel."""
_PADDED_ROWS = 32
"""The memory-efficient kernel pads its logsumexp to a multiple of this number of rows."""


def mask_of(call: OpCall) -> int | None:
    """Position among the operands of an additive mask, if there is one."""
    return next((i for name in MASKS if name in call.arguments and (i := call.index(name)) is not None), None)


def can_be_parted(call: OpCall, rows: int) -> bool:
    """Whether results for parts of ``rows`` rows can be merged.

    This is not possible if a kernel draws random numbers (each part would draw its own, and the backward pass must draw
    the same), computes the gradient of a mask, or pads.
    """
    wanted = call.get("grad_input_mask")
    padded = "_efficient_" in str(call.op) and rows % _PADDED_ROWS != 0
    return call.get("dropout_p") == 0.0 and not (wanted and wanted[3]) and not padded


def why_whole(node: fx.Node) -> str | None:
    """Why an attention kernel cannot work on parts of keys, if the kernel itself is the reason."""
    if getattr(node.target, "overloadpacket", None) not in KERNELS:
        return None
    if bind_arguments(node.target, node.args, node.kwargs).get("dropout_p"):
        return "its kernel draws the numbers of dropout itself, and no part could draw them again; set dropout_p=0"
    return None


@dataclass(frozen=True)
class Rows:
    """A kernel's result for some rows of queries.

    Args:
        output: (batch, heads, rows, size).
        logarithms: of the sums of exponentials, (batch, heads, rows, 1).
        outputs: everything that the kernel gave, as the graph's operator does.
    """

    output: fx.Node
    logarithms: fx.Node
    outputs: list[fx.Node | None]


class Kernel:
    """The attention operator of a call, run on parts of its operands.

    Args:
        call: of the forward or the backward operator.
    """

    def __init__(self, call: LocalCall) -> None:
        self.call = call
        self.program: LocalProgram = call.program
        self.mask = next((name for name in MASKS if call.get(name) is not None), None)

    def forward(self, query: fx.Node, key: fx.Node, value: fx.Node, *, causal: bool, mask: fx.Node | None) -> Rows:
        """Output and logarithms for some queries and some keys."""
        call, given = self.call, self._given(query, key, value, causal, mask)
        result = call.default(**given)
        outputs: list[fx.Node | None] = [
            None if value is None else call.call(operator.getitem, result, i)
            for i, value in enumerate(result.meta["val"])
        ]
        output, logarithms = outputs[0], outputs[_LOGARITHMS]
        if output is None or logarithms is None:
            raise TypeError(f"{call.op} gave no output")
        if len(self.program.shape(logarithms)) == 3:
            logarithms = call.call(aten.unsqueeze.default, logarithms, -1)
        if self.program.spec(output).dtype == torch.float64:  # torch 2.11's shape function says float32, its kernel not
            logarithms = cast(self.program, logarithms, torch.float64)
        return Rows(output, logarithms, outputs)

    def backward(
        self,
        rows: Sequence[fx.Node],
        key: fx.Node,
        value: fx.Node,
        *,
        causal: bool,
        mask: fx.Node | None,
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Gradients of some queries, keys and values.

        Args:
            rows: gradient of the output, queries, output and logarithms (rows, 1) of all keys, for the same rows.
            key: some keys.
            value: their values.
            causal: whether the i-th query sees the first i keys only.
            mask: for these rows and keys.
        """
        call = self.call
        gradient, query, output, logarithms = rows
        given = self._given(query, key, value, causal, mask)
        if len(call.spec("logsumexp").shape) == 3:
            logarithms = call.call(aten.squeeze.dim, logarithms, -1)
        upstream = "grad_out_" if "grad_out_" in call.globals else "grad_out"
        sizes = {"max_q": self.program.shape(query)[2], "max_k": self.program.shape(key)[2]}
        given |= {name: size for name, size in sizes.items() if name in call.globals}
        given |= {upstream: gradient, "out": output, "logsumexp": logarithms}
        result = call.default(**given)
        first, second, third = (call.call(operator.getitem, result, i) for i in range(3))
        return first, second, third

    def _given(
        self, query: fx.Node, key: fx.Node, value: fx.Node, causal: bool, mask: fx.Node | None
    ) -> dict[str, Any]:
        given: dict[str, Any] = {"query": query, "key": key, "value": value, "is_causal": causal}
        return given | ({self.mask: mask} if self.mask is not None else {})

    @property
    def logarithms(self) -> fx.Node:
        """The backward operator's logarithms as (batch, heads, rows, 1)."""
        node = self.call["logsumexp"]
        return node if len(self.program.shape(node)) == 4 else self.call.call(aten.unsqueeze.default, node, -1)

    def results(self, output: fx.Node, logarithms: fx.Node, last: Rows) -> list[fx.Node | None]:
        """The forward operator's outputs: these two, what only the kernel can know as it was for the last part."""
        call = self.call
        specs = call.outputs
        if isinstance(specs[_LOGARITHMS], TensorSpec) and len(specs[_LOGARITHMS].shape) == 3:
            logarithms = call.call(aten.squeeze.dim, logarithms, -1)
        return [output, logarithms, *last.outputs[2:]]


def merged(program: LocalProgram, first: Rows, second: Rows, *, dead: bool = False) -> tuple[fx.Node, fx.Node]:
    """(output, logarithms) for the keys of both, in the precision of the logarithms.

    Args:
        program: where it is computed.
        first: results for some keys.
        second: results of the same rows for others.
        dead: whether a row may have seen no key yet: its logarithm is minus infinity, its output anything finite.
    """
    run = program.call
    total = run(aten.logaddexp.default, first.logarithms, second.logarithms)
    base = total
    if dead:
        nothing = run(aten.eq.Scalar, total, -math.inf)
        base = run(aten.masked_fill.Scalar, total, nothing, 0.0)
    parts = [
        run(aten.mul.Tensor, part.output, run(aten.exp.default, run(aten.sub.Tensor, part.logarithms, base)))
        for part in (first, second)
    ]
    return run(aten.add.Tensor, *parts), total


def cast(program: LocalProgram, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """``node`` in this precision."""
    return node if program.spec(node).dtype == dtype else program.call(aten._to_copy.default, node, dtype=dtype)
