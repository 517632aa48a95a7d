"""A plan as plain data, for ``--json``, tables and the page."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from lightning_spmd.cost.operators import specs_in, work_of
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.planning.contents import KINDS, Contents
from lightning_spmd.planning.outlook import Collective, Layer, Outlook, Phase
from lightning_spmd.planning.search import Search
from lightning_spmd.planning.streams import COMPUTE, Played

FORMAT = 1
"""Of the JSON file: it grows when a key changes its meaning."""
POINTS = 600
"""Of a memory curve: of the nodes between two of them the highest one is kept."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def facts_of(outlook: Outlook) -> dict[str, Any]:
    """All facts of a plan."""
    return {
        "format": FORMAT,
        "run": _run(outlook),
        "memory": _memory(outlook),
        "time": _time(outlook),
        "collectives": [dataclasses.asdict(c) for c in outlook.collectives()],
        "messages": summed(outlook.collectives()),
        "phases": [_phase(phase) for phase in outlook.phases],
        "modules": _modules(outlook),
        "edges": _edges(outlook),
        "operators": _operators(outlook),
        "parameters": _layers(outlook.layers),
        "remarks": list(outlook.remarks),
    }


def search_facts(found: Search) -> list[dict[str, Any]]:
    """The results of a search, the best first; layouts that were only estimated come last."""
    rows: list[dict[str, Any]] = []
    for candidate in [*found.built, *found.others]:
        outlook = candidate.outlook
        row: dict[str, Any] = {
            "options": candidate.options,
            "estimate": dataclasses.asdict(candidate.estimate),
            "reason": candidate.reason,
        }
        if outlook is not None:
            row.update(time=_time(outlook), fits=outlook.fits, needed=outlook.needed_bytes, rows=outlook.rows)
        rows.append(row)
    return rows


def pattern(name: str) -> str:
    """A module's path with its numbers left out: layers of one kind are one line."""
    return _NUMBER.sub("*", name)


