"""The untidy steps of ``tests/untidy`` on this device against Lightning's own training of them on it.

What Python keeps, prints and draws must be eager's; numbers may be rounded otherwise. What ends in an error without
this package (tensors that a step makes on the CPU) says nothing and is counted apart.
"""

from __future__ import annotations

import time
import traceback
from typing import Any

from lightning_spmd import messages
from tests.gpu.child import Setting, exact
from tests.untidy.cases import CASES
from tests.untidy.not_yet import NOT_YET, PARTLY_EAGER
from tests.untidy.running import NEAR, differences, run_case
from tests.untidy.untidy import STEPS

TOY_CASES = 4
SHORTEST = 5.0
"""Seconds that must be left for a case to begin."""


def same_as_eager(setting: Setting, slice_of: str) -> dict[str, Any]:
    """Some of the cases, one after the other.

    Args:
        setting: where.
        slice_of: ``"0/3"`` is the first of three slices.
    """
    exact()
    number, count = map(int, slice_of.split("/"))
    names = [name for name in CASES if name not in NOT_YET][number::count]
    accelerator = "gpu" if setting.device == "cuda" else "cpu"
    rows: list[dict[str, Any]] = []
    for name in names[:TOY_CASES] if setting.toy else names:
        if time.monotonic() + SHORTEST > setting.deadline:
            break
        rows.append(_row(name, accelerator))
        setting.write(_found(rows, len(names)))
    return _found(rows, len(names))


def _row(name: str, accelerator: str) -> dict[str, Any]:
    try:
        eager = run_case(name, "auto", accelerator=accelerator)
    except Exception as error:
        return {"case": name, "eager_fails": _first_line(error)}
    said: list[str] = []
    messages.hear(said)
    try:
        ours = run_case(name, "spmd", accelerator=accelerator)
    except Exception as error:
        traceback.print_exc()
        return {"case": name, "found": [_first_line(error)]}
    finally:
        messages.hear_no_more(said)
    found = differences(ours, eager, NEAR)
    if ours.runs != STEPS:
        found.append(f"training_step ran {ours.runs} times in {STEPS} steps")
    if ours.how != "graph" and name not in PARTLY_EAGER:
        found.append(f"{ours.how}: {' '.join(text for text in said if 'eager' in text)[:600]}")
    return {"case": name, "how": ours.how, "found": found, "seconds": [eager.seconds, ours.seconds]}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}"


def _found(rows: list[dict[str, Any]], count: int) -> dict[str, Any]:
    compared = [row for row in rows if "found" in row]
    wrong = [f"{row['case']}: {'; '.join(row['found'])}" for row in compared if row["found"]]
    note = f"{len(compared) - len(wrong)} of {len(compared)} as eager"
    if len(rows) > len(compared):
        note += f"; {len(rows) - len(compared)} fail without this package: {rows_that_fail(rows)}"
    if len(rows) < count:
        note += f"; {count - len(rows)} of {count} not begun"
    return {
        "kind": "untidy",
        "rows": rows,
        "note": note,
        "passed": bool(compared) and not wrong,
        "reason": "\n".join(wrong),
    }


def rows_that_fail(rows: list[dict[str, Any]]) -> str:
    """Names of the cases that end in an error without this package."""
    return ", ".join(row["case"] for row in rows if "eager_fails" in row)
