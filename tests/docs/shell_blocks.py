"""Commands in bash blocks are looked at as far as they can be without training.

Options are parsed by the programs' own parsers, recipes are loaded and their objects made; files and modules exist.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.cli import LightningCLI

from lightning_spmd.cli import compare, plan
from lightning_spmd.cli.main import main
from tests.docs.pages import ROOT, Block, PageError

_SHELL = ("cd", "echo", "exec", "export", "ls", "mkdir", "set", "source", "tail", "cat", "kill", "wait", "sleep")
_SCHEDULER = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "sacct")
_SETTING = re.compile(r"[A-Z_][A-Z0-9_]*=")


class _Checked(BaseException):
    """A command's arguments have been read."""


def check(block: Block, folder: Path) -> None:
    """Look at each command of a block.

    Raises:
        PageError: naming the line and what is wrong with it.
    """
    shell = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    if shell.returncode != 0:
        raise PageError(f"{block.place}: bash: {shell.stderr.strip()}")
    for line, command in _commands(block):
        try:
            check_command(command, folder)
        except PageError as error:
            raise PageError(f"{block.page}:{line}: {command}: {error}") from error


def _commands(block: Block) -> Iterator[tuple[int, str]]:
    """The commands with their lines; what a backslash continues is one."""
    begun, first = "", block.line
    for number, line in enumerate(block.text.splitlines(), block.line):
        first = first if begun else number
        if line.rstrip().endswith("\\"):
            begun += line.rstrip()[:-1]
            continue
        if command := (begun + line).strip():
            yield first, command
        begun = ""


def check_command(command: str, folder: Path) -> None:
    """Look at one line of commands.

    Raises:
        PageError: saying what is wrong with one of them.
    """
    words: list[str] = []
    for word in [*shlex.split(command, comments=True), ";"]:
        if word not in ("|", "||", "&", "&&", ";"):
            words.append(word)
            continue
        _check_one(words, folder)
        words = []


def _check_one(words: list[str], folder: Path) -> None:
    while words and (_SETTING.match(words[0]) or words[0] in ("exec", "export")):
        words = words[1:]
    for written in [after for word, after in pairwise(words) if word == ">" and "/" not in after]:
        (folder / written).touch()  # later commands may name it
    words = words[: next((i for i, word in enumerate(words) if word in (">", ">>", "<", "2>&1")), len(words))]
    if not words:
        return
    name, rest = words[0], words[1:]
    if name == "srun":
        _check_one(rest[next((i for i, word in enumerate(rest) if word in CHECKS), len(rest)) :], folder)
    elif name in _SHELL or name in _SCHEDULER:
        return
    elif name.startswith((".ci/", "./")):
        if not os.access(ROOT / name, os.X_OK):
            raise PageError("there is no such command")
    elif name in CHECKS:
        CHECKS[name](rest, folder)
    else:
        known = ", ".join([*CHECKS, *_SHELL, *_SCHEDULER])
        raise PageError(f"no test knows {name!r} (known: {known}): mark the block <!-- not run: reason -->")


def _check_command_line(arguments: list[str], folder: Path) -> None:
    """Up to the training: recipes are read, and model, data and Trainer made."""
    if any(word.startswith("--config") for word in arguments):
        _check_recipe(tuple(arguments), str(folder) if (folder / _config(arguments)).exists() else str(ROOT))


def _config(arguments: Sequence[str]) -> str:
    at = next(i for i, word in enumerate(arguments) if word.startswith("--config"))
    return arguments[at].partition("=")[2] or arguments[at + 1]


@cache
def _check_recipe(arguments: tuple[str, ...], folder: str) -> None:
    said = io.StringIO()
    given = list(arguments)
    here = [] if arguments[0] == "plan" or "--trainer.accelerator" in given else ["--trainer.accelerator", "cpu"]
    stop = mock.Mock(side_effect=_Checked)
    patches = [
        mock.patch.object(LightningCLI, "_run_subcommand", stop),
        mock.patch.object(plan, "_plan", stop),
        mock.patch.object(plan, "_here", lambda recipe, layout, machines: (machines, None)),
        mock.patch.object(compare, "measure", stop),
        mock.patch.object(sys, "argv", ["lightning-spmd"]),
        mock.patch.object(sys, "path", [folder, *sys.path]),
        contextlib.chdir(folder),
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(said),
    ]
    seed = torch.get_rng_state()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)  # pyright: ignore
        try:
            main([*given, *here])
        except _Checked:
            return
        except SystemExit as stopped:
            if stopped.code in (0, None):
                return
            raise PageError(said.getvalue().strip() or str(stopped.code)) from stopped
        finally:
            torch.set_rng_state(seed)


def _check_python(arguments: list[str], folder: Path) -> None:
    """Modules must exist and take their options; scripts must be files of the page or of the repository."""
    if arguments[:1] == ["-m"]:
        _check_module(arguments[1], arguments[2:], folder)
    elif arguments and arguments[0].endswith(".py"):
        _file(arguments[0], folder)
    elif arguments[:1] != ["-c"]:
        raise PageError("neither a module nor a script")


def _file(name: str, folder: Path) -> None:
    if not (folder / name).is_file() and not (ROOT / name).is_file():
        raise PageError(f"there is no {name}; a block may be one: <!-- run: file={name} -->")


def _check_module(name: str, arguments: list[str], folder: Path) -> None:
    if name in ("build", "pip", "venv"):  # of which only pip is there in every environment
        return CHECKS["pip"](arguments, folder) if name == "pip" else None
    if name == "pytest":
        for word in arguments:
            if word.startswith("tests/") and not (ROOT / word.partition("::")[0]).exists():
                raise PageError(f"there is no {word}")
        return None
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        if importlib.util.find_spec(name) is None:
            raise PageError(f"there is no module {name}")
    return _check_options(name, arguments)


def _check_options(name: str, arguments: list[str]) -> None:
    """Let the module's own parser read the options, and stop there; a module without one gets files."""
    parse = argparse.ArgumentParser.parse_args

    def and_stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse(parser, *args, **kwargs)
        raise _Checked

    if "parse_args" not in _source(name):
        return
    said = io.StringIO()
    try:
        with (
            mock.patch.object(argparse.ArgumentParser, "parse_args", and_stop),
            mock.patch.object(sys, "argv", [name, *arguments]),
            contextlib.redirect_stderr(said),
        ):
            runpy.run_module(name, run_name="__main__")
    except _Checked:
        return
    except SystemExit as stopped:
        raise PageError(said.getvalue().strip() or str(stopped.code)) from stopped


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    return Path(spec.origin).read_text() if spec is not None and spec.origin else ""


def _check_pip(arguments: list[str], folder: Path) -> None:
    """Extras must be this project's; other packages those that it names itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in arguments[1:]:
        name, _, extras = word.partition("[")
        for extra in filter(None, extras.rstrip("]").split(",")):
            if name in (".", project["name"]) and extra not in project["optional-dependencies"]:
                raise PageError(f"there is no extra {extra!r}")


def _check_torchrun(arguments: list[str], folder: Path) -> None:
    from torch.distributed.run import get_args_parser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = get_args_parser().parse_args(arguments)
    except SystemExit as stopped:
        raise PageError(said.getvalue().strip()) from stopped
    if not options.module and not options.training_script.endswith("lightning-spmd"):
        _file(options.training_script, folder)


CHECKS: dict[str, Callable[[list[str], Path], None]] = {
    "lightning-spmd": _check_command_line,
    "python": _check_python,
    "pip": _check_pip,
    "torchrun": _check_torchrun,
}
