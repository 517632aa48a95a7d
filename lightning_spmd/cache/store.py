"""Bytes on disk by kind and key, which only the user's own processes can have written.

An entry is a file: a line of format, a line of versions, a seal, the content. The seal is the HMAC-SHA256 of everything
else, of kind and key too, with a secret that lies beside the entries. So an entry that was cut, changed, renamed or
brought in from elsewhere is not read, and what is read may be code: a process of the same user wrote it. Folder
and secret are for the user alone (0700 and 0600); a folder that belongs to somebody else, or that others may enter, is
not used. Files appear under their name when they are complete.

The folder is ``LIGHTNING_SPMD_CACHE``, else ``$XDG_CACHE_HOME/lightning_spmd``, else ``~/.cache/lightning_spmd``;
``LIGHTNING_SPMD_CACHE=off`` keeps nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_spmd.messages import tell

VARIABLE = "LIGHTNING_SPMD_CACHE"
"""The environment variable that names the folder."""
MOST_BYTES = 1 << 30
"""What all files may take; beyond, those that were not used for longest go."""
ROOM = 64 << 20
"""Bytes that must be free where a compiler is to work: it writes sources, libraries and its own headers."""

_FORMAT = b"lightning_spmd cache 1\n"
_SEAL = hashlib.sha256().digest_size


@dataclass
class Counts:
    """Numbers of entries of one kind.

    Args:
        loaded: entries that were read.
        missing: entries that were asked for and not there.
        broken: entries that were there and could not be trusted; they are removed.
        written: entries that were written.
    """

    loaded: int = 0
    missing: int = 0
    broken: int = 0
    written: int = 0


class Store:
    """Entries in one folder.

    Args:
        folder: made where it is missing; None keeps nothing.
        versions: of whatever decides what content means; an entry of other versions is not read.
    """

    def __init__(self, folder: Path | None, versions: str | None = None) -> None:
        self.counts: dict[str, Counts] = {}
        self.versions = f"torch {torch.__version__}" if versions is None else versions
        self.folder: Path | None = None
        self._secret = b""
        self._places: dict[str, Path] = {}
        self._own: tempfile.TemporaryDirectory[str] | None = None
        if folder is None:
            return
        try:
            self._secret = _secret_of(_own_folder(folder))
        except OSError as error:
            tell(f"strategy='spmd' keeps no compiled code between runs: {error}")
        else:
            self.folder = folder
            _drop_oldest(folder, MOST_BYTES)

    def of(self, kind: str) -> Counts:
        """The numbers for a kind so far."""
        return self.counts.setdefault(kind, Counts())

    def get(self, kind: str, key: str) -> bytes | None:
        """The content of an entry; None if there is none that can be trusted.

        Args:
            kind: of entry, a word.
            key: within its kind, a name that a file can have: a hash.
        """
        counts, path = self.of(kind), self._path(kind, key)
        if path is None:
            counts.missing += 1
            return None
        try:
            data = path.read_bytes()
        except OSError:
            counts.missing += 1
            return None
        problem, content = self._open(kind, key, data)
        if content is None:
            counts.broken += 1
            tell(f"strategy='spmd' makes a cache entry anew, for it {problem}: {path}")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        counts.loaded += 1
        with contextlib.suppress(OSError):
            os.utime(path)  # read lately
        return content

    def put(self, kind: str, key: str, content: bytes) -> None:
        """Keep an entry. If the disk does not allow it, nothing is kept, and a message says so."""
        path = self._path(kind, key)
        if path is None:
            return
        head = _FORMAT + self.versions.encode() + b"\n"
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write(path, head + self._seal(kind, key, head, content) + content)
        except OSError as error:
            tell(f"strategy='spmd' could not keep a cache entry: {error}")
            return
        self.of(kind).written += 1

    def subfolder(self, name: str) -> Path | None:
        """A private folder for tools that need one; None if nothing is kept at all.

        It is beside the entries, or, where that disk is full or takes nothing, one that goes with the process.
        """
        if self.folder is None:
            return None
        if name not in self._places:
            self._places[name] = self._place_for(self.folder / name)
        return self._places[name]

    # ------------------------------------------------------------------ pieces
    def _place_for(self, wanted: Path) -> Path:
        try:
            return _with_room(_own_folder(wanted))
        except OSError as error:
            self._own = self._own or tempfile.TemporaryDirectory(prefix="lightning_spmd-", ignore_cleanup_errors=True)
            tell(f"strategy='spmd' compiles in {self._own.name}, for this process alone: {error}")
            return _own_folder(Path(self._own.name) / wanted.name)

    def _path(self, kind: str, key: str) -> Path | None:
        if not (kind.isidentifier() and key.isalnum()):
            raise ValueError(f"an entry is named by a word and a hash, not by {kind!r} and {key!r}")
        return None if self.folder is None else self.folder / f"{kind}.entries" / key

    def _seal(self, kind: str, key: str, head: bytes, content: bytes) -> bytes:
        named = f"{kind}/{key}\n".encode() + head
        return hmac.digest(self._secret, named + hashlib.sha256(content).digest(), "sha256")

    def _open(self, kind: str, key: str, data: bytes) -> tuple[str, bytes | None]:
        """The problem of an entry (empty if it has none), and its content."""
        if not data.startswith(_FORMAT):
            return "is of another format or damaged", None
        versions, _, rest = data[len(_FORMAT) :].partition(b"\n")
        head = _FORMAT + versions + b"\n"
        seal, content = rest[:_SEAL], rest[_SEAL:]
        if not hmac.compare_digest(seal, self._seal(kind, key, head, content)):
            return "is damaged, or was not written here", None
        if versions != self.versions.encode():
            return f"is of {versions.decode(errors='replace')}, not {self.versions}", None
        return "", content


def the_store() -> Store:
    """The store of this process, in the folder that its environment names now."""
    return _store_in(_folder_by_environment())


@functools.cache
def _store_in(folder: Path | None) -> Store:
    return Store(folder)


def _folder_by_environment() -> Path | None:
    named = os.environ.get(VARIABLE, "")
    if named.lower() == "off":
        return None
    if named:
        return Path(named).expanduser() / "1"
    root = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):  # no home
        return (Path(root) if root else Path.home() / ".cache") / "lightning_spmd" / "1"
    return None


def _own_folder(folder: Path) -> Path:
    """The folder, made if it is missing.

    Raises:
        OSError: it cannot be made, or others than the user have a say in it.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is not a folder")
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o077):
        raise PermissionError(
            f"{folder} is not this user's alone. Give another one in {VARIABLE}, or remove it: code that is found "
            "there is run"
        )
    return folder


