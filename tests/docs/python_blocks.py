"""Python blocks of a page are run one after the other in one namespace and one folder, like the cells of a notebook.

What differs from the page is said in the comment above a block: ``devices=1`` makes every Trainer one of so many
devices on CPUs; with ``devices=2`` the blocks run in two processes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch

from tests.docs import given
from tests.docs.pages import Block, PageError, blocks_of

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def run_page(page: str, devices: int, folder: str) -> None:
    """Run the page's blocks that are for so many devices; on several, in each of as many processes.

    Raises:
        PageError: naming the block that did not do what the page says.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with _in(Path(folder)):
        printed = None
        for block in blocks_of(page):
            if block.word == "output" and printed is not None and os.environ.get("RANK", "0") == "0":
                _compare(block, printed)
            elif block.language == "python" and block.word != "not run":
                printed = _run(block, namespace, devices) if devices in block.devices else None


def has_blocks(page: str, devices: int) -> bool:
    """Whether some are for so many devices."""
    blocks = [b for b in blocks_of(page) if b.language == "python" and b.word != "not run"]
    return any(devices in b.devices for b in blocks)


def write_files(page: str, folder: Path) -> None:
    """Write what the page calls files, and what its blocks ask for."""
    for block in blocks_of(page):
        if name := block.options.get("file"):
            (folder / name).write_text(block.text)
        if "my_project" in _given(block):
            shutil.copy(Path(__file__).with_name("my_project.py"), folder)


def _run(block: Block, namespace: dict[str, Any], devices: int) -> str:
    expected = block.options.get("raises")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), _trainers(block, devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _given(block):
                namespace[name] = getattr(given, name)
            _execute(block, namespace)
    except Exception as error:
        if type(error).__name__ == expected:
            return f"{type(error).__name__}: {error}"
        raise PageError(f"{block.place}: {type(error).__name__}: {error}") from error
    if expected is not None:
        raise PageError(f"{block.place}: raises no {expected}")
    return printed.getvalue()


def _execute(block: Block, namespace: dict[str, Any]) -> None:
    # lines of a traceback are those of the page
    code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
    if name := block.options.get("file"):
        exec(code, {"__name__": "__main__", "__file__": name})
    elif block.options.get("inside") == "fit":
        given.inside_fit(lambda names: exec(code, {**namespace, **names}), block.options.get("strategy", "spmd"))
    else:
        exec(code, namespace)


def _given(block: Block) -> list[str]:
    return [name for name in block.options.get("given", "").split(",") if name]


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    """Work in ``folder``, whose files can be imported; leave the process as it was."""
    before, modules, seed = os.getcwd(), set(sys.modules), torch.get_rng_state()
    quiet = logging.getLogger("lightning.pytorch")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.chdir(before)
        quiet.setLevel(level)
        torch.set_rng_state(seed)
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


@contextlib.contextmanager
def _trainers(block: Block, devices: int) -> Iterator[None]:
    """Make every Trainer one of ``devices`` devices on CPUs, as the block's comment says, and silent."""
    original = L.Trainer.__init__

    def init(self: L.Trainer, **flags: Any) -> None:
        if "devices" not in block.options and flags.get("devices", 1) not in (1, "auto"):
            raise PageError(f"{block.place}: say on how many devices the test runs it: <!-- run: devices=1 -->")
        flags |= {"devices": devices, "num_nodes": 1, "accelerator": "cpu"}
        flags = {"enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1, **flags}
        if batches := block.options.get("batches"):
            flags |= {"limit_train_batches": int(batches), "limit_val_batches": int(batches)}
        original(self, **flags)

    with mock.patch.object(L.Trainer, "__init__", init):
        yield


def _compare(block: Block, printed: str) -> None:
    """Words must be the same, numbers within a percent: they depend on the machine.

    Raises:
        PageError: naming the first line that differs.
    """
    expected = textwrap.dedent(block.text).strip().splitlines()
    lines = printed.strip().splitlines()
    for number, (said, was) in enumerate(zip(expected, lines, strict=False)):
        if not _alike(said, was):
            raise PageError(f"{block.page}:{block.line + number}: the page says\n{said}\nand this was printed:\n{was}")
    if len(expected) != len(lines):
        raise PageError(f"{block.place}: {len(expected)} lines, but this was printed:\n{printed}")


def _alike(said: str, was: str) -> bool:
    if _NUMBER.sub("#", said).split() != _NUMBER.sub("#", was).split():
        return False
    pairs = zip(_NUMBER.findall(said), _NUMBER.findall(was), strict=True)
    return all(abs(float(a) - float(b)) <= 0.01 * max(abs(float(a)), abs(float(b)), 1e-3) for a, b in pairs)
