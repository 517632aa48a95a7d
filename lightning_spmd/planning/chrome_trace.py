"""A plan as a trace that Perfetto and chrome://tracing open (Trace Event Format, the JSON object form).

A process is a phase, its threads are the device and the process groups; memory is a counter beside them. What was
measured follows, with a process for each rank and graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_spmd.planning.contents import KINDS
from lightning_spmd.planning.streams import COMPUTE

_MICRO = 1e6
Facts = Mapping[str, Any]


def trace_of(facts: Facts) -> dict[str, Any]:
    """The trace.

    Args:
        facts: ``facts_of`` an outlook.
    """
    phases = [*facts["phases"], *(p for rank in facts.get("measured", {}).get("ranks", ()) for p in rank["phases"])]
    events = [event for number, phase in enumerate(phases, 1) for event in _phase(phase, number)]
    events.sort(key=lambda event: event["ts"])  # names first: theirs is 0
    run = facts["run"]
    what = "predicted by lightning-spmd plan"
    if "measured" in facts:
        what += "; processes named after a rank: measured"
    told = {"ranks": str(run["ranks"]), "device": run["device"]["name"], "what": what}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def _phase(phase: Facts, pid: int) -> Iterator[dict[str, Any]]:
    streams = list(dict.fromkeys([COMPUTE, *(s["stream"] for s in phase["spans"])]))
    yield _named("process_name", pid, 0, phase["name"])
    yield {**_named("process_sort_index", pid, 0, ""), "args": {"sort_index": pid}}
    for tid, stream in enumerate(streams, 1):
        yield _named("thread_name", pid, tid, stream if stream == COMPUTE else f"communication: {stream}")
        yield {**_named("thread_sort_index", pid, tid, ""), "args": {"sort_index": tid}}
    for span in phase["spans"]:
        begin = max(0.0, span["begin"])  # what began in the iteration before is shown from this one's begin
        if span["end"] <= begin:
            continue
        tid = streams.index(span["stream"]) + 1
        yield {
            "name": span["name"], "cat": span["section"], "ph": "X", "pid": pid, "tid": tid,
            "ts": _MICRO * begin, "dur": _MICRO * (span["end"] - begin),
            "args": {"module": span["module"], "waited_us": _MICRO * span["waited"]},
        }  # fmt: skip
    for stall in phase["stalls"]:
        yield {
            "name": f"waits for {stall['for'] or 'communication'}", "cat": "wait", "ph": "X", "pid": pid, "tid": 1,
            "ts": _MICRO * stall["begin"], "dur": _MICRO * (stall["end"] - stall["begin"]), "args": {},
        }  # fmt: skip
    for point in phase["curve"]:
        held = {kind: point["bytes"][kind] for kind in KINDS}
        yield {"name": "memory", "ph": "C", "pid": pid, "tid": 0, "ts": _MICRO * point["at"], "args": held}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
