"""The command, run in the tests' own process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process; gives its exit status, stdout and stderr."""
    from lightning_spmd.cli import main as cli

    def run(*arguments: str) -> tuple[int, str, str]:
        # Lightning warns where arguments come from the caller and from the process both.
        monkeypatch.setattr(sys, "argv", ["lightning-spmd"])
        status = 0
        try:
            cli.main(arguments)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        out, error = capsys.readouterr()
        return status, out, error

    return run
