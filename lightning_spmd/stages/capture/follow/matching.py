"""Compares a call with a note: by value, or by a compiled function that knows the objects of the last step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.sizes import Size
from lightning_spmd.stages.capture.follow import placeholders
from lightning_spmd.stages.capture.follow.notes import (
    SOURCES,
    Fresh,
    Given,
    Made,
    Note,
    Operand,
    Outside,
    Place,
    Source,
    formulas_in,
    in_step,
    sized,
)
from lightning_spmd.stages.capture.numbers.opened import stretch_of

_ARITHMETIC = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("add", "sub", "mul", "div", "truediv", "pow", "lerp", "clamp", "lt", "le", "gt", "ge", "eq", "ne")
    for prefix, suffix in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"))
)


_TORCHS = frozenset({"", "torch", "torch._tensor", "torch.functional", "torch.nn.functional", "torch._ops.aten"})
"""Modules of functions that are known to depend on nothing but what they are given; methods of tensors have none."""
_IN_C = "torch._C."


def is_torchs(func: Any) -> bool:
    """Whether a function is known to depend on nothing but what it is given; operators of others run any Python."""
    module = str(getattr(func, "__module__", None) or "")
    return module in _TORCHS or module.startswith(_IN_C)


def decides_as_torch(func: Any) -> bool:
    """Whether a function, or one that we call with more around it, decides on numbers as torch's do."""
    func = getattr(func, "function", func)
    return is_torchs(func) or str(getattr(func, "__module__", None)).startswith("lightning_spmd.")


def keeps_shapes(func: Any) -> bool:
    """Whether no number among a function's arguments decides shapes. For other functions each number is checked."""
    return getattr(func, "__name__", "") in _ARITHMETIC or getattr(func, "keeps_shapes", False) is True


class _Step(Protocol):
    """The part of a step that is used here."""

    def source_of(self, tensor: Tensor) -> Source: ...
    def accepts(self, note: Note, tensor: Tensor, number: int) -> bool: ...


class Differs(Exception):
    """Control flow: a call differs from the note."""


def numbers_that_differ(note: Note, args: Any, kwargs: Any, step: _Step) -> dict[Place, Any] | None:
    """The numbers that differ between a call and a note, by place; None if the calls differ."""
    found: dict[Place, Any] = {}
    try:
        _compare(note, (note.args, note.kwargs), (args, kwargs), (), step, found)
    except Differs:
        return None
    return found


def _compare(note: Note, noted: Any, value: Any, place: Place, step: _Step, found: dict[Place, Any]) -> None:
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
    """Whether two constants of one kind are the same number bit for bit, or the same object."""
    if type(one) is float:
        if one != one:
            return other != other
        return one == other and math.copysign(1.0, one) == math.copysign(1.0, other)
    if type(one) is complex:
        return type(other) is complex and same_constant(one.real, other.real) and same_constant(one.imag, other.imag)
    try:
        return bool(one == other)
    except Exception:  # an object that says of equality what is no yes or no
        return False


MISSED = object()
"""What a compiled note gives for a call that may be another one."""
Take = Callable[[Any, Any, Any], Any]
"""Given a step, and the arguments of a call: takes it as the note's, and gives its results."""


def never(step: Any, args: Any, kwargs: Any) -> Any:
    """A comparison that always fails."""
    return MISSED


