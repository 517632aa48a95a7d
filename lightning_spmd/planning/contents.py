"""The contents of a rank's memory while a graph runs, by kind; ``cost/memory.py`` counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from lightning_spmd.cost.memory import Liveness, Storage, liveness
from lightning_spmd.ir.node_info import Section, info_of, value_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep

PARAMETERS, STATE, INPUTS = "parameters", "optimizer state", "batch and other inputs"
ACTIVATIONS, GRADIENTS, MESSAGES, WORKSPACE = "activations", "gradients", "communication", "intermediate results"
KINDS = (PARAMETERS, STATE, INPUTS, GRADIENTS, ACTIVATIONS, MESSAGES, WORKSPACE)
"""What memory holds, as pictures stack it: what lies there always comes first."""

_OF_ROLE = {
    InputRole.PARAMETER: PARAMETERS,
    InputRole.BUFFER: PARAMETERS,
    InputRole.OPTIMIZER_STATE: STATE,
    InputRole.GRADIENT: GRADIENTS,
}
_UPDATE = (Section.CLIP, Section.OPTIMIZER)


@dataclass(frozen=True)
class Held:
    """A tensor in memory.

    Args:
        module: path of the module that made it.
        kind: one of ``KINDS``.
        what: operator and shape.
        bytes: its size.
        source: the user's line.
    """

    module: str
    kind: str
    what: str
    bytes: int
    source: str


@dataclass(frozen=True)
class Contents:
    """The contents of memory while a graph runs.

    Args:
        always: bytes by kind that are always there.
        curve: by position in the graph, bytes by kind of temporary tensors.
        peak_at: position of the peak.
        at_peak: temporary tensors at the peak, the largest first.
        peak_node: the node that runs at the peak.
    """

    always: Mapping[str, int]
    curve: Sequence[Mapping[str, int]]
    peak_at: int
    at_peak: Sequence[Held]
    peak_node: fx.Node | None

    def total(self, position: int) -> int:
        """All bytes at a position."""
        return sum(self.always.values()) + sum(self.curve[position].values())

    @property
    def peak(self) -> int:
        """Bytes at the highest point."""
        return self.total(self.peak_at) if self.curve else sum(self.always.values())

    def by_kind(self, position: int | None = None) -> dict[str, int]:
        """Bytes by kind at a position; by default at the highest point."""
        where = self.peak_at if position is None else position
        moving = self.curve[where] if self.curve else {}
        return {kind: self.always.get(kind, 0) + moving.get(kind, 0) for kind in KINDS}


def contents_of(step: ShardedStep) -> Contents:
    """The contents of memory while the graph runs."""
    found = liveness(step.graph_module.graph, step.signature)
    always = Counter[str]()
    for role, size in found.inputs.items():
        always[_OF_ROLE.get(role, INPUTS)] += size
    kinds = [_kind_of(found, storage) for storage in found.storages]
    curve = _curve(found, kinds)
    totals = [sum(here.values()) for here in curve]
    peak_at = max(range(len(totals)), key=totals.__getitem__, default=0)
    there = [
        _held(storage, kind)
        for storage, kind in zip(found.storages, kinds, strict=True)
        if storage.first <= peak_at <= storage.last
    ]
    there.sort(key=lambda held: -held.bytes)
    return Contents(dict(always), curve, peak_at, there, found.order[peak_at] if found.order else None)


def _kind_of(found: Liveness, storage: Storage) -> str:
    section = info_of(storage.maker).section
    end = found.order[storage.last]
    read_last = info_of(end).section
    if storage.maker.op == "placeholder" or section is Section.COMMUNICATION and storage.leaves:
        return MESSAGES  # handed on from one iteration to the next
    if storage.leaves and end.op == "output":
        return WORKSPACE if section is Section.FORWARD else GRADIENTS
    if section is Section.FORWARD:
        return ACTIVATIONS if read_last is not Section.FORWARD else WORKSPACE
    if read_last in _UPDATE and section not in _UPDATE:
        return GRADIENTS
    return MESSAGES if section is Section.COMMUNICATION else WORKSPACE


def _curve(found: Liveness, kinds: Sequence[str]) -> list[dict[str, int]]:
    changes: list[Counter[str]] = [Counter() for _ in range(len(found.order) + 1)]
    for storage, kind in zip(found.storages, kinds, strict=True):
        changes[storage.first][kind] += storage.bytes
        changes[storage.last + 1][kind] -= storage.bytes
    here = Counter[str]()
    curve: list[dict[str, int]] = []
    for change in changes[:-1]:
        here.update(change)
        curve.append({kind: size for kind, size in here.items() if size})
    return curve


def _held(storage: Storage, kind: str) -> Held:
    info = info_of(storage.maker)
    value = value_of(storage.maker)
    shape = str(value) if not isinstance(value, (tuple, list)) else "one of several results"
    name = str(storage.maker.target).removesuffix(".default")
    return Held(info.module, kind, f"{name} {shape}", storage.bytes, info.source)
