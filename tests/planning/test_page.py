"""The page and the trace, read as a browser and Perfetto read them; ``test_browser.py`` has a real browser."""

from __future__ import annotations

import json
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest

from lightning_spmd.planning.chrome_trace import trace_of
from lightning_spmd.planning.facts import facts_of
from lightning_spmd.planning.page import page_of
from lightning_spmd.planning.page.sharding import stretches

from .common import Deep, outlook

_VOID = {"meta", "br"}


@cache
def _facts() -> Any:
    found = outlook({"overlap_iterations": True, "bucket_size_mb": 0.004}, 2, 2, device="cpu", make=Deep)
    return json.loads(json.dumps(facts_of(found)))


class _Page(HTMLParser):
    """Elements by id, and whether every one that opens also closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.inside: dict[str, list[str]] = {}
        self.outside: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.outside += [str(v) for k, v in attrs if k in ("src", "href") and not str(v).startswith("#")]
        for _, name in self.open:
            self.inside.setdefault(name, []).append(tag)
        if tag not in _VOID:
            self.open.append((tag, given.get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_has_its_pictures_and_needs_nothing_else() -> None:
    text = page_of(_facts())
    page = _Page(text)
    assert page.outside == []
    assert "@import" not in text
    assert "http" not in text
    assert page.inside["timeline"].count("rect") > 20
    assert page.inside["memory-curve"].count("polygon") >= 3 * len(_facts()["phases"])
    assert page.inside["sharding"].count("svg") == len(_facts()["parameters"])
    assert page.inside["flow"].count("rect") >= 2
    assert "details" in page.inside["modules"]
    said = " ".join(page.texts)
    for word in ("setup", "main", "cleanup", "compute", "data messages", "layers.*.weight × 4", "Predicted"):
        assert word in said


def test_one_node_is_no_plural() -> None:
    facts = {**_facts(), "run": {**_facts()["run"], "nodes": 1}}
    assert "2 nodes of 2: " in page_of(_facts())
    assert "<p>one node: " in page_of(facts)


def test_names_of_modules_cannot_break_the_page() -> None:
    facts = json.loads(json.dumps(_facts()).replace("layers.", "<b>&."))
    text = page_of(facts)
    _Page(text)
    assert "<b>&." not in text


def test_the_trace_is_trace_event_json() -> None:
    trace = json.loads(json.dumps(trace_of(_facts()), allow_nan=False))
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    needed = {
        "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"},
        "C": {"name", "ph", "pid", "tid", "ts", "args"},
    }
    for event in events:
        assert set(event) == needed.get(event["ph"], needed["C"]), event
        assert event["ph"] in ("X", "C", "M"), event
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        numbers = event["ph"] != "C" or all(isinstance(v, (int, float)) and v >= 0 for v in event["args"].values())
        assert numbers, "a counter's arguments are its numbers"
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["setup", "main", "cleanup"]
    assert {"compute", "communication: data_parallel"} <= set(named.values())
    timed = [e for e in events if e["ph"] == "X"]
    assert timed
    last: dict[tuple[int, int], float] = {}
    for event in sorted(timed, key=lambda e: (e["pid"], e["tid"], e["ts"])):
        thread = event["pid"], event["tid"]
        assert thread in named
        assert event["dur"] > 0
        assert event["ts"] >= last.get(thread, 0.0) - 1e-6, "spans of a thread must not cross"
        last[thread] = event["ts"] + event["dur"]
    counters = [e for e in events if e["ph"] == "C"]
    assert max(sum(e["args"].values()) for e in counters) == _facts()["memory"]["peak"]


@pytest.mark.parametrize(
    ("placements", "local", "held"),
    [
        ({"data_parallel": "R"}, 8, [(0.0, 1.0)]),
        ({"data_parallel": "C(0)"}, 2, [(0.0, 0.25)]),
        ({"tensor_parallel": "S(0)"}, 4, [(0.0, 0.5)]),
        ({"tensor_parallel": "S(0,outer=2)"}, 4, [(0.0, 0.25), (0.5, 0.25)]),
        ({"tensor_parallel": "S(0,outer=2)", "data_parallel": "C(0)"}, 1, [(0.0, 0.125)]),
        ({"tensor_parallel": "S(1)"}, 8, [(0.0, 1.0)]),
    ],
)
def test_what_rank_0_holds_is_drawn(placements: dict[str, str], local: int, held: list[Any]) -> None:
    mesh = {"data_parallel": 4, "tensor_parallel": 2}
    assert stretches(placements, 0, mesh, {"shape": [8, 8], "local": [local, 8]}) == held
