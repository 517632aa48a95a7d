"""Mistakes in one line: the key, the value, what is allowed. jsonargparse takes ten lines."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import types
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from lightning_spmd.cli.broken_modules import broken_module
from lightning_spmd.cli.recipe_files import with_place
from lightning_spmd.cli.recipe_names import recipe_named

_KEY = re.compile(r'Parser key "([^"]+)"')
_EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value: .*)?$", re.MULTILINE)
_GIVEN = re.compile(r"(?:Given value|Got value): (.+)")
_UNKNOWN = re.compile(r"(?:Group '([\w.]+)' )?does not accept option '([\w.]+)'|unrecognized arguments: --([^\s=]+)")
_OF_CLASS = re.compile(r"Problem with given class_path '([\w.]+)':\n(.*)", re.DOTALL)
_MISSING = re.compile(r'Key "([\w.]+)" is required')
_WORDS = {int: "a whole number", float: "a number", type(None): "null", str: "a word", bool: "true, false"}
_WORDS[timedelta] = "a time as hours:minutes:seconds (0:05:00)"
_OF_A_RECIPE = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path")
_BASES = ("lightning.LightningModule", "lightning.LightningDataModule", "lightning.pytorch.Callback")
_CLASSES_OF: dict[str, type] = {
    "optimizer": torch.optim.Optimizer,
    "lr_scheduler": torch.optim.lr_scheduler.LRScheduler,
    "trainer.callbacks": Callback,
    "trainer.logger": Logger,
}
_NO_CLASS = re.compile(r"dot import path string: (\S+)|does not correspond to a subclass of (\w+)")
_A_PATH = re.compile(r"[\w.]+")
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_ABSENT = re.compile(r"the following arguments are required: (\w+)")
_PLACED = re.compile(r"unrecognized arguments: ([^-\s]\S*)")
_FLAG = re.compile(r"NestedArg\(key='[^']*', val='?(.*?)'?\)$", re.MULTILINE)
_COMMAND = re.compile(r"argument subcommand: invalid choice: '(.*?)'|expected \"subcommand\" to be one of")
_NOTHING = re.compile(r"the following arguments are required: (?:\w+\.)?model$")
COMMANDS = ("fit", "validate", "test", "predict", "compare", "plan")
_LONGEST = 400


class OneLineParser(LightningArgumentParser):
    """Reports a mistake in one line."""

    arguments: ClassVar[Sequence[str]] = ()
    """The command line of this process."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Report a mistake; does not return."""
        if not self.exit_on_error:  # the parser of a class within the command's, which says more
            return super().error(message, ex)
        options = [option for action in self._actions for option in action.option_strings]
        said = with_place(one_line(message, options), self.arguments)
        return self.exit(2, f"{self.prog.partition(' [options]')[0]}: error: {said}\n")


def one_line(message: str, options: Iterable[str]) -> str:
    """A message of jsonargparse in one line.

    Args:
        message: the message.
        options: the command's options, with their dashes.
    """
    message = _FLAG.sub(r"\1", message)  # --model.class_path and the like: what was written, not jsonargparse's object
    command = _COMMAND.search(message)
    if command is not None:
        return _no_command(command[1])
    if _NOTHING.search(message.strip()) is not None:
        return "there is no model: name a recipe with --config RECIPE, or a class with --model my_project.MyModule"
    placed = _PLACED.search(message)
    if placed is not None and (placed[1].endswith((".yaml", ".yml")) or recipe_named(placed[1]) is not None):
        return f"{placed[1]}: a recipe is named with --config {placed[1]}"
    unknown = _UNKNOWN.search(message)
    if unknown is not None:
        group, name, flag = unknown.groups()
        return _unknown_key(flag or ".".join(filter(None, (group, name))), message, [o.lstrip("-") for o in options])
    outer = _KEY.findall(message)[:1]
    if outer and (broken := broken_module(outer[0], message)) is not None:
        return broken
    of_class = _OF_CLASS.search(message)
    if of_class is not None:
        return _in_class(".".join(outer), of_class[1], of_class[2])
    given = _GIVEN.findall(message)
    no_class = _NO_CLASS.search(message)
    named = (
        []
        if no_class is None
        else [text for text in (*given[-1:], no_class[1] or "") if _A_PATH.fullmatch(text.strip())]
    )
    if no_class is not None and outer and named:
        return _no_class(outer[0], named[0].strip(), no_class[2], message)
    missing = _MISSING.search(message)
    if missing is not None:
        return f"{missing[1]} is missing"
    kinds = [kind for kind in _EXPECTED.findall(message) if not kind.startswith("path but ")]
    allowed = list(dict.fromkeys(map(_in_words, kinds)))
    if outer and allowed and given:
        return f"{_inner(message)}: {given[-1].strip()} is not one of: {', '.join(allowed)}"
    text = " ".join(message.split())
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def _no_command(given: str | None) -> str:
    """A command that does not exist, or none at all."""
    if given is None:
        return f"which command? There are {', '.join(COMMANDS)}: lightning-spmd fit --config RECIPE"
    near = _near([given], COMMANDS)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{given}: there is no such command.{hint} There are {', '.join(COMMANDS)}"


