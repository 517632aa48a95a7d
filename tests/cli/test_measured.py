"""What is calibrated and what it is compared with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spmd.cli.measured import Measured, measured_facts
from lightning_spmd.cost.hardware import DEVICES, LINKS
from lightning_spmd.planning import calibration
from lightning_spmd.planning.calibration import Calibration, calibrate, mean_of
from lightning_spmd.report.measure import SideResult


def test_a_batch_is_compared_with_a_batch() -> None:
    """Seen: with accumulated batches all of an iteration was compared with one of its batches."""
    outlook: Any = SimpleNamespace(
        step_seconds=1.0, exposed=0.2, micro_batches=4, peak_bytes=100,
        highest=SimpleNamespace(contents=SimpleNamespace(always={"parameters": 40})),
    )  # fmt: skip
    facts = measured_facts(outlook, Measured(SideResult("spmd", [0.25, 0.26]), 60, 0.1, 0.5))
    assert facts["step"]["predicted"] == 0.25
    assert facts["processor"] == {"predicted": pytest.approx(0.1), "measured": 0.1}
    assert facts["memory"] == {"predicted": 60, "measured": 60}


def test_a_calibration_gives_every_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LEAST_SECONDS", 0.0)
    found = calibrate()
    device = found.device(DEVICES["cpu"])
    shares = (device.attention_share, device.convolution_share, device.curve_share, device.reduction_share)
    assert all(0 < share <= 1 for share in shares)
    assert 0 < found.on_cpu <= 1
    assert device.launch < 1e-3
    assert found.link(LINKS["loopback"]) is LINKS["loopback"], "one rank has no link"


def test_of_several_the_mean_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [Calibration({"add": 1.0}, (1.0, 3.0), 0.5), Calibration({"add": 3.0}, (3.0, 5.0), 1.0)]
    both = mean_of(some)
    assert (both.seconds, both.all_reduces, both.on_cpu) == ({"add": 2.0}, (2.0, 4.0), 0.75)
    monkeypatch.setattr(calibration.dist, "get_world_size", lambda: 2)
    link = both.link(LINKS["loopback"])
    assert link.start == 2.0
    assert link.bandwidth == pytest.approx(((8 << 20) - (1 << 10)) / 2.0)