def summed(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Collectives of one kind in one group as one entry."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for c in collectives:
        new: dict[str, Any] = {
            "kind": c.kind, "group": c.group, "ranks": c.ranks, "link": c.link,
            "count": 0, "bytes": 0, "seconds": 0.0, "exposed": 0.0,
        }  # fmt: skip
        entry = found.setdefault((c.group, c.kind), new)
        entry["count"] += 1
        entry["bytes"] += c.size
        entry["seconds"] += c.seconds
        entry["exposed"] += c.exposed
    return list(found.values())


def streams_facts(name: str, times: int, played: Played) -> dict[str, Any]:
    """The streams of a run of a graph, as pictures draw them.

    Args:
        name: of the phase.
        times: how often it runs in an iteration.
        played: the run.
    """
    spans = [
        {
            "stream": s.stream,
            "begin": s.begin - played.begin,
            "end": s.end - played.begin,
            "waited": 0.0 if s.stream == COMPUTE else played.waited(s.node),
            "name": str(s.node.target).removesuffix(".default"),
            "module": info_of(s.node).module,
            "section": str(info_of(s.node).section),
        }
        for s in [*played.carried, *played.spans]
    ]
    return {
        "name": name,
        "times": times,
        "seconds": played.seconds,
        "computing": played.computing,
        "exposed": played.exposed,
        "spans": spans,
        "stalls": [
            {"begin": s.begin - played.begin, "end": s.end - played.begin, "for": info_of(s.node).module}
            for s in played.stalls
        ],
    }


# ---------------------------------------------------------------- pieces
def _run(outlook: Outlook) -> dict[str, Any]:
    machines, layout = outlook.machines, outlook.layout
    return {
        "ranks": layout.ranks,
        "devices": layout.devices,
        "nodes": layout.nodes,
        "mesh": dict(outlook.axes),
        "options": {name: value for name, value in layout.options.items() if value is not None},
        "device": dataclasses.asdict(machines.device),
        "within": dataclasses.asdict(machines.within),
        "between": dataclasses.asdict(machines.between),
        "precision": outlook.precision,
        "rows": outlook.rows,
        "global_rows": outlook.global_rows,
    }


def _memory(outlook: Outlook) -> dict[str, Any]:
    highest = outlook.highest
    contents = highest.contents
    node = contents.peak_node
    by_pattern: dict[tuple[str, str], list[int]] = defaultdict(list)
    for held in contents.at_peak:
        by_pattern[pattern(held.module), held.kind].append(held.bytes)
    modules = [
        {"module": module, "kind": kind, "count": len(sizes), "bytes": sum(sizes)}
        for (module, kind), sizes in by_pattern.items()
    ]
    return {
        "peak": outlook.peak_bytes,
        "reserved": outlook.machines.device.reserved,
        "available": outlook.machines.device.memory,
        "fits": outlook.fits,
        "parameters": outlook.parameters,
        "phase": highest.name,
        "node": "" if node is None else str(node.target),
        "module": "" if node is None else info_of(node).module,
        "section": "" if node is None else str(info_of(node).section),
        "at_peak": contents.by_kind(),
        "always": {kind: outlook.always(kind) for kind in KINDS if outlook.always(kind)},
        "modules": sorted(modules, key=lambda m: -m["bytes"]),
        "tensors": [dataclasses.asdict(held) for held in contents.at_peak[:200]],
    }


def _time(outlook: Outlook) -> dict[str, Any]:
    return {
        "step": outlook.step_seconds,
        "computing": outlook.computing,
        "communicating": outlook.communicating,
        "exposed": outlook.exposed,
        "host_bound": outlook.idle,
        "mfu": outlook.mfu,
        "flops": outlook.flops,
        "rows_per_second": outlook.rows_per_second,
    }


def _phase(phase: Phase) -> dict[str, Any]:
    played = phase.played
    return {
        **streams_facts(phase.name, phase.times, played),
        "nodes": len(phase.step.graph_module.graph.nodes),
        "peak": phase.contents.peak,
        "curve": _curve(phase.contents, [at - played.begin for at in played.at]),
    }


def _curve(contents: Contents, at: Sequence[float]) -> list[dict[str, Any]]:
    """Bytes by kind over time."""
    width = max(1, -(-len(at) // POINTS))
    points: list[dict[str, Any]] = []
    for begin in range(0, len(at), width):
        here = max(range(begin, min(begin + width, len(at))), key=contents.total)
        points.append({"at": at[here], "total": contents.total(here), "bytes": contents.by_kind(here)})
    return points


def _modules(outlook: Outlook) -> list[dict[str, Any]]:
    """Time, arithmetic and traffic by module and section, over a steady iteration."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for phase in outlook.phases:
        for span in phase.played.spans if phase.times else ():
            info = info_of(span.node)
            new = {"module": info.module, "section": str(info.section), "seconds": 0.0, "messages": 0.0}
            entry = found.setdefault((info.module, str(info.section)), {**new, "flops": 0.0, "bytes": 0.0, "nodes": 0})
            work = work_of(span.node)
            entry["seconds" if span.stream == COMPUTE else "messages"] += phase.times * span.seconds
            entry["flops"] += phase.times * work.flops
            entry["bytes"] += phase.times * work.bytes
            entry["nodes"] += phase.times
    return list(found.values())


def _edges(outlook: Outlook) -> list[dict[str, Any]]:
    """Bytes that modules hand to each other in the forward pass."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    phase = first([p for p in outlook.phases if p.times], "steady phase")
    made_in: dict[fx.Node, str] = {}
    for node in phase.step.graph_module.graph.nodes:
        info = info_of(node)
        if node.op != "call_function" or info.section not in (Section.FORWARD, Section.COMMUNICATION):
            continue
        handed = [n for n in node.all_input_nodes if n in made_in]
        if info.section is Section.COMMUNICATION:  # what is gathered or reduced is still what its module made
            if handed:
                made_in[node] = made_in[handed[0]]
            continue
        made_in[node] = info.module
        for operand in handed:
            if made_in[operand] != info.module:
                found[made_in[operand], info.module] += sum(s.bytes for s in specs_in(operand.meta.get("val")))
    return [{"from": a, "to": b, "bytes": size} for (a, b), size in found.items()]


def _operators(outlook: Outlook) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for phase in outlook.phases:
        for span in phase.played.spans if phase.times else ():
            if span.stream == COMPUTE:
                name = str(span.node.target).removesuffix(".default")
                new: dict[str, Any] = {"operator": name, "seconds": 0.0, "count": 0, "flops": 0.0, "bytes": 0.0}
                entry, work = found.setdefault(name, new), work_of(span.node)
                entry["seconds"] += phase.times * span.seconds
                entry["count"] += phase.times
                entry["flops"] += phase.times * work.flops
                entry["bytes"] += phase.times * work.bytes
    return sorted(found.values(), key=lambda e: -e["seconds"])


def _layers(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Parameters of one kind that lie alike are one entry."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for layer in layers:
        places: Mapping[str, str] = layer.placements
        key = (pattern(layer.name), layer.shape, layer.local, tuple(places.items()))
        new: dict[str, Any] = {
            "name": key[0], "shape": list(layer.shape), "local": list(layer.local), "placements": dict(places),
            "count": 0, "bytes": 0,
        }  # fmt: skip
        entry = found.setdefault(key, new)
        entry["count"] += 1
        entry["bytes"] += layer.bytes
    return list(found.values())
