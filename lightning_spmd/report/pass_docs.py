"""Writes what the passes' docstrings say into ``docs/passes.md``, between its markers.

python -m lightning_spmd.report.pass_docs docs/passes.md
"""

from __future__ import annotations

import re
import sys
from inspect import getmodule
from pathlib import Path

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.stages.passes import KNOWN_PASSES, GraphPass

_MARKED = re.compile(r"<!-- docstring of (\w+) -->\n.*?<!-- end -->\n", re.DOTALL)


def markdown(docstring: str) -> str:
    """A docstring as Markdown: code blocks are indented alike, so only ``::`` and double backticks differ."""
    lines = [line[:-1] if line.endswith("::") else line for line in docstring.strip().splitlines()]
    return "\n".join(lines).replace("``", "`")


def with_docstrings(document: str) -> str:
    """A document with the present docstring of each pass between its markers.

    Args:
        document: Markdown with ``<!-- docstring of NAME -->`` and ``<!-- end -->`` around each.

    Raises:
        ConfigurationError: a pass has no place in it, or a place is for no pass.
    """
    passes = {p.name: p for p in KNOWN_PASSES}
    places = _MARKED.findall(document)
    if sorted(places) != sorted(passes):
        raise ConfigurationError(f"the document has places for {sorted(places)}, the passes are {sorted(passes)}")
    return _MARKED.sub(lambda match: _block(passes[match[1]]), document)


def _block(graph_pass: GraphPass) -> str:
    text = getattr(getmodule(graph_pass.run), "__doc__", None) or ""
    return f"<!-- docstring of {graph_pass.name} -->\n{markdown(text)}\n<!-- end -->\n"


def main() -> None:
    """Rewrite the file that is named."""
    path = Path(sys.argv[1])
    path.write_text(with_docstrings(path.read_text()))


if __name__ == "__main__":
    main()