def _with_room(folder: Path) -> Path:
    """The folder, if something can be written into it.

    Raises:
        OSError: its disk is full, or takes nothing.
    """
    if (free := shutil.disk_usage(folder).free) < ROOM:
        raise OSError(f"{folder} is on a disk with {free >> 20} MiB left. Give another folder in {VARIABLE}")
    _temporary(folder / "room", b"0").unlink()
    return folder


def _secret_of(folder: Path) -> bytes:
    """The folder's secret; of several processes that begin at once all get the same."""
    path = folder / "secret"
    if not path.exists():
        own = _temporary(path, secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(own, path)
        own.unlink()
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or (hasattr(os, "getuid") and found.st_uid != os.getuid()):
        raise PermissionError(f"{path} is not this user's")
    secret = path.read_bytes()
    if len(secret) != 32:
        raise PermissionError(f"{path} is damaged: remove the folder")
    return secret


def _temporary(path: Path, content: bytes) -> Path:
    """A complete file beside ``path``, for the user alone."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    return Path(name)


def _write(path: Path, content: bytes) -> None:
    own = _temporary(path, content)
    try:
        own.replace(path)
    except OSError:
        own.unlink()
        raise


def _drop_oldest(folder: Path, most: int) -> None:
    """Remove the files that were not used for longest until the rest takes at most ``most`` bytes."""
    found: list[tuple[float, int, Path]] = []
    for path in folder.glob("*/**/*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
