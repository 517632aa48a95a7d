"""Notes: the known calls of a module's steps. They form a tree, because steps may differ; a path in it is a program."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.sizes import Condition, Formula, Size
from lightning_spmd.ir.stable_hash import stable_hash


@dataclass(frozen=True, slots=True)
class Made:
    """A result of an earlier call of the step.

    Args:
        depth: of the call, counted from the beginning of the step.
        index: among the tensors that the call made.
    """

    depth: int
    index: int


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor of the batch.

    Args:
        position: among the tensors of the batch.
    """

    position: int


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor that the step did not make: the one that the call has here in this step.

    Args:
        number: of such tensors, in the order in which a step meets them.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Operand:
    """A result that is one of the call's operands, as of an in-place operator.

    Args:
        index: among the tensors of the call.
    """

    index: int


@dataclass(frozen=True, slots=True)
class Fresh:
    """A result that the call made.

    Args:
        index: among the tensors that it made.
    """

    index: int


Source = Made | Given | Outside
SOURCES = (Made, Given, Outside)
Place = tuple[Any, ...]
"""Where in the arguments of a call something stands: keys and positions from the outside in."""


_GRADIENT = "'s gradient"


def named_gradient(name: str) -> str:
    """The name of the gradient of a sharded parameter."""
    return name + _GRADIENT


def gradient_in_parts(name: str | None) -> str | None:
    """The sharded parameter whose gradient has this name; None for other tensors."""
    return name.removesuffix(_GRADIENT) if name is not None and name.endswith(_GRADIENT) else None


class Kind(NamedTuple):
    """The properties of an outside tensor that a path depends on.

    Args:
        name: of a parameter or buffer of the module or the optimizer; None of others.
        type: its class.
        spec: shape, strides, dtype, device.
        trained: whether it asks for gradients.
        shares: the first tensor from outside that it overlaps in memory, if it is not itself.
        lazy: whether its values are the conjugates, and the negatives, of what is in its memory.
    """

    name: str | None
    type: type
    spec: TensorSpec
    trained: bool
    shares: int | None
    lazy: tuple[bool, bool]

    @property
    def is_parameter(self) -> bool:
        """Whether it is found by its name."""
        return self.name is not None and issubclass(self.type, nn.Parameter)

    def of_any_size(self) -> Kind:
        """The same of dense tensors of all sizes."""
        return self._replace(spec=TensorSpec((), (), self.spec.dtype, self.spec.device))

    def in_words(self) -> str:
        """The kind as text, equal on all ranks."""
        spec = self.spec
        about = self.trained, self.shares, self.lazy
        return repr((self.name, self.type.__name__, spec.shape, spec.stride, spec.dtype, *about))


class Around(NamedTuple):
    """Torch's switches at the time of a call.

    Args:
        grad: whether autograd records.
        autocast: device types for which autocast is on, with its dtype; None where it is off.
        dtype: of what is made without one.
        attention: what chooses the operator that attention becomes.
        kernels: what kernels look at when they run.
        block: which of the step's blocks of autocast it is, if each casts a weight once for all calls; else None.
    """

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...] | None
    dtype: torch.dtype
    attention: tuple[Any, ...] = ()
    kernels: tuple[bool, ...] = ()
    block: int | None = None


def sized(tensor: Tensor, *shape: int) -> Tensor:
    """A call that Python does not make: it tells how large a tensor from outside is, which is met by it.

    Args:
        tensor: the tensor.
        shape: its sizes.
    """
    return tensor


_numbers = itertools.count()


