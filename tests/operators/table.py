"""The table in ``docs/operators.md``, from the results of a sweep."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

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
from tests.operators.sweep import Result, Side

_HEAD = """# Operators

Every operator of torch's own database (`torch.testing._internal.common_methods_invocations.op_db`) that takes float64,
as the body of a training step: forward and gradients on two simulated ranks against the eager step on one device, in
float64. NaN and infinities must be in the same places, and both ranks' graphs must be the same.

{sides}

Up to {samples} samples of each of {operators} operators, as different as possible; torch {version}. Made by
`python -m tests.operators --sides {names} --write docs/operators.md`.

{counts}

An operator counts as its worst sample; one that is not listed below is equal. *Gathered*: it has no sharding rule for
some arguments and works on whole tensors, with a warning that names module, line and bytes. *Refused*: an error that
names operator, module and line; with replicated parameters training goes on eagerly. Where the reason is that a value
or a size is read, this holds for the table alone: in training the value is there, and the step stays a graph
([limits.md](limits.md)). *Slow*: more than {seconds:.0f} seconds of processor time to capture, expand and run a step.
"""
_KINDS = {
    WRONG: "**Wrong**",
    CRASHED: "**Ended in torch's error**",
    SLOW: "**Slow**",
    REFUSED: "**Refused** for some arguments or all",
    REPLICATED: "**Equal, gathered** for some arguments or all, with a warning",
    FORMULA: "**Equal** to one device's graph, in which autograd's formula for a gradient is not the eager one",
    ARBITRARY: "**Random numbers or uninitialised memory**, shapes and collectives are right",
    EQUAL: "Equal",
    SKIPPED: "**Not tried**, one device cannot do it, or no tensor has a dimension to split",
}
_SHORT = {
    WRONG: "wrong",
    CRASHED: "ended in an error that is not ours",
    SLOW: "slow",
    REFUSED: "refused",
    REPLICATED: "equal, gathered",
    FORMULA: "equal by another formula",
    ARBITRARY: "arbitrary, shapes right",
    EQUAL: "equal",
    SKIPPED: "not tried",
}
_TITLES = {"rows": "Rows", "parameters": "Parameters", "in place": "In place"}
_MEANING = {
    "rows": "the operator's first tensor, and all tensors with as many rows, are the batch, in unequal shares: all\n"
    "  rows but one and one, all and none, equal ones.",
    "parameters": "each tensor in turn is split on each of its dimensions over a tensor axis.",
    "in place": "the in-place form, where there is one, with rows split.",
}
_ORDER = list(_KINDS)


def table(results: Sequence[Result], names: Iterable[str], samples: int | None, seconds: float) -> str:
    """The document."""
    names = sorted(names)
    by_side = {side: [r for r in results if r.side == side] for side in _TITLES}
    by_side = {side: found for side, found in by_side.items() if found}
    head = _HEAD.format(
        sides="\n".join(f"* **{_TITLES[side]}**: {_MEANING[side]}" for side in by_side),
        names=" ".join(f"'{side}'" if " " in side else side for side in by_side),
        samples="400" if samples is None else samples,
        version=str(torch.__version__).split("+")[0],
        operators=len(names),
        counts=_counts(by_side, names),
        seconds=seconds,
    )
    return "\n".join([head, *(f"## {_TITLES[s]}\n\n{_side(found, names)}" for s, found in by_side.items())])


def _counts(by_side: Mapping[Side, Sequence[Result]], names: Sequence[str]) -> str:
    """A table of how many operators came out how."""
    members = {side: _members(found, names) for side, found in by_side.items()}
    rows = [["", *(_TITLES[side].lower() for side in by_side)], ["---", *("---:" for _ in by_side)]]
    nobody = [kind for kind in _KINDS if not any(members[side][kind] for side in by_side)]
    rows += [[_SHORT[k], *(str(len(members[side][k])) for side in by_side)] for k in _KINDS if k not in nobody]
    rows += [["checks", *(str(len(found)) for found in by_side.values())]]
    none = f"\n\nNo operator came out as: {'; '.join(_SHORT[kind] for kind in nobody)}." if nobody else ""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + none


def _members(results: Sequence[Result], names: Sequence[str]) -> dict[str, list[str]]:
    """By kind, the operators whose worst result is of it."""
    by_operator = worst(results)
    found = {kind: [n for n, r in by_operator.items() if r.outcome.kind == kind] for kind in _KINDS}
    if results[0].side != "in place":
        found[SKIPPED] += [n for n in names if n not in by_operator]
    return found


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
    for kind, members in _members(results, names).items():
        title = _KINDS[kind]
        if not members or kind == EQUAL:
            continue
        begin = f"* {title} ({len(members)}):"
        if kind in (REFUSED, WRONG, CRASHED, SLOW):
            lines.append(begin)
            lines += [
                f"  * {_reason(by_operator[n])}: {_code([m for m in members if _same(by_operator, m, n)])}"
                for n in members
                if next(m for m in members if _same(by_operator, m, n)) == n
            ]
        else:
            lines.append(f"{begin} {_code(members)}")
    return "\n".join([*lines, ""])


def _same(by_operator: dict[str, Result], one: str, other: str) -> bool:
    return _reason(by_operator[one]) == _reason(by_operator[other])


def _reason(result: Result) -> str:
    """The reason without what is particular to one call."""
    text = re.sub(r"^(Capture|Emission|Expansion)Error: ", "", result.outcome.reason)
    text = re.sub(r" (Capture|Emission|Expansion)Error: ", ": ", text)
    text = re.sub(r"\s+at /\S+", "", text)
    text = re.sub(r" ?(in module '' )?/\S+\.py:\d+", "", text)
    text = re.sub(r"\baten\.\w+(\.\w+)?", "the operator", text)
    return re.sub(r"\d+", "N", text).split(";")[0].strip()


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
