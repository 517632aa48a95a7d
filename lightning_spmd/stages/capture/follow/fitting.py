"""Whether a call is the one that was noted: by value, and, compiled for each note, by the objects of the last step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_spmd.ir.sizes import Size
from lightning_spmd.stages.capture.follow.notes import (
    SOURCES,
    Given,
    Made,
    Note,
    Outside,
    Place,
    Source,
    formulas_in,
    in_step,
)

_ARITHMETIC = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "truediv", "pow", "lerp", "clamp", "lt", "le", "gt", "ge", "eq", "ne")
    for prefix, suffix in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"))
)


def keeps_shapes(func: Any) -> bool:
    """Whether numbers among a function's arguments never decide shapes: of others that is asked for each number."""
    return getattr(func, "__name__", "") in _ARITHMETIC or getattr(func, "keeps_shapes", False) is True


class Whereabouts(Protocol):
    """Where the tensors of a step come from."""

    def source_of(self, tensor: Tensor) -> Source:
        """Of a tensor of this step."""
        ...

    def accepts(self, note: Note, tensor: Tensor, number: int) -> bool:
        """Whether a tensor from outside may be what a note has under this number."""
        ...


class Differs(Exception):
    """Control flow: a call is another one."""


def numbers_that_differ(note: Note, args: Any, kwargs: Any, step: Whereabouts) -> dict[Place, Any] | None:
    """The numbers of a call that are others than the note's, by place; None if it is another call."""
    found: dict[Place, Any] = {}
    try:
        _compare(note, note.args, args, (0,), step, found)
        _compare(note, note.kwargs, kwargs, (1,), step, found)
    except Differs:
        return None
    return found


def _compare(note: Note, noted: Any, value: Any, place: Place, step: Whereabouts, found: dict[Place, Any]) -> None:
    if isinstance(value, Tensor):
        source = step.source_of(value)
        if noted != source or type(noted) is not type(source):
            raise Differs
        if type(source) is Outside and not step.accepts(note, value, source.number):
            raise Differs
        return
    kind = type(value)
    if isinstance(noted, SOURCES):
        raise Differs
    if type(noted) is Size or type(noted) is torch.Size:
        noted = in_step(noted)
    if kind is not type(noted):
        raise Differs
    if kind is tuple or kind is list or (isinstance(value, tuple) and kind is not torch.Size):
        if len(value) != len(noted):
            raise Differs
        for i, (n, v) in enumerate(zip(noted, value, strict=True)):
            _compare(note, n, v, (*place, i), step, found)
    elif isinstance(value, dict):
        if kind is not dict or list(value) != list(noted):
            raise Differs
        for key, v in value.items():
            _compare(note, noted[key], v, (*place, key), step, found)
    elif kind is slice:
        for key in ("start", "stop", "step"):
            _compare(note, getattr(noted, key), getattr(value, key), (*place, key), step, found)
    elif value is not noted and not same_constant(value, noted):
        if kind not in (int, float) or place in note.plain:
            raise Differs
        found[place] = value


def same_constant(one: Any, other: Any) -> bool:
    """Whether two constants of one kind are the same number, bit for bit, or the same thing."""
    if type(one) is float:
        if one != one:
            return other != other
        return one == other and math.copysign(1.0, one) == math.copysign(1.0, other)
    try:
        return bool(one == other)
    except Exception:  # an object that says of equality what is no yes or no
        return False


def compiled(
    note: Note, args: Any, kwargs: Any, sources: Mapping[int, Source], path: Sequence[Note], given: list[Tensor]
) -> tuple[Callable[[Any, Any], bool], Callable[[Any, Any], tuple[Tensor, ...]]]:
    """A function that says whether a call is a note's, with the very objects of this step and new placeholders.

    And one that gives the tensors from outside which a step meets there.

    What it refuses may be the note's all the same.

    Args:
        note: the call.
        args: its arguments in this step.
        kwargs: likewise.
        sources: where this step's tensors come from, by ``id``.
        path: the notes before it.
        given: the tensors of the batch; the live list, which has those of each step.
    """
    names: dict[str, Any] = {}
    met: dict[int, str] = {}
    formulas = {place: index for index, place in enumerate(formulas_in(note))}

    def bind(value: Any) -> str:
        names[name := f"v{len(names)}"] = value
        return name

    def tensor(value: Tensor, there: str) -> Iterator[str]:
        source = sources.get(id(value))
        if type(source) is Made:
            yield f"{there} is {bind(path[source.depth].handed)}[{source.index}]"
        elif type(source) is Outside:
            known = bind(value)
            yield f"{there} is {known}"
            if source.number in note.met:  # later ones of the step are its own doing, and noted
                met.setdefault(source.number, there)
                yield f"{known}.requires_grad is {note.met[source.number].trained}"
        elif type(source) is Given:
            yield f"{there} is {bind(given)}[{source.position}]"
        else:
            yield "False"

    def checks(value: Any, there: str, place: Place) -> Iterator[str]:
        kind = type(value)
        if isinstance(value, Tensor):
            yield from tensor(value, there)
        elif kind in (tuple, list):
            yield f"type({there}) is {kind.__name__} and len({there}) == {len(value)}"
            for i, v in enumerate(value):
                yield from checks(v, f"{there}[{i}]", (*place, i))
        elif isinstance(value, tuple) and kind is not torch.Size:
            yield f"type({there}) is {bind(kind)} and len({there}) == {len(value)}"
            for i, v in enumerate(value):
                yield from checks(v, f"{there}[{i}]", (*place, i))
        elif isinstance(value, dict):
            yield f"type({there}) is dict and list({there}) == {bind(list(value))}"
            for k, v in value.items():
                yield from checks(v, f"{there}[{bind(k)}]", (*place, k))
        elif kind is slice:
            yield f"type({there}) is slice"
            for key in ("start", "stop", "step"):
                yield from checks(getattr(value, key), f"{there}.{key}", (*place, key))
        elif place in formulas and place not in note.free:
            yield f"type({there}) is {bind(kind)} and {there} == {bind(note.now)}[{formulas[place]}]"
        elif place in note.free:
            yield f"type({there}) is {kind.__name__}" if keeps_shapes(note.func) else "False"
        elif value is None or value is True or value is False:
            yield f"{there} is {value}"
        elif kind in (int, str):
            yield f"type({there}) is {kind.__name__} and {there} == {value!r}"
        elif kind is torch.dtype:
            yield f"{there} is {bind(value)}"
        elif kind is float:
            yield f"type({there}) is float and same({there}, {bind(value)})"
        else:
            known = bind(value)
            yield f"({there} is {known} or (type({there}) is type({known}) and same({there}, {known})))"

    names["same"] = same_constant
    terms = [*checks(args, "args", (0,)), *checks(kwargs, "kwargs", (1,))]
    source = "def fits(args, kwargs): return " + (" and ".join(terms) or "True")
    source += f"\ndef new(args, kwargs): return ({''.join(met[number] + ', ' for number in sorted(met))})"
    exec(source, names)
    return names["fits"], names["new"]


def never(args: Any, kwargs: Any) -> bool:
    """No call is known by its objects."""
    return False
