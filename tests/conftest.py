"""Few threads, because tests start several processes on one machine; ranks for the session; a text to train on.

``.ci/test`` runs the tests in two processes (pytest-xdist). Tests of a file stay together, for they share captured
graphs and the runs of one device that they compare with; those on four ranks stay together too, and those on
fake GPUs, so that one process alone starts them.
"""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import matrices
from tests.helpers.ranks import RARE_FULL_COLLECTIONS, RankPool, read_entry_points_once

# Inductor takes the processor's word for its vector instructions. In each process it would build libraries to try them,
# which takes 8 s.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
gc.set_threshold(*RARE_FULL_COLLECTIONS)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.keyword and not any("::" in argument for argument in config.args):
        matrices.check(item.nodeid for item in items)
    for item in items:
        if matrices.is_row(item.nodeid, matrices.LONG):
            item.add_marker("long")
        if matrices.is_row(item.nodeid) and item.get_closest_marker("long") is None:
            item.add_marker("matrix")
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        four = "four_ranks" in getattr(item, "fixturenames", ()) or parameters.get("ranks") == 4
        group = item.path.parent.name if "lane" in getattr(item, "fixturenames", ()) else item.path.stem
        item.add_marker(pytest.mark.xdist_group("four ranks" if four else group))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not go through it again and again, a fifth of a second each time."""
    read_entry_points_once()
    gc.freeze()


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    """One thread; and what ``Trainer(deterministic=True)`` sets is over with its test."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="session", autouse=True)
def quiet_lightning() -> None:
    """Lightning's banner a hundred times over hides what a failing test says."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two worker processes, started at the first use."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four worker processes, started at the first use."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "poem.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return folder
