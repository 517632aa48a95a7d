"""LightningCLI as both commands use it: strategies by name may take options, mistakes are answered with what to write.

A recipe says ``strategy: spmd``; beside ``--trainer.strategy.overlap_iterations true`` jsonargparse wants a class there
and says so in words of its own. And what a recipe brings along may stand in the way of a flag: its progress bar where
there shall be none.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_spmd.messages import tell
from lightning_spmd.strategy.spmd_strategy import SPMDStrategy

STRATEGY = "--trainer.strategy"
CLASS_PATH = f"lightning_spmd.{SPMDStrategy.__name__}"
_UNWANTED: tuple[tuple[str, type[Callback]], ...] = (
    ("enable_progress_bar", ProgressBar),
    ("enable_checkpointing", Checkpoint),
    ("logger", LearningRateMonitor),
)
"""Flags that Lightning refuses to switch off while there is such a callback."""


def named_options(name: Any) -> dict[str, Any] | None:
    """What a registered name gives ``SPMDStrategy``; None if it is another strategy's, or none."""
    entry: Any = StrategyRegistry[name] if isinstance(name, str) and name in StrategyRegistry else None
    return dict(entry["init_params"]) if entry is not None and entry["strategy"] is SPMDStrategy else None


def with_class_for_name(arguments: Sequence[str]) -> list[str]:
    """The arguments with the class in place of a strategy's name, where options of the strategy follow."""
    options = [i for i, a in enumerate(arguments) if a.startswith(f"{STRATEGY}.")]
    if not options:
        return list(arguments)
    named = [i for i, a in enumerate(arguments) if a == STRATEGY or a.startswith(f"{STRATEGY}=")]
    kept = list(arguments)
    if named:
        at = named[-1]
        name = arguments[at].partition("=")[2] or "".join(arguments[at + 1 : at + 2])
        end = at + (1 if "=" in arguments[at] else 2)
    else:
        at = end = options[0]
        name = _named_by_recipe(arguments)
    given = named_options(name)
    if given is None:
        return kept
    return [
        *kept[:at],
        f"{STRATEGY}={CLASS_PATH}",
        *(f"{STRATEGY}.{key}={value}" for key, value in given.items()),
        *kept[end:],
    ]


def _named_by_recipe(arguments: Sequence[str]) -> Any:
    """The strategy of the last recipe that names one."""
    name = None
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        file = value if flag in ("-c", "--config") else flag.removeprefix("--config=")
        if (flag in ("-c", "--config") or file != flag) and Path(file).is_file():
            recipe = yaml.safe_load(Path(file).read_text())
            trainer = recipe.get("trainer") if isinstance(recipe, dict) else None
            name = (trainer.get("strategy") if isinstance(trainer, dict) else None) or name
    return name


class Parser(LightningArgumentParser):
    """Adds to an error what could be written instead."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Answer a mistake; does not return."""
        options = [option for action in self._actions for option in action.option_strings]
        return super().error("\n".join([message, *advice(message, options)]), ex)


def advice(message: str, options: Iterable[str]) -> list[str]:
    """What to write in place of what a message of jsonargparse names.

    Args:
        message: the message.
        options: of the command.
    """
    found = [
        f"Did you mean {near}?" for near in _near(re.findall(r"unrecognized arguments: (--[^\s=]+)", message), options)
    ]
    for path, rest in re.findall(r"Problem with given class_path '([\w.]+)':(.*)", message, re.DOTALL):
        taken = _parameters(path)
        for option in re.findall(r"Option '(\w+)' is not accepted", rest):
            near = _near([option], taken)
            found.append(f"{path} has no {option!r}. " + (f"Did you mean {near[0]!r}?" if near else _listed(taken)))
        for option in re.findall(r"Parser key \"(\w+)\":", rest):
            if option in taken:
                found.append(f"{option} takes {', '.join(_values(taken[option])) or taken[option]}")
    return list(dict.fromkeys(found))


def _near(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """For each name the known one that was probably meant, if there is one: what it begins, or something close."""
    known, found = list(known), list[str]()
    for name in names:
        begun = [k for k in known if k.startswith(name)]
        found += begun[:1] or difflib.get_close_matches(name, known, n=1)
    return found


def _listed(names: Iterable[str]) -> str:
    return f"It has {', '.join(names)}"


def _parameters(class_path: str) -> dict[str, Any]:
    """Types of a class' arguments by name; empty where it cannot be imported."""
    module, _, name = class_path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
        hints = get_type_hints(kind.__init__)
    except (ImportError, AttributeError, NameError, TypeError, ValueError):
        return {}
    return {name: hints.get(name, Any) for name in inspect.signature(kind).parameters}


def _values(kind: Any) -> list[str]:
    """How values of a type are written."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if get_origin(kind) in (Union, types.UnionType):
        return [text for part in get_args(kind) for text in _values(part)]
    words = {bool: ["true", "false"], type(None): ["null"], int: ["a whole number"], float: ["a number"]}
    return words.get(kind, [getattr(kind, "__name__", str(kind))])


class RecipeCLI(LightningCLI):
    """LightningCLI for recipes that name this package's strategies."""

    def __init__(self, *args: Any, parser_class: type[LightningArgumentParser] = Parser, **kwargs: Any) -> None:
        super().__init__(*args, parser_class=parser_class, **kwargs)

    def before_instantiate_classes(self) -> None:
        """Refuse names of strategies that do not exist, with those that do."""
        config: Any = self.config if self.subcommand is None else self.config[self.subcommand]
        name = config["trainer"]["strategy"]
        known = ["auto", *StrategyRegistry.available_strategies()]
        if isinstance(name, str) and name not in known:
            ours = [known_name for known_name in known if named_options(known_name) is not None]
            near = difflib.get_close_matches(name, known, n=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            others = ", ".join(n for n in known if n not in ours)
            self.parser.error(
                f"trainer.strategy: there is no strategy {name!r}.{guess} This package has {', '.join(ours)}; "
                f"Lightning has {others}; {CLASS_PATH} takes options"
            )

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """The Trainer, without the recipe's callbacks that are in the way of a flag."""
        config: Any = self.config_init if self.subcommand is None else self.config_init[self.subcommand]
        trainer = config["trainer"]
        own = trainer["callbacks"] or []
        own = own if isinstance(own, list) else [own]
        for flag, kind in _UNWANTED:
            for callback in [c for c in own if isinstance(c, kind) and trainer[flag] is False]:
                tell(f"{type(callback).__name__} of the recipe steps aside: trainer.{flag} is false")
                own = [c for c in own if c is not callback]
        trainer["callbacks"] = own
        return super().instantiate_trainer(**kwargs)
