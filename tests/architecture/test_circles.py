"""No file of the package imports, through others, itself: not for types either."""

from __future__ import annotations

import graphlib

from tests.architecture.test_architecture import FILES, own_imports


def _module(parts: list[str]) -> str:
    return ".".join(["lightning_spmd", *parts])


def test_no_circle_of_imports() -> None:
    imported: dict[str, set[str]] = {}
    for name in FILES:
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        imported[module] = {_module(parts) for _, parts in own_imports(name)} - {module}
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(f"files import one another in a circle: {' -> '.join(reversed(error.args[1]))}") from None
