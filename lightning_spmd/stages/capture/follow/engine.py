"""Autograd's engine. It pauses where the user's Python runs in a backward pass, and continues with Python's results.

A call of the engine has a thread of its own, and one of the two threads always waits for the other. So Python runs in
the step's thread, in the engine's order and on placeholders, while the engine works on fake tensors, on copies or on
the true tensors. If Python leaves its path in the middle of a backward pass, the engine waits there.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.follow.matching import keeps_shapes
from lightning_spmd.stages.capture.optimizer.own_backward import leaves_of

OVER = -1
"""The place that stands for the end of a call of the engine."""


class Engine:
    """The calls of autograd's engine in one world.

    Args:
        around: context that is entered on the engine's thread.
        is_fake: whether its tensors are fake, so that no random numbers are drawn.

    Attributes:
        states: (token, states of torch's generators), by ``id`` of the token.
        inline: runs the Python of a place at once, if no call of the engine waits for it.
        of_loss: called in place of the backward pass of the loss that training_step returned.
        scaled: gives the scaled loss, with which its backward pass begins.
        parameters: gives the parameters, in whose ``.grad`` are those that this backward pass's Python adds.
        before: (parameter, its ``.grad``) before this backward pass.
        gradients: (tensor, its gradient) of the returned loss, once they have been computed.
        handles: the handles of hooks on tensors, by place.
        nodes: (token, node of autograd's graph), by ``id`` of the token.
    """

    def __init__(self, around: Callable[[], Any] = contextlib.nullcontext, *, is_fake: bool = False) -> None:
        self.is_fake = is_fake
        self.states: dict[int, tuple[Tensor, Any]] = {}
        self.inline: Callable[[int, tuple[Any, ...]], tuple[Any, ...]] | None = None
        self.of_loss: Callable[[], None] | None = None
        self.scaled: Callable[[Tensor], Tensor] = lambda loss: loss
        self.parameters: Callable[[], Iterable[Tensor]] = tuple
        self.before: list[tuple[Tensor, Tensor | None]] = []
        self.gradients: list[tuple[Tensor, Tensor]] | None = None
        self.handles: dict[int, Any] = {}
        self.nodes: dict[int, tuple[Tensor, Any]] = {}
        self._around = around
        self._passes: list[_Pass] = []

    def begin(self, function: Callable[[], Any], *, creates: bool) -> tuple[Any, ...]:
        """Call the engine. Returns the place where it pauses and the gradients there, or OVER and the call's result.

        Args:
            function: calls it.
            creates: gradients have a history of their own.
        """
        self._passes.append(_Pass(function, self._around, creates=creates))
        return self.go_on(())

    def go_on(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Continue with the results of the user's Python. Returns as :meth:`begin`."""
        try:
            is_over, found = self._passes[-1].resume(results)
        except BaseException:
            self._passes.pop()
            raise
        if is_over:
            self._passes.pop()
            return (OVER, found)
        return found

    def arrived(self, place: int, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Run the user's Python of the place that the engine has reached. Returns its results."""
        for waiting in reversed(self._passes):
            if waiting.is_this_thread:
                return waiting.pause((place, *gradients))
        if self.inline is None:
            raise RuntimeError("a backward pass runs Python of the module's where it cannot be followed")
        return self.inline(place, tuple(gradients))

    def becomes(self, made: Tensor, other: Tensor) -> None:
        """Put another token in place of one."""
        for table in (self.states, self.nodes):
            if (known := table.get(id(made))) is not None:
                table[id(other)] = other, known[1]

    def close(self) -> None:
        """End all calls that still wait."""
        while self._passes:
            self._passes.pop().abandon()


class _Pass:
    """One call of the engine, on a thread of its own.

    Nodes of histories that it makes are numbered as if it were on the caller's: the engine runs the newest first.
    """

    def __init__(self, function: Callable[[], Any], around: Callable[[], Any], *, creates: bool) -> None:
        self._function, self._around, self._creates = function, around, creates
        self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._run, name="lightning_spmd backward", daemon=True)
        self._thread.start()

    @property
    def is_this_thread(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def _run(self) -> None:
        try:
            self._wait()
            with contextlib.ExitStack() as stack:
                if self._stream is not None:
                    stack.enter_context(torch.cuda.stream(self._stream))
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # other threads have no modes
                stack.enter_context(self._around())
                found = True, self._function()
        except BaseException as error:
            found = error
        self._found.put((found, private.next_sequence_number()))

    def _wait(self) -> tuple[Any, ...]:
        results, number = self._told.get()
        if results is None:
            raise _Abandoned
        self._number_from(number)
        if len(results) == 1 and isinstance(results[0], Raised):
            raise results[0].error
        return results

    def _number_from(self, number: int) -> None:
        if self._creates:
            private.number_nodes_from(number)

    def resume(self, results: tuple[Any, ...]) -> tuple[bool, Any]:
        self._told.put((results, private.next_sequence_number()))
        found, number = self._found.get()
        self._number_from(number)
        if isinstance(found, BaseException):
            raise found
        return found

    def pause(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        self._found.put(((False, found), private.next_sequence_number()))
        return self._wait()

    def abandon(self) -> None:
        self._told.put((None, 0))
        self._thread.join()


class Raised:
    """In place of results: the user's Python raised an error.

    Args:
        error: what it raised.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Abandoned(BaseException):
    """Control flow: the step does not need this call of the engine any more."""


class EngineCall:
    """A noted call that the engine of the executing side performs.

    Args:
        name: for the user.
        make: performs the call, given the results of earlier calls (``values.py``) and the arguments.
    """

    keeps_shapes = True
    """No number among the arguments decides the size of anything."""

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.__name__, self.make = name, make


class Begin(EngineCall):
    """A call during which the engine may reach the user's Python.

    Args:
        function: what is called.
        creates: gradients have a history of their own.
    """

    def __init__(self, function: Any, *, creates: bool) -> None:
        super().__init__(f"{getattr(function, '__name__', function)}", self._begin)
        self.function, self._creates = function, creates

    def _begin(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        return values.engine.begin(lambda: values.call(self.function, args, kwargs), creates=self._creates)


def is_of_loss(func: Any) -> bool:
    """Whether a call begins the backward pass of the loss that training_step returned."""
    return isinstance(func, Begin) and func.function is OF_LOSS


@functools.cache
def joined_as(name: str) -> EngineCall:
    """The results of a user's ``autograd.Function`` of this name get an autograd history, with a node of the name."""
    kind: Any = type(name, (_Joined,), {})

    def join(values: Any, place: int, materialize: bool, inputs: Any, *results: Any) -> Any:
        return private.applied(kind, (values.engine.arrived, place, materialize, *results, *inputs), {})

    return EngineCall(name, join)


class _Joined(torch.autograd.Function):
    """Stands in autograd's graph for a function of the user's that has run."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:  # type: ignore[override]
        ctx.arrived, ctx.place, materialize, outputs, dirty, still = args[:6]
        ctx.set_materialize_grads(materialize)
        if dirty:
            ctx.mark_dirty(*dirty)
        if still:
            ctx.mark_non_differentiable(*still)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        return (*([None] * 6), *ctx.arrived(ctx.place, gradients))


def is_ours(node: Any) -> bool:
    """Whether a node that runs Python in the backward pass is one that following has put there."""
    return type(node)._forward_cls.__module__.startswith("lightning_spmd.")  # noqa: SLF001 - the class of whose calls it is


def is_joined(node: Any) -> bool:
    """Whether a node of autograd's graph stands for a function of the user's."""
    return isinstance(node, BackwardCFunction) and hasattr(node, "arrived") and hasattr(node, "place")


class Saving(EngineCall):
    """A call under the user's saved-tensor hooks. It returns the saved tensors too, and asks Python for them on use.

    Args:
        function: what is called.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(f"{getattr(function, '__name__', function)}", self._call)
        self.function = function
        self.keeps_shapes = keeps_shapes(function)

    def without_place(self, _: int, *args: Any, **kwargs: Any) -> Any:
        """The call alone, of the same arguments."""
        return self.function(*args, **kwargs)

    def _call(self, values: Any, place: int, *args: Any, **kwargs: Any) -> Any:
        saved: list[Tensor] = []
        arrived = values.engine.arrived

        def pack(tensor: Tensor) -> int:
            saved.append(tensor)
            return place + len(saved) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda at: arrived(at, ())[0]):
            out = values.call(self.function, args, kwargs)
        return out, saved


def below(node: Any, path: str) -> Any:
    """The node of autograd's graph at the end of a path of positions among ``next_functions``."""
    for index in path:
        node = node.next_functions[ord(index)][0]
    return node


def _of_loss(values: Any, loss: Tensor, divisor: int) -> None:
    engine: Engine = values.engine
    if engine.of_loss is not None:
        engine.of_loss()
        return
    loss = engine.scaled(loss if divisor == 1 else loss / divisor)
    leaves = leaves_of([loss])
    engine.before = [(parameter, parameter.grad) for parameter in engine.parameters()]
    for parameter, _ in engine.before:
        parameter.grad = None
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    pairs = zip(leaves, found, strict=True)
    engine.gradients = [(leaf, gradient) for leaf, gradient in pairs if gradient is not None]


def _hook(values: Any, place: int, tensor: Tensor) -> None:
    engine: Engine = values.engine
    engine.handles[place] = tensor.register_hook(lambda gradient: engine.arrived(place, (gradient,))[0])


def _node_of(values: Any, tensor: Tensor) -> Any:
    engine: Engine = values.engine
    token: Any = torch.empty(0)
    engine.nodes[id(token)] = token, tensor.grad_fn
    if engine.is_fake:
        token.node = tensor.grad_fn
    return token


def _hook_node(values: Any, place: int, token: Tensor, path: str, name: str) -> None:
    engine: Engine = values.engine
    node = below(engine.nodes[id(token)][1], path)
    if name == "register_hook":
        engine.handles[place] = node.register_hook(lambda given, came: engine.arrived(place, (given, came))[0])
    else:
        engine.handles[place] = node.register_prehook(lambda came: engine.arrived(place, (came,))[0])


def _random_state(values: Any) -> Tensor:
    token = torch.empty(0)
    values.engine.states[id(token)] = token, None if values.engine.is_fake else private.generator_states()
    return token


def _set_random_state(values: Any, token: Tensor) -> None:
    _, states = values.engine.states[id(token)]
    if states is not None:
        private.set_generator_states(states)


GO_ON = EngineCall("backward", lambda values, *results: values.engine.go_on(results))
OF_LOSS = EngineCall("backward", _of_loss)
"""The backward pass of the loss that training_step returned."""
HOOK = EngineCall("register_hook", _hook)
UNHOOK = EngineCall("remove", lambda values, place: values.engine.handles.pop(place).remove())
NODE_OF, HOOK_NODE = EngineCall("grad_fn", _node_of), EngineCall("register_hook", _hook_node)
"""``grad_fn`` of a tensor is a token."""
STATE, SET_STATE = EngineCall("get_rng_state", _random_state), EngineCall("set_rng_state", _set_random_state)
"""The state of torch's generators is a token."""
