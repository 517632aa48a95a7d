"""Checks before a run resumes that a checkpoint is one, and is undamaged.

``torch.load`` does not check the checksums in a file, and the shards of a folder have none: a flipped bit would be
trained on. Rank 0 checks a file. A folder has a list of its files with sizes and checksums (``seals.json``), and each
rank checks some of the files.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.strategy.checkpoints.state_dicts import METADATA_FILE

SEALS = "seals.json"
"""In a distributed checkpoint: size and sum of every other file."""
Seals = dict[str, tuple[int, int]]
_BLOCK = 2**22
_ANOTHER = "Go on from another one: ModelCheckpoint(save_top_k=...) keeps more than the last"


def seals_of(folder: Path, rank: int) -> Seals:
    """Sizes and checksums of the files that a rank wrote into a distributed checkpoint."""
    names = [path.name for path in folder.glob(f"__{rank}_*")]
    names += [".metadata", METADATA_FILE] if rank == 0 else []
    return {name: ((folder / name).stat().st_size, _sum_of(folder / name)) for name in names}


def write_seals(folder: Path, of_ranks: Sequence[Seals]) -> None:
    """Write the list when all files are complete."""
    (folder / SEALS).write_text(json.dumps({name: seal for seals in of_ranks for name, seal in seals.items()}))


def damage_of_folder(folder: Path, rank: int, ranks: int) -> str | None:
    """The damage of a distributed checkpoint, as far as this rank checks it. Folders without a list are trusted."""
    if not (folder / SEALS).is_file():
        return None
    try:
        seals: Mapping[str, Sequence[int]] = json.loads((folder / SEALS).read_text())
    except ValueError:
        return f"{SEALS} is damaged"
    missing = [name for name in seals if not (folder / name).is_file()]
    if missing:
        return f"{', '.join(missing[:3])} is missing"
    for name, (size, expected) in sorted(seals.items())[rank::ranks]:
        if (folder / name).stat().st_size != size:
            return f"{name} has {(folder / name).stat().st_size:,} bytes where {size:,} were written"
        if _sum_of(folder / name) != expected:
            return f"{name} is not what was written"
    return None


def damage_of_file(path: Path) -> str | None:
    """The damage of a checkpoint file. Files that are not archives raise an error when they are loaded."""
    if path.is_dir():
        return f"it is a folder without {METADATA_FILE}, so no distributed checkpoint"
    if not zipfile.is_zipfile(path) or not torch.serialization.get_crc32_options():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            part = archive.testzip()
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        return f"its archive is damaged ({error})"
    return None if part is None else f"its part {part} is not what was written"


def damaged(path: Path, what: str) -> ConfigurationError:
    """The error for a damaged checkpoint."""
    return ConfigurationError(f"the checkpoint {path} cannot be read: {what}. {_ANOTHER}")


def why_unreadable(path: Path) -> str:
    """Describes a file that could not be loaded."""
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        return "it is an archive that torch.save did not write, or one with a part missing"
    with path.open("rb") as file:
        begin = file.read(4)
    if begin[:2] == b"PK":
        return f"it ends too early (it has {size:,} bytes), as a file does that was not copied or written to its end"
    return f"it is no file of torch.save ({size:,} bytes)"


def check_is_training(path: Path, checkpoint: Any) -> None:
    """Check that a loaded object is a Lightning checkpoint.

    Raises:
        ConfigurationError: saying what it is, and what to do with it.
    """
    if isinstance(checkpoint, Mapping) and "state_dict" in checkpoint:
        return
    if not isinstance(checkpoint, Mapping):
        what = f"it holds a {type(checkpoint).__name__}"
    else:
        names = [str(name) for name in checkpoint]  # pyright: ignore[reportUnknownVariableType]
        what = f"it has no 'state_dict' but {', '.join(names[:4])}{' and others' if len(names) > 4 else ''}"
    raise ConfigurationError(
        f"{path} is no checkpoint of Lightning's: {what}. Weights that something else saved are loaded before "
        "training: module.load_state_dict(torch.load(...)), with their names as the module's"
    )


def _sum_of(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total
