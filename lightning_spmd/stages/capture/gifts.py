"""Objects that a library gave to the user's code, and that nobody has once the step is over: they are no state.

``config = copy.copy(self.config); config.layers = 2``, or ``call = signature.bind(x); call.apply_defaults()``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning_spmd.stages.capture.holders import Holder


class Gifts:
    """What libraries gave while a step was captured.

    Args:
        holders: everything that was met.
        kept: what keeps it alive for the capture's sake.
    """

    def __init__(self, holders: Sequence[Holder], kept: Iterable[Any]) -> None:
        self._holders, self._kept = holders, kept
        self._given: set[int] = set()
        self._known: dict[int, bool] = {}

    def add(self, value: Any) -> None:
        """A library gave ``value``, which was met nowhere else."""
        self._given.add(id(value))

    def are_gone(self, holder: Holder) -> bool:
        """Whether nothing but the capture has what ``holder`` is in; then no graph depends on it.

        To be asked when the step is over, of what the step changed: it takes a look at all objects.
        """
        outermost = _outermost(holder).subject
        if id(outermost) not in self._given or not gc.is_tracked(outermost):
            return False
        known = self._known.get(id(outermost))
        if known is None:
            known = self._known[id(outermost)] = not any(map(self._is_strange(), gc.get_referrers(outermost)))
            for other in self._holders if known else ():
                if _outermost(other).subject is outermost:
                    other.guarded = False
        return known

    def _is_strange(self) -> Callable[[Any], bool]:
        """Tells whether an object that refers to one of them is not of this capture."""
        entries = [entry for holder in self._holders for entry in holder.entries.values()]
        own = {id(thing) for thing in (*self._kept, *self._holders, *entries)}
        own |= {id(vars(holder)) for holder in self._holders}
        return lambda thing: id(thing) not in own


def _outermost(holder: Holder) -> Holder:
    return holder if holder.place is None else list(holder.place.way())[-1].holder
