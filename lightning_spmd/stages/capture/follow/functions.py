"""The user's Python in backward passes: functions with a backward of their own, and hooks.

``forward`` of such a function runs where it is applied, and its calls are noted like all others. One more note gives
its results their autograd history. When a backward pass reaches them, ``backward`` runs with placeholders as gradients.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils.hooks import RemovableHandle

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.follow.engine import (
    GO_ON,
    HOOK,
    HOOK_NODE,
    NODE_OF,
    OF_LOSS,
    OVER,
    UNHOOK,
    Begin,
    Raised,
    below,
    is_joined,
    joined_as,
)
from lightning_spmd.stages.capture.follow.notes import tensors_in


class _Step(Protocol):
    """The step to which the functions belong."""

    @property
    def is_eager(self) -> bool: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any: ...
    def called(self, func: Any, args: Any, kwargs: Any) -> Any: ...
    def for_good(self, func: Any, args: Any, kwargs: Any) -> Any: ...
    def asks(self, tensor: Tensor) -> bool: ...
    def eagerly(self, why: str) -> None: ...
    def fake_made(self, placeholder: Tensor) -> Any: ...
    def live_node(self, token: Tensor) -> Any: ...


class Functions:
    """The user's Python in the backward passes of one step.

    Args:
        step: the step.
        begins: calls of the engine by what is called, of all steps.

    Attributes:
        hooks: gives those on what autograd saves.
        retained: tensors whose gradient is retained, and that, by ``id``.
    """

    def __init__(self, step: _Step, begins: dict[Any, Begin]) -> None:
        self._step, self._begins = step, begins
        self._places: dict[int, Callable[..., tuple[Any, ...]]] = {}
        self._nodes: dict[int, Node] = {}
        self._operators: dict[int, Operator] = {}
        self._current: Any = None
        self.hooks: Callable[[], tuple[Any, Any] | None] = lambda: None
        self._handles: dict[int, Handle] = {}  # of retained gradients
        self.retained: dict[int, tuple[Tensor, Tensor | None]] = {}

    @property
    def are_there(self) -> bool:
        """Whether a backward pass may run Python of the user's."""
        return bool(self._places)

    @property
    def count(self) -> int:
        """The number of the next place."""
        return len(self._places)

    def forget(self) -> None:
        """Python is done; no backward pass runs its code any more."""
        self._places.clear()
        self._nodes.clear()
        self._handles.clear()
        for operator in self._operators.values():
            operator.token = None
        self._operators.clear()

    def placed(self, function: Callable[..., tuple[Any, ...]]) -> int:
        """The number of a place where this function runs; it is the same in all steps on this path."""
        self._places[len(self._places)] = function
        return len(self._places) - 1

    # ------------------------------------------------------------------ in the forward pass
    def apply(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``kind.apply``."""
        step = self._step
        if has_own_setup := kind.setup_context is not Function.setup_context:
            bound = inspect.signature(kind.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        context: Any = Context()
        context.needs_input_grad = tuple([isinstance(a, Tensor) and step.asks(a) for a in args])
        with torch.no_grad():
            if has_own_setup:
                found = kind.forward(*args)
                kind.setup_context(context, args, found)
            else:
                found = kind.forward(context, *args, **kwargs)
        if (hooks := self.hooks()) is not None:
            context.pack(*hooks)
        return self.joined(kind.__name__, context, Applied(kind, context, args), args, found)

    def joined(self, name: str, context: Any, applied: Applied, args: tuple[Any, ...], found: Any) -> Any:
        """The results of a function with their autograd history.

        Args:
            name: of the function.
            context: of the call.
            applied: its backward.
            args: what it was given.
            found: what it gave.
        """
        outputs = found if isinstance(found, tuple) else (found,)
        made = tuple([o for o in outputs if isinstance(o, Tensor)])
        inputs = tuple([a for a in args if isinstance(a, Tensor)])
        if not made:
            return found
        parts = tuple([tuple(tensors_in(part)) for part in (context.dirty_tensors, context.non_differentiable)])
        applied.gives = [isinstance(o, Tensor) for o in outputs]
        place = self.placed(applied)
        self._nodes[place] = Node(name, context, applied)
        with private.no_torch_functions():  # ``apply`` comes past the mode, which would see what noting asks of tensors
            joined = list(self.call(joined_as(name), (place, context.materialize_grads, inputs, made, *parts), {}))
        results = tuple([joined.pop(0) if isinstance(o, Tensor) else o for o in outputs])
        return results if isinstance(found, tuple) else results[0]

    def node(self, tensor: Tensor, fake: Tensor) -> Any:
        """The object that Python sees as ``grad_fn`` of a tensor, given its fake.

        Here the tensor has it: calls to come may write in place, and give it another one.
        """
        if fake.grad_fn is None or is_joined(fake.grad_fn):
            return self._stands_for(fake.grad_fn, None, "")
        token = self.call(NODE_OF, (tensor,), {})
        if self._step.is_eager:
            return tensor.grad_fn
        return self._stands_for(self._step.fake_made(token).node, token, "")

    def _stands_for(self, node: Any, token: Tensor | None, path: str) -> Any:
        if node is None:
            return None
        if is_joined(node):
            return self._nodes.get(node.place)
        if id(node) not in self._operators:
            self._operators[id(node)] = _operator(type(node).__name__)(self, node, token, path)
        return self._operators[id(node)]

    def next_of(self, operator: Operator) -> tuple[tuple[Any, int], ...]:
        """``next_functions`` of such an object."""
        return tuple(
            [
                (self._stands_for(node, operator.token, operator.path + chr(i)), number)
                for i, (node, number) in enumerate(operator.node.next_functions)
            ]
        )

    def hook_node(self, operator: Operator, name: str, function: Callable[..., Any]) -> Any:
        """``register_hook`` or ``register_prehook`` of a node."""
        gone = operator.token is None
        if gone or operator.node.name() == "torch::autograd::AccumulateGrad" or self._step.is_eager:
            return getattr(self.real(operator, name), name)(function)
        place = self.placed(lambda *gradients: (function(*gradients),))
        self.call(HOOK_NODE, (place, operator.token, operator.path, name), {})
        return Handle(self._step, place)

    def real(self, operator: Operator, name: str) -> Any:
        """The node in its place, in a step that runs eagerly."""
        if operator.token is None:
            raise RuntimeError(f"{name} of the grad_fn of a tensor of an earlier step, whose backward pass is over")
        if not self._step.is_eager:
            self._step.eagerly(f"{name} of a grad_fn in the step")
        return below(self._step.live_node(operator.token), operator.path)

    def hook(self, tensor: Tensor, function: Callable[[Tensor], Any]) -> Handle:
        """``tensor.register_hook``."""
        place = self.placed(lambda gradient: (function(gradient),))
        self.call(HOOK, (place, tensor), {})
        if (last := self._handles.get(id(tensor))) is not None:  # what is retained is the gradient behind all hooks
            last.remove()
            self._retain(tensor)
        return Handle(self._step, place)

    def retain(self, tensor: Tensor) -> None:
        """``tensor.retain_grad``."""
        if id(tensor) not in self._handles:
            self.retained[id(tensor)] = tensor, None
            self._retain(tensor)

    def _retain(self, tensor: Tensor) -> None:
        def note(gradient: Tensor) -> None:
            before = self.retained[id(tensor)][1]
            now = gradient.clone() if before is None else before + gradient
            self.retained[id(tensor)] = tensor, now
            if self._step.is_eager:
                tensor.grad = now

        place = self.placed(lambda gradient: (note(gradient),))
        self.call(HOOK, (place, tensor), {})
        self._handles[id(tensor)] = Handle(self._step, place)

    def keep(self, tensor: Tensor, gradient: Tensor) -> None:
        """Retain the gradient of a tensor that Python still has at the end of the step."""
        self.retained[id(tensor)] = tensor, gradient

    def settle(self) -> None:
        """Put retained gradients into ``.grad``."""
        with private.no_torch_functions():
            for tensor, gradient in self.retained.values():
                tensor.grad = gradient
        if not self._step.is_eager:
            self.retained.clear()

    # ------------------------------------------------------------------ in the backward pass
    def of_loss(self, loss: Tensor, divisor: int) -> None:
        """The backward pass of the loss that training_step returned."""
        self.through_engine(OF_LOSS, (loss, divisor), {}, create=False)

    def through_engine(self, function: Any, args: Any, kwargs: Any, *, create: bool) -> Any:
        """Call the engine, and run the user's Python wherever the engine pauses.

        Args:
            function: what is called.
            args: of the call.
            kwargs: likewise.
            create: whether gradients have an autograd history of their own (``create_graph``).
        """
        begin = self._begins.get((function, create))
        if begin is None:
            begin = self._begins[function, create] = Begin(function, creates=create)
        before, self._current = self._current, object()
        try:
            place, *found = self.call(begin, args, kwargs)
            while place != OVER:
                try:
                    with torch.set_grad_enabled(create), self.seen():
                        results = self._places[place](*found)
                except Exception as error:
                    if function is not OF_LOSS:
                        self._raise(error)
                    raise
                place, *found = self.call(GO_ON, results, {})
            return found[0]
        finally:
            self._current = before

    def _raise(self, error: Exception) -> None:
        """Raise in the true engine: what it has added to gradients by then is there if the step catches the error."""
        if not self._step.is_eager:
            self._step.eagerly(f"Python in a backward pass raised {type(error).__name__}")
        self.call(GO_ON, (Raised(error),), {})

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Calls inside are the step's. A backward pass by hand begins inside a call, where the step's modes are off."""
        is_seen = any(mode is self._step for mode in private.function_modes())
        with private.with_torch_functions(), contextlib.nullcontext() if is_seen else self._step:
            yield

    @property
    def current(self) -> Any:
        """An object that identifies the running backward pass."""
        return private.graph_task() if self._current is None else self._current

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note a call, or perform it if the step runs eagerly."""
        return (self._step.for_good if self._step.is_eager else self._step.called)(func, args, kwargs)

    def inline(self, place: int, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run the Python of a place in a step that runs eagerly."""
        return self._places[place](*gradients)


class Context(FunctionCtx):
    """The ``ctx`` of a function that is followed."""

    def __init__(self) -> None:
        self.to_save: tuple[Any, ...] = ()
        self.dirty_tensors: tuple[Tensor, ...] = ()
        self.non_differentiable: tuple[Tensor, ...] = ()
        self.materialize_grads = True
        self.needs_input_grad: tuple[bool, ...] = ()
        self._unpack: Callable[[Any], Any] | None = None

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The saved tensors."""
        return tuple(self.to_save) if self._unpack is None else tuple(map(self._unpack, self.to_save))

    def pack(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        """Tensors were saved under hooks: pack them now, and unpack them on use."""
        with torch.no_grad():
            self.to_save = tuple([None if t is None else pack(t.detach()) for t in self.to_save])
        self._unpack = lambda packed: None if packed is None else unpack(packed)

    def maybe_clear_saved_tensors(self) -> None:
        """As in torch."""


class Applied:
    """The backward of one call of a function.

    Args:
        kind: the function.
        context: of the call.
        args: what it was given.
    """

    def __init__(self, kind: Any, context: Context, args: tuple[Any, ...]) -> None:
        # a handle has a weak reference to one, which a plain dict does not take
        self.before = OrderedDict[int, Callable[..., Any]]()
        self.after = OrderedDict[int, Callable[..., Any]]()
        self._kind, self._context = kind, context
        self._are_tensors = [isinstance(a, Tensor) for a in args]
        self.gives: Sequence[bool] = ()
        """Whether each output is a tensor: also for what is none there is a gradient, which is None."""

    def __call__(self, *gradients: Any) -> tuple[Any, ...]:
        """The gradients of the tensors among the function's arguments."""
        given = iter(gradients)
        gradients = tuple([next(given, None) if is_tensor else None for is_tensor in self.gives])
        for hook in tuple(self.before.values()):
            found = hook(gradients)
            gradients = gradients if found is None else found
        kind, count = self._kind, len(self._are_tensors)
        function = kind.backward if kind.vjp is Function.vjp else kind.vjp
        found = function(self._context, *gradients)
        results = found if isinstance(found, tuple) else (found,)
        if len(results) < count or any(r is not None for r in results[count:]):
            raise RuntimeError(
                f"function {kind.__name__}Backward returned an incorrect number of gradients (expected {count}, got "
                f"{len(results)})"
            )
        mine = tuple([r for r, is_tensor in zip(results, self._are_tensors, strict=False) if is_tensor])
        for hook in tuple(self.after.values()):
            found = hook(mine, gradients)
            mine = mine if found is None else tuple(found)
        return mine


class Node:
    """``grad_fn`` of a result of a user's function.

    Args:
        name: of the function.
        context: of the call.
        applied: its backward.
    """

    def __init__(self, name: str, context: Any, applied: Applied) -> None:
        self._name, self._context, self._applied = f"{name}Backward", context, applied

    def name(self) -> str:
        """As in torch."""
        return self._name

    def register_hook(self, function: Callable[..., Any]) -> Any:
        """As in torch."""
        return _added(self._applied.after, function)

    def register_prehook(self, function: Callable[..., Any]) -> Any:
        """As in torch."""
        return _added(self._applied.before, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


@torch.autograd.graph.Node.register
class Operator:
    """``grad_fn`` of a result of an operator of torch, or a node below it.

    Args:
        functions: of the step.
        node: the recorded node, which answers plain questions.
        token: the placeholder of a ``grad_fn``; None once the step is over.
        path: from this ``grad_fn`` to the node.
    """

    def __init__(self, functions: Functions, node: Any, token: Tensor | None, path: str) -> None:
        self.node, self.token, self.path = node, token, path
        self._functions, self._metadata = functions, dict[str, Any]()

    def name(self) -> str:
        """As in torch."""
        return self.node.name()

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """As in torch."""
        return self._functions.next_of(self)

    @property
    def metadata(self) -> dict[str, Any]:
        """As in torch."""
        return self._metadata

    def register_hook(self, fn: Callable[..., Any]) -> Any:
        """As in torch."""
        return self._functions.hook_node(self, "register_hook", fn)

    def register_prehook(self, fn: Callable[..., Any]) -> Any:
        """As in torch."""
        return self._functions.hook_node(self, "register_prehook", fn)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(self.node, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._functions.real(self, name), name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} object at {id(self):#x}>"


@functools.cache
def _operator(name: str) -> type[Operator]:
    """A class with the name of torch's own."""
    return type(name, (Operator,), {})


def _added(hooks: OrderedDict[int, Any], function: Callable[..., Any]) -> Any:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = function
    return handle


class Handle:
    """The handle of a hook on a tensor.

    Args:
        step: the step that registered it.
        place: the hook's number.
    """

    def __init__(self, step: Any, place: int) -> None:
        self._step, self._place = step, place

    def remove(self) -> None:
        """Remove the hook."""
        step, self._step = self._step, None
        if step is not None and not step.is_over:
            (step.for_good if step.is_eager else step.called)(UNHOOK, (self._place,), {})

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
