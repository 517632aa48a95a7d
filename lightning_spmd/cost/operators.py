"""Arithmetic and memory traffic of an operator, read off the shapes of its operands and results.

Products, convolutions and attention have a formula; every other operator counts as one that moves what it reads and
writes. Views, and operators that only allocate, cost nothing. Attention with ``is_causal`` counts half of its scores,
for kernels skip the other half.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from lightning_spmd._private_api import OpOverload
from lightning_spmd.ir.aliasing import aliased_argument, written_arguments
from lightning_spmd.ir.node_info import SHARE, TensorSpec

Kind = Literal["plain", "attention", "convolution", "curve", "reduction"]
_ATTENTION = "_scaled_dot_product_"
_CURVES = re.compile("gelu|silu|mish|tanh|sigmoid|softmax|softplus|exp|erf|log1p")
_REDUCTIONS = re.compile(
    "^(sum|mean|amax|amin|prod|var|std|norm|linalg_vector_norm|_foreach_norm|cum|nll_loss|native_(layer|batch|group)_norm)"
)
_ALLOCATING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_PICKING = frozenset({"embedding", "index_select", "gather", "index"})
"""What they read of a table is as much as they write."""
_SCATTERING = frozenset({"scatter_", "scatter_add_", "index_put_", "index_add_"})
"""What they touch of a table is as much as they are given."""


@dataclass(frozen=True)
class Work:
    """The arithmetic and memory traffic of an operator.

    Args:
        flops: floating-point operations of products; 0 for what only moves memory.
        bytes: read and written.
        dtype: of the products' operands.
        kind: ``"attention"``: products inside a kernel that does more; ``"curve"``: functions such as GELU and softmax,
            which a CPU takes longer for than for the memory they touch; ``"reduction"``: sums and norms, likewise;
            ``"convolution"``: products that reach less than others.
    """

    flops: float
    bytes: float
    dtype: torch.dtype = torch.float32
    kind: Kind = "plain"

    @property
    def is_none(self) -> bool:
        """Whether nothing runs on the device: a view, an allocation, arithmetic of the host."""
        return not self.flops and not self.bytes


NOTHING = Work(0.0, 0.0)


def work_of(node: fx.Node) -> Work:
    """The work of a node; collectives and waits have none here."""
    target: Any = node.target
    if node.op != "call_function" or target is operator.getitem or not isinstance(target, OpOverload):
        return NOTHING
    name = _name(target)
    if target.namespace == "_c10d_functional" or name in _ALLOCATING:
        return NOTHING
    if aliased_argument(node) is not None and not written_arguments(node):
        return NOTHING
    results = list(specs_in(node.meta.get("val")))
    if not results and not written_arguments(node):
        return NOTHING  # arithmetic of the host
    flops = _flops(node, name)
    return Work(flops, _traffic(node, name, results), _dtype(node) if flops else torch.float32, _kind(name))


def _kind(name: str) -> Kind:
    if name.startswith(_ATTENTION):
        return "attention"
    if "convolution" in name:
        return "convolution"
    if _CURVES.search(name):
        return "curve"
    return "reduction" if _REDUCTIONS.match(name) else "plain"


def specs_in(value: Any) -> Iterator[TensorSpec]:
    """The tensors in what a node produces."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from specs_in(item)


# ---------------------------------------------------------------- pieces
def _name(target: Any) -> str:
    return target._schema.name.partition("::")[2]  # noqa: SLF001 - how operators are described everywhere in torch


def _extent(spec: TensorSpec) -> int:
    """Bytes of memory behind a tensor: an expanded one is read once."""
    shown = math.prod(size for size, stride in zip(spec.shape, spec.stride, strict=True) if stride)
    return shown * spec.dtype.itemsize if spec.numel else 0


def _traffic(node: fx.Node, name: str, results: list[TensorSpec]) -> float:
    written = written_arguments(node)
    inside = {id(n) for n in written}
    reads = sum(_extent(s) for n in node.all_input_nodes for s in specs_in(n.meta.get("val")))
    fresh = 0 if inside and _returns_operand(node) else sum(_extent(s) for s in results)
    writes = fresh + sum(_extent(s) for n in written for s in specs_in(n.meta.get("val")))
    if name in _PICKING and results:
        return 2.0 * fresh
    if name in _SCATTERING:
        return float(sum(3 * _extent(s) for n in node.all_input_nodes[1:] for s in specs_in(n.meta.get("val"))))
    return float(reads + writes)


def _returns_operand(node: fx.Node) -> bool:
    return aliased_argument(node) is not None


def _operand(node: fx.Node, index: int) -> TensorSpec | None:
    operand: Any = node.args[index] if index < len(node.args) else None
    value = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    return value if isinstance(value, TensorSpec) else None


def _dtype(node: fx.Node) -> torch.dtype:
    return next((s.dtype for n in node.all_input_nodes for s in specs_in(n.meta.get("val"))), torch.float32)


def _flops(node: fx.Node, name: str) -> float:
    if name.startswith(_ATTENTION):
        return _attention(node, backward=name.endswith("_backward"))
    if name == "_grouped_mm":
        left, right = _operand(node, 0), _operand(node, 1)
        share = node.meta.get(SHARE, 1.0)
        return 0.0 if left is None or right is None else 2.0 * left.numel * right.shape[-1] * share
    if name == "mv":
        matrix = _operand(node, 0)
        return 0.0 if matrix is None else 2.0 * matrix.numel
    if name == "addmv":
        matrix = _operand(node, 1)
        return 0.0 if matrix is None else 2.0 * matrix.numel
    packet = getattr(node.target, "overloadpacket", None)
    count: Any = flop_registry.get(packet)
    if count is None:
        return 0.0
    shapes = fx.map_arg((node.args, node.kwargs), _shape)
    arguments, keywords = shapes  # pyright: ignore[reportGeneralTypeIssues]
    out = [tuple(s.shape) for s in specs_in(node.meta.get("val"))]
    # The formulas take tensors by their shapes; what is not a tensor goes through as it is.
    return float(count(*arguments, **keywords, out_val=_output_of(node, out)))


def _shape(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, TensorSpec) else value


def _output_of(node: fx.Node, shapes: list[tuple[int, ...]]) -> Any:
    value = node.meta.get("val")
    if isinstance(value, TensorSpec):
        return shapes[0]
    if not isinstance(value, (tuple, list)):
        return None
    return tuple(tuple(v.shape) if isinstance(v, TensorSpec) else None for v in value)  # pyright: ignore


def _attention(node: fx.Node, *, backward: bool) -> float:
    """Two products forward, five backward (flash attention computes the scores once more)."""
    first = 1 if backward else 0
    query, key, value = (_operand(node, first + i) for i in range(3))
    if query is None or key is None or value is None:
        return 0.0
    pairs = query.shape[0] * query.shape[1] * query.shape[-2] * key.shape[-2]
    products = (
        2.0 * pairs * ((3 * query.shape[-1] + 2 * value.shape[-1]) if backward else query.shape[-1] + value.shape[-1])
    )
    return products / 2 if _is_causal(node) else products


def _is_causal(node: fx.Node) -> bool:
    schema: Any = node.target
    for position, argument in enumerate(schema._schema.arguments):  # noqa: SLF001
        if argument.name == "is_causal":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("is_causal", False)
            return bool(given)
    return False
