"""DTensor's registered strategies, for operators without a rule of ours.

This is what makes ``torch.distributed.tensor.experimental.register_sharding`` of a user's custom operator work. The
strategy is looked up and called once; DTensor's propagator itself is never run: without an entry it searches through
decompositions, for ever on some operators.
"""

from __future__ import annotations

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import REPLICATE, Partial, Placement, Shard
from lightning_spmd.stages.expand.call import Layout, OpCall


def registered_layouts(call: OpCall) -> list[Layout] | None:
    """Layouts from DTensor's registry, or None if it has none for this operator."""
    node = call.node
    if not private.has_dtensor_strategy(call.op):
        return None
    current = dict(zip(call.operands, call.current, strict=True))
    choices = private.dtensor_strategies(
        call.op,
        node.args,
        node.kwargs,
        lambda n: (n.meta["val"], current[n]) if n in current else n.meta.get("val"),
        call.axis.size,
    )
    found: list[Layout] = []
    for inputs, outputs in choices:
        if len(inputs) != len(call.operands):
            continue
        placed = [_translate(p) for p in (*inputs, *outputs)]
        specs = [*call.specs, *call.outputs]
        if all(p is not None and _fits(call, p, s) for p, s in zip(placed, specs, strict=False)):
            known = [p for p in placed if p is not None]
            padding = [REPLICATE] * (len(call.outputs) - len(outputs))
            found.append(Layout(tuple(known[: len(inputs)]), (*known[len(inputs) :], *padding)))
    return found


def _translate(name: tuple[str, object]) -> Placement | None:
    kind, detail = name
    if kind == "shard" and isinstance(detail, int):
        return Shard(detail)
    if kind == "partial":
        return Partial(detail) if detail in ("sum", "max", "min") else None  # type: ignore[arg-type]
    return REPLICATE if kind == "replicate" else None


def _fits(call: OpCall, placement: Placement, spec: object) -> bool:
    if not isinstance(placement, Shard):
        return True
    return (
        isinstance(spec, TensorSpec)
        and placement.dim < len(spec.shape)
        and call.axis.divides(spec.shape[placement.dim])
    )
