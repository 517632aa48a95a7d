"""A plan's numbers: they add up, and they are those of the graphs that would run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lightning_spmd.cost.hardware import DEVICES, LINKS, Machines
from lightning_spmd.cost.memory import liveness
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.planning.contents import PARAMETERS, STATE
from lightning_spmd.planning.facts import facts_of
from lightning_spmd.planning.layout import Layout
from lightning_spmd.planning.outlook import Outlook, outlook_of
from lightning_spmd.planning.streams import COMPUTE

from .common import WIDTH, Deep, captured, outlook

SMALL = {"bucket_size_mb": 0.004}
NUMBERS = WIDTH * WIDTH + WIDTH + 1


@pytest.mark.parametrize("options", [{}, {"data_parallel": "zero2"}, {"data_parallel": "zero3"}])
def test_what_a_rank_keeps_follows_from_the_plan(options: dict[str, Any]) -> None:
    found = outlook(options, 8)
    chunk = 4 * (WIDTH // 8 * WIDTH + WIDTH + 1)  # the head has one row, which is one rank's
    whole = 4 * NUMBERS
    assert found.always(PARAMETERS) == (chunk if options.get("data_parallel") == "zero3" else whole)
    counters = 3 * 4
    assert found.always(STATE) == 2 * (chunk if options else whole) + counters
    assert found.parameters == NUMBERS


@pytest.mark.parametrize("options", [{}, {"data_parallel": "zero2"}, {"data_parallel": "zero3"}])
def test_memory_by_kind_adds_up_to_the_count_of_the_graph(options: dict[str, Any]) -> None:
    for phase in outlook(options, 8).phases:
        counted = liveness(phase.step.graph_module.graph, phase.step.signature)
        assert phase.contents.peak == counted.total
        fixed = sum(counted.inputs.values())
        totals = [phase.contents.total(i) - fixed for i in range(len(counted.alive))]
        assert totals == list(counted.alive)


def test_the_streams_of_a_rank_add_up() -> None:
    found = outlook({"overlap_iterations": True, **SMALL}, 2, 2, device="cpu", make=Deep)
    assert [p.name for p in found.phases] == ["setup", "main", "cleanup"]
    for phase in found.phases:
        streams: dict[str, float] = {}
        for span in phase.played.spans:
            assert span.begin >= streams.get(span.stream, 0.0), "a stream does one thing at a time"
            streams[span.stream] = span.end
        computing = [s for s in phase.played.spans if s.stream == COMPUTE]
        assert all(phase.played.begin <= s.begin <= s.end <= phase.played.end + 1e-12 for s in computing)
    assert found.step_seconds == pytest.approx(found.computing + found.exposed + found.idle)
    assert found.exposed <= found.step_seconds


def test_what_overlaps_is_not_waited_for() -> None:
    apart = outlook({"overlap_iterations": False, **SMALL}, 2, 2, device="cpu", make=Deep)
    overlapping = outlook({"overlap_iterations": True, **SMALL}, 2, 2, device="cpu", make=Deep)
    assert overlapping.exposed < apart.exposed
    assert overlapping.step_seconds < apart.step_seconds
    assert overlapping.communicating == pytest.approx(apart.communicating)


def test_a_core_that_sends_does_not_compute() -> None:
    layout = Layout({"overlap_iterations": True, **SMALL}, 2, 1)
    capture = captured(layout.batches, Deep)
    slow = replace(LINKS["loopback"], start=1e-3)
    free, busy = (
        outlook_of(capture, layout, Machines(DEVICES["cpu"], 2, 1, replace(slow, core=core))) for core in (0.0, 0.4)
    )
    assert free.communicating == pytest.approx(busy.communicating)
    assert free.computing == pytest.approx(busy.computing)
    lost = busy.idle - free.idle
    assert lost == pytest.approx(0.4 * busy.communicating)
    assert busy.step_seconds <= free.step_seconds + lost, "what is lost while it waits anyway is not lost twice"


def _collectives(found: Outlook) -> dict[str, int]:
    counts: dict[str, int] = {}
    for collective in found.collectives():
        counts[collective.kind] = counts.get(collective.kind, 0) + 1
    return counts


def test_collectives_are_those_of_the_graph_and_do_not_grow_with_ranks() -> None:
    few, many = outlook({"data_parallel": "zero3"}, 8), outlook({"data_parallel": "zero3"}, 8, 16)
    assert _collectives(few) == _collectives(many)
    assert {c.ranks for c in many.collectives()} == {128}
    assert {c.link for c in few.collectives()} == {"nvlink4"}
    assert {c.link for c in many.collectives()} == {"infiniband-ndr"}


def test_hybrid_sharding_has_its_own_groups() -> None:
    found = outlook({"data_parallel": "zero3", "data_parallel_shard_size": "node"}, 4, 2)
    assert (found.groups["shard"].size, found.groups["replica"].size) == (4, 2)
    links = {c.group: c.link for c in found.collectives()}
    assert links["shard"] == "nvlink4"
    assert links["replica"] == "infiniband-ndr"


def test_one_device_has_no_collectives() -> None:
    found = outlook({}, 1)
    assert not list(found.collectives())
    assert found.exposed == 0.0


def test_an_iteration_of_several_batches_is_counted_whole() -> None:
    one, three = outlook({}, 2), outlook({}, 2, accumulate_grad_batches=3)
    assert three.flops == 3 * one.flops
    assert [p.times for p in three.phases if p.times] == [1, 1, 1]
    assert sum(p.times * p.played.seconds for p in three.phases) == three.step_seconds


def test_a_device_that_is_too_small_is_said_to_be() -> None:
    assert outlook({}, 2).fits
    small = outlook({}, 2)
    assert small.needed_bytes > small.machines.device.reserved


def test_axes_that_do_not_fill_the_ranks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="context_parallel_size=3"):
        outlook({"context_parallel_size": 3}, 8)


def test_batches_of_each_rank_alone_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="batch='local'"):
        outlook({"batch": "local"}, 8)


def test_facts_are_json() -> None:
    facts = facts_of(outlook({"data_parallel": "zero2"}, 8, 2))
    again = json.loads(json.dumps(facts))
    assert again["run"]["ranks"] == 16
    assert sum(again["memory"]["at_peak"].values()) == again["memory"]["peak"]
    assert all(p["total"] == sum(p["bytes"].values()) for phase in again["phases"] for p in phase["curve"])
    assert max(p["total"] for phase in again["phases"] for p in phase["curve"]) == again["memory"]["peak"]
