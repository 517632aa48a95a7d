"""``next(iterator)`` raises StopIteration, which Lightning's loops take for the end of the data: a run ends mutely."""

import ast

from tests.architecture.test_architecture import FILES, tree_of


def test_next_is_given_a_default() -> None:
    wrong: list[str] = []
    for name in FILES:
        for node in ast.walk(tree_of(name)):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id == "next" and len(node.args) != 2:
                wrong.append(f"{name}:{node.lineno}: use lightning_spmd.ir.first, or give a default")
            if isinstance(called, ast.Attribute) and called.attr == "__next__":
                wrong.append(f"{name}:{node.lineno}: the same in other words")
    assert not wrong, "\n".join(wrong)
