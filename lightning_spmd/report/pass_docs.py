"""Writes the table of passes into ``docs/passes.md``, between its markers.

python -m lightning_spmd.report.pass_docs docs/passes.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from inspect import getfile, getmodule
from pathlib import Path

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.stages.passes import PASSES, GraphPass

_BEGIN, _END = "<!-- passes -->\n", "<!-- end of passes -->\n"
_MARKED = re.compile(f"{_BEGIN}.*?{_END}", re.DOTALL)
_ROOT = Path(__file__).parents[2]


def table(passes: Sequence[GraphPass]) -> str:
    """A row for each pass, in order: name and file, the first line of its docstring, whether bits may change."""
    head = "| pass | what it does | numbers |\n|---|---|---|\n"
    return head + "".join(map(_row, passes))


def _row(graph_pass: GraphPass) -> str:
    module = getmodule(graph_pass.run)
    file = Path(getfile(graph_pass.run)).relative_to(_ROOT).as_posix()
    summary = (getattr(module, "__doc__", None) or "").strip().partition("\n")[0].removesuffix(".")
    numbers = "may round differently" if graph_pass.changes_numerics else "bitwise"
    return f"| [`{graph_pass.name}`](../{file}) | {summary} | {numbers} |\n"


def with_table(document: str) -> str:
    """A document with the present table between its markers.

    Args:
        document: Markdown with ``<!-- passes -->`` and ``<!-- end of passes -->``.

    Raises:
        ConfigurationError: it has no such markers.
    """
    if not _MARKED.search(document):
        raise ConfigurationError(f"the document has no {_BEGIN.strip()} and {_END.strip()}")
    return _MARKED.sub(lambda _: _BEGIN + table(PASSES) + _END, document)


def main() -> None:
    """Rewrite the file that is named."""
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))


if __name__ == "__main__":
    main()
