"""Matrix products. Split rows or columns stay; a split contraction gives a partial sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lightning_spmd.ir.placement import PARTIAL, Shard
from lightning_spmd.stages.expand.call import Layout, OpCall, Rule, Where, along, linear

aten = torch.ops.aten


def product(
    call: OpCall, left: int, right: int, subscripts: tuple[str, str, str], bias: int | None = None
) -> list[Layout]:
    """Layouts of ``out = left @ right (+ bias)`` from one letter a dimension, as in einsum."""
    first, second, out = subscripts
    found: list[Layout] = []
    for letter in sorted(set(first + second)):
        inputs: list[Where] = [None] * len(call.operands)
        inputs[left] = first.index(letter) if letter in first else None
        inputs[right] = second.index(letter) if letter in second else None
        if bias is not None:
            inputs[bias] = _bias(call, bias, out.index(letter)) if letter in out else PARTIAL
        found += along(call, inputs, [out.index(letter) if letter in out else PARTIAL])
    for one in (left, right):
        found += linear(call, (one,) if bias is None else (one, bias))
    return _rows_of_scores(call, left, right, Shard(first.index("m")), found) if "b" in first else found


def _rows_of_scores(call: OpCall, left: int, right: int, rows: Shard, found: list[Layout]) -> list[Layout]:
    """Attention written out: scores stay split by the rows of queries, and the keys or values are gathered.

    Moving the scores instead can count fewer bytes where a sequence is short beside a head; every later use of them
    would have to move, too.
    """
    if not call.splits_sequences or call.current[left] != rows or not isinstance(call.current[right], Shard):
        return found
    if any(list(layout.inputs) == call.current for layout in found):
        return found
    return [replace(layout, expected=True) for layout in found if layout.inputs[left] == rows]


def _bias(call: OpCall, bias: int, dim: int) -> Where:
    own = dim - (len(call.shape) - len(call.specs[bias].shape))
    return own if own >= 0 and call.specs[bias].shape[own] == call.shape[dim] else None


def _plain(subscripts: tuple[str, str, str]) -> Rule:
    return lambda call: product(call, 0, 1, subscripts)


def _biased(subscripts: tuple[str, str, str]) -> Rule:
    return lambda call: product(call, 1, 2, subscripts, bias=0)


def _linear(call: OpCall) -> list[Layout]:
    batch = "abcdefgh"[: len(call.specs[0].shape) - 1]
    bias = 2 if len(call.operands) == 3 else None
    return product(call, 0, 1, (batch + "k", "nk", batch + "n"), bias)


RULES: dict[Any, Rule] = {
    aten.mm: _plain(("mk", "kn", "mn")),
    aten.bmm: _plain(("bmk", "bkn", "bmn")),
    aten.mv: _plain(("mk", "k", "m")),
    aten.dot: _plain(("k", "k", "")),
    aten.vdot: _plain(("k", "k", "")),
    aten.ger: _plain(("m", "n", "mn")),
    aten.addmm: _biased(("mk", "kn", "mn")),
    aten.addmv: _biased(("mk", "k", "m")),
    aten.baddbmm: _biased(("bmk", "bkn", "bmn")),
    aten.addbmm: _biased(("bmk", "bkn", "mn")),
    aten._addmm_activation: lambda call: [c for c in _biased(("mk", "kn", "mn"))(call) if PARTIAL not in c.outputs],
    aten.linear: _linear,
}
