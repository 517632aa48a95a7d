"""Runs the calls of a path, one after the other, on given tensors: fake, copied or live."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.default_dtype import autocast_as, default_dtype
from lightning_spmd.ir.sizes import Size
from lightning_spmd.stages.capture.follow.engine import Engine, EngineCall
from lightning_spmd.stages.capture.follow.notes import (
    SOURCES,
    Around,
    Fresh,
    Given,
    Made,
    Note,
    Operand,
    Outside,
    Place,
    in_step,
    mapped,
    tensors_in,
    with_numbers,
)
from lightning_spmd.stages.capture.follow.worlds import CallByHand, World


class Values:
    """The results of the calls of a path.

    Args:
        of_outside: gives what stands for a tensor of the batch, or one that the step did not make.
        engine: autograd's, where it needs something around it.

    Attributes:
        world: in which calls of manual optimization are made; None where there are none.
        engine: autograd's.
        number: gives a number that follows from sizes of the batch.
        instead: what is called in place of some functions.
        on_same: told of a mask, and of the one that was made before and is the same; None if nobody asks.
    """

    def __init__(self, of_outside: Callable[[Given | Outside], Tensor], engine: Engine | None = None) -> None:
        self.world: World | None = None
        self.engine = Engine() if engine is None else engine
        self.number: Callable[[Any], Any] = in_step
        self.on_same: Callable[[Tensor, Tensor], None] | None = None
        self.made: dict[Made, Tensor] = {}
        self.instead: dict[Any, Callable[..., Any]] = {}
        self.done = 0
        self._of_outside = of_outside
        self._block: int | None = None

    @contextlib.contextmanager
    def kept_casts(self, block: int | None = None) -> Iterator[None]:
        """Autocast's casts of weights last from call to call inside, in each of its blocks, as they did for the user.

        Args:
            block: that which goes on behind, with the same casts.
        """
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0 or self._block != block:
                torch.clear_autocast_cache()

    def of(self, source: Given | Outside | Made) -> Tensor:
        """The value of a source."""
        return self.made[source] if type(source) is Made else self._of_outside(source)  # type: ignore[arg-type]

    def arguments(self, note: Note, numbers: Mapping[Place, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with other numbers in some places."""
        args, kwargs = with_numbers((note.args, note.kwargs), dict(numbers))
        return mapped(self._value, args), mapped(self._value, kwargs)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, SOURCES):
            return self.of(leaf)
        return self.number(leaf) if type(leaf) in (Size, torch.Size) else leaf

    def run(self, note: Note, numbers: Mapping[Place, Any]) -> Any:
        """Perform the next call of the path. Returns its result; a read has none here."""
        if note.reads:
            self.done = note.depth + 1
            return None
        args, kwargs = self.arguments(note, numbers)
        if note.around.block is not None and note.around.block != self._block:
            self._block = note.around.block
            torch.clear_autocast_cache()
        with surroundings(note.around):
            out = self.call(note.func, args, kwargs)
        found: list[Any] = []
        mapped(found.append, note.results)
        of_tensors = [leaf for leaf in found if type(leaf) in (Fresh, Operand)]
        for leaf, tensor in zip(of_tensors, tensors_in(out), strict=True):
            if type(leaf) is Fresh:  # a kernel may give its operand where the recorded call made a new tensor
                self.made[Made(note.depth, leaf.index)] = tensor
        self.tell_same(note)
        self.done = note.depth + 1
        return out

    def tell_same(self, note: Note) -> None:
        """Mark masks as equal to those of an earlier call that made the same ones."""
        if note.same is not None and self.on_same is not None:  # who does not ask may not have made the earlier ones
            for made in note.made:
                self.on_same(self.made[made], self.made[Made(note.same, made.index)])

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Perform a call with these arguments."""
        if isinstance(func, EngineCall):
            return func.make(self, *args, **kwargs)
        if isinstance(func, CallByHand) and self.world is not None:
            return func.make(self.world, *args)
        return self.instead.get(func, func)(*args, **kwargs)

    def keep(self, depth: int, out: Any, operands: Any) -> None:
        """Remember the results of a call that is being recorded."""
        for index, tensor in enumerate(new_tensors(out, operands)):
            self.made[Made(depth, index)] = tensor
        self.done = depth + 1


def new_tensors(out: Any, operands: Any) -> list[Tensor]:
    """The tensors of a result that are not operands, each once, in order."""
    known = {id(t) for t in tensors_in(operands)}
    found: list[Tensor] = []
    for tensor in tensors_in(out):
        if id(tensor) not in known:
            known.add(id(tensor))
            found.append(tensor)
    return found


def structure_of(out: Any, operands: Any) -> Any:
    """A result in which each tensor is replaced by its origin: a fresh tensor or an operand."""
    given = {id(t): i for i, t in reversed(list(enumerate(tensors_in(operands))))}
    made = {id(t): i for i, t in enumerate(new_tensors(out, operands))}

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return Fresh(made[id(value)]) if id(value) in made else Operand(given[id(value)])

    return mapped(leaf, out)


@contextlib.contextmanager
def surroundings(around: Around) -> Iterator[None]:
    """Torch's switches as they were when a call was made."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(around.grad))
        stack.enter_context(default_dtype(around.dtype))
        stack.enter_context(autocast_as(around.autocast or (), keeps_casts=around.block is not None))
        switches = (*private.ATTENTION_SWITCHES, *private.KERNEL_SWITCHES)
        for value, (read, put) in zip((*around.attention, *around.kernels), switches, strict=False):
            if (before := read()) != value:
                put(value)
                stack.callback(put, before)
        yield