class _Compiler:
    """Writes the function that compares calls with a note and takes them.

    Args:
        note: the note.
        sources: where a step's tensors come from, by ``id``.
        path: the notes of that step.
        given: the tensors of the batch; the live list, which has those of each step.
    """

    def __init__(self, note: Note, sources: Mapping[int, Source], path: Sequence[Note], given: list[Tensor]) -> None:
        self.names: dict[str, Any] = {"same": same_constant, "MISSED": MISSED, "refs": sys.getrefcount}
        self.tensors: list[str] = []
        self.met: dict[int, str] = {}
        self.free: dict[Place, str] = {}
        self._note, self._sources, self._path, self._given = note, sources, path, given
        self._bound: dict[int, str] = {}
        self._formulas = formulas_in(note)
        self.told = [self._there(place) for place in note.told]
        self._counts = {i: there for there, i in zip(self.told, note.told.values(), strict=True)}

    def _there(self, place: Place) -> str:
        """An expression for an argument in a place."""
        value, there = (self._note.args, self._note.kwargs)[place[0]], ("args", "kwargs")[place[0]]
        for key in place[1:]:
            there += f".{key}" if type(value) is slice else f"[{key!r}]"
            value = getattr(value, key) if type(value) is slice else value[key]
        return there

    def bind(self, value: Any) -> str:
        """A name for an object."""
        name = self._bound.get(id(value))
        if name is None:
            name = self._bound[id(value)] = f"v{len(self._bound)}"
            self.names[name] = value
        return name

    def made(self, source: Made) -> str:
        """An expression for the placeholder of a result."""
        return f"{self.bind(self._path[source.depth].handed)}[{source.index}]"

    def _tensor(self, value: Tensor, there: str) -> Iterator[str]:
        note, source = self._note, self._sources.get(id(value))
        self.tensors.append(there)
        if type(source) is Made:
            yield f"{there} is {self.made(source)}"
        elif type(source) is Given:
            yield f"{there} is {self.bind(self._given)}[{source.position}]"
        elif type(source) is not Outside:
            yield "False"
        elif source.number not in note.met or source.number in self.met:  # the step has it already, by its number
            first = self.met.get(source.number)
            yield f"{there} is step.outside[{source.number}]" if first is None else f"{there} is {first}"
        elif note.anew:
            yield f"len(step.outside) == {source.number} and step.takes({self.bind(note)}, {there}, {source.number})"
            self.met[source.number] = there
        else:
            kind = note.met[source.number]
            yield f"{there} is {self.bind(value)} and {there}.requires_grad is {kind.trained}"
            if kind.name is None and note.func is not sized:
                yield f"{there}.shape == {self.bind(value.shape)}"
            yield f"id({there}) not in step.sources"
            self.met[source.number] = there

    def checks(self, value: Any, there: str, place: Place) -> Iterator[str]:
        """The terms that compare one argument and its contents."""
        kind, note = type(value), self._note
        if isinstance(value, Tensor):
            yield from self._tensor(value, there)
        elif isinstance(value, (tuple, list)) and kind is not torch.Size:
            yield f"type({there}) is {kind.__name__ if kind in (tuple, list) else self.bind(kind)}"
            yield f"len({there}) == {len(value)}"
            yield from self.parts(value, there, place)
        elif isinstance(value, dict):
            yield f"type({there}) is dict and list({there}) == {self.bind(list(value))}"
            for k, v in value.items():
                yield from self.checks(v, f"{there}[{self.bind(k)}]", (*place, k))
        elif kind is slice:
            yield f"type({there}) is slice"
            for key in ("start", "stop", "step"):
                yield from self.checks(getattr(value, key), f"{there}.{key}", (*place, key))
        elif place in note.free:
            may_be_alike = keeps_shapes(note.func) or (kind is float and decides_as_torch(note.func))
            yield f"type({there}) is {kind.__name__}" if may_be_alike else "False"
            self.free[place] = there
        elif place in note.told:
            yield f"type({there}) is int and {there} >= 0"
        elif place in self._formulas:
            yield f"type({there}) is {self.bind(kind)} and {there} == {self._now(place)}"
        elif value is None or value is True or value is False:
            yield f"{there} is {value}"
        elif kind in (int, str):
            yield f"type({there}) is {kind.__name__} and {there} == {value!r}"
        elif kind is torch.dtype:
            yield f"{there} is {self.bind(value)}"
        elif kind is float:
            yield f"type({there}) is float and same({there}, {self.bind(value)})"
        else:
            known = self.bind(value)
            yield f"({there} is {known} or (type({there}) is type({known}) and same({there}, {known})))"

    def _now(self, place: Place) -> str:
        """A number that follows from counts, as it is in the step that runs."""
        leaf = self._formulas[place]
        parts = leaf if type(leaf) is torch.Size else (leaf,)
        last = max((i for part in parts if type(part) is Size for i in part.formula.names()), default=-1)
        names = [self._counts.get(i, f"step.counts[{i}]") for i in range(last + 1)]
        codes = [str(part.formula.with_names(names)) if type(part) is Size else str(part) for part in parts]
        return f"({''.join(f'{code}, ' for code in codes)})" if type(leaf) is torch.Size else codes[0]

    def parts(self, value: Sequence[Any], there: str, place: Place) -> Iterator[str]:
        """The terms that compare the contents of a tuple or list."""
        for i, v in enumerate(value):
            yield from self.checks(v, f"{there}[{i}]", (*place, i))

    def switches(self) -> Iterator[str]:
        """The terms that compare torch's switches."""
        around = self._note.around
        self.names.update(grad=torch.is_grad_enabled, dtype=torch.get_default_dtype)
        self.names.update(casts=private.is_autocast_on, autocast=private.autocast_state)
        yield f"grad() is {around.grad}"
        yield "not casts()" if around.autocast is None else f"autocast() == {self.bind(around.autocast)}"
        if around.autocast is not None:
            self.names["keeps_casts"] = torch.is_autocast_cache_enabled
            yield "not keeps_casts()" if around.block is None else f"keeps_casts() and step.block == {around.block}"
        yield f"dtype() is {self.bind(around.dtype)}"
        switches = (*private.ATTENTION_SWITCHES, *private.KERNEL_SWITCHES)
        for i, (value, (read, _)) in enumerate(zip((*around.attention, *around.kernels), switches, strict=False)):
            self.names[f"switch{i}"] = read
            yield f"switch{i}() == {value}"

    def results(self, value: Any) -> str:
        """What a call gives."""
        kind = type(value)
        if kind is Fresh:
            return f"h[{value.index}]"
        if kind is Operand:
            return self.tensors[value.index]
        if isinstance(value, dict):
            return f"{{{''.join([f'{self.bind(k)}: {self.results(v)}, ' for k, v in value.items()])}}}"
        if isinstance(value, (tuple, list)) and kind is not torch.Size:
            inside = "".join([f"{self.results(v)}, " for v in value])
            if kind in (tuple, list):
                return f"[{inside}]" if kind is list else f"({inside})"
            return f"{self.bind(kind)}({inside if hasattr(value, '_fields') else f'({inside})'})"
        return self.bind(value)


