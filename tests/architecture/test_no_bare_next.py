"""``next(iterator)`` raises StopIteration, which Lightning's loops take for the end of the data: a run ends mutely."""

import ast

import pytest

from tests.architecture.test_architecture import TREES


@pytest.mark.parametrize("name", TREES)
def test_next_is_given_a_default(name: str) -> None:
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next":
            assert len(node.args) == 2, f"{name}:{node.lineno}: use lightning_spmd.ir.first, or give a default"
        called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        assert called != "__next__", f"{name}:{node.lineno}: the same in other words"
