"""Nothing depends on how CPython runs code: no bytecode, profile hook or frame by depth, nothing of Python's replaced.

What a step's Python does is found by running it. Each row is a way that was once taken and broke with a version of
Python, or with a program that nobody had foreseen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.test_architecture import FILES, imports, tree_of

_NAMES = re.compile(r"^(co_code|co_exceptiontable|f_lasti|tb_lasti|_getframe|setprofile|settrace|get_referrers|opmap)$")
_OF_PYTHON = {"builtins", "math", "numpy", "random", "logging", "np", "print", "float", "int", "bool", "str"}


def _found(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _NAMES.match(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAMES.match(node.value):
            yield node.lineno, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr" and node.args:
            yield from _replaced(node.args[0], node.lineno)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute):
                yield from _replaced(target.value, node.lineno)


def _replaced(owner: ast.expr, line: int) -> Iterator[tuple[int, str]]:
    """An attribute of something of Python's own is set."""
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    if isinstance(owner, ast.Name) and owner.id in _OF_PYTHON:
        yield line, f"{owner.id} is written to"


def test_nothing_reads_or_replaces_pythons_machinery() -> None:
    wrong: list[str] = []
    for name in FILES:
        found = [*_found(tree_of(name)), *(found for found in imports(name) if found[1] in ("dis", "opcode"))]
        wrong += [f"{name}:{line}: {what}" for line, what in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "frame.f_lasti",
        "sys._getframe(1)",
        "getattr(sys, 'setprofile')",
        "builtins.print = mine",
        "math.sqrt = mine",
        "setattr(random, name, mine)",
        "np.random.rand = mine",
    ],
)
def test_each_way_is_found(text: str) -> None:
    assert list(_found(ast.parse(text)))


_OF_GENERATORS = re.compile(r"^(get_rng_state|set_rng_state|manual_seed|initial_seed|seed)(_all)?$")


def _asks_torch(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _OF_GENERATORS.match(node.attr):
            owner = ast.unparse(node.value)
            if owner.partition(".")[0] == "torch" and "generator" not in owner and not owner.startswith("torch.ops"):
                yield node.lineno, f"{owner}.{node.attr}"


def test_what_runs_within_a_step_asks_generators_themselves() -> None:
    """While a step is followed, torch's functions for this are the user's, who goes on eagerly behind some."""
    within = [name for name in FILES if re.match(r"lightning_spmd/(stages|ir|strategy/steps)/", name)]
    wrong = [f"{name}:{line}: {what}" for name in within for line, what in _asks_torch(tree_of(name))]
    assert within
    assert not wrong, "\n".join(wrong)
    assert list(_asks_torch(ast.parse("torch.cuda.get_rng_state_all()")))
    assert not list(_asks_torch(ast.parse("torch.default_generator.manual_seed(1)")))