def _unknown_key(path: str, message: str, options: list[str]) -> str:
    """A key of a recipe, or a flag, that does not exist."""
    head, _, name = path.rpartition(".")
    known = [f"{head}.{key}" for key in _parameters_of(Trainer)] if head == "trainer" else [*options, *_OF_A_RECIPE]
    near = _near([path], known) or [o for o in known if o.endswith(f".{name}")][:1]
    flag = "--" if "unrecognized" in message else ""
    first = path.partition(".")[0]
    if not flag and first not in {o.partition(".")[0] for o in known}:
        path, near = first, _near([first], _OF_A_RECIPE)
    return f"{flag}{path}: there is no such key" + (f". Did you mean {flag}{near[0]}?" if near else "")


def _in_class(outer: str, class_path: str, text: str) -> str:
    """A mistake in the arguments of a class."""
    if class_path in _BASES and "is not accepted" in text:
        return f"{outer}.class_path is missing: name the class that the init_args are for"
    taken = _parameters(class_path)
    for option in re.findall(r"Option '(\w+)' is not accepted", text):
        near = _near([option], taken)
        hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(taken)}"
        return f"{outer}.init_args.{option}: {class_path} has no {option!r}. {hint}"
    keys, given = _KEY.findall(text), _GIVEN.findall(text)
    if keys and given:
        option = keys[0].split(".")[0]
        allowed = ", ".join(_values(taken.get(option, Any))) or ", ".join(map(_in_words, _EXPECTED.findall(text)))
        return f"{outer}.init_args.{option}: {given[0].strip()!r} is not what it takes: {allowed}"
    module, _, name = class_path.rpartition(".")
    if "has no attribute" in text:
        near = _near([name], dir(importlib.import_module(module)))
        file = getattr(importlib.import_module(module), "__file__", None)
        hint = f". Did you mean {near[0]!r}?" if near else f" ({file})" if file else ""
        return f"{outer}.class_path: {module} has no {name!r}{hint}"
    if (no_module := _NO_MODULE.search(text)) is not None:
        return f"{outer}.class_path: {class_path}: {_nowhere(module, no_module[1])}"
    if (absent := _ABSENT.search(text)) is not None:
        return f"{outer}.init_args.{absent[1]} is missing: {class_path} needs it"
    reason = " ".join(text.split("\n    - Expected")[0].split("\n  - Expected")[0].split("Given value type")[0].split())
    return f"{outer}.class_path: {class_path}: {reason.rstrip(' -')}"


def _nowhere(wanted: str, missing: str) -> str:
    """Where a missing module was looked for."""
    if missing != wanted and not wanted.startswith(f"{missing}."):
        return f"{wanted} was found, and it imports {missing}, which is not installed"
    return (
        f"there is no module {missing}. It is looked for beside the recipe, in the working directory, in the folders "
        "of PYTHONPATH, and among what is installed"
    )


def _no_class(key: str, given: str, kind: str | None, message: str) -> str:
    """A class path that is no class, or not one that the key takes."""
    if kind is not None:
        return f"{key}.class_path: {given} is no {kind}"
    base = _CLASSES_OF.get(key)
    known = [] if base is None else [known.__name__ for known in _below(base)]
    near = _near([given], known)
    also = ", a list" if "<class 'list'>" in message else ""
    hint = f". Did you mean {near[0]}?" if near else ""
    return f"{key}: {given} is not what it takes: a class_path (my_project.MyClass){also}{hint}"


def _below(base: type) -> list[type]:
    """All classes that are derived from one, as far as they are imported."""
    return [kind for child in base.__subclasses__() for kind in (child, *_below(child))]


def refusal(error: Exception) -> str:
    """The message of an error raised by an object of the recipe, without what jsonargparse adds."""
    text = str(error).partition("Not a valid subclass of")[0]
    lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
    frame = ("Does not validate", "Subtypes:", "Errors:", "Expected a", "Given value")
    kept = [line for line in lines if line and not line.startswith(frame)]
    return (" ".join(kept) or " ".join(str(error).split())).removesuffix(" -")


def _near(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """For each name the known one that was probably meant, if any: one that it begins, or a near match."""
    known, found = list(known), list[str]()
    for name in names:
        begun = [k for k in known if k.startswith(name)]
        found += begun[:1] or difflib.get_close_matches(name, known, n=1)
    return found


def _inner(message: str) -> str:
    """The path of keys from the outermost to the innermost; inner messages repeat the outer keys."""
    found: list[str] = []
    for key in _KEY.findall(message):
        if not any(key == other or other.endswith("." + key) for other in found):
            found = [other for other in found if not key.startswith(other + ".")] + [key]
    return ".".join(found)


def _in_words(kind: str) -> str:
    kind = kind.strip().rstrip(".")
    literal = re.fullmatch(r"typing\.Literal\[(.+)\]", kind)
    named = {f"<class '{k.__name__}'>": text for k, text in _WORDS.items()}
    return literal[1].replace("'", "") if literal else named.get(kind, kind.removeprefix("<class '").removesuffix("'>"))


def _parameters(class_path: str) -> dict[str, Any]:
    """Types of a class's arguments by name; empty if it cannot be imported."""
    module, _, name = class_path.rpartition(".")
    try:
        return _parameters_of(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, NameError, TypeError, ValueError):
        return {}


def _parameters_of(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind.__init__)
    return {name: hints.get(name, Any) for name in inspect.signature(kind).parameters}


def _values(kind: Any) -> list[str]:
    """How values of a type are written; empty for any value."""
    if kind is Any:
        return []
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if get_origin(kind) in (Union, types.UnionType):
        return [text for part in get_args(kind) for text in _values(part)]
    if get_origin(kind) in (list, tuple, Sequence):
        return ["a list"]
    return [_WORDS.get(kind, getattr(kind, "__name__", str(kind)))]
