"""LightningCLI as all commands use it: strategies by name may take options, mistakes are reported with the fix.

A recipe says ``strategy: spmd``; with ``--trainer.strategy.overlap_iterations true`` jsonargparse would want a class
there. A recipe's callback may conflict with a flag, such as its progress bar with ``--trainer.enable_progress_bar
false``.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_spmd.cli.first_steps import key_of, place_in_class
from lightning_spmd.cli.one_line import OneLineParser, refusal
from lightning_spmd.cli.recipe_files import recipes_of
from lightning_spmd.cli.trainer_values import wrong_seed, wrong_value
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
    """The options that a registered name gives ``SPMDStrategy``; None if it is not a name of this strategy."""
    entry: Any = StrategyRegistry[name] if isinstance(name, str) and name in StrategyRegistry else None
    return dict(entry["init_params"]) if entry is not None and entry["strategy"] is SPMDStrategy else None


def with_class_for_name(arguments: Sequence[str]) -> list[str]:
    """The arguments with the class in place of a strategy's name, if options of the strategy follow."""
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
    for file in recipes_of(arguments):
        recipe = yaml.safe_load(Path(file).read_text())
        trainer = recipe.get("trainer") if isinstance(recipe, dict) else None
        name = (trainer.get("strategy") if isinstance(trainer, dict) else None) or name
    return name


class RecipeCLI(LightningCLI):
    """LightningCLI for recipes that name this package's strategies."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("args")
        OneLineParser.arguments = sys.argv[1:] if given is None else given
        super().__init__(*args, parser_class=OneLineParser, **kwargs)

    @classmethod
    def calling(cls, arguments: Sequence[str]) -> type[RecipeCLI]:
        """The class with the one subcommand that is called: the options of each take 40 ms to declare.

        Args:
            arguments: of the command line; without a subcommand in front, the class has them all, for ``--help``.
        """
        every, called = cls.subcommands(), "".join(arguments[:1])
        if called not in every:
            return cls
        return type(cls.__name__, (cls,), {"subcommands": staticmethod(lambda: {called: every[called]})})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the command line; the model's arguments are kept, because a checkpoint will overrule them."""
        super().parse_arguments(parser, args)
        config: Any = self.config
        config = config.get(config.get("subcommand"), config)
        if (wrong := wrong_seed(config.get("seed_everything"))) is not None:
            parser.error(wrong)
        self._asked = self._arguments_of_model()

    def _arguments_of_model(self) -> dict[str, Any]:
        config: Any = self.config
        config = config.get(config.get("subcommand"), config)
        model: Any = config.get("model")
        arguments = getattr(model, "init_args", None)
        return {} if arguments is None else {"class_path": model.class_path, **vars(arguments)}

    def _tell_what_the_checkpoint_overrules(self) -> None:
        """Tell which arguments of the model the checkpoint overrules, which Lightning does silently."""
        for key, value in self._arguments_of_model().items():
            if key in self._asked and self._asked[key] != value:
                tell(f"model.{key} is {value!r}, as the checkpoint of ckpt_path has it, not {self._asked[key]!r}")

    def before_instantiate_classes(self) -> None:
        """Refuse invalid numbers for the Trainer, and unknown names of strategies."""
        config: Any = self.config if self.subcommand is None else self.config[self.subcommand]
        if (wrong := wrong_value(config["trainer"])) is not None:
            self.parser.error(wrong)
        self._tell_what_the_checkpoint_overrules()
        name = config["trainer"]["strategy"]
        known = ["auto", *StrategyRegistry.available_strategies()]
        if isinstance(name, str) and name not in known:
            ours = [known_name for known_name in known if named_options(known_name) is not None]
            near = difflib.get_close_matches(name, [*known, CLASS_PATH], n=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            others = ", ".join(n for n in known if n not in ours)
            self.parser.error(
                f"trainer.strategy: there is no strategy {name!r}.{guess} This package has {', '.join(ours)}; "
                f"Lightning has {others}; {CLASS_PATH} takes options"
            )

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Make the Trainer, without callbacks of the recipe that conflict with a flag."""
        config: Any = self.config_init if self.subcommand is None else self.config_init[self.subcommand]
        trainer = config["trainer"]
        own = trainer["callbacks"] or []
        own = own if isinstance(own, list) else [own]
        for flag, kind in _UNWANTED:
            for callback in [c for c in own if isinstance(c, kind) and trainer[flag] is False]:
                tell(f"{type(callback).__name__} of the recipe steps aside: trainer.{flag} is false")
                own = [c for c in own if c is not callback]
        trainer["callbacks"] = own
        try:
            return super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError, RuntimeError, MisconfigurationException) as error:
            self.parser.error(f"{_trainer_key(str(error), trainer)}: {refusal(error)}")

    def instantiate_classes(self) -> None:
        """Make the objects of the recipe; errors about its values are reported in one line."""
        try:
            super().instantiate_classes()
        except ValueError as error:  # what jsonargparse makes of theirs
            said = refusal(error)
            option = re.match(r"(\w+)=", said)
            # Where a name would do as well as an object, jsonargparse drops who refused its arguments.
            ours = "SPMDStrategy(" in said or (option is not None and option[1] in signature(SPMDStrategy).parameters)
            key = "trainer.strategy" if ours else key_of(error) or "the recipe"
            self.parser.error(f"{key}: {said}{place_in_class(error)}")


def _trainer_key(message: str, trainer: Any) -> str:
    """The key of the Trainer that one of its messages is about, if it names one."""
    words = re.findall(r"`(\w+)", message.replace("`Trainer(", "`"))
    return next((f"trainer.{word}" for word in words if word in trainer), "trainer")
