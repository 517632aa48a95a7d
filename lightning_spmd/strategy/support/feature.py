"""A row of the support matrix, and its detection in a run."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lightning_spmd.strategy.support.detectors import Detector


class Mode(enum.StrEnum):
    """How a training iteration runs."""

    COMPILED = "compiled"
    SPLIT = "split"
    EAGER = "eager"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Feature:
    """One row of the matrix.

    Args:
        name: the flag, hook or callback, in Lightning's words.
        mode: the mode that it gets.
        note: the reason, or what to know; for rejected features the fix.
        detect: returns what it found (for the message), or None.
    """

    name: str
    mode: Mode
    note: str
    detect: Detector


@dataclass(frozen=True)
class Finding:
    """A feature of this run that is not simply compiled."""

    feature: Feature
    found: str

    def __str__(self) -> str:
        return f"{self.found}: {self.feature.note}"
