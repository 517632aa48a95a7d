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
        parameters: gives the parameters whose gradients are zeroed before this backward pass.
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
        self.gradients: list[tuple[Tensor, Tensor]] | None = None
        self.handles: dict[int, Any] = {}
        self.nodes: dict[int, tuple[Tensor, Any]] = {}
        self._around = around
        self._passes: list[_Pass] = []

    def begin(self, function: Callable[[], Any]) -> tuple[Any, ...]:
        """Call the engine. Returns the place where it pauses and the gradients there, or OVER and the call's result."""
        self._passes.append(_Pass(function, self._around))
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
    """One call of the engine, on a thread of its own."""

    def __init__(self, function: Callable[[], Any], around: Callable[[], Any]) -> None:
        self._function, self._around = function, around
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
        self._found.put(found)

    def _wait(self) -> tuple[Any, ...]:
        results = self._told.get()
        if results is None:
            raise _Abandoned
        return results

    def resume(self, results: tuple[Any, ...]) -> tuple[bool, Any]:
        self._told.put(results)
        found = self._found.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def pause(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        self._found.put((False, found))
        return self._wait()

    def abandon(self) -> None:
        self._told.put(None)
        self._thread.join()


class _Abandoned(BaseException):
    """Control flow: the step does not need this call of the engine any more."""


class EngineCall:
    """A noted call that the engine of the executing side performs.

    Args:
        name: for the user.
    """

    keeps_shapes = True
    """No number among the arguments decides the size of anything."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def make(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Perform the call.

        Args:
            values: the results of earlier calls (``values.py``).
            args: of the call.
            kwargs: likewise.
        """
        raise NotImplementedError


class Begin(EngineCall):
    """A call during which the engine may reach the user's Python.

    Args:
        function: what is called.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(f"{getattr(function, '__name__', function)}")
        self.function = function

    def make(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Perform the call."""
        return values.engine.begin(lambda: values.call(self.function, args, kwargs))


class GoOn(EngineCall):
    """The engine continues with the results of Python."""

    def make(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Perform the call."""
        return values.engine.go_on(args)


class OfLoss(EngineCall):
    """The backward pass of the loss that training_step returned."""

    def make(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Perform the call."""
        if values.engine.of_loss is not None:
            values.engine.of_loss()
            return
        loss, divisor = args
        loss = values.engine.scaled(loss if divisor == 1 else loss / divisor)
        leaves = leaves_of([loss])
        for parameter in values.engine.parameters():
            parameter.grad = None
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        pairs = zip(leaves, found, strict=True)
        values.engine.gradients = [(leaf, gradient) for leaf, gradient in pairs if gradient is not None]


def is_of_loss(func: Any) -> bool:
    """Whether a call begins the backward pass of the loss that training_step returned."""
    return isinstance(func, Begin) and func.function is OF_LOSS


class Join(EngineCall):
    """The results of a user's ``autograd.Function`` get their autograd history.

    Args:
        name: the function's, and its node's in autograd's graph.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kind: Any = type(name, (_Joined,), {})

    def make(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Perform the call."""
        place, materialize, inputs, outputs, dirty, still = args
        return private.applied(
            self._kind, (values.engine.arrived, place, materialize, outputs, dirty, still, *inputs), {}
        )


@functools.cache
def joined_as(name: str) -> Join:
    """The :class:`Join` for functions of this name."""
    return Join(name)


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


def is_joined(node: Any) -> bool:
    """Whether a node of autograd's graph stands for a function of the user's."""
    return isinstance(node, BackwardCFunction) and hasattr(node, "arrived") and hasattr(node, "place")


class Saving(EngineCall):
    """A call under the user's saved-tensor hooks. It returns the saved tensors too, and asks Python for them on use.

    Args:
        function: what is called.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(f"{getattr(function, '__name__', function)}")
        self.function = function
        self.keeps_shapes = keeps_shapes(function)

    def make(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Perform the call."""
        place, *rest = args
        saved: list[Tensor] = []
        arrived = values.engine.arrived

        def pack(tensor: Tensor) -> int:
            saved.append(tensor)
            return place + len(saved) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda at: arrived(at, ())[0]):
            out = values.call(self.function, rest, kwargs)
        return out, saved


class RandomState(EngineCall):
    """Get the state of torch's generators. The result is a token."""

    def make(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Perform the call."""
        token = torch.empty(0)
        states = None if values.engine.is_fake else private.generator_states()
        values.engine.states[id(token)] = token, states
        return token


class SetRandomState(EngineCall):
    """Set the state of torch's generators from a token."""

    def make(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Perform the call."""
        _, states = values.engine.states[id(args[0])]
        if states is not None:
            private.set_generator_states(states)


class Hook(EngineCall):
    """Register a hook on a tensor."""

    def make(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Perform the call."""
        place, tensor = args
        arrived = values.engine.arrived
        values.engine.handles[place] = tensor.register_hook(lambda gradient: arrived(place, (gradient,))[0])


class NodeOf(EngineCall):
    """Get ``grad_fn`` of a tensor. The result is a token."""

    def make(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Perform the call."""
        token: Any = torch.empty(0)
        values.engine.nodes[id(token)] = token, args[0].grad_fn
        if values.engine.is_fake:
            token.node = args[0].grad_fn
        return token


def below(node: Any, path: str) -> Any:
    """The node of autograd's graph at the end of a path of positions among ``next_functions``."""
    for index in path:
        node = node.next_functions[ord(index)][0]
    return node


class HookNode(EngineCall):
    """Register a hook on a node of autograd's graph."""

    def make(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Perform the call."""
        place, token, path, name = args
        engine = values.engine
        node, arrived = below(engine.nodes[id(token)][1], path), engine.arrived
        if name == "register_hook":
            engine.handles[place] = node.register_hook(lambda given, came: arrived(place, (given, came))[0])
        else:
            engine.handles[place] = node.register_prehook(lambda came: arrived(place, (came,))[0])


class Unhook(EngineCall):
    """Remove a hook."""

    def make(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Perform the call."""
        values.engine.handles.pop(args[0]).remove()


GO_ON, OF_LOSS = GoOn("backward"), OfLoss("backward")
HOOK, UNHOOK = Hook("register_hook"), Unhook("remove")
NODE_OF, HOOK_NODE = NodeOf("grad_fn"), HookNode("register_hook")
STATE, SET_STATE = RandomState("get_rng_state"), SetRandomState("set_rng_state")
