"""When a captured graph may be used again.

Two kinds. *Value guards*: a named Python value (attribute, flag) must equal what capture saw. *Predicate guards*: the
outcome of a comparison that user or optimizer code made on a host number (``batch_idx % 100 == 0``, ``rho_t > 5``)
must be the same for this step's numbers; so a counter does not force a new graph each step, a changed decision does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class ValueGuard:
    """``read()`` must equal ``expected``."""

    name: str
    read: Callable[[], Any]
    expected: Any

    def failure(self) -> str | None:
        """Why the guard fails now, or None."""
        try:
            seen = self.read()
        except AttributeError:
            seen = "<missing>"
        same = type(seen) is type(self.expected) and seen == self.expected
        return None if same else f"{self.name} changed from {_short(self.expected)} to {_short(seen)}"


class PresentGradients:
    """Which parameters may have a gradient when a step that optimizes by hand begins.

    Args:
        parameters: by name.
        present: names of those that had one, or were taken to have one, at capture.
    """

    def __init__(self, parameters: Mapping[str, Any], present: frozenset[str]) -> None:
        self.present = present
        self._parameters = list(parameters.values())
        self._names = list(parameters)
        self._accepted = {self._pattern(present)}

    def _pattern(self, present: frozenset[str]) -> tuple[bool, ...]:
        return tuple([name in present for name in self._names])

    def accept(self, present: frozenset[str]) -> None:
        """The graph does the same where these have one."""
        self._accepted.add(self._pattern(present))

    def fit(self) -> bool:
        """Whether the graph is right for the gradients that are there now."""
        return tuple([parameter.grad is not None for parameter in self._parameters]) in self._accepted

    def guard(self) -> ValueGuard:
        """The guard that says so."""
        return ValueGuard("whether the graph was made for the gradients that are there", self.fit, expected=True)


@dataclass(frozen=True)
class BatchGuard:
    """A non-tensor leaf of the batch that training_step reads must equal ``expected``."""

    path: str
    expected: Any

    def failure(self, leaves: Mapping[str, Any]) -> str | None:
        """Why the guard fails for a batch with these leaves (by path), or None."""
        seen = leaves.get(self.path)
        same = type(seen) is type(self.expected) and seen == self.expected
        return None if same else f"batch{self.path} changed from {_short(self.expected)} to {_short(seen)}"


@dataclass(frozen=True)
class PredicateGuard:
    """A small program over graph inputs whose results must equal ``expected``.

    Args:
        names: source of each decision (``file:line``), for messages.
        inputs: positions of the graph inputs that the program reads.
        program: called with those inputs' values; must not change them; returns one value a decision.
        expected: the decisions taken at capture.
        exact: which of ``inputs`` are among the results as they are.
    """

    names: tuple[str, ...]
    inputs: tuple[int, ...]
    program: Callable[..., Sequence[Any]]
    expected: tuple[Any, ...]
    exact: tuple[int, ...] = ()

    def exact_inputs(self, names: Sequence[str]) -> list[str]:
        """Names of inputs on whose very value, as it is, a decision was made: no other value is decided alike.

        Args:
            names: of all inputs, in order.
        """
        return [names[self.inputs[position]] for position in self.exact]

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


class Watch(Protocol):
    """Many Python values at once.

    Args:
        unseen: paths of what cannot be compared as a whole, with the reason.
    """

    unseen: Mapping[str, str]

    def changes(self) -> list[Any]:
        """All that changed."""
        ...

    def failure(self) -> str | None:
        """What changed first, or None."""
        ...


@dataclass
class Guards:
    """All guards of one graph.

    Args:
        values: flags and structures.
        batch: leaves of the batch.
        predicate: decisions on numbers.
        state: the Python values that the step saw.
    """

    values: list[ValueGuard] = field(default_factory=list[ValueGuard])
    batch: list[BatchGuard] = field(default_factory=list[BatchGuard])
    predicate: PredicateGuard | None = None
    state: Watch | None = None

    def failure(self, graph_inputs: Callable[[], Sequence[Any]], leaves: Callable[[], Mapping[str, Any]]) -> str | None:
        """First reason why the graph may not be used now, or None.

        Args:
            graph_inputs: gives the values of the graph's inputs; called only if a predicate needs them.
            leaves: gives the batch's leaves by path; called only if the graph depends on one.
        """
        for guard in self.values:
            if (reason := guard.failure()) is not None:
                return reason
        if self.state is not None and (reason := self.state.failure()) is not None:
            return reason
        if self.batch:
            named = leaves()
            for leaf in self.batch:
                if (reason := leaf.failure(named)) is not None:
                    return reason
        return None if self.predicate is None else self.predicate.failure(graph_inputs())
