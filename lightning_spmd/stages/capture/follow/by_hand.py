"""Manual optimization in a followed step: ``.grad``, ``backward`` and ``optimizer.step()`` become calls and a table.

Until Python is done, ``.grad`` of live tensors stays as it was before the step. The gradients that the step sees and
sets are kept here. A backward pass is one noted call, whose results are the new ``.grad`` of its leaves. A step of one
of torch's optimizers is one noted call too: its settings are numbers of the call, and its state is no operand.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.ir.successors import successor_of
from lightning_spmd.messages import place_of
from lightning_spmd.stages.capture.follow.engine import Begin
from lightning_spmd.stages.capture.follow.notes import Made, Source
from lightning_spmd.stages.capture.follow.step import Step
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed
from lightning_spmd.stages.capture.follow.values import Values
from lightning_spmd.stages.capture.follow.worlds import (
    CallByHand,
    Live,
    OnCopies,
    OnFakes,
    World,
    as_tuple,
    places_of_numbers,
)
from lightning_spmd.stages.capture.optimizer.optimizer_swap import is_torchs_own
from lightning_spmd.stages.capture.optimizer.own_backward import leaves_of
from lightning_spmd.stages.capture.user_code import user_location

_SETTINGS = 2
"""Where the settings are among the arguments of a step."""
_MOST_EVALUATIONS = 2
"""SAM evaluates twice in each step; what evaluates oftener decides by values how often."""
_OURS = 3
"""References to an otherwise unused placeholder with a gradient: its note's, the table's, the counting code's."""


