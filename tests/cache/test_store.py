"""The store on disk: what comes back is what this user put there, or nothing."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_spmd.cache import Counts, Store, store, the_store

KEY, OTHER_KEY = "a" * 64, "b" * 64
CONTENT = bytes(range(256)) * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(store, "tell", lines.append)
    return lines


def entry(folder: Path) -> Path:
    return folder / "region.entries" / KEY


def test_what_was_put_comes_back_in_another_process(folder: Path) -> None:
    Store(folder).put("region", KEY, CONTENT)
    again = Store(folder)
    assert again.get("region", KEY) == CONTENT
    assert again.get("region", OTHER_KEY) is None
    assert again.get("graph", KEY) is None
    assert again.counts == {"region": Counts(loaded=1, missing=1), "graph": Counts(missing=1)}


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut in the head": lambda data: data[:30],
    "cut in the content": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "a flipped bit in the format": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "a flipped bit in the versions": lambda data: data[:25] + bytes([data[25] ^ 1]) + data[26:],
    "a flipped bit in the seal": lambda data: (
        data[: -len(CONTENT) - 1] + bytes([data[-len(CONTENT) - 1] ^ 1]) + data[-len(CONTENT) :]
    ),
    "a flipped bit in the content": lambda data: data[:-9] + bytes([data[-9] ^ 128]) + data[-8:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_said_and_made_anew(folder: Path, told: list[str], damage: str) -> None:
    Store(folder).put("region", KEY, CONTENT)
    path = entry(folder)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    again = Store(folder)
    assert again.get("region", KEY) is None
    assert again.of("region").broken == 1
    assert len(told) == 1
    assert str(path) in told[0]
    again.put("region", KEY, CONTENT)
    assert Store(folder).get("region", KEY) == CONTENT


def test_an_entry_of_another_version_is_said_and_made_anew(folder: Path, told: list[str]) -> None:
    Store(folder, "torch 1.0").put("region", KEY, CONTENT)
    assert Store(folder, "torch 2.0").get("region", KEY) is None
    assert len(told) == 1
    assert "is of torch 1.0, not torch 2.0" in told[0]


def test_an_entry_under_another_name_is_not_read(folder: Path, told: list[str]) -> None:
    Store(folder).put("region", KEY, CONTENT)
    entry(folder).rename(entry(folder).with_name(OTHER_KEY))
    assert Store(folder).get("region", OTHER_KEY) is None
    assert "was not written here" in told[0]


def test_an_entry_from_elsewhere_is_not_read(folder: Path, tmp_path: Path, told: list[str]) -> None:
    elsewhere = Store(tmp_path / "elsewhere")
    elsewhere.put("region", KEY, CONTENT)
    here = Store(folder)
    here.put("region", KEY, b"ours")
    entry(folder).write_bytes(entry(tmp_path / "elsewhere").read_bytes())
    assert here.get("region", KEY) is None
    assert "was not written here" in told[0]


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_that_others_may_enter_is_not_used(folder: Path, told: list[str], mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    refused = Store(folder)
    refused.put("region", KEY, CONTENT)
    assert refused.get("region", KEY) is None
    assert refused.subfolder("inductor") is None
    assert not list(folder.iterdir())
    assert len(told) == 1
    assert "not this user's alone" in told[0]
    assert store.VARIABLE in told[0]


def test_a_folder_of_somebody_else_is_not_used(folder: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Store(folder).put("region", KEY, CONTENT)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert Store(folder).get("region", KEY) is None
    assert "not this user's alone" in told[0]


def test_a_link_to_a_folder_is_not_used(folder: Path, tmp_path: Path, told: list[str]) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "target")
    assert Store(folder).folder is None
    assert "is not a folder" in told[0]


def test_folder_and_secret_are_for_the_user_alone(folder: Path) -> None:
    Store(folder).put("region", KEY, CONTENT)
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "secret").stat().st_mode & 0o077 == 0
    assert entry(folder).stat().st_mode & 0o077 == 0
    assert sorted(p.name for p in folder.iterdir()) == ["region.entries", "secret"]


def test_a_disk_that_takes_nothing_is_said(folder: Path, told: list[str]) -> None:
    kept = Store(folder)
    (folder / "region.entries").write_text("in the way")
    kept.put("region", KEY, CONTENT)
    assert kept.of("region").written == 0
    assert "could not keep" in told[0]


def _full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))


def _read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    (folder / "inductor").mkdir(0o700)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)


@pytest.mark.parametrize(("disk", "words"), [(_full, "5 MiB left"), (_read_only, "Read-only file system")])
def test_a_compiler_works_elsewhere_where_the_disk_takes_nothing(
    folder: Path, told: list[str], monkeypatch: pytest.MonkeyPatch, disk: Callable[..., None], words: str
) -> None:
    """Inductor's locks go into its folder: where that is read-only, code from an earlier run was not even read."""
    kept = Store(folder)
    kept.put("region", KEY, CONTENT)
    disk(folder, monkeypatch)
    place = kept.subfolder("inductor")
    assert place is not None
    assert place.is_dir()
    assert not place.is_relative_to(folder)
    assert place.stat().st_mode & 0o077 == 0
    assert kept.subfolder("inductor") == place
    (line,) = told
    assert words in line
    assert kept.get("region", KEY) == CONTENT


def test_entries_that_were_not_used_for_longest_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Store(folder)
    for name in ("a", "b", "c"):
        first.put("region", name, CONTENT)
        os.utime(folder / "region.entries" / name, (0, ord(name)))
    first.get("region", "a")  # used just now
    monkeypatch.setattr(store, "MOST_BYTES", 2 * len(CONTENT) + 500)
    Store(folder)
    assert sorted(p.name for p in (folder / "region.entries").iterdir()) == ["a", "c"]


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "named"))
    assert the_store().folder == tmp_path / "named" / "1"
    monkeypatch.setenv(store.VARIABLE, "off")
    assert the_store().folder is None
    monkeypatch.delenv(store.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert the_store().folder == tmp_path / "xdg" / "lightning_spmd" / "1"


def test_names_cannot_leave_the_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match="by a word and a hash"):
        Store(folder).get("region", "../secret")
    with pytest.raises(ValueError, match="by a word and a hash"):
        Store(folder).put("a/b", KEY, CONTENT)