@dataclass(eq=False, slots=True)
class Note:
    """One call.

    Args:
        depth: counted from the beginning of the step; -1 for the beginning itself.
        func: what was called.
        args: positional arguments, tensors as where they come from.
        kwargs: the others.
        around: torch's switches.
        met: tensors from outside that a step meets here for the first time, by number.
        reads: whether Python gets values by this call.
        draws: whether it draws random numbers.
        module: path of the module whose ``forward`` called.
        source: ``file:line`` of the user's code.

    Attributes:
        number: its own, in this process.
        whole: if it is a read that gives whole numbers, those that it gave first.
        mark: a hash of the path from the beginning to here, the same on all ranks that take it.
        free: places of numbers that differ from step to step.
        plain: places of numbers that decide whether masks are the same; another number is another call.
        told: places of numbers that are counts of the path, which Python tells by this call, and which ones.
        decides: a graph in which numbers of its own are inputs has decided on them.
        alike: whether all numbers between two quarters give results of the noted sizes by the same operators, by
            place, and for which counts.
        varies: it is a call in whose place others came, with other numbers in such places.
        asking: what results answer about their history behind this call, by the question or, whether they require
            gradients, by themselves.
        kin: a hash of what it computes; None where nobody has asked.
        same: the depth of the call that made the same masks before; None if there is none.
        fakes: what the call made, as fake tensors of the recording.
        results: the structure of what it returned.
        children: the calls that came next, the likeliest last.
        take: compiled comparison with the objects of the last step, which takes the call; None where there is none.
        anew: what it meets are other objects in each step.
        made: what its results are as sources.
        handed: placeholders of the last step.
        moulds: what placeholders are copies of.
        specs: of the results.
        trained: whether each result asks for gradients.
        versions: how often each had been written to when it was made.
        written: which of them calls write into, or train or freeze.
        seen: the counts of steps that called it, as far as they were known.
        counts: the path's counts that this call reads: as large as its results, or what it reads.
        slot: which of its operators asks for them (``DataSizes.slot``).
        spare: moulds and placeholders of other counts.
        sizes: gives shape and strides of its results from the counts of a step, if they depend on them.
        is_fitted: formulas for other counts have been looked for.
        apart: why its results have no sizes for other counts than those with which it was recorded, if so.
        needs: the counts on which the sizes of its results depend, by their position.
        sized_for: those counts, as its placeholders are now.
        open: specs of its results with formulas of counts; None if they are the same for all of them.
        pins: counts for which alone it is this call, with others it is another one.
        conditions: on counts, without which it is another call.
        usual: conditions on counts that graphs are made with: with others torch leaves out a slice that takes all.
        behind: if it gives a loss and its backward pass has been looked at, the sizes in that that follow from counts.
        ties: counts that follow from others, with how.
        roots: of each result what it shares memory with, itself if nothing, and how many elements behind it begins.
        writes: into whose memory it writes.
    """

    depth: int
    func: Any = None
    args: Any = ()
    kwargs: Any = field(default_factory=dict[str, Any])
    around: Around = Around(True, None, torch.float32)
    met: dict[int, Kind] = field(default_factory=dict[int, Kind])
    reads: bool = False
    draws: bool = False
    module: str = ""
    source: str = ""
    number: int = field(default_factory=_numbers.__next__)
    whole: Sequence[int] | None = None
    mark: int = 0
    free: set[Place] = field(default_factory=set[Place])
    plain: set[Place] = field(default_factory=set[Place])
    told: dict[Place, int] = field(default_factory=dict[Place, int])
    decides: bool = False
    alike: dict[Any, bool] = field(default_factory=dict[Any, bool])
    varies: bool = False
    asking: dict[Any, Any] = field(default_factory=dict[Any, Any])
    kin: int | None = None
    same: int | None = None
    fakes: list[Tensor] = field(default_factory=list[Tensor])
    results: Any = None
    children: list[Note] = field(default_factory=list["Note"])
    take: Callable[[Any, Any, Any], Any] | None = None
    anew: bool = False
    made: list[Made] = field(default_factory=list[Made])
    handed: list[Tensor] = field(default_factory=list[Tensor])
    moulds: list[Tensor] = field(default_factory=list[Tensor])
    specs: list[TensorSpec] = field(default_factory=list[TensorSpec])
    trained: list[bool] = field(default_factory=list[bool])
    versions: list[int] = field(default_factory=list[int])
    written: set[int] = field(default_factory=set[int])
    seen: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    counts: range = range(0)
    slot: int = 0
    spare: dict[Any, tuple[list[Tensor], list[Tensor]]] = field(
        default_factory=dict[Any, tuple[list[Tensor], list[Tensor]]]
    )
    sizes: Callable[[Sequence[int]], tuple[tuple[Any, Any], ...]] | None = None
    is_fitted: bool = False
    apart: str | None = None
    needs: tuple[int, ...] = ()
    sized_for: tuple[int, ...] = ()
    open: list[TensorSpec] | None = None
    pins: dict[int, int] = field(default_factory=dict[int, int])
    conditions: Sequence[Condition] = ()
    usual: Sequence[Condition] = ()
    behind: Sequence[Formula] | None = None
    ties: dict[int, Formula] = field(default_factory=dict[int, Formula])
    roots: list[tuple[Source, int]] = field(default_factory=list[tuple[Source, int]])
    writes: frozenset[Source] = frozenset()

    @property
    def asks(self) -> bool:
        """Whether the call is a read of values."""
        return self.reads or len(self.counts) > 0

    @property
    def name(self) -> str:
        """The name of the called function, for messages."""
        return "a tensor from outside" if self.func is sized else getattr(self.func, "__name__", str(self.func))

    def specs_at(self, counts: Sequence[int]) -> list[TensorSpec]:
        """The specs of its results in a step with these counts."""
        if self.sizes is None:
            return self.specs
        sizes = zip(self.specs, self.sizes(counts), strict=True)
        return [TensorSpec(shape, stride, spec.dtype, spec.device) for spec, (shape, stride) in sizes]

    def numbers_told(self, args: Any, kwargs: Any) -> list[int] | None:
        """The counts that Python tells by a call, if it is this one; None if it is another one."""
        try:
            found = [leaf_at((args, kwargs), place) for place in self.told]
        except (LookupError, TypeError, AttributeError):  # it has no such arguments
            return None
        return found if all(type(number) is int and number >= 0 for number in found) else None

    def with_arguments(self, args: Any, kwargs: Any) -> Note:
        """The same call with other numbers."""
        changed = copy.copy(self)
        changed.args, changed.kwargs = args, kwargs
        return changed

    def marked(self, before: Note) -> None:
        """Set the hash of the path up to this call.

        Args:
            before: the call before it.
        """
        self.mark = stable_hash((before.mark, self.in_words()))

    def in_words(self) -> str:
        """The call as text, equal on all ranks."""
        owner = getattr(getattr(self.func, "__self__", None), "__name__", "")
        met = [(number, kind.in_words()) for number, kind in sorted(self.met.items())]
        name = f"{owner}.{self.name}" if owner else str(self.name)
        given = mapped(_in_words, self.args), mapped(_in_words, self.kwargs)
        return repr((name, *given, self.around, met, self.reads, self.same))


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _in_words(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):  # ranks have devices of their own
        return leaf.type
    return leaf if isinstance(leaf, SOURCES) else _ADDRESS.sub("", repr(leaf))


