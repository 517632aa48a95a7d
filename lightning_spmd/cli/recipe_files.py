"""Checks a recipe as a file, before jsonargparse: mistakes are reported in one line with file, line and key.

jsonargparse silently takes the last of two equal keys, and reports mistakes of YAML without a file.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from lightning.pytorch import callbacks

from lightning_spmd.cli.encodings import misread
from lightning_spmd.cli.recipe_names import named_recipes, near_recipes, recipe_named

_OF_A_CLASS = ("class_path", "init_args")
_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*(?=: | is missing)")
_KINDS = {"seq": "a list", "str": "a word", "int": "a number", "float": "a number", "bool": "true or false"}
_KEYS = "model, data, trainer, seed_everything"


def recipes_of(arguments: Sequence[str]) -> list[str]:
    """The recipes that a command line names, in their order.

    Args:
        arguments: the command line.
    """
    found: list[str] = []
    for flag, value in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if flag in ("-c", "--config"):
            found.append(value)
        elif flag.startswith("--config="):
            found.append(flag.partition("=")[2])
    return [name for name in found if name]


def mistake_in_recipes(arguments: Sequence[str]) -> str | None:
    """What is wrong with the recipes that a command line names; None if they are readable.

    Args:
        arguments: the command line.
    """
    for name in recipes_of(arguments):
        mistake = _mistake_in(name)
        if mistake is not None:
            return mistake
    return None


def with_place(mistake: str, arguments: Sequence[str]) -> str:
    """A mistake with file and line of the key that it begins with, if a recipe has that.

    Args:
        mistake: in one line.
        arguments: the command line; what it says itself has no line.
    """
    found = _KEY.match(mistake)
    if found is None:
        return mistake
    key = _plain(found[0].split("."))
    flags = [_plain(a[2:].partition("=")[0].rstrip("+").split(".")) for a in arguments if a.startswith("--")]
    if any(flag[: len(key)] == key[: len(flag)] for flag in flags):
        return mistake
    for name in reversed(recipes_of(arguments)):
        line = _line_of(yaml.compose(Path(name).read_text(), yaml.SafeLoader), key)
        if line is not None:
            return f"{name}, line {line}: {mistake}"
    return mistake


def _plain(keys: list[str]) -> list[str]:
    """A path of keys without what command lines may leave out."""
    return [key for key in keys if key != "init_args"]


def _line_of(node: yaml.Node | None, key: Sequence[str]) -> int | None:
    """The line of a key below a node, or of the last key on the way to it; None if not even its first one is there."""
    if isinstance(node, yaml.SequenceNode):
        lines = [line for entry in node.value if (line := _line_of(entry, key)) is not None]
        return lines[0] if len(lines) == 1 else None  # of several entries nobody knows which
    for name, value in node.value if key and isinstance(node, yaml.MappingNode) else ():
        if name.value == key[0]:
            below = _line_of(value, key[1:])
            return name.start_mark.line + 1 if below is None else below
        if name.value == "init_args" and (below := _line_of(value, key)) is not None:
            return below
    return None


def _mistake_in(name: str) -> str | None:
    file = Path(name)
    if file.is_dir():
        return f"--config {name}: this is a folder. Name a file in it{_recipes_in(file)}{_hidden_by(name)}"
    if not file.exists():
        return f"--config {name}: {_not_there(name)}"
    try:
        if (wrong := misread(file.read_bytes())) is not None:
            return f"--config {name}: {wrong}"
        text = file.read_text()
    except UnicodeDecodeError:
        return f"--config {name}: this is no text, so no recipe"
    except OSError as error:
        return f"--config {name}: cannot be read: {error.strerror}"
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        return f"{name}{_of_yaml(error, text)}"
    if not isinstance(root, yaml.MappingNode):
        what = {yaml.SequenceNode: "a list", yaml.ScalarNode: "one value"}.get(type(root), "nothing")
        return f"--config {name}: it holds {what}; a recipe has keys: {_KEYS}"
    mistake = _wrong_key(root, "", set())
    return None if mistake is None else f"{name}, {mistake}"


def _of_yaml(error: yaml.YAMLError, text: str) -> str:
    """Where parsing YAML failed, and why."""
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    if mark is None:
        return f": {problem}"
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    tabs = " (YAML is indented with spaces, and there is a tab)" if "\t" in line else ""
    return f", line {mark.line + 1}, column {mark.column + 1}: this is not YAML: {problem}{tabs}"


def _wrong_key(node: yaml.Node, path: str, seen: set[int]) -> str | None:
    """The first key below ``node`` that appears twice, or that nearly is ``class_path`` or ``init_args``."""
    if id(node) in seen:  # an alias
        return None
    seen.add(id(node))
    below: list[tuple[str, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        below = [(f"{path}[{number}]", value) for number, value in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            place = f"{path}.{name}" if path else name
            if name in lines and name != "<<":
                return f"line {line}: {place} is there already, in line {lines[name]}: one of the two would not count"
            lines[name] = line
            below.append((place, value))
            if (wrong := _of_another_kind(name, value)) is not None:
                return f"line {line}: {place}: {wrong}"
        for name in lines if path else ():
            meant = difflib.get_close_matches(name, _OF_A_CLASS, n=1, cutoff=0.75)
            if meant and name not in _OF_A_CLASS and meant[0] not in lines:
                return f"line {lines[name]}: {path}.{name}: there is no such key. Did you mean {path}.{meant[0]}?"
    return next((m for place, value in below if (m := _wrong_key(value, place, seen)) is not None), None)


def _of_another_kind(name: str, value: yaml.Node) -> str | None:
    """Why a value has the wrong kind for its key; None if it has not."""
    kind = value.tag.rpartition(":")[2]
    if name == "class_path" and kind != "str":
        return "give the path of a class, such as my_project.MyClass"
    if name == "init_args" and kind not in ("map", "null"):
        return f"give names with values, one a line; this is {_KINDS.get(kind, kind)}"
    if name != "callbacks" or not isinstance(value, yaml.SequenceNode):
        return None
    known = [c for c in dir(callbacks) if isinstance(getattr(callbacks, c), type)]
    for number, entry in enumerate(value.value, start=1):
        if isinstance(entry, yaml.ScalarNode) and "." not in entry.value and entry.value not in known:
            near = difflib.get_close_matches(entry.value, known, n=1)
            hint = f". Did you mean {near[0]}?" if near else ": give each a class_path"
            return f"number {number} of the list is {entry.value or 'nothing'!r}, which is no callback{hint}"
    return None


def _not_there(name: str) -> str:
    """A message that a file does not exist, with what was probably meant: a file beside it, or a recipe by name."""
    file = Path(name)
    here = f"there is no such file, seen from {Path.cwd()}"
    beside = _near(file)
    # A path was meant as a path; a word alone may be a name as well.
    if len(file.parts) > 1:
        near = beside or near_recipes(name)[:1]
        ours = ", a recipe of this package" if near and not beside else ""
        return f"{here}. Did you mean {near[0]}{ours}?" if near else here + _recipes_in(file.parent)
    near = [*beside, *near_recipes(name)]
    guess = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"{here}, and no recipe of this package has that name.{guess} The package has {', '.join(named_recipes())}"


def _hidden_by(folder: str) -> str:
    """How to name a recipe of the package that a folder of the same name hides."""
    hidden = recipe_named(folder)
    return "" if hidden is None else f". The recipe {folder} of this package is --config {hidden}"


def _near(file: Path) -> list[str]:
    """The file of the same folder that was probably meant, if there is one."""
    names = [f.name for f in file.parent.iterdir()] if file.parent.is_dir() else []
    return [str(file.with_name(name)) for name in difflib.get_close_matches(file.name, names, n=1)]


def _recipes_in(folder: Path) -> str:
    names = sorted(f.name for f in folder.glob("*.yaml"))
    more = ", ..." if len(names) > 8 else ""
    return f": {', '.join(names[:8])}{more}" if names else ""
