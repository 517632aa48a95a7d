"""The table in ``docs/operators.md``, from the results of a sweep."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from tests.operators.check import (
    ARBITRARY,
    CRASHED,
    EQUAL,
    FORMULA,
    REFUSED,
    REPLICATED,
    SKIPPED,
    SLOW,
    WRONG,
)
from tests.operators.sweep import Result

_HEAD = """# Operators

Every operator of torch's own operator database (`torch.testing._internal.common_methods_invocations.op_db`) that takes
float64, as the body of a training step: forward and gradients on two simulated ranks against the eager step on one
device, in float64. NaN and infinities must be in the same places, and both ranks' graphs must be the same.

* **Rows**: the operator's first tensor, and all tensors with as many rows, are the batch, in unequal shares: all rows
  but one and one, all and none, equal ones.
* **Parameters**: each tensor in turn is split on each of its dimensions over a tensor axis.
* **In place**: the in-place form, where there is one, with rows split.

Up to {samples} samples an operator that differ in shapes, dimensions and keywords; torch {version}: {checks} checks of
{operators} operators. Made by

    python -m tests.operators --write docs/operators.md

An operator stands where its worst sample stands. *Gathered* means that it has no sharding rule for some arguments and
works on whole tensors, which a warning says, with module, line and bytes. *Refused* means an error that names operator,
module and line; with replicated parameters training goes on eagerly. None is wrong, none ends in an error that is not
ours, none takes {seconds:.0f} seconds.
"""
_KINDS = {
    WRONG: "**Wrong**",
    CRASHED: "**Ended in torch's error**",
    SLOW: "**Slow**",
    REFUSED: "Refused for some arguments or all",
    REPLICATED: "Equal, gathered for some arguments or all, with a warning",
    FORMULA: "Equal to one device's graph, in which autograd's formula for a gradient is not the eager one",
    ARBITRARY: "Random numbers or uninitialised memory: shapes and collectives are right",
    EQUAL: "Equal",
    SKIPPED: "Not tried: one device cannot do it, or no tensor has a dimension to split",
}
_TITLES = {"rows": "Rows", "parameters": "Parameters", "in place": "In place"}
_ORDER = list(_KINDS)


def table(results: Sequence[Result], names: Iterable[str], samples: int | None, seconds: float) -> str:
    """The document."""
    version = str(torch.__version__).split("+")[0]
    head = _HEAD.format(
        samples="400" if samples is None else samples,
        version=version,
        checks=len(results),
        operators=len({r.operator for r in results}),
        seconds=seconds,
    )
    parts = [head]
    for side, title in _TITLES.items():
        mine = [r for r in results if r.side == side]
        if mine:
            parts.append(f"## {title}\n\n{_side(mine, sorted(names))}")
    return "\n".join(parts)


def worst(results: Iterable[Result]) -> dict[str, Result]:
    """By operator, its worst result; one that one device cannot do counts only where there is no other."""
    found: dict[str, Result] = {}
    for result in results:
        known = found.get(result.operator)
        if known is None or _ORDER.index(result.outcome.kind) < _ORDER.index(known.outcome.kind):
            found[result.operator] = result
    return found


def _side(results: Sequence[Result], names: Sequence[str]) -> str:
    by_operator = worst(results)
    lines: list[str] = []
    for kind, title in _KINDS.items():
        members = [n for n, r in by_operator.items() if r.outcome.kind == kind]
        if kind == SKIPPED and results[0].side != "in place":
            members += [n for n in names if n not in by_operator]
        if not members:
            continue
        lines.append(f"**{title}** ({len(members)})\n" if not title.startswith("**") else f"{title} ({len(members)})\n")
        if kind in (REFUSED, WRONG, CRASHED, SLOW):
            lines += [
                f"* {_reason(by_operator[n])}: {_code([m for m in members if _same(by_operator, m, n)])}"
                for n in members
                if next(m for m in members if _same(by_operator, m, n)) == n
            ]
            lines.append("")
        else:
            lines.append(_code(members) + "\n")
    return "\n".join(lines)


def _same(by_operator: dict[str, Result], one: str, other: str) -> bool:
    return _reason(by_operator[one]) == _reason(by_operator[other])


def _reason(result: Result) -> str:
    """The reason without what is particular to one call."""
    text = result.outcome.reason.removeprefix("CaptureError: ").removeprefix("ExpansionError: ")
    text = re.sub(r"\s+at /\S+", "", text)
    text = re.sub(r" ?(in module '' )?/\S+\.py:\d+", "", text)
    text = re.sub(r"\baten\.\w+(\.\w+)?", "the operator", text)
    return re.sub(r"\d+", "N", text).split(";")[0].strip()


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