def compiled(
    note: Note, args: Any, kwargs: Any, sources: Mapping[int, Source], path: Sequence[Note], given: list[Tensor]
) -> Take:
    """A function that compares a call with a note by this step's objects, and takes it if they are the same.

    A call that it refuses may still be the note's: the objects may be others with the same values.

    Args:
        note: the call.
        args: its arguments in this step.
        kwargs: likewise.
        sources: where this step's tensors come from, by ``id``.
        path: the notes of the step.
        given: the tensors of the batch; the live list, which has those of each step.
    """
    code = _Compiler(note, sources, path, given)
    terms = [f"len(args) == {len(args)}", *code.parts(args, "args", (0,))]
    if kwargs:
        terms += ["kwargs", *code.checks(kwargs, "kwargs", (1,))]
    else:
        terms.append("not kwargs")
    if code.free and not keeps_shapes(note.func):
        code.names.update(alike=note.alike, stretch=stretch_of)
        stretches = "".join(f"stretch({code.free[place]}), " for place in sorted(code.free, key=repr))
        terms.append(f"alike.get((({stretches}), tuple(step.counts)))")
    terms += code.switches()
    if note.pins or note.conditions:
        told = "".join(f"{there}, " for there in code.told)
        terms.append(f"step.data_counts.may_be({code.bind(note)}, ({told}))")
    if note.anew and len(note.met) > 1:
        return never
    lines = ["def take(step, args, kwargs):", " try:", f"  if not ({' and '.join(terms)}): return MISSED"]
    lines.append(" except IndexError: return MISSED")  # a call before has other placeholders
    if note.counts or note.pins or note.apart is not None:
        lines.append(f" return step.take({code.bind(note)}, args, kwargs or {{}})")
    else:
        lines += _taking(code, note)
    exec("\n".join(lines), code.names)
    return code.names["take"]


def _taking(code: _Compiler, note: Note) -> Iterator[str]:
    """The lines that take a call."""
    code.names["h"] = note.handed
    if note.draws:
        yield f" if not step.generator.may_draw(): return step.called({code.bind(note.func)}, args, kwargs or {{}})"
    if code.told:
        yield f" step.counts += ({', '.join(code.told)},)"
    if note.sizes is not None:
        counts = "".join(f"step.counts[{i}], " for i in note.needs)
        yield f" if ({counts}) != {code.bind(note)}.sized_for: step.data_counts.resize({code.bind(note)})"
    yield " sources = step.sources"
    for number in sorted(code.met):
        yield f" sources[id({code.met[number]})] = {code.bind(Outside(number))}"
        yield f" step.outside.append({code.met[number]})"
    yield f" step.notes.append({code.bind(note)})"
    if note.free:
        yield f" step.held[{note.depth}] = args, kwargs or {{}}"
    if note.made:
        free = " and ".join(
            [f"refs(h[{m.index}]) <= {placeholders.OURS} and not h[{m.index}].__dict__" for m in note.made]
        )
        yield f" try: free = {free}"
        yield " except IndexError: free = False"
        yield f" if not free: step.hand_out({code.bind(note)})"
    for made in note.made:
        yield f" sources[id(h[{made.index}])] = {code.bind(made)}"
    yield f" step.here = {code.bind(note)}"
    yield f" return {code.results(note.results)}"