class ByHand:
    """The state that all steps of a module with manual optimization share.

    Args:
        optimizers: the live ones.
        in_parts: their state is sharded over the ranks: a step is one call, whatever class it is of.
        part_of: gives the part of a whole gradient that this rank has, as it has of a tensor.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        in_parts: bool = False,
        part_of: Callable[[Tensor, Any], Tensor] = lambda _, gradient: gradient,
    ) -> None:
        self.optimizers, self.part_of = tuple(optimizers), part_of
        self.step: HandStep | None = None
        self.backward = CallByHand("backward", self._world)
        self.is_known = [in_parts or is_torchs_own(optimizer) for optimizer in self.optimizers]
        """Whether a step of an optimizer is one call; of others it is followed."""
        self.steps = [CallByHand(f"{type(o).__name__}.step", self._world, i) for i, o in enumerate(self.optimizers)]

    def _world(self) -> World:
        """The world of the running step, for calls outside of notes that run eagerly."""
        if self.step is None or self.step.step.is_eager:
            return Live(self.optimizers)
        return OnFakes(self.step.step.recorder.tensors)

    def of(self, step: Step) -> HandStep:
        """The manual optimization of a step."""
        self.step = step.by_hand = HandStep(self, step)
        step.follower.kinds.update(dict.fromkeys((self.backward, *self.steps), "call"))
        step.follower.kinds[Tensor.requires_grad_] = "by hand"  # and no call, because others note it as one
        return self.step


class HandStep:
    """The manual optimization of one step.

    Args:
        common: what is the same in all steps.
        step: the step.
    """

    def __init__(self, common: ByHand, step: Step) -> None:
        self.step = step
        self._common = common
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._in_engine = set[int]()  # ``id`` of leaves of backward passes that have not ended
        self._trained: dict[int, tuple[Tensor, bool]] = {}  # as they were when the step met them
        self._states = [_Watched(optimizer, self._looked) for optimizer in common.optimizers]
        self._stepped: set[int] = set()
        self._has_looked = self._is_zeroed = False

    # ------------------------------------------------------------------ around the user's code
    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A context in which ``backward`` and steps of optimizers are noted."""
        step = self.step
        step.on_read, step.on_values = self._unwatched(step.on_read), self._unwatched(step.on_values)
        with private.backward_replaced(self.backward), contextlib.ExitStack() as stack:
            for index, optimizer in enumerate(self._common.optimizers):
                is_known = self._common.is_known[index]
                stack.enter_context(self._step_replaced(index, optimizer, self._step_of if is_known else self._counted))
                if is_known:
                    stack.enter_context(self._states[index].active())
            yield

    @contextlib.contextmanager
    def _step_replaced(self, index: int, optimizer: Any, by: Callable[..., Callable[..., Any]]) -> Iterator[None]:
        attributes = vars(optimizer)
        before = attributes.get("step")
        original: Callable[..., Any] = optimizer.step
        attributes["step"] = replacement = by(index, optimizer, original)
        try:
            yield
        finally:
            if attributes.get("step") is replacement:
                if before is None:
                    del attributes["step"]
                else:
                    attributes["step"] = before

    def _unwatched(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a function of a library, which may read the states of optimizers."""
        if not self._states:
            return function

        def unwatched() -> Any:
            with contextlib.ExitStack() as stack:
                for state in self._states:
                    stack.enter_context(state.not_watching())
                return function()

        return unwatched

    @property
    def has_gradients(self) -> bool:
        """Whether the step has put gradients into ``.grad`` of parameters."""
        return any(isinstance(t, nn.Parameter) and g is not None for t, g in self._gradients.values())

    # ------------------------------------------------------------------ gradients
    def handles(self, name: str, owner: str) -> bool:
        """Whether a function of torch is about manual optimization."""
        return (
            owner == "grad" or name in ("backward", "requires_grad_") or (owner, name) == ("requires_grad", "__set__")
        )

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note a call of such a function."""
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "backward":
            return self._of_tensor(*args, **kwargs)
        if owner == "grad":
            return self._set_gradient(func, args)
        return self._set_trained(func, args, kwargs)

    def gradient(self, tensor: Tensor) -> Tensor | None:
        """``tensor.grad`` in the step. For callers outside of the step's modes."""
        known = self._gradients.get(id(tensor)) or self.step.functions.retained.get(id(tensor))
        if known is None and isinstance(tensor, nn.Parameter):
            if self._is_zeroed:
                return None
            if self.step.reads_gradients is None and not self._states:  # automatic optimization
                self.step.reads_gradients = user_location()
        return tensor.grad if known is None else known[1]

    def zero(self) -> None:
        """Zero gradients, as Lightning does before the backward pass of the loss."""
        self._is_zeroed = True
        self._gradients = {k: v for k, v in self._gradients.items() if not isinstance(v[0], nn.Parameter)}

    def added(self) -> Sequence[tuple[Tensor, Tensor]]:
        """The gradients that backward passes within that of the loss gave to parameters."""
        found = [(t, g) for t, g in self._gradients.values() if isinstance(t, nn.Parameter) and g is not None]
        self.zero()
        return found

    def _set_gradient(self, func: Any, args: Any) -> Any:
        tensor, value = args[0], args[1] if len(args) > 1 else None
        fits = value is None or (
            isinstance(value, Tensor)
            and (value.shape, value.dtype, value.device, value.layout)
            == (tensor.shape, tensor.dtype, tensor.device, tensor.layout)
            and value is not tensor
        )
        if not fits:
            self.step.eagerly("a gradient of another kind than its tensor")
            return func(*args)
        if not self._is_zeroed:
            self.step.on_zeroed([tensor])
        self._gradients[id(tensor)] = tensor, value
        return None

    def _set_trained(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Change ``requires_grad`` of a live tensor, and in the notes if a call has used the tensor."""
        tensor = args[0]
        trained = bool(kwargs.get("requires_grad", args[1] if len(args) > 1 else True))
        source = self.step.source_if_known(tensor)
        if type(source) is Made:
            found = self.step.called(Tensor.requires_grad_, (tensor, trained), {})
            return None if func.__name__ == "__set__" else found  # torch never releases what a setter returns
        if source is not None and tensor.requires_grad is not trained:
            self._trained.setdefault(id(tensor), (tensor, tensor.requires_grad))
            self.step.called(Tensor.requires_grad_, (tensor, trained), {})
        with self.step.beside():
            return func(*args, **kwargs)

    def trained_at_first(self, tensor: Tensor) -> bool:
        """Whether a live tensor asked for gradients when the step met it."""
        known = self._trained.get(id(tensor))
        return tensor.requires_grad if known is None else known[1]

    # ------------------------------------------------------------------ backward
    def _of_tensor(
        self,
        tensor: Tensor,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        self.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """``torch.autograd.backward``."""
        step = self.step
        given = grad_variables if grad_tensors is None else grad_tensors
        retain = create_graph if retain_graph is None else retain_graph
        if not (step.is_eager or step.is_apart):
            with private.no_torch_functions():  # of which none is the user's
                if self._noted_backward(tensors, given, bool(retain), bool(create_graph), inputs):
                    return
            if not step.is_eager:
                step.eagerly("backward of what depends on no trained tensor that is known")
        private.true_backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

    def _noted_backward(self, tensors: Any, given: Any, retain: bool, create: bool, inputs: Any) -> bool:
        """Note a backward pass, or run it eagerly. Returns whether that was possible."""
        roots, weights = as_tuple(tensors), None if given is None else as_tuple(given)
        leaves = self._leaves(roots, None if inputs is None else as_tuple(inputs))
        if not leaves:
            return False
        held = [self.gradient(leaf) for leaf in leaves]
        arguments = (roots, weights, leaves, held, retain, create, inputs is not None)
        if self.step.functions.are_there:
            outer, self._in_engine = self._in_engine, {*self._in_engine, *map(id, leaves)}
            try:
                found = self.step.functions.through_engine(self._common.backward, arguments, {}, create=create)
            finally:
                self._in_engine = outer
        else:
            found = self._call(self._common.backward, arguments)
        for leaf, now in zip(leaves, () if self.step.is_eager else found, strict=False):
            if now is not None:
                self._gradients[id(leaf)] = leaf, now
        return True

    def _leaves(self, roots: tuple[Tensor, ...], wanted: tuple[Tensor, ...] | None) -> list[Tensor] | None:
        """The tensors that get gradients; None if only autograd itself knows them."""
        step = self.step
        if wanted is not None:
            return list(wanted) if all(map(step.recorder.is_leaf, wanted)) else None
        sources = tuple([step.source_if_known(root) for root in roots])
        if None in sources:
            return None
        for note in reversed(step.here.children):
            func = note.func.function if isinstance(note.func, Begin) else note.func
            if func is self._common.backward and note.args[0] == sources and not note.args[-1]:
                return [step.tensor_in_hand(source) for source in note.args[2]]
        try:
            return step.recorder.leaves(sources, leaves_of)
        except CannotBeFollowed as error:
            step.eagerly(str(error))
            return None

    def _call(self, func: Any, args: tuple[Any, ...]) -> Any:
        return self.step.__torch_function__(func, (), args, {})

    # ------------------------------------------------------------------ steps of optimizers
    def _step_of(self, index: int, optimizer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # with the mark that schedulers look for
        def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            if (args or kwargs) and not self.step.is_eager:
                self.step.eagerly(f"{type(optimizer).__name__}.step with further arguments")
            if not self.step.is_eager and private.step_hooks(optimizer):  # the step has put them there
                self.step.eagerly(f"{type(optimizer).__name__}.step with hooks")
            if self.step.is_eager:
                return original(*(() if closure is None else (closure,)), *args, **kwargs)
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            if self.step.is_eager:
                original()
            else:
                private.mark_stepped(optimizer)
                with private.no_torch_functions():
                    loss = result if isinstance(result, Tensor) else None
                    is_asked = closure is not None and not is_torchs_own(optimizer)
                    self._note_step(index, optimizer, [loss] if is_asked else [])
            return result

        return step

    def _counted(self, index: int, optimizer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """A step whose Python runs. One that evaluates until it has converged (LBFGS) is another graph in each step."""

        @functools.wraps(original)
        def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            if closure is None:
                return original(*args, **kwargs)
            times = 0

            def counted() -> Any:
                nonlocal times
                times += 1
                if times > _MOST_EVALUATIONS and not self.step.is_eager:
                    where = f"{type(optimizer).__name__}.step{place_of(type(optimizer).step)}"
                    self.step.eagerly(f"{where} evaluates its closure again and again")
                return closure()

            return original(counted, *args, **kwargs)

        return step

    def _note_step(self, index: int, optimizer: Any, evaluated: list[Tensor | None]) -> None:
        if self._has_looked:
            self.step.eagerly("the state of an optimizer is looked at before its step")
            private.step_without_hooks(optimizer)
            return
        self._stepped.add(index)
        parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        call = self._common.steps[index]
        self._call(call, (parameters, [self.gradient(p) for p in parameters], settings, evaluated))
        if not self.step.is_eager and (note := self.step.notes[-1]).take is None:
            note.free |= places_of_numbers(settings, _SETTINGS)

    def _looked(self) -> None:
        """The user's code reads the state of an optimizer. After a step of it, this step goes on eagerly."""
        if self.step.is_eager:
            return
        self._has_looked = True
        if self._stepped:
            self.step.eagerly("the state of an optimizer is looked at behind its step")

    def refuse_state(self, tensor: Tensor) -> None:
        """Raise if a tensor belongs to the state of an optimizer that steps in this step.

        Raises:
            CannotBeFollowed: it is.
        """
        for index in self._stepped:
            for state in self._states[index].real.values():
                if any(value is tensor for value in state.values()):
                    raise CannotBeFollowed("the state of an optimizer is looked at behind its step")

    # ------------------------------------------------------------------ the notes made true
    def on_fakes(self, others: Callable[[], Any]) -> World:
        """The world for recording."""
        return OnFakes(others)

    def on_copies(self, values: Values) -> World:
        """The world that computes values for Python on copies."""
        states = [state.real for state in self._states]
        return OnCopies(lambda: values.made.values(), self._common.optimizers, states)

    def live(self) -> World:
        """The world of a step that runs eagerly. Changes that the step made at once are taken back."""
        for state in self._states:
            state.watch_no_more()
        for tensor, trained in self._trained.values():
            tensor.requires_grad_(trained)
        return Live(self._common.optimizers)

    def let_go(self, sources: dict[int, Source]) -> None:
        """Drop gradients of tensors that the step made and that no longer exist."""
        made = [key for key in self._gradients if type(sources.get(key)) is Made]
        for key in made:
            if sys.getrefcount(self._gradients[key][0]) <= _OURS:
                del self._gradients[key]

    def take_parts(self) -> list[tuple[Tensor, Made]]:
        """Take out the gradients of sharded tensors. No rank has a whole one, so a graph puts them into ``.grad``."""
        step, found = self.step, list[tuple[Tensor, Made]]()
        for key, (tensor, gradient) in list(self._gradients.items()):
            source = None if gradient is None else step.source_if_known(gradient)
            if isinstance(tensor, DTensor) and type(source) is Made:
                found.append((tensor, source))
                del self._gradients[key]
        return found

    def exchange(self) -> None:
        """Parameters have been replaced: gradients are those of their successors."""
        known = [(successor_of(tensor), gradient) for tensor, gradient in self._gradients.values()]
        self._gradients = {id(tensor): (tensor, gradient) for tensor, gradient in known}

    def settle(self) -> None:
        """Write the step's gradients into ``.grad``, except where a true backward pass that has paused adds to them."""
        settled, self._gradients = self._gradients, {}
        with private.no_torch_functions():
            for key in settled.keys() - self._in_engine:
                tensor, gradient = settled[key]
                whole = isinstance(tensor, DTensor) and gradient is not None and not isinstance(gradient, DTensor)
                tensor.grad = self._common.part_of(tensor, gradient) if whole else gradient


class _Watched(MutableMapping[Any, Any]):
    """``optimizer.state`` during a step; it detects accesses.

    Args:
        optimizer: the live one.
        looked: told so.
    """

    def __init__(self, optimizer: Any, looked: Callable[[], None]) -> None:
        self._optimizer, self._looked = optimizer, looked
        self.real: Any = optimizer.state
        self._is_over = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A context in which it replaces the optimizer's state."""
        self._optimizer.state = self
        try:
            yield
        finally:
            self.watch_no_more()

    @contextlib.contextmanager
    def not_watching(self) -> Iterator[None]:
        """A context in which the optimizer has its own state."""
        if vars(self._optimizer).get("state") is not self:
            yield
            return
        self._optimizer.state = self.real
        try:
            yield
        finally:
            if not self._is_over:
                self._optimizer.state = self

    def watch_no_more(self) -> None:
        """Give the optimizer its own state again, or the one that the step assigned."""
        self._is_over = True
        if vars(self._optimizer).get("state") is self:
            self._optimizer.state = self.real

    def __getitem__(self, key: Any) -> Any:
        self._looked()
        return self.real[key]

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        self._looked()
        return self.real.get(key, default)  # an item that is missing is made by asking for it otherwise

    @override
    def pop(self, key: Any, *default: Any) -> Any:
        self._looked()
        return self.real.pop(key, *default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._looked()
        self.real[key] = value

    def __delitem__(self, key: Any) -> None:
        self._looked()
        del self.real[key]

    def __contains__(self, key: object) -> bool:
        self._looked()
        return key in self.real

    def __iter__(self) -> Iterator[Any]:
        self._looked()
        return iter(self.real)

    def __len__(self) -> int:
        self._looked()
        return len(self.real)
