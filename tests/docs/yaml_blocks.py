"""YAML blocks are read by what reads them for the user: the command line's parser, or that of hardware files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lightning_spmd.planning.hardware_file import read_hardware
from tests.docs.pages import Block, PageError
from tests.docs.shell_blocks import check_command


def check(block: Block, folder: Path) -> None:
    """Read a block.

    Raises:
        PageError: it cannot be read; what its reader says.
    """
    try:
        content = yaml.safe_load(block.text)
    except yaml.YAMLError as error:
        raise PageError(f"{block.place}: {error}") from error
    if block.options.get("kind") == "hardware":
        _hardware(block, folder)
    else:
        _recipe(block, content, folder)


def _hardware(block: Block, folder: Path) -> None:
    file = folder / "hardware_of_a_block.yaml"
    file.write_text(block.text)
    try:
        read_hardware(str(file))
    except ValueError as error:
        raise PageError(f"{block.place}: {error}") from error


def _recipe(block: Block, content: Any, folder: Path) -> None:
    """``under=trainer`` says where in a recipe the block stands, ``recipe=FILE`` of which recipe it is a part."""
    for key in reversed([key for key in block.options.get("under", "").split(".") if key]):
        content = {key: content}
    file = folder / block.options.get("file", "recipe_of_a_block.yaml")
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    base = block.options.get("recipe")
    first = f"--config {base} " if base else ""
    try:
        check_command(f"lightning-spmd fit {first}--config {file}", folder)
    except PageError as error:
        raise PageError(f"{block.place}: {error}") from error
