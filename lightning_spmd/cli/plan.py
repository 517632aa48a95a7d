"""``lightning-spmd plan --config RECIPE``: what a training will need and how long it will take, before it runs.

The recipe is captured in this process on tensors without memory and laid out for any number of devices; no device and
no other process is needed. ``docs/plan.md`` says what is counted, and how far to trust it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console

from lightning_spmd.cli.compare import Recipe
from lightning_spmd.cli.first_steps import place_of
from lightning_spmd.cli.measured import Measured, calibrated, check_here, measured, measured_facts, print_measured
from lightning_spmd.cli.recipe_cli import named_options, with_class_for_name
from lightning_spmd.cost.hardware import DEVICES, LINKS, Machines
from lightning_spmd.errors import ConfigurationError, SPMDError
from lightning_spmd.planning.capturing import Capture, capture_iteration, without_memory
from lightning_spmd.planning.chrome_trace import trace_of
from lightning_spmd.planning.facts import facts_of, search_facts
from lightning_spmd.planning.hardware_file import Hardware, read_hardware
from lightning_spmd.planning.kernels import Kernels
from lightning_spmd.planning.layout import Layout
from lightning_spmd.planning.outlook import Outlook, outlook_of
from lightning_spmd.planning.page import page_of
from lightning_spmd.planning.search import Search, search
from lightning_spmd.planning.tables import print_plan, print_search

DESCRIPTION = "Predict memory, communication and time of what a recipe describes, for any devices, without any."
WIDTH = 120
_ALONE: Mapping[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "fast_dev_run": False,
    "profiler": None,
}
"""Flags of the Trainer under which the step is captured."""


class _ModelError(ConfigurationError):
    """The model's class raised."""


