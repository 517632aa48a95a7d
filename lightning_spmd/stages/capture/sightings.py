"""What the frames of a captured step could see: holders, their entries, and the tensors in them.

``walk.py`` fills this in; ``state_guard.py`` makes guards of it, ``side_effects.py`` finds what the step changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from lightning_spmd.stages.capture.code_facts import CodeFacts
from lightning_spmd.stages.capture.containers import Content, Entries, Items, Members
from lightning_spmd.stages.capture.gifts import Gifts
from lightning_spmd.stages.capture.holders import Attributes, Closure, Entry, Fields, Holder

H = TypeVar("H", bound=Holder)
_MAIN_KINDS = (Attributes, Fields, Entries, Items, Members, Closure, Content)


class Sightings:
    """Everything that was met, and where.

    Args:
        module: the LightningModule.
        optimizer: its optimizer, or None.

    Attributes:
        holders: in the order in which they were met; what leads to a holder comes before it.
        tensors: where a tensor was met, by its ``id``.
        substitutes: what was put into an entry for the time of the capture.
        places: entries that lead to a value whose inside was not looked at, by ``id`` of the value.
        hidden: modules that are not registered below the LightningModule.
        caches: functions with a ``functools.lru_cache`` that were met.
        untold: paths that cannot be compared, with the reason.
        gifts: what libraries gave to the step.
        left_alone: ids of what is not looked into.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        self.module, self.optimizer = module, optimizer
        self.modules = {id(m): path for path, m in module.named_modules()}
        self.holders: list[Holder] = []
        self.tensors: dict[int, list[Entry]] = {}
        self.substitutes: dict[Entry, Any] = {}
        self.places: dict[int, Entry] = {}
        self.hidden: list[nn.Module] = []
        self.caches: list[Any] = []
        self.untold: dict[str, str] = {}
        self._by_subject: dict[tuple[int, type[Holder]], Holder] = {}
        self._made_here: set[int] = set()
        self._alive: list[Any] = []
        self.gifts = Gifts(self.holders, self._alive)
        self.left_alone: set[int] = set()

    def holder(self, kind: type[H], subject: Any, path: str, place: Entry | None, **how: Any) -> H:
        """The holder of ``subject``; a new one if it was not met."""
        key = (id(subject), kind)
        holder = self._by_subject.get(key)
        if holder is None:
            holder = self._by_subject[key] = kind(subject, path, place, **how)
            self.holders.append(holder)
        elif place is not None and holder.place is None and not holder.root:
            holder.lead_from(place)  # met before as an argument, now where it lasts
        elif place is not None and holder.place is not place:
            holder.shared = True
        return holder  # type: ignore[return-value] - filed under its kind

    def root(self, kind: type[H], subject: Any, path: str) -> H:
        """The holder of something that is always the same."""
        holder = self.holder(kind, subject, path, None)
        holder.root = True
        return holder

    def lasts(self, value: Any) -> None:
        """``value`` is no object of the step's own, though nothing that was met leads to it."""
        for holder in self._holders_of(value):
            holder.root = True

    def met_again(self, value: Any, place: Entry | None) -> None:
        """A second entry leads to ``value``."""
        for holder in self._holders_of(value):
            if place is not None and holder.place is None and not holder.root:
                holder.lead_from(place)
            elif holder.place is not place and place is not None:
                holder.shared = True

    def was_met(self, value: Any) -> bool:
        """Whether it is known."""
        return id(value) in self.modules or id(value) in self.places or any(True for _ in self._holders_of(value))

    def _holders_of(self, value: Any) -> Iterator[Holder]:
        for kind in _MAIN_KINDS:
            if (holder := self._by_subject.get((id(value), kind))) is not None:
                yield holder

    def keep(self, *values: Any) -> None:
        """Keep values alive, so that their ``id`` stays theirs."""
        self._alive.append(values)

    def leave_alone(self, value: Any) -> None:
        """Nothing of ``value`` counts but what is noted elsewhere."""
        self.left_alone.add(id(value))
        self.keep(value)

    def was_made_here(self, value: Any) -> None:
        """The step itself makes ``value``."""
        self._made_here.add(id(value))
        self.keep(value)

    def may_last(self, holder: Holder) -> bool:
        """Whether the step did not make for itself what ``holder`` holds, as far as can be seen."""
        if holder.lasts:
            return True
        return isinstance(holder, (Attributes, Fields)) and id(holder.subject) not in self._made_here


EMPTY = CodeFacts.nothing()
"""Looks into containers alone."""
