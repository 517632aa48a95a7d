"""Mistakes found before training begins: a missing folder, a model that does not fit its data or checkpoint.

A recipe cannot know whether a folder exists or what a checkpoint holds; the classes that it names find out in their
hooks. An error that they raise there with a plain ``raise`` is about a value of the recipe and is reported in one line.
Any other error is a bug in the code and keeps its traceback.
"""

from __future__ import annotations

import errno
import linecache
import os
import pickle
import re
import sys
import traceback
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy

from lightning_spmd.cli.recipe_files import with_place
from lightning_spmd.errors import ConfigurationError, RankLostError, SPMDError, VerificationError, own_line
from lightning_spmd.strategy.checkpoints.intact import damaged, why_unreadable

_OF_VALUES = (ValueError, TypeError, LookupError, ImportError)
_HOOKS = frozenset(
    {
        *("prepare_data", "setup", "configure_model", "configure_optimizers", "configure_callbacks"),
        *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
        *("on_fit_start", "on_train_start", "on_sanity_check_start"),
    }
)
"""Hooks of modules, data and callbacks that run before the first batch."""
_KEYS = (
    (LightningModule, "model"),
    (LightningDataModule, "data"),
    (Strategy, "trainer.strategy"),
    (Callback, "trainer.callbacks"),
    (Logger, "trainer.logger"),
)
_OF_LIGHTNING = "lightning.pytorch.callbacks."
_LOOKS = "_parse_ckpt_path"
_ANOTHER_FOLDER = (
    ". Give results a folder that can be written: --trainer.default_root_dir FOLDER, or that of the logger"
)
_OF_CHECKPOINTS = re.compile(r"Error\(s\) in loading state_dict for (\w+):\s*(.*)", re.DOTALL)


@contextmanager
def refusals_in_one_line(command: str, arguments: Sequence[str]) -> Iterator[None]:
    """While open, an error about a value of the recipe ends the command with one line.

    Args:
        command: the beginning of the line.
        arguments: the command line.

    Raises:
        SystemExit: with 1, in place of that error.
    """
    try:
        yield
    except Exception as error:
        said = refused_with(error)
        if said is None:
            raise
        sys.stderr.write(f"{command}: error: {with_place(said, arguments)}\n")
        sys.stderr.flush()
        raise SystemExit(1) from error


def refused_with(error: BaseException) -> str | None:
    """The error in one line if it is about a value of the recipe, else None.

    Errors of the strategy say themselves what happened, where, and what to do, in as many lines as they have: a full
    disk, ranks that disagree.

    Args:
        error: the error that ended a training.
    """
    text = " ".join(str(error).split())
    if isinstance(error, ConfigurationError | MisconfigurationException | RankLostError):
        return text  # what a lost rank ended with is in its own output
    if isinstance(error, SPMDError) and not isinstance(error, VerificationError):  # that one is a defect of ours
        return str(error).strip()
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    names = {frame.f_code.co_name for frame, _ in frames}
    if {"restore_model", "load_model_state_dict"} & names and (found := _OF_CHECKPOINTS.search(str(error))):
        return f"ckpt_path: the checkpoint is not of this {found[1]}: {_shortened(found[2])}"
    if {"resume_start", "_select_ckpt_path", _LOOKS} & names:
        return f"ckpt_path: {_of_checkpoint(error, _shortened(text))}"
    frame, line = frames[-1]
    on_purpose = linecache.getline(frame.f_code.co_filename, line).strip().startswith("raise ")
    if on_purpose and "SaveConfigCallback" in {type(frame.f_locals.get("self")).__name__ for frame, _ in frames}:
        return text + _ANOTHER_FOLDER  # for the recipe as it was run, which jsonargparse writes
    if on_purpose and isinstance(error, RuntimeError) and frame.f_globals.get("__name__", "").startswith(_OF_LIGHTNING):
        return f"trainer.callbacks: {text}"  # EarlyStopping: there is no metric of that name
    refused = isinstance(error, OSError) or (on_purpose and isinstance(error, _OF_VALUES))
    if refused and any(_is_hook(frame) for frame, _ in frames):
        return f"{text}{place_of(error)}"
    # Lightning's own look at the data, and folders that cannot be written, before the first batch.
    folder = isinstance(error, OSError) and error.filename is not None and "advance" not in names
    if folder:
        return text + _another_folder(error)
    return text if refused and "setup_data" in names else None


def _another_folder(error: BaseException) -> str:
    """Advice for a file or folder that could not be created; nothing if one could not be read."""
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EROFS):
        return ""
    return "" if os.path.lexists(str(error.filename)) or own_line(error) is not None else _ANOTHER_FOLDER


def place_of(error: BaseException) -> str:
    """The line of the user's code that raised, in words; empty if the error came from elsewhere.

    Args:
        error: the error that was raised.
    """
    line = own_line(error)
    return "" if line is None else f" at {line}"


def place_in_class(error: BaseException | None) -> str:
    """The line of the user's class that raised when it was instantiated, in words; empty if it was elsewhere.

    Args:
        error: perhaps one that was raised in place of others.
    """
    place = ""
    while error is not None:
        place, error = place_of(error) or place, error.__cause__ or error.__context__
    return place


def key_of(error: BaseException | None) -> str | None:
    """The recipe's key whose object was being instantiated when an error was raised; None if unknown.

    Args:
        error: perhaps one that was raised in place of others.
    """
    found = None
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            made = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
            found = next((key for kind, key in _KEYS if isinstance(made, kind)), found)
        error = error.__cause__ or error.__context__
    return found


def _is_hook(frame: FrameType) -> bool:
    """Whether a frame is a hook of an object that a recipe names."""
    whose = frame.f_locals.get("self")
    return frame.f_code.co_name in _HOOKS and isinstance(whose, LightningModule | LightningDataModule | Callback)


def _of_checkpoint(error: BaseException, text: str) -> str:
    """What is wrong with a checkpoint from which LightningCLI reads the model's arguments."""
    of = [f.f_locals.get("ckpt_path") for f, _ in traceback.walk_tb(error.__traceback__) if f.f_code.co_name == _LOOKS]
    if not of or not Path(str(of[0])).is_file():
        return text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"
    path = Path(str(of[0]))
    if isinstance(error, PermissionError):
        return text
    if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
        return f"{path} holds objects that torch.load(weights_only=True) does not read, as LightningCLI wants: {text}"
    if isinstance(error, AttributeError):
        return f"{path} is no checkpoint of Lightning's, which is a dictionary"
    return str(damaged(path, why_unreadable(path)))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:300] + " ..."
