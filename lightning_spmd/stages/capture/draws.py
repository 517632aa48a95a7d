"""Random numbers that a step draws from Python's ``random`` and from NumPy: inputs of the graph, drawn anew each step.

    lam = np.random.beta(a, a)            an input of the graph
    if random.random() < 0.5: ...         and a predicate on one

A graph knows what its step draws, in order, and with which arguments. Its inputs are read by drawing that from the
state in which the generators are; when the graph has run they are left in the state after it, as the step itself would
leave them. A graph that is looked at and does not do leaves no trace.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.drawn_array import DrawnArray, from_numpy_by
from lightning_spmd.stages.capture.drawn_lists import of_lists
from lightning_spmd.stages.capture.host_scalar import Number, scalar_of
from lightning_spmd.stages.capture.numpy_numbers import check_type, flagged
from lightning_spmd.stages.capture.user_code import user_location

_OF_PYTHON = (
    "random", "uniform", "triangular", "randint", "randrange", "getrandbits", "gauss", "normalvariate",
    "lognormvariate", "expovariate", "vonmisesvariate", "gammavariate", "betavariate", "paretovariate",
    "weibullvariate",
)  # fmt: skip
_OF_NUMPY = (
    "rand", "randn", "random", "random_sample", "ranf", "sample", "uniform", "normal", "standard_normal", "beta",
    "gamma", "standard_gamma", "exponential", "standard_exponential", "poisson", "binomial", "randint", "integers",
    "choice", "permutation", "dirichlet", "laplace", "lognormal", "triangular", "logistic", "gumbel", "geometric",
    "chisquare", "pareto", "weibull", "power", "rayleigh", "multivariate_normal", "random_integers",
)  # fmt: skip
_LISTS = ("sample", "choices", "shuffle", "choice")
_LEFT = "the states of random numbers"
HostValue = Callable[[str, Number], Any]


State = tuple[Any, Any]
"""Of a generator: something to compare, and what sets it again."""


@dataclass(frozen=True)
class Source:
    """A generator.

    Args:
        name: for messages.
        find: gives what has the functions that draw, as it is now.
        save: gives its state.
        restore: sets a state.
        identity: tells which generator it is, for one may have several names.
    """

    name: str
    find: Callable[[], Any]
    save: Callable[[], State]
    restore: Callable[[State], None]
    identity: Callable[[], int]


@dataclass(frozen=True)
class Draw:
    """One draw.

    Args:
        source: the generator.
        function: what draws; None: what the generator has under this name by then.
        method: its name.
        args, kwargs: with which arguments.
        name: readable.
    """

    source: Source
    function: Callable[..., Any] | None
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str

    def make(self) -> Any:
        """Draw."""
        function = getattr(self.source.find(), self.method) if self.function is None else self.function
        return function(*self.args, **self.kwargs)


@dataclass
class DrawnInOrder:
    """What one graph draws each step.

    Args:
        draws: in their order.
    """

    draws: list[Draw] = field(default_factory=list[Draw])
    _before: list[Any] = field(default_factory=list[Any])
    _after: list[Any] = field(default_factory=list[Any])
    _values: list[Any] = field(default_factory=list[Any])

    def sources(self) -> list[Source]:
        """The generators, each once."""
        return list({draw.source.name: draw.source for draw in self.draws}.values())

    def states(self) -> dict[str, Any]:
        """What tells their states apart, by name."""
        return {source.name: source.save()[0] for source in self.sources()}

    def value(self, position: int) -> Any:
        """What a draw gives in the step that is about to run; the generators stay as they are."""
        sources = self.sources()
        now = [source.save() for source in sources]
        keys = [key for key, _ in now]
        if not self._values or keys != self._before:
            try:
                self._values = [draw.make() for draw in self.draws]
                self._after = [source.save() for source in sources]
            finally:
                _restore(sources, now)
            self._before = keys
        return self._values[position]

    def leave(self, _: Any = None) -> None:
        """A step has run: the generators go on."""
        self.value(0)
        _restore(self.sources(), self._after)
        self._values = []


class Draws:
    """Follows what one trace draws.

    Args:
        host_value: makes a number an input of the graph.

    Attributes:
        drawn: what the graph draws each step.
        readers: of the inputs, by name.
        functions: what stands for functions that the user's modules may have imported, by the id of each.
        may_be_skipped: says whether what runs is left out in some steps.
    """

    def __init__(self, host_value: HostValue) -> None:
        self.drawn = DrawnInOrder()
        self.readers: dict[str, Callable[[], Any]] = {}
        self.functions: dict[int, tuple[Any, Any]] = {}
        self._constants: dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}
        self.may_be_skipped: Callable[[], bool] = lambda: False
        self._host_value = host_value
        self._states: dict[int, tuple[Source, State, State]] = {}
        self._lost = False

    # ------------------------------------------------------------------ while capturing
    @contextlib.contextmanager
    def followed(self, module: nn.Module) -> Iterator[None]:
        """Inside, draws are recorded: of ``random`` and NumPy, and of generators that the user's modules keep.

        Generators are put back where they were, unless somebody drew unseen: who looks at their states then finds out.
        """
        with contextlib.ExitStack() as stack:
            for source, scope, names in _global_sources():
                for name in names:
                    if name in scope:
                        stand_in = self._recorded(source, name, scope[name])
                        self.functions[id(scope[name])] = (scope[name], stand_in)
                        stack.enter_context(_put(scope, name, stand_in))
            python, *_ = _global_sources()
            own = {name: random.__dict__[name] for name in _LISTS}
            for name, stand_in in self.of_lists(python[0], own.__getitem__, random.randrange).items():
                self.functions[id(own[name])] = (own[name], stand_in)
                stack.enter_context(_put(random.__dict__, name, stand_in))
            stack.enter_context(_put(torch.__dict__, "from_numpy", from_numpy_by(torch.from_numpy)))
            for path, part in module.named_modules():
                for name, value in list(vars(part).items()):
                    if (source := _source_of(path, part, name, value)) is not None:
                        stack.enter_context(_put(vars(part), name, _RecordedGenerator(self, source, value)))
            try:
                yield
            finally:
                for source, before, last in self._states.values():
                    if source.save()[0] == last[0] and not self._lost:
                        source.restore(before)

    def _recorded(self, source: Source, name: str, function: Callable[..., Any] | None) -> Callable[..., Any]:
        """A function that draws, and makes what it draws an input."""

        def draw(*args: Any, **kwargs: Any) -> Any:
            place = user_location() or "<library code>"
            plain_args = tuple(self._plain(a, name, place) for a in args)
            plain_kwargs = {key: self._plain(a, name, place) for key, a in kwargs.items()}
            return self._draw(source, name, function, plain_args, plain_kwargs, place)

        return draw

    def method(self, source: Source, name: str) -> Callable[..., Any]:
        """The same of a generator that a module keeps."""
        return self._recorded(source, name, None)

    def of_lists(
        self, source: Source, plain: Callable[[str], Callable[..., Any]], randrange: Any
    ) -> Mapping[str, Callable[..., Any]]:
        """What stands for a generator's functions that give lists, or take one."""

        def draw(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return self._recorded(source, name, function)(*args, **kwargs)

        return of_lists(draw, plain, randrange)

    def _draw(
        self,
        source: Source,
        name: str,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: str,
    ) -> Any:
        if self.may_be_skipped():
            raise CaptureError(f"{source.name}.{name}() is called in an update, skipped or not", place)
        state = source.save()
        _, before, last = self._states.get(source.identity(), (source, state, state))
        self._lost = self._lost or state[0] != last[0]
        words = ", ".join([*map(_shown, args), *(f"{k}={_shown(v)}" for k, v in kwargs.items())])
        position = len(self.drawn.draws)
        text = f"draw {position + 1}, {source.name}.{name}({words}) at {place}"
        made = Draw(source, function, name, args, kwargs, text)
        with private.disable_dispatch_modes():
            value = made.make()
        self.drawn.draws.append(made)
        self._states[source.identity()] = (source, before, source.save())
        return self._input(value, text, lambda: self.drawn.value(position))

    def _input(self, value: Any, text: str, read: Callable[[], Any]) -> Any:
        """What stands for a drawn value in the step."""
        if type(value) is list:
            return [self._input(item, f"item {i} of {text}", lambda i=i: read()[i]) for i, item in enumerate(value)]
        if getattr(value, "shape", ()) != ():
            return DrawnArray(value, text, read, self._input, self._tensor)
        kind = check_type(value, text) if hasattr(value, "item") else None
        plain = value.item() if hasattr(value, "item") else value
        if type(plain) is bool:
            plain, read = int(plain), lambda before=read: int(before())
        if type(plain) not in (int, float):
            raise CaptureError(f"{the_step()} draws a {type(value).__name__}, which is no input of a graph ({text})")
        self.readers[text] = lambda: type(plain)(read())
        symbol = self._host_value(text, plain)
        return symbol if kind is None else flagged(symbol, kind)

    def _tensor(self, value: Any, read: Callable[[], Any], make: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        with private.disable_dispatch_modes():
            tensor = make(value)
        self._constants[id(tensor)] = (tensor, lambda: make(read()))
        return tensor

    def _plain(self, value: Any, name: str, place: str) -> Any:
        if (scalar := scalar_of(value)) is not None:
            return scalar.recorder.decide(scalar)
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._plain(v, name, place) for v in value)
        if isinstance(value, (torch.Tensor, DrawnArray)):
            raise CaptureError(f"{the_step()} draws with {name}() and a tensor or drawn array as argument", place)
        return value

    # ------------------------------------------------------------------ afterwards
    def record(self, record: Callable[..., int]) -> None:
        """Let each run leave the generators where the step leaves them."""
        if self.drawn.draws:
            record("", "assign", OutputRole.LOGGED, (_LEFT, None), {})

    def writers(self) -> dict[str, Callable[[Any], None]]:
        """What that call does, by its name."""
        return {_LEFT: self.drawn.leave} if self.drawn.draws else {}

    def reader_of(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Makes, at each step, the tensor of drawn numbers that this one is; None of others."""
        known = self._constants.get(id(tensor))
        return None if known is None else known[1]


class _RecordedGenerator:
    """Stands for a generator that a module keeps.

    Args:
        draws: of the trace.
        source: the generator, wherever it is then.
        generator: as it is now.
    """

    def __init__(self, draws: Draws, source: Source, generator: Any) -> None:
        self._draws, self._source, self.generator = draws, source, generator

    def __getattr__(self, name: str) -> Any:
        of_python = isinstance(self.generator, random.Random)
        if name in (_OF_PYTHON if of_python else _OF_NUMPY):
            return self._draws.method(self._source, name)
        if name in _LISTS and of_python:
            find, randrange = self._source.find, self._draws.method(self._source, "randrange")
            return self._draws.of_lists(self._source, lambda own: getattr(find(), own), randrange)[name]
        raise CaptureError(
            f"{the_step()} asks for {name} of the generator {self._source.name}, which a graph cannot repeat",
            user_location(),
        )


def _global_sources() -> list[tuple[Source, dict[str, Any], Sequence[str]]]:
    python = Source(
        "random",
        lambda: random,
        lambda: _twice(random.getstate()),
        lambda s: random.setstate(s[1]),
        _owner_of(random.seed),
    )
    found: list[tuple[Source, dict[str, Any], Sequence[str]]] = [(python, random.__dict__, _OF_PYTHON)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        legacy = numpy.random
        source = Source(
            "np.random",
            lambda: legacy,
            lambda: _key_of(legacy.get_state()),
            lambda s: legacy.set_state(s[1]),
            _owner_of(legacy.get_state),
        )
        found.append((source, legacy.__dict__, _OF_NUMPY))
    return found


def _owner_of(method: Any) -> Callable[[], int]:
    owner = id(method.__self__)
    return lambda: owner


def _source_of(path: str, part: nn.Module, name: str, value: Any) -> Source | None:
    """The generator in an attribute of a module, if there is one."""
    numpy = sys.modules.get("numpy")

    def find() -> Any:
        now = vars(part)[name]
        return now.generator if isinstance(now, _RecordedGenerator) else now

    def source(save: Callable[[], State], restore: Callable[[State], None]) -> Source:
        return Source(
            f"{path or 'self'}.{name}", find, save, restore, lambda: id(getattr(find(), "bit_generator", find()))
        )

    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return source(lambda: _twice(find().getstate()), lambda s: find().setstate(s[1]))
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return source(lambda: _key_of(find().get_state()), lambda s: find().set_state(s[1]))
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return source(lambda: _of_bits(find()), lambda s: setattr(find().bit_generator, "state", s[1]))
    return None


def _twice(state: Any) -> State:
    return state, state


def _key_of(state: Any) -> State:
    return (state[0], state[1].tobytes(), *state[2:]), state


def _of_bits(generator: Any) -> State:
    state = generator.bit_generator.state
    return pickle.dumps(state), state


def _restore(sources: Sequence[Source], states: Sequence[State]) -> None:
    for source, state in zip(sources, states, strict=True):
        source.restore(state)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@contextlib.contextmanager
def _put(scope: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    before = scope[name]
    scope[name] = value
    try:
        yield
    finally:
        scope[name] = before