class PlanRecipe(Recipe):
    """A recipe whose model is made without memory."""

    in_memory = False
    begun = 0.0
    """When the command began, by ``time.monotonic``."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of ``plan``."""
        parser.add_argument(
            "--devices", type=int | None, default=None, help="Devices of a node; by default the recipe's"
        )
        parser.add_argument("--num_nodes", type=int | None, default=None, help="Nodes; by default the recipe's")
        kinds = f"One of {', '.join(DEVICES)}; by default h100, and cpu to calibrate and measure"
        parser.add_argument("--device_type", type=str | None, default=None, help=kinds)
        parser.add_argument("--within", type=str | None, default=None, help=f"Link in a node: {', '.join(LINKS)}")
        parser.add_argument("--between", type=str | None, default=None, help="Link between nodes; likewise")
        parser.add_argument("--hardware", type=str | None, default=None, help="YAML file of devices and links")
        parser.add_argument("--json", type=str | None, default=None, help="File that receives everything as JSON")
        parser.add_argument("--search", type=bool, default=False, help="Rank layouts, and plan the best one")
        parser.add_argument("--search_seconds", type=float, default=90.0, help="After which the plan is told")
        parser.add_argument("--calibrate", type=bool, default=False, help="Measure this machine's CPU, and plan for it")
        parser.add_argument("--measured", type=bool, default=False, help="Train here too, and compare; calibrates")
        parser.add_argument("--html", type=str | None, default=None, help="File that receives a page with pictures")
        parser.add_argument("--trace", type=str | None, default=None, help="File that receives a trace for Perfetto")

    def before_instantiate_classes(self) -> None:
        """Instantiate modules without memory, in place of what Lightning registered."""
        super().before_instantiate_classes()
        self.parser.add_instantiator(self._make_module, L.LightningModule, subclasses=True)

    def _make_module(self, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """The module without memory, or with it if its code reads the values of its tensors."""
        reason = None
        if not self.in_memory:
            try:
                with without_memory():
                    return kind(*args, **kwargs)
            except Exception as error:
                reason = error
        try:
            module = kind(*args, **kwargs)
        except Exception as error:
            raise _ModelError(f"model: {_in_short(error)}") from error
        if reason is not None:
            _say(f"the model is made with memory, for without it cannot be made: {_in_short(reason)}")
        return module

    def capture(self, layout: Layout) -> Capture:
        """Capture the training iteration.

        Raises:
            SPMDError: it cannot be a graph.
        """
        updates = layout.options.get("bf16_updates", "plain")
        try:
            return capture_iteration(self._alone, layout.batches, updates)
        except (SPMDError, MisconfigurationException):
            raise
        except Exception as error:
            if (failure := _model_error(error)) is not None:
                raise failure from error
            reason = error
        self.in_memory = True
        found = capture_iteration(self._alone, layout.batches, updates)
        _say(f"the training is set up with memory, for without it cannot be: {_in_short(reason)}")
        return found

    def _alone(self, strategy: Any) -> tuple[L.Trainer, L.LightningModule, Any]:
        return self.build(strategy, dict(_ALONE), [])

    def layout(self) -> Layout:
        """The devices and axes to plan for.

        Raises:
            ConfigurationError: a number is invalid, or the axes do not fill the ranks.
        """
        trainer = self.config["trainer"]
        devices = self._count("devices", trainer["devices"])
        nodes = self._count("num_nodes", trainer["num_nodes"])
        layout = Layout(self.spmd_options(), devices, nodes)
        named = trainer["strategy"]
        if isinstance(named, str) and named != "auto" and named_options(named) is None:
            _say(f"the recipe names strategy {named!r}; planned is strategy 'spmd' with its defaults")
        layout.mesh()
        return layout

    def _count(self, name: str, of_recipe: Any) -> int:
        """A number of devices or nodes; ``auto`` and lists of devices mean the recipe's own machine."""
        given = self.config[name]
        if given is not None:
            if given < 1:
                raise ConfigurationError(f"--{name} {given}: give a whole number of at least 1")
            return given
        if isinstance(of_recipe, list):
            return len(of_recipe)
        text = str(of_recipe)
        if text.isdigit() and int(text) > 0:
            return int(text)
        raise ConfigurationError(f"trainer.{name} of the recipe is {of_recipe!r}: say how many with --{name} NUMBER")

    def machines(self, hardware: Hardware, layout: Layout) -> Machines:
        """The devices and links to plan for.

        Raises:
            ConfigurationError: a name is unknown.
        """
        config = self.config
        here = config["measured"] or config["calibrate"]
        device = hardware.device(config["device_type"] or ("cpu" if here else "h100"), "--device-type")
        within = hardware.link(config["within"] or device.link, "--within")
        usual = "ethernet-10" if device.kind == "cpu" else "infiniband-ndr"
        between = hardware.link(config["between"] or usual, "--between")
        machines = Machines(device, layout.devices, layout.nodes, within, between)
        if config["measured"] and config["search"]:
            raise ConfigurationError("--search with --measured: measured is the recipe's own layout. Leave one out")
        if here:
            check_here(machines, trains=config["measured"])
        return machines


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: The arguments after ``plan``.

    Raises:
        SystemExit: With 2 where an argument or the recipe is wrong, with 1 where the training cannot be planned.
    """
    begun = time.monotonic()
    with _quiet():
        recipe = _read(args)
        recipe.begun = begun
        try:
            layout = recipe.layout()
            machines = recipe.machines(read_hardware(recipe.config["hardware"]), layout)
        except ConfigurationError as error:
            _stop(error, 2)
        try:
            machines, side = _here(recipe, layout, machines)
            outlook, found = _plan(recipe, layout, machines, {} if side is None else side.kernels)
        except (ConfigurationError, MisconfigurationException) as error:
            _stop(error, 2)
        except SPMDError as error:
            _stop(error, 1)
        except Exception as error:  # the user's own code, which has not trained yet
            _stop(ConfigurationError(f"{_in_short(error)}{place_of(error)}"), 1)
        _report(outlook, found, side, recipe.config)


def _read(args: Sequence[str]) -> PlanRecipe:
    given = [_as_declared(argument) for argument in args]
    return PlanRecipe(
        args=with_class_for_name(given),
        run=False,
        save_config_callback=None,
        parser_kwargs={
            "prog": "lightning-spmd plan",
            "description": DESCRIPTION,
            "usage": "lightning-spmd plan --config RECIPE [--devices 8] [--num-nodes 16] [--device-type h100]",
        },
    )


def _as_declared(argument: str) -> str:
    """The arguments with ``--num-nodes=2`` as ``--num_nodes=2``, and switches with their value."""
    if argument in ("--search", "--calibrate", "--measured"):
        return f"{argument}=true"
    for name in ("num-nodes", "device-type", "search-seconds"):
        if argument == f"--{name}" or argument.startswith(f"--{name}="):
            return argument.replace(name, name.replace("-", "_"), 1)
    return argument


def _plan(recipe: PlanRecipe, layout: Layout, machines: Machines, kernels: Kernels) -> tuple[Outlook, Search | None]:
    """The recipe's own layout, or the best one with the results of the search."""
    capture = recipe.capture(layout)
    if not recipe.config["search"]:
        return outlook_of(capture, layout, machines, kernels=kernels), None
    if not recipe.config["search_seconds"] > 0:
        raise ConfigurationError(f"--search_seconds {recipe.config['search_seconds']}: give a number above 0")
    found = search(capture, layout, machines, recipe.config["search_seconds"], _say, recipe.begun)
    if found.best is None or found.best.outlook is None:
        reasons = "; ".join(dict.fromkeys(c.reason for c in found.built))
        raise ConfigurationError(f"no layout can be planned: {reasons}")
    return found.best.outlook, found


def _here(recipe: PlanRecipe, layout: Layout, machines: Machines) -> tuple[Machines, Measured | None]:
    """The machines, calibrated if this one was measured, and the measurements."""
    config = recipe.config
    if config["measured"]:
        return measured(recipe, layout, machines)
    return (calibrated(machines) if config["calibrate"] else machines), None


def _report(outlook: Outlook, found: Search | None, side: Measured | None, config: Any) -> None:
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=WIDTH)
    facts = facts_of(outlook)
    if found is not None:
        facts["search"] = search_facts(found)
        print_search(found, console)
    print_plan(facts, console)
    if side is not None:
        facts["measured"] = measured_facts(outlook, side)
        print_measured(facts["measured"], console)
    writers = {
        "json": lambda: json.dumps(facts),
        "html": lambda: page_of(facts),
        "trace": lambda: json.dumps(trace_of(facts)),
    }
    for option, text in writers.items():
        if config[option] is not None:
            _write(config[option], text(), f"--{option}")


def _write(name: str, text: str, option: str) -> None:
    file = Path(name).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        _stop(ConfigurationError(f"{option} {name}: {error}"), 2)
    _say(f"written to {file}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's banners, which are about this process and not the planned training."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _model_error(error: BaseException | None) -> _ModelError | None:
    """The error that the model's class raised, inside that of jsonargparse."""
    while error is not None and not isinstance(error, _ModelError):
        error = error.__cause__ or error.__context__
    return error


def _in_short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _stop(error: BaseException, status: int) -> NoReturn:
    _say("lightning-spmd plan: error: " + " ".join(str(error).split()))
    raise SystemExit(status)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
