"""Captured steps for batches of all sizes that a trace with symbols treats alike."""

from __future__ import annotations

from typing import Any

from lightning_spmd import _private_api as private
from lightning_spmd.ir.family import Family, rebuilt
from lightning_spmd.ir.sizes import Formula, Size, Sizes, sized
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages.capture.sizes.symbolic_batch import Symbol, SymbolicBatch


class NotGeneral(Exception):
    """One graph cannot serve other sizes. The message is the reason, for users."""


def family_of(step: CapturedStep, batch: SymbolicBatch) -> Family:
    """The family of a step that was traced with symbols.

    Args:
        step: the step.
        batch: that it was traced on.

    Raises:
        NotGeneral: a number of it has no formula that gives the same bits.
    """
    symbols = batch.symbols
    sizes = Sizes(tuple(batch.sizes), symbols.conditions())

    def number_of(value: Any) -> Any:
        value = value.value if isinstance(value, Symbol) else value
        if not private.is_symbol(value):
            return value
        number = private.seen_value(value)
        code = None if isinstance(number, bool) else symbols.code(value)
        return number if code is None else sized(number, Formula(code), sizes)

    try:
        family = rebuilt(step, number_of)
        places = tuple(number_of(symbol) for symbol in batch.numbers)
    except ValueError as error:
        raise NotGeneral(f"a number is rounded more than once on its way ({error})") from error
    found = tuple(p.formula if isinstance(p, Size) else int(p) for p in places)
    return Family(family, sizes, tuple(batch.sizes.values()), found, symbols.fixed())
