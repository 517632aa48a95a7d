"""``docs/compatibility.md``, from results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version

import torch

from tests.compatibility.result import GRAPHS, Result
from tests.compatibility.rows import ROWS, STEPS

_HEAD = """# Compatibility

Third-party models, each trained through the Trainer with its own classes and its own loss: {steps} steps of AdamW or of
the module's own optimizer, {rows} rows a step, random weights and data, dropout and drop path off. torch {torch},
lightning {lightning}. Made by `python -m tests.compatibility --write docs/compatibility.md`; with `--only REGEX` some
rows are measured and the others stay as they are.

* **one process**: losses and weights compared with Lightning's own strategy; *bitwise* means equal in every bit.
* **two processes**: the largest relative difference of a loss from one device on the whole batch. Rows have different
  lengths and numbers of labels, so a mean of the ranks' means would show.
* **moved**: collectives on activations. There are none if the rows of a batch are independent of each other.
* **graphs**, **seconds**: graphs built in a run of two processes on two shared cores, and the time that took. Some rows
  were measured on a busy machine.

{counts}

| model | how | one process | two processes | moved | graphs | seconds | note |
|---|---|---|---|---:|---:|---:|---|"""
_NAMES = {"transformers": "Hugging Face", "": ""}


Line = tuple[tuple[str, ...], str]
"""The cells of a row, the model's name first, and its note."""


def table(results: Sequence[Result], before: str = "") -> str:
    """The document.

    Args:
        results: what was measured.
        before: an earlier document, whose other rows stay as they are.
    """
    sections = _sections(before)
    for result in results:
        lines = sections.setdefault(result.row.kind[0].upper() + result.row.kind[1:], {})
        lines[result.row.name] = _line(result)
    every = [line for lines in sections.values() for line in lines.values()]
    graphs = sum(cells[1] in GRAPHS for cells, _ in every)
    text = _HEAD.format(
        steps=STEPS,
        rows=ROWS,
        torch=torch.__version__.split("+")[0],
        lightning=version("lightning"),
        counts=f"{len(every)} models: {graphs} as graphs, {len(every) - graphs} eagerly.",
    )
    return "\n".join([text, *(_section(kind, list(lines.values())) for kind, lines in sections.items()), ""])


def _sections(document: str) -> dict[str, dict[str, Line]]:
    """The rows of a document by section and name."""
    found: dict[str, dict[str, Line]] = {}
    for section in document.split("\n| **")[1:]:
        rows = re.findall(r"^\| `(.+?)` \| (.*) \|$", section, re.MULTILINE)
        lines = {name: [name, *(cell.strip() for cell in rest.split("|"))] for name, rest in rows}
        found[section.partition("**")[0]] = {name: (tuple(cells[:-1]), cells[-1]) for name, cells in lines.items()}
    return found


def _section(kind: str, lines: Sequence[Line]) -> str:
    text = [f"| **{kind}** |{' |' * 7}"]
    text += [f"| {' | '.join((f'`{name}`', *cells, note.replace('|', '/')))} |" for (name, *cells), note in lines]
    return "\n".join(text)


def _line(result: Result) -> Line:
    first = result.ranks[0]
    compiled = first.mode in GRAPHS
    one = "bitwise" if result.is_bitwise else "**differs**"
    two = "" if result.row.draws else f"{result.difference:.0e}" if compiled else "as DDP"
    numbers = (len(first.moved), first.captures, f"{first.seconds:.1f}") if compiled else ("", "", "")
    return (result.row.name, first.mode, one, two, *map(str, numbers)), _note(result)


def _note(result: Result) -> str:
    row = result.row
    parts = [row.note, f"gathers embeddings: {row.couples}" if row.couples else "", row.draws]
    if result.ranks[0].mode not in GRAPHS:
        parts += [row.eager, result.reason]
    if result.faults():
        parts.append(f"**{'; '.join(result.faults())}**")
    text = ". ".join(part for part in parts if part)
    return re.sub(r"\s*\n\s*|/\S*/site-packages/", " ", text)
