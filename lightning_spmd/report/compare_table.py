"""A comparison of strategies as a table for people and as JSON for programs."""

from __future__ import annotations

import io
import json
import platform
import statistics
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from rich.console import Console
from rich.table import Table

from lightning_spmd.report.measure import Amount, SideResult


@dataclass(frozen=True)
class Comparison:
    """Everything that was measured.

    Args:
        results: by side; ratios are to the first that ran, and to the first of this package's strategy.
        amount: how it was measured.
        ranks: processes that trained together.
        spmd: names of the sides that are this package's strategy.
    """

    results: list[SideResult]
    amount: Amount
    ranks: int
    spmd: tuple[str, ...] = ()

    @property
    def first(self) -> SideResult | None:
        """The first side that ran."""
        return next((r for r in self.results if r.reason is None), None)

    @property
    def first_spmd(self) -> SideResult | None:
        """The first side of this package's strategy that ran."""
        return next((r for r in self.results if r.reason is None and r.name in self.spmd), None)

    @property
    def _counts_bytes(self) -> bool:
        return any(result.sent for result in self.results)

    def row(self, result: SideResult) -> dict[str, Any]:
        """One side in numbers: seconds, bytes, ratios; None where there is none."""
        if result.reason is not None:
            return {"name": result.name, "reason": result.reason, "notes": result.notes}
        low, high = result.spread
        first, spmd = self.first, self.first_spmd
        return {
            "name": result.name,
            "median_seconds": result.median,
            "p10_seconds": low,
            "p90_seconds": high,
            "ratio_to_first": None if first is None else result.median / first.median,
            "ratio_to_spmd": None if spmd is None else result.median / spmd.median,
            "samples_per_second": result.rows / result.median,
            "peak_memory_bytes": result.peak_memory,
            "final_loss": result.final_loss,
            "loss_difference": _relative(result.final_loss, None if first is None else first.final_loss),
            "sent_bytes_per_step": None if not result.sent else statistics.median(result.sent),
            "seconds": result.seconds,
            "notes": result.notes,
        }

    def as_json(self) -> dict[str, Any]:
        """The comparison and how it came about, of values that JSON has."""
        return {
            "ranks": self.ranks,
            "steps": self.amount.steps,
            "warmup": self.amount.warmup,
            "rounds": self.amount.rounds,
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "sides": [self.row(result) for result in self.results],
        }

    def json_text(self) -> str:
        """:meth:`as_json` as text."""
        return json.dumps(self.as_json(), indent=2) + "\n"

    def table(self) -> Table:
        """The sides as rows."""
        table = Table(title=f"{self.ranks} ranks, {self.amount.rounds} rounds of {self.amount.steps} steps")
        table.add_column("strategy", no_wrap=True)
        first = self.first
        for heading in (
            "median ms",
            "p10-p90",
            f"÷ {first.name if first else 'first'}",
            *([f"÷ {self.first_spmd.name}"] if self.first_spmd is not None else []),
            "samples/s",
            "memory MiB",
            *(["sent MiB"] if self._counts_bytes else []),
            "last loss",
            "difference",
        ):
            table.add_column(heading, justify="right")
        for result in self.results:
            cells = _cells(self.row(result), with_spmd=self.first_spmd is not None, with_sent=self._counts_bytes)
            table.add_row(result.name, *cells)
        return table

    def table_text(self, width: int = 140) -> str:
        """The table, then why a side could not run and what the strategy said about itself."""
        console = Console(file=io.StringIO(), width=width, force_terminal=False)
        self.print_to(console)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def print_to(self, console: Console) -> None:
        """Print table, reasons and notes."""
        console.print(self.table())
        for result in self.results:
            if result.reason is not None:
                console.print(f"{result.name}: did not run: {result.reason}", markup=False, highlight=False)
            for note in result.notes:
                console.print(f"{result.name}: {note}", markup=False, highlight=False)


def _cells(row: dict[str, Any], *, with_spmd: bool, with_sent: bool) -> list[str]:
    if "reason" in row:
        return ["-"]
    memory, loss, difference = row["peak_memory_bytes"], row["final_loss"], row["loss_difference"]
    sent = row["sent_bytes_per_step"]
    return [
        f"{1e3 * row['median_seconds']:.1f}",
        f"{1e3 * row['p10_seconds']:.1f}-{1e3 * row['p90_seconds']:.1f}",
        f"{row['ratio_to_first']:.3f}",
        *([f"{row['ratio_to_spmd']:.3f}"] if with_spmd else []),
        f"{row['samples_per_second']:.1f}",
        "-" if memory is None else f"{memory / 2**20:.1f}",
        *(["-" if sent is None else f"{sent / 2**20:.2f}"] if with_sent else []),
        "-" if loss is None else f"{loss:.6g}",
        "-" if difference is None else f"{difference:.1e}",
    ]


def _relative(value: float | None, reference: float | None) -> float | None:
    if value is None or reference is None:
        return None
    return abs(value - reference) / max(abs(reference), 1e-12)
