"""What the layout promises: imports in one direction, private names in one place.

The picture is in docs/architecture.md. A failure here names the file, the line and what to move.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import lightning_spmd

PACKAGE = Path(lightning_spmd.__file__).parent
FILES = {file.relative_to(PACKAGE.parent).as_posix(): file for file in sorted(PACKAGE.rglob("*.py"))}
MODULES = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in FILES}

LAYERS = {
    "errors": 0,
    "messages": 0,
    "_private_api": 0,
    "ir": 1,
    "parallel": 2,
    "cache": 1,
    "cost": 2,
    "stages": 3,
    "strategy": 4,
    "examples": 4,
    "planning": 5,
    "report": 5,
    "early_signals": 0,
    "": 5,  # lightning_spmd/__init__.py: the public names
    "cli": 6,
}
"""A part imports only parts of a lower layer, and itself."""

STAGES = ("capture", "expand", "passes", "phases", "runtime")
"""Of lightning_spmd.stages; they meet only in its __init__.py."""

FOREIGN = {"torch", "lightning", "torchmetrics"}
PUBLIC_NAMES = {
    "BatchError",
    "BuildEvent",
    "CaptureError",
    "ConfigurationError",
    "ExpansionError",
    "RankDisagreementError",
    "RankLostError",
    "SPMDError",
    "SPMDStrategy",
    "StepStatistics",
    "VerificationError",
    "__version__",
}


@functools.cache
def tree_of(name: str) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(FILES[name].read_text(), name)


def imports(name: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, at any depth; a package's member counts as its module."""
    package = name.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def own_imports(name: str) -> Iterator[tuple[int, list[str]]]:
    """Line and path below the package of every import of one of its own modules."""
    for line, imported in imports(name):
        parts = imported.split(".")
        if parts[0] == "lightning_spmd":
            while ".".join(parts) not in MODULES:  # the names after a module's are of things inside it
                parts.pop()
            yield line, parts[1:]


def part_of(name: str) -> str:
    """The layer's name for a file: its folder or module right below the package."""
    return (name.removesuffix(".py").split("/")[1:] or [""])[0].replace("__init__", "")


def is_private(dotted: str) -> bool:
    """Whether a component of a dotted name has one leading underscore.

    Operators under torch.ops are named in a public schema, whatever the name looks like (``aten._softmax``).
    """
    names = dotted.split(".")
    return names[:2] != ["torch", "ops"] and any(n.startswith("_") and not n.startswith("__") for n in names)


def foreign_attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of every attribute chain that begins at a module or name imported from FOREIGN."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        chain, root = [], node
        while isinstance(root, ast.Attribute):
            chain.insert(0, root.attr)
            root = root.value
        if chain and isinstance(root, ast.Name) and bound.get(root.id, "").split(".")[0] in FOREIGN:
            yield root.lineno, ".".join([bound[root.id], *chain])


def test_imports_go_down_the_layers() -> None:
    wrong: list[str] = []
    for name in FILES:
        part = part_of(name)
        assert part in LAYERS, f"{name}: give {part!r} a place in LAYERS and in docs/architecture.md"
        for line, imported in own_imports(name):
            other = imported[0] if imported else ""
            if other != part and LAYERS[other] >= LAYERS[part]:
                wrong.append(f"{name}:{line}: {part or 'the root'} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_sibling_stages_do_not_import_each_other() -> None:
    wrong: list[str] = []
    for name in FILES:
        stage = [*name.split("/"), ""][2]
        if name.startswith("lightning_spmd/stages/") and stage in STAGES:
            wrong += [
                f"{name}:{line}: stage {stage} imports {'.'.join(imported)}"
                for line, imported in own_imports(name)
                if imported[:1] == ["stages"] and imported[1:2] != [stage]
            ]
    assert not wrong, "\n".join(wrong)


def test_private_names_of_other_packages_are_used_in_one_file_only() -> None:
    wrong: list[str] = []
    for name in FILES:
        if not name.startswith("lightning_spmd/_private_api/"):
            foreign = [(line, dotted) for line, dotted in imports(name) if dotted.split(".")[0] in FOREIGN]
            found = [*foreign, *foreign_attributes(tree_of(name))]
            wrong += [f"{name}:{line}: {dotted}" for line, dotted in found if is_private(dotted)]
    assert not wrong, "\n".join([*wrong, "these belong into lightning_spmd/_private_api"])


def test_the_public_names_are_exactly_these() -> None:
    assert set(lightning_spmd.__all__) == PUBLIC_NAMES
    assert all(hasattr(lightning_spmd, name) for name in PUBLIC_NAMES)


def test_every_folder_of_the_package_is_one_and_in_a_wheel() -> None:
    """What ``.gitignore`` names is left out of wheels, where a checkout has it still."""
    folders = {file.parent for file in FILES.values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
    ignored = (PACKAGE.parent / ".gitignore").read_text().splitlines()
    names = {folder.name for folder in folders}
    assert [line for line in ignored if line.strip("/") in names and not line.startswith("/")] == []
