"""``lightning-spmd fit|validate|test|predict``: LightningCLI with the strategies of this package.

``lightning-spmd compare`` trains under several strategies in turn (``cli.compare``); ``lightning-spmd plan`` predicts
memory, communication and time (``cli.plan``).
"""

import platform
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import lightning
import torch
from lightning_utilities.core.imports import RequirementCache

import lightning_spmd  # registers the strategies that a recipe names
from lightning_spmd.cli import compare, plan
from lightning_spmd.cli.encodings import write_whatever_comes
from lightning_spmd.cli.first_steps import refusals_in_one_line
from lightning_spmd.cli.one_line import COMMANDS
from lightning_spmd.cli.own_modules import classes_beside
from lightning_spmd.cli.recipe_cli import RecipeCLI, with_class_for_name
from lightning_spmd.cli.recipe_files import mistake_in_recipes
from lightning_spmd.cli.recipe_names import named_recipes, with_files_for_names

DESCRIPTION = (
    "Train, validate, test or predict what a recipe describes: lightning-spmd fit --config RECIPE; or train it under "
    "several strategies in turn: lightning-spmd compare --config RECIPE; or predict memory, communication and time for "
    "any devices: lightning-spmd plan --config RECIPE. RECIPE is a file, or a recipe of this package by name: "
)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Model and data are given by class, in a recipe (``model: {class_path: ..., init_args: {...}}``) or as arguments
    (``--model my_package.MyModule --model.width 256``). See ``--help`` of each subcommand, ``--print_config`` for a
    recipe with every default filled in, and ``--trainer.strategy.help lightning_spmd.SPMDStrategy``.

    Args:
        args: The arguments; those of the process if ``None``.

    Raises:
        SystemExit: With 2 where an argument or a recipe is wrong; with a message where jsonargparse is missing.
    """
    if not RequirementCache("jsonargparse[signatures]>=4.39"):
        raise SystemExit(
            "lightning-spmd: the command line needs jsonargparse, which training from Python does not. "
            "Install it with: pip install 'lightning-spmd[cli]', or by itself: pip install 'jsonargparse[signatures]'"
        )
    write_whatever_comes()
    written = sys.argv[1:] if args is None else list(args)
    arguments = with_files_for_names(written)
    if (mistake := mistake_in_recipes(arguments)) is not None:
        sys.stderr.write(f"lightning-spmd: error: {mistake}\n")
        raise SystemExit(2)
    with classes_beside(arguments):
        _command(arguments, as_the_process_has_them=args is None and arguments == written)


def _command(arguments: list[str], as_the_process_has_them: bool) -> None:
    if arguments[:1] == ["compare"]:
        with refusals_in_one_line("lightning-spmd compare", arguments):
            compare.main(arguments[1:])
        return
    if arguments[:1] == ["plan"]:
        plan.main(arguments[1:])
        return
    given = with_class_for_name(arguments)
    cli = RecipeCLI.calling(given)
    # A mistake is answered with usage and message: the full usage, 60 lines of options, would hide the message.
    usage: dict[str, Any] = {
        name: {"usage": f"lightning-spmd {name} --config RECIPE [options]"} for name in cli.subcommands()
    }
    if "".join(arguments[:1]) not in COMMANDS:  # argparse would call each subcommand by this line
        usage["usage"] = f"lightning-spmd {{{','.join(COMMANDS)}}} --config RECIPE [options]"
    with warnings.catch_warnings():
        # Lightning means callers from Python; here the arguments are the process's own, with a name spelt out.
        warnings.filterwarnings("ignore", message=".*parameter is intended to run from within Python.*")
        with refusals_in_one_line("lightning-spmd " + "".join(arguments[:1]), arguments):
            cli(
                args=None if as_the_process_has_them and given == arguments else given,
                # A rerun into the same folder replaces the recipe that was saved beside the last run's results.
                save_config_kwargs={"overwrite": True},
                parser_kwargs={
                    "prog": "lightning-spmd",
                    "description": DESCRIPTION + ", ".join(named_recipes()),
                    "version": version_text(),
                    **usage,
                },
            )


def version_text() -> str:
    """The output of ``--version``: what a bug report needs."""
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}"
    return f"{lightning_spmd.__version__} ({versions})"


if __name__ == "__main__":
    main()