def around_now(block: int) -> Around:
    """Torch's switches, in this block of autocast."""
    attention = tuple([read() for read, _ in private.ATTENTION_SWITCHES])
    autocast, dtype = private.autocast_state(), torch.get_default_dtype()
    known = block if autocast is not None and torch.is_autocast_cache_enabled() else None
    return Around(torch.is_grad_enabled(), autocast, dtype, attention, kernels_now(), known)


def kernels_now() -> tuple[bool, ...]:
    """What kernels would look at."""
    return tuple([read() for read, _ in private.KERNEL_SWITCHES])


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``function`` to each leaf of arguments or results. Other sequences become lists: they may change later."""
    kind = type(value)
    if kind in _LEAVES:
        return function(value)
    if kind is tuple:
        return tuple([mapped(function, v) for v in value])
    if kind is list:
        return [mapped(function, v) for v in value]
    if kind is dict:
        return {k: mapped(function, v) for k, v in value.items()}
    if kind is slice:
        return slice(mapped(function, value.start), mapped(function, value.stop), mapped(function, value.step))
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        parts = [mapped(function, v) for v in value]
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, torch.Size)):
        return [mapped(function, v) for v in value]
    return function(value)


_LEAVES = {Tensor, nn.Parameter, int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.Size}
"""The common ones, for speed."""


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in arguments or results, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    kind = type(value)
    if kind is tuple or kind is list:
        for part in value:
            _collect(part, found)
    elif isinstance(value, Tensor):
        found.append(value)
    elif kind is dict:
        for part in value.values():
            _collect(part, found)
    elif isinstance(value, (tuple, list)):
        for part in value:
            _collect(part, found)
    elif kind is slice:
        _collect((value.start, value.stop, value.step), found)


def sources_in(value: Any) -> list[Source]:
    """Where the tensors in noted arguments come from, in order."""
    return [leaf for _, leaf in leaves_by_place(value) if isinstance(leaf, SOURCES)]


def leaves_by_place(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """(place, leaf) of arguments."""
    kind = type(value)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        for i, part in enumerate(value):
            yield from leaves_by_place(part, (*place, i))
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from leaves_by_place(part, (*place, key))
    elif kind is slice:
        for key in ("start", "stop", "step"):
            yield from leaves_by_place(getattr(value, key), (*place, key))
    else:
        yield place, value


def leaf_at(value: Any, place: Place) -> Any:
    """The leaf of arguments in one place."""
    for key in place:
        value = getattr(value, key) if type(value) is slice else value[key]
    return value


def with_numbers(value: Any, numbers: dict[Place, Any], place: Place = ()) -> Any:
    """Arguments with other leaves in some places."""
    if not numbers:
        return value
    if place in numbers:
        return numbers[place]
    kind = type(value)
    if kind is slice:
        return slice(*(with_numbers(getattr(value, k), numbers, (*place, k)) for k in ("start", "stop", "step")))
    if isinstance(value, dict):
        return {k: with_numbers(v, numbers, (*place, k)) for k, v in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        parts = [with_numbers(v, numbers, (*place, i)) for i, v in enumerate(value)]
        if kind in (tuple, list):
            return kind(parts)
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    return value


def in_step(leaf: Any) -> Any:
    """A number of a noted call in the running step."""
    if type(leaf) is Size:
        return leaf.sizes.number(leaf.formula)
    return torch.Size([in_step(n) for n in leaf]) if type(leaf) is torch.Size else leaf


def is_formula(leaf: Any) -> bool:
    """Whether a leaf of noted arguments follows from sizes."""
    return type(leaf) is Size or (type(leaf) is torch.Size and any(type(n) is Size for n in leaf))


def formulas_in(note: Note) -> dict[Place, Any]:
    """The leaves of noted arguments that follow from sizes, by place."""
    return {place: leaf for place, leaf in leaves_by_place((note.args, note.kwargs)) if is_formula(leaf)}
