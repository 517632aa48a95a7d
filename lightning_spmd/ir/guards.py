"""Conditions for using a captured graph again.

There are two kinds. *Value guards*: a named Python value (attribute, flag) must equal the captured one. *Predicate
guards*: a comparison that user or optimizer code made on a host number (``batch_idx % 100 == 0``, ``rho_t > 5``) must
have the same outcome for this step's numbers. So a counter does not force a new graph in each step, but a changed
decision does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ValueGuard:
    """``read()`` must equal ``expected``; ``difference(expected, seen)`` says what changed, if repr() does not."""

    name: str
    read: Callable[[], Any]
    expected: Any
    difference: Callable[[Any, Any], str] | None = None

    def failure(self) -> str | None:
        """Why the guard fails now, or None."""
        try:
            seen = self.read()
        except AttributeError:
            seen = "<missing>"
        same = type(seen) is type(self.expected) and seen == self.expected
        if same:
            return None
        if self.difference is not None:
            return f"{self.name} changed: {self.difference(self.expected, seen)}"
        return f"{self.name} changed from {_short(self.expected)} to {_short(seen)}"


@dataclass(frozen=True)
class PredicateGuard:
    """A small program over graph inputs whose results must equal ``expected``.

    Args:
        names: source of each decision (``file:line``), for messages.
        inputs: positions of the graph inputs that the program reads.
        program: called with those inputs' values; must not change them; returns one value a decision.
        expected: the decisions taken at capture.
    """

    names: tuple[str, ...]
    inputs: tuple[int, ...]
    program: Callable[..., Sequence[Any]]
    expected: tuple[Any, ...]

    def failure(self, values: Sequence[Any]) -> str | None:
        """Why the guard fails for these graph inputs, or None."""
        seen = self.program(*[values[i] for i in self.inputs])
        for name, new, old in zip(self.names, seen, self.expected, strict=True):
            if new != old:
                return f"a decision at {name} changed from {old!r} to {new!r}"
        return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass
class Guards:
    """All guards of one graph.

    Args:
        values: flags and structures.
        predicate: decisions on numbers.
        at_reads: for each read of a value, the decisions between the previous read and this one.
    """

    values: list[ValueGuard] = field(default_factory=list[ValueGuard])
    predicate: PredicateGuard | None = None
    at_reads: Sequence[PredicateGuard | None] = ()

    def failure(self, graph_inputs: Callable[[], Sequence[Any]]) -> str | None:
        """The first reason why the graph may not be used now, or None.

        Args:
            graph_inputs: returns the values of the graph's inputs; called only if a predicate needs them.
        """
        return self._failure(self.predicate, graph_inputs, self.values)

    def failure_at(self, read: int, graph_inputs: Callable[[], Sequence[Any]]) -> str | None:
        """The same for a value that Python reads while the rest of its numbers are not known yet.

        Named values are compared at the first read and when Python is done: what decides values that it reads in
        between are the calls that it makes.

        Args:
            read: how often it has read in this step.
            graph_inputs: as above.
        """
        predicate = self.at_reads[read] if read < len(self.at_reads) else None
        return self._failure(predicate, graph_inputs, () if read else self.values)

    @staticmethod
    def _failure(
        predicate: PredicateGuard | None, graph_inputs: Callable[[], Sequence[Any]], values: Sequence[ValueGuard]
    ) -> str | None:
        for guard in values:
            if (reason := guard.failure()) is not None:
                return reason
        return None if predicate is None else predicate.failure(graph_inputs())
