"""What is calibrated and what it is compared with."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_spmd.cli import measured
from lightning_spmd.cli.measured import WAITS, Lines, Measured, measured_facts
from lightning_spmd.cost.hardware import DEVICES, LINKS
from lightning_spmd.cost.operators import Work
from lightning_spmd.ir.verify import starts_collective
from lightning_spmd.planning import calibration
from lightning_spmd.planning.calibration import Calibration, calibrate, mean_of
from lightning_spmd.planning.chrome_trace import trace_of
from lightning_spmd.planning.facts import facts_of
from lightning_spmd.planning.page import page_of
from lightning_spmd.planning.streams import BETWEEN, COMPUTE
from lightning_spmd.planning.timed import predicted_waits, timed_facts
from lightning_spmd.report.measure import Amount, SideResult
from lightning_spmd.stages.runtime.stopwatch import Timed
from tests.helpers.ranks import RankPool
from tests.helpers.training import Result, assert_bitwise, fit
from tests.planning.common import Deep as PlannedDeep
from tests.planning.common import outlook
from tests.strategy.hooks.test_overlap import SMALL
from tests.strategy.hooks.test_pauses import Deep


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


def _trained(*callbacks: L.Callback) -> Result:
    L.seed_everything(5, verbose=False)
    data = torch.randn(4 * 16, 32, generator=torch.Generator().manual_seed(4))
    options = {"overlap_iterations": True, "bucket_size_mb": SMALL}
    return fit(Deep(), DataLoader(data, batch_size=2), options, 2, list(callbacks), max_epochs=1)[0]


def timed_rank() -> tuple[Result, Any, Result]:
    """What a rank trains and measures with clocks between the lines, and what it trains without."""
    lines = Lines()
    with mock.patch.object(measured, "LINES", Amount(steps=4, warmup=12, rounds=1)):  # the schedule ends at 20
        return _trained(lines), lines.facts, _trained()


@pytest.fixture(scope="module")
def timed(two_ranks: RankPool) -> list[tuple[Result, Any, Result]]:
    """What each rank gives."""
    return two_ranks.run(timed_rank)


@pytest.mark.matrix
def test_clocks_between_the_lines_change_no_bit(timed: list[tuple[Result, Any, Result]]) -> None:
    for found, facts, plain in timed:
        assert_bitwise(found, plain)
        assert set(facts["seconds"]) == {"computing", "exposed", "communicating", "between"}


@pytest.mark.matrix
def test_the_picture_of_overlapped_iterations(timed: list[tuple[Result, Any, Result]]) -> None:
    """What is under way at the end of an iteration is waited for in the next one."""
    for _, facts, _ in timed:
        assert_one_after_the_other(facts)


def assert_one_after_the_other(facts: Any) -> None:
    """Spans of a stream come one after the other, and messages begun before the iteration are among them."""
    (phase,) = facts["phases"]
    (host,) = [s for s in phase["spans"] if s["section"] == BETWEEN]
    assert host["end"] == pytest.approx(phase["seconds"])
    assert any(s["begin"] <= 0.0 for s in phase["spans"] if s["stream"] != COMPUTE), "begun in the iteration before"
    for stream in {s["stream"] for s in phase["spans"]}:
        line = sorted((s["begin"], s["end"]) for s in phase["spans"] if s["stream"] == stream)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(line)), "one after the other"
        assert line[-1][1] <= phase["seconds"] + 1e-9


def test_a_wait_says_whose_messages_it_is_for() -> None:
    found = outlook({"overlap_iterations": False, "bucket_size_mb": 0.004}, 2, 2, device="cpu", make=PlannedDeep)
    waits = predicted_waits(found)
    assert sum(wait["seconds"] for wait in waits) == pytest.approx(found.exposed)
    assert any("common.py:" in wait["of"] for wait in waits)
    assert any("layers." in wait["of"] for wait in waits)


def test_the_page_and_the_trace_show_each_rank() -> None:
    """The largest waits are those of the rank that waited longest, beside the least of all ranks."""
    found = outlook({}, 2, device="cpu", make=PlannedDeep)
    (main,) = [phase for phase in found.phases if phase.times]
    nodes = [n.name for n in main.step.graph_module.graph.nodes if n.op == "call_function"]
    starts = [n.name for n in main.step.graph_module.graph.nodes if starts_collective(n)]
    ranks: list[Any] = []
    for rank in range(2):
        seconds = dict.fromkeys(nodes, (1 + rank) * 1e-3)
        timed = Timed("apply", main.step, 10, seconds, 2e-3, 1.0, 5e-3, dict.fromkeys(starts, 4e-3))
        ranks.append(timed_facts([timed], 10, 10))
    side = SideResult("spmd", [0.25, 0.26])
    measured = measured_facts(found, Measured(side, None, None, 1.0, ranks))
    assert measured["between"]["measured"] == 5e-3
    longest = [wait for wait in measured["waits"] if wait["side"] == "measured"]
    assert 0 < len(longest) <= WAITS
    assert all((w["rank"], w["seconds"], w["least"]) == pytest.approx((1, 2e-3, 1e-3)) for w in longest)
    facts = {**facts_of(found), "measured": measured}
    text = page_of(json.loads(json.dumps(facts)))
    assert 'id="measured-0"' in text
    assert 'id="measured-1"' in text
    assert BETWEEN in text
    names = {e["args"]["name"] for e in trace_of(facts)["traceEvents"] if e["name"] == "process_name"}
    assert {"rank 0", "rank 1", "main"} <= names


def test_a_calibration_gives_every_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LEAST_SECONDS", 0.0)
    found = calibrate()
    device = found.device(DEVICES["cpu"])
    shares = (device.attention_share, device.convolution_share, device.curve_share, device.reduction_share)
    assert all(0 < share <= 1 for share in shares)
    assert 0 < found.on_cpu <= 1
    assert device.launch < 1e-3
    assert found.link(LINKS["loopback"]) is LINKS["loopback"], "one rank has no link"


def test_convolutions_may_be_faster_than_products() -> None:
    """Seen: their speed was taken to be that of products at most, and a plan 1.33 of what was measured."""
    names = ("fp32", "bf16", "fp64", "add", "curve", "reduction", "attention", "convolution", "launch")
    seconds = dict.fromkeys(names, 0.1)
    some = Calibration({**seconds, "convolution": 1e-4}, None, 0.0, 1.0)
    device = some.device(DEVICES["cpu"])
    flops = 3 * 2.0 * 16 * 16 * 32 * 9 * 32**2
    assert device.seconds(Work(flops, 0.0, kind="convolution")) == pytest.approx(1e-4)
    products = 3 * 2.0 * 2048 * (128 * 512 + 512 * 512)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert device.seconds(Work(products, 0.0, dtype)) == pytest.approx(0.1)
    assert max(device.attention_share, device.convolution_share, device.flops_share) == 1.0


def test_of_several_the_mean_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [Calibration({"add": 1.0}, (1.0, 3.0), 0.2, 0.5), Calibration({"add": 3.0}, (3.0, 5.0), 0.4, 1.0)]
    both = mean_of(some)
    assert (both.seconds, both.all_reduces, both.on_cpu) == ({"add": 2.0}, (2.0, 4.0), 0.75)
    monkeypatch.setattr(calibration.dist, "get_world_size", lambda: 2)
    link = both.link(LINKS["loopback"])
    assert link.start == 2.0
    assert link.bandwidth == pytest.approx(((8 << 20) - (1 << 10)) / 2.0)
    assert link.core == pytest.approx(0.3)
