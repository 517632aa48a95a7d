"""``lightning-spmd compare --config RECIPE --against ddp,fsdp2``: the user's own training under several strategies.

Model, data, Trainer flags and seed are the recipe's; the strategies take turns in one group of processes
(``report.measure``). Callbacks that save, print or watch are left out, the rest stay: they belong to the training.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lightning.pytorch.cli import LightningArgumentParser
from lightning_utilities.core.rank_zero import rank_zero_only
from rich.console import Console

from lightning_spmd.cli.recipe_cli import RecipeCLI, named_options, with_class_for_name
from lightning_spmd.examples import SampleText
from lightning_spmd.report.compare_table import Comparison
from lightning_spmd.report.measure import Amount, measure
from lightning_spmd.report.sides import NAMES, Side, side_of, spmd_side
from lightning_spmd.strategy.spmd_strategy import SPMDStrategy

DESCRIPTION = "Train what a recipe describes under several strategies in turn and compare time, memory and loss."
LEFT_OUT = (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    SampleText,
    Timer,
)
"""Callbacks that save, print, watch or end a training; some of them insist on the logger that a comparison has not."""
WIDTH = 140


class Recipe(RecipeCLI):
    """A recipe from which trainings are made, any number of times."""

    _strategy: Any = None
    _flags: Mapping[str, Any] = {}
    _callbacks: Sequence[L.Callback] = ()

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what ``compare`` itself takes."""
        names = "; ".join(f"{name}: {meaning}" for name, meaning in NAMES.items())
        parser.add_argument("--against", type=str, default="ddp", help=f"Comma-separated strategies. {names}")
        parser.add_argument(
            "--variants",
            type=dict[str, dict[str, Any]],
            default={"spmd": {}},
            help="Options of SPMDStrategy by the name of a row, on top of the recipe's own: "
            """'{"spmd": {}, "spmd no overlap": {"overlap_iterations": false}}'""",
        )
        parser.add_argument("--steps", type=int, default=30, help="Steps measured in a round")
        parser.add_argument("--warmup", type=int, default=10, help="Steps before them, which compile and fill caches")
        parser.add_argument("--rounds", type=int, default=3, help="How often each strategy gets its turn")
        parser.add_argument("--output", type=str, default=None, help="File that receives everything as JSON")

    def instantiate_classes(self) -> None:
        """Do nothing: :meth:`build` makes model, data and Trainer for each training."""

    def build(
        self, strategy: Any, flags: dict[str, Any], callbacks: list[L.Callback]
    ) -> tuple[L.Trainer, L.LightningModule, Any]:
        """Make one training; see ``report.measure.Build``."""
        L.seed_everything(self.seed, workers=True, verbose=False)
        self._strategy, self._flags, self._callbacks = strategy, flags, callbacks
        # Instantiated, the recipe's logger would make its folder, and its strategy could be attached once only.
        self.config["trainer"]["strategy"], self.config["trainer"]["logger"] = "auto", False
        super().instantiate_classes()
        return self.trainer, self.model, self.datamodule

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """The recipe's Trainer with another strategy, and without callbacks that disturb measurements."""
        own = self.config_init["trainer"]["callbacks"] or []
        kept = [c for c in (own if isinstance(own, list) else [own]) if not isinstance(c, LEFT_OUT)]
        callbacks = [*kept, *self._callbacks]
        return super().instantiate_trainer(**{**self._flags, "strategy": self._strategy, "callbacks": callbacks})

    @property
    def seed(self) -> int:
        """The recipe's seed; without one, different weights would be compared."""
        seed = self.config["seed_everything"]
        return 0 if isinstance(seed, bool) or seed is None else int(seed)

    def spmd_options(self) -> dict[str, Any]:
        """The options that the recipe gives ``SPMDStrategy``."""
        strategy = self.config["trainer"]["strategy"]
        if strategy is None or isinstance(strategy, str):
            return named_options(strategy) or {}
        if strategy["class_path"].rpartition(".")[2] != SPMDStrategy.__name__:
            return {}
        defaults = {name: p.default for name, p in inspect.signature(SPMDStrategy).parameters.items()}
        given = strategy.get("init_args") or {}
        return {name: value for name, value in dict(given).items() if value != defaults.get(name)}

    def sides(self) -> list[Side]:
        """The strategies to compare, in the order of the table.

        Raises:
            ConfigurationError: a name or an option is unknown.
            ValueError: a name appears twice, or there is nothing to compare.
        """
        options = self.spmd_options()
        names = [name.strip() for name in self.config["against"].split(",") if name.strip()]
        variants: dict[str, dict[str, Any]] = self.config["variants"]
        names += [name for name in variants if name not in names]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"--against names {name!r} twice")
        sides = [
            spmd_side(name, {**options, **variants[name]}) if name in variants else side_of(name, options)
            for name in names
        ]
        if not sides:
            raise ValueError("--against and --variants name nothing to compare")
        return sides


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: The arguments after ``compare``.

    Raises:
        SystemExit: With 2 where an argument or the recipe is wrong, with 1 where no strategy could run.
    """
    with warnings.catch_warnings():
        # Lightning means callers from Python; here the arguments are the process's own, less the subcommand.
        warnings.filterwarnings("ignore", message=".*parameter is intended to run from within Python.*")
        recipe = Recipe(
            args=with_class_for_name(args),
            run=False,
            save_config_callback=None,
            parser_kwargs={
                "prog": "lightning-spmd compare",
                "description": DESCRIPTION,
                "usage": "lightning-spmd compare --config RECIPE [--against ddp,fsdp2] [options]",
            },
        )
    config = recipe.config
    try:
        sides = recipe.sides()
        amount = Amount(config["steps"], config["warmup"], config["rounds"])
    except ValueError as error:
        recipe.parser.error(str(error))
    results = measure(sides, recipe.build, amount, lambda name, number: _say(f"round {number + 1}: {name}"))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    ours = tuple(side.name for side in sides if isinstance(side.strategy(), SPMDStrategy))
    comparison = Comparison(results, amount, ranks, ours)
    _report(comparison, config["output"])
    if dist.is_initialized():
        dist.destroy_process_group()
    if comparison.first is None:
        raise SystemExit(1)


@rank_zero_only
def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@rank_zero_only
def _report(comparison: Comparison, output: str | None) -> None:
    console = Console()
    comparison.print_to(console if console.is_terminal else Console(width=WIDTH))
    if output is not None:
        file = Path(output).expanduser()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(comparison.json_text(), encoding="utf-8")
        except OSError as error:
            raise SystemExit(f"--output {output}: {error}") from None
        console.print(f"written to {file}", markup=False, highlight=False, soft_wrap=True)
