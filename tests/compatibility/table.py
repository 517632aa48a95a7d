"""``measured.csv`` beside this file, a row for each model, and ``docs/compatibility.md``, which groups them."""

from __future__ import annotations

import csv
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from importlib.metadata import version
from pathlib import Path

import torch

from tests.compatibility.result import GRAPHS, Result
from tests.compatibility.rows import ROWS, STEPS

MEASURED = Path(__file__).with_name("measured.csv")
_WIDTH = 180
_HEAD = """\
Third-party models, each trained through the Trainer with its own classes and its own loss: {steps} steps of AdamW
or of the module's own optimizer, {rows} rows a step, random weights and data, dropout and drop path off. torch {torch},
lightning {lightning}. Made by `python -m tests.compatibility --write docs/compatibility.md`; with `--only REGEX` some
models are measured and the others stay as they are. The numbers of each model are in
[measured.csv](../tests/compatibility/measured.csv).

On one process losses and weights are bitwise those of Lightning's own strategy{differ}. Behind the names of models that
are alike stands what two processes gave: the largest relative difference of a loss from one device on the whole batch
(rows have different lengths and numbers of labels, so a mean of the ranks' means would show); collectives on
activations, if any (there are none if the rows of a batch are independent of each other); the graphs that were built,
and how long the run took on two shared cores.

{counts}"""


@dataclass(frozen=True)
class Line:
    """What came of a model, as it is kept.

    Args:
        name: of the model.
        section: of the page.
        how: the strategy's mode.
        one: whether one process is bitwise eager.
        two: how far two processes are from one device.
        moved: collectives on activations.
        graphs: built in the run of two processes.
        seconds: which that took.
        note: what else is to be said.
    """

    name: str
    section: str
    how: str
    one: str
    two: str
    moved: str
    graphs: str
    seconds: str
    note: str


def read_lines(file: Path = MEASURED) -> dict[str, Line]:
    """What is kept, by name."""
    with file.open(newline="") as text:
        return {row[0]: Line(*row) for row in list(csv.reader(text))[1:]}


def write_lines(lines: Mapping[str, Line], file: Path = MEASURED) -> None:
    """Keep these."""
    with file.open("w", newline="") as text:
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(field.name for field in fields(Line))
        rows.writerows(astuple(line) for line in lines.values())


def line(result: Result) -> Line:
    """What is kept of a result."""
    row, first = result.row, result.ranks[0]
    compiled = result.mode in GRAPHS
    one = "bitwise" if result.is_bitwise else "**differs**"
    two = "" if row.draws else f"{result.difference:.0e}" if compiled else "as DDP"
    numbers = (str(len(first.moved)), str(first.captures), f"{first.seconds:.1f}") if compiled else ("", "", "")
    return Line(row.name, row.kind[0].upper() + row.kind[1:], result.mode, one, two, *numbers, _note(result))


def page(lines: Sequence[Line]) -> str:
    """The document: models of a section that have the same note are one entry."""
    groups: dict[str, dict[tuple[str, str, str], list[Line]]] = {}
    for each in lines:
        groups.setdefault(each.section, {}).setdefault((each.how, each.one, each.note), []).append(each)
    graphs = sum(each.how in GRAPHS for each in lines)
    differ = [each.name for each in lines if each.one != "bitwise"]
    text = _HEAD.format(
        steps=STEPS,
        rows=ROWS,
        torch=torch.__version__.split("+")[0],
        lightning=version("lightning"),
        differ=f", except {', '.join(differ)}" if differ else "",
        counts=f"{len(lines)} models: {graphs} as graphs, {len(lines) - graphs} eagerly.",
    )
    entries = []
    for section, alike in groups.items():
        first, *others = (_entry(group) for group in alike.values())
        entries += [f"* **{section}**: {first}", *(f"  * {other}" for other in others)]
    head = "\n\n".join(_wrapped(paragraph) for paragraph in text.split("\n\n"))
    return "\n".join(["# Compatibility", "", head, "", *(_wrapped(entry) for entry in entries), ""])


def _wrapped(entry: str) -> str:
    inner = " " * (entry.index("* ") + 2) if entry.lstrip().startswith("* ") else ""
    return textwrap.fill(entry, _WIDTH, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)


def _entry(group: Sequence[Line]) -> str:
    names = ", ".join(f"`{each.name}`" for each in group)
    differences = [float(each.two) for each in group if re.match(r"\d", each.two)]
    moved = _span([int(each.moved) for each in group if each.moved])
    graphs = _span([int(each.graphs) for each in group if each.graphs])
    numbers = [
        "" if group[0].how == "compiled" else group[0].how,
        f"{max(differences):.0e}" if differences else group[0].two,
        "" if moved in ("", "0") else _counted(moved, "collective"),
        graphs and _counted(graphs, "graph"),
        f"{_span([round(float(each.seconds)) for each in group if each.seconds])} s" if graphs else "",
    ]
    said = ", ".join(number for number in numbers if number)
    return f"{names} ({said})" + (f": {group[0].note}" if group[0].note else "")


def _counted(number: str, thing: str) -> str:
    return f"{number} {thing}{'' if number == '1' else 's'}"


def _span(numbers: Sequence[int]) -> str:
    """The numbers, from the smallest to the largest."""
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _note(result: Result) -> str:
    row = result.row
    parts = [row.note, f"gathers embeddings: {row.couples}" if row.couples else "", row.draws]
    if result.mode not in GRAPHS:
        parts += [row.eager, result.reason]
    if result.faults():
        parts.append(f"**{'; '.join(result.faults())}**")
    text = ". ".join(part for part in parts if part)
    return re.sub(r"\s*\n\s*|/\S*/site-packages/", " ", text)
