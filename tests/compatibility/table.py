"""``docs/compatibility.md``, from results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version

import torch

from tests.compatibility.result import Result
from tests.compatibility.rows import ROWS, STEPS

_HEAD = """# Compatibility

Models that nobody here wrote, each through the Trainer with its own classes and its own loss: {steps} steps of AdamW or
of the module's own optimizer, {rows} rows a step, random weights and data, dropout and drop path off. torch {torch},
lightning {lightning}. Made by

```bash
python -m tests.compatibility --write docs/compatibility.md
```

* **one process**: losses and weights against Lightning's own strategy. *bitwise* is the same bits.
* **two processes**: the largest relative difference of a loss from one device on the whole batch. Rows have different
  lengths and numbers of labels, so that a mean of the ranks' means would show.
* **moved**: collectives on activations. There are none where the rows of a batch have nothing to do with each other.
* **graphs**, **seconds**: built in a run of two processes on two shared cores, and how long that took.

{counts}
"""
_NAMES = {"transformers": "Hugging Face", "": ""}


def table(results: Sequence[Result]) -> str:
    """The document."""
    kinds = list(dict.fromkeys(r.row.kind for r in results))
    text = _HEAD.format(
        steps=STEPS,
        rows=ROWS,
        torch=torch.__version__.split("+")[0],
        lightning=version("lightning"),
        counts=_counts(results),
    )
    return "\n".join([text, *(_section(kind, [r for r in results if r.row.kind == kind]) for kind in kinds)])


def _counts(results: Sequence[Result]) -> str:
    graphs = sum(all(run.mode == "compiled" for run in r.ranks) for r in results)
    return f"{len(results)} models: {graphs} as graphs, {len(results) - graphs} eagerly."


def _section(kind: str, results: Sequence[Result]) -> str:
    lines = [
        f"## {kind[0].upper()}{kind[1:]}\n",
        "| model | how | one process | two processes | moved | graphs | seconds |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    notes: list[str] = []
    for result in results:
        first = result.ranks[0]
        note = _note(result)
        if note:
            notes.append(note)
        mark = f" [{len(notes)}]" if note else ""
        compiled = first.mode == "compiled"
        one = "bitwise" if result.is_bitwise else "**differs**"
        two = "" if result.row.draws else f"{result.difference:.0e}" if compiled else "as DDP"
        numbers = (len(first.moved), first.captures, f"{first.seconds:.1f}") if compiled else ("", "", "")
        cells = (f"`{result.row.name}`{mark}", first.mode, one, two, *numbers)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *numbered, *([""] if notes else [])])


def _note(result: Result) -> str:
    row = result.row
    parts = [row.note, f"moves embeddings, for {row.couples}" if row.couples else "", row.draws]
    if result.ranks[0].mode != "compiled":
        parts += [row.eager, result.reason]
    if result.faults():
        parts.append(f"**{'; '.join(result.faults())}**")
    text = ". ".join(part for part in parts if part)
    return re.sub(r"\s*\n\s*|/\S*/site-packages/", " ", text)
