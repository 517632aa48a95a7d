"""Writes ``docs/support_matrix.md`` from the table that decides at run time.

python -m lightning_spmd.report.support_matrix > docs/support_matrix.md
"""

from __future__ import annotations

import sys

from lightning_spmd.strategy.support.feature import Feature, Mode
from lightning_spmd.strategy.support.matrix import FEATURES

_HEADER = """# Support matrix

What `strategy="spmd"` does with each Lightning feature. Generated from
`lightning_spmd/strategy/support/matrix.py`, which also decides at run time; do not edit by hand.

* **compiled**: the whole iteration is one graph.
* **split**: a graph up to `p.grad`, the user's hooks on real gradients, a graph for the update.
* **eager**: plain autograd; on several devices gradients are averaged, as DDP does. A message gives the reason.
* **rejected**: an error at `fit` that names the feature and the fix.
"""


def support_matrix() -> str:
    """The table as Markdown."""
    rows = ["| feature | how | note | test |", "|---|---|---|---|"]
    ordered = sorted(FEATURES, key=lambda f: list(Mode).index(f.mode))
    return "\n".join([_HEADER, *rows, *map(_row, ordered)]) + "\n"


def _row(feature: Feature) -> str:
    file, _, name = feature.test.partition("::")
    return f"| {feature.name} | {feature.mode} | {feature.note} | `{name}` in `{file.removeprefix('tests/')}` |"


def main() -> None:
    """Print the table."""
    sys.stdout.write(support_matrix())


if __name__ == "__main__":
    main()
