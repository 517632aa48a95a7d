"""What ``transformers`` reads from local folders, without ever asking the network."""

import importlib
import os
from pathlib import Path
from typing import Any


def from_folder(auto: str, folder: str, option: str, kind: str) -> Any:
    """A model or a tokenizer from a local folder.

    Args:
        auto: The class of transformers that reads it, as ``AutoTokenizer``.
        folder: What ``save_pretrained`` wrote, or a clone of a model's repository.
        option: Where a user gave the folder, for messages.
        kind: What it is to hold, for messages.

    Raises:
        ModuleNotFoundError: If transformers is not installed.
        FileNotFoundError: If ``folder`` is no folder.
        ValueError: If it holds nothing of the kind.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{option} needs transformers. Install it with: pip install 'lightning-spmd[hugging-face]'"
        ) from error
    place = Path(folder).expanduser()
    if not place.is_dir():
        # Here, because transformers would take the name for a model of its hub and ask the network.
        raise FileNotFoundError(f"{option}={folder!r} is not a folder (seen from {os.getcwd()}).")
    try:
        return getattr(transformers, auto).from_pretrained(str(place), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{option}={folder!r} holds no {kind} that transformers can read: {reason[:300]}") from error
