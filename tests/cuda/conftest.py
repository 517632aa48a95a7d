from collections.abc import Iterator

import pytest

from tests.helpers.fake_cuda.lane import Lane, compiler


@pytest.fixture(scope="session")
def lane() -> Iterator[Lane]:
    """A process with fake GPUs."""
    if compiler() is None:
        pytest.skip("no C++ compiler, which the fake device guard needs (set CXX, or install g++)")
    process = Lane()
    yield process
    process.close()
