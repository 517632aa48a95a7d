"""Saved-tensor hooks of the user's, and checkpointed parts, which save nothing.

Under such hooks a call is noted with the tensors that autograd saves as further results. They pass the hooks at the
call, and again where the backward pass needs them. So the calls that compute a checkpointed part again are noted, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.follow.engine import SET_STATE, STATE, Saving
from lightning_spmd.stages.capture.follow.functions import Applied, Context, Functions
from lightning_spmd.stages.capture.follow.notes import around_now
from lightning_spmd.stages.capture.follow.values import surroundings


class Saved:
    """Saved-tensor hooks and checkpointed parts of one step.

    Args:
        step: the step.
        functions: of the step.
        saving: calls under hooks by what is called, of all steps.

    Attributes:
        hooks: the user's, the innermost last, and whether torch has them.
    """

    def __init__(self, step: Any, functions: Functions, saving: dict[Any, Saving]) -> None:
        self.hooks: list[_Hooks] = []
        self._step, self._functions, self._saving = step, functions, saving
        functions.hooks = self._innermost

    def _innermost(self) -> tuple[Any, Any] | None:
        return (self.hooks[-1].pack, self.hooks[-1].unpack) if self.hooks and torch.is_grad_enabled() else None

    # ------------------------------------------------------------------ hooks
    def enter(self, hooks: Any, enter: Callable[[Any], None]) -> None:
        """``saved_tensors_hooks.__enter__``."""
        if self._step.is_apart or self._step.is_eager:
            enter(hooks)
        else:
            self.hooks.append(_Hooks(hooks.pack_hook, hooks.unpack_hook, hooks))
            self._step.looks_closer = True

    def leave(self, hooks: Any, leave: Callable[[Any], None]) -> None:
        """``saved_tensors_hooks.__exit__``."""
        mine = self.hooks.pop() if self.hooks and self.hooks[-1].owner is hooks else None
        if mine is None or mine.is_real:
            leave(hooks)

    def for_good(self) -> None:
        """The step goes on eagerly; torch has the hooks now."""
        for hooks in self.hooks:
            hooks.is_real = True
            hooks.owner.__enter__()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call under hooks."""
        step, hooks, places = self._step, self.hooks[-1], self._functions
        saving = self._saving.get(func)
        if saving is None:
            saving = self._saving[func] = Saving(func)
            step.follower.kinds[saving] = "call"
        found = step.__torch_function__(saving, (), (places.count, *args), kwargs)
        out, saved = found
        for tensor in saved:
            with torch.no_grad(), places.seen():
                packed = hooks.pack(tensor)
            places.placed(lambda packed=packed: (hooks.unpack(packed),))
        return out

    # ------------------------------------------------------------------ checkpointed parts
    def checkpointed(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
        """The contexts that ``torch.utils.checkpoint`` enters around a part."""
        if self._step.is_apart or self._step.is_eager:
            return original(*args, **kwargs)
        if (args[2] if len(args) > 2 else kwargs.get("context_fn")) is not private.no_checkpoint_contexts:
            self._step.eagerly("checkpoint with contexts of its own")
            return original(*args, **kwargs)
        return self._around(*args, **kwargs)

    def _around(
        self,
        function: Callable[..., Any],
        preserve: bool,
        contexts: Any,
        determinism: str,
        debug: bool,
        stops: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        part = _Part(
            self._functions, lambda: function(*args, **kwargs), self._again(preserve), stops=private.stops_early(stops)
        )
        with torch.autograd.graph.saved_tensors_hooks(part.pack, part.unpack):
            yield

    def _again(self, preserve: bool) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """The context in which a part is computed again."""
        around = around_now(self._step.block)._replace(grad=True)
        call = self._functions.call
        state = call(STATE, (), {}) if preserve else None

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            now = None if state is None else call(STATE, (), {})
            if state is not None:
                call(SET_STATE, (state,), {})
            try:
                with surroundings(around):
                    yield
            finally:
                if now is not None:
                    call(SET_STATE, (now,), {})

        return again

    def reentrant(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """The older form of a checkpointed part: a backward pass in the backward pass."""
        functions, again, context = self._functions, self._again(preserve), Context()
        with torch.no_grad():
            found = function(*args)
        asked = [isinstance(a, Tensor) and self._step.asks(a) for a in args]

        class Part:
            """Replaces ``CheckpointFunction``."""

            vjp = torch.autograd.Function.vjp

            @staticmethod
            def backward(_: Any, *gradients: Any) -> tuple[Any, ...]:
                inputs = [
                    a.detach().requires_grad_(r) if isinstance(a, Tensor) else a
                    for a, r in zip(args, asked, strict=True)
                ]
                with again():
                    out = function(*inputs)
                outputs = out if isinstance(out, tuple) else (out,)
                pairs = [
                    (o, g)
                    for o, g in zip(outputs, gradients, strict=True)
                    if isinstance(o, Tensor) and self._step.asks(o)
                ]
                if not pairs:
                    raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
                return tuple([i.grad if isinstance(i, Tensor) else None for i in inputs])

        Part.__name__ = "CheckpointFunction"
        return functions.joined("CheckpointFunction", context, Applied(Part, context, args), args, found)


class _Hooks:
    """The user's saved-tensor hooks.

    Args:
        pack: called with what autograd saves.
        unpack: called with what that gave.
        owner: has them.

    Attributes:
        is_real: torch has them.
    """

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], owner: Any) -> None:
        self.pack, self.unpack, self.owner, self.is_real = pack, unpack, owner, False


class _Part:
    """A checkpointed part: it saves nothing, and each backward pass that needs it computes it again.

    Args:
        functions: of the step.
        run: computes it.
        again: entered around that.
        stops: as soon as all is there that was saved.
    """

    def __init__(self, functions: Functions, run: Callable[[], Any], again: Callable[[], Any], *, stops: bool) -> None:
        self._functions, self._run, self._again, self._stops = functions, run, again, stops
        self._count = 0
        self._found: dict[Any, dict[int, Tensor]] = {}

    def pack(self, _: Tensor) -> int:
        """Number a saved tensor."""
        self._count += 1
        return self._count - 1

    def unpack(self, number: int) -> Tensor:
        """The saved tensor of a number, computed again.

        Raises:
            CheckpointError: the part is another one now.
        """
        current = self._functions.current
        if current not in self._found:
            self._found[current] = self._computed()
        try:
            return self._found[current].pop(number)
        except KeyError:
            raise CheckpointError("torch.utils.checkpoint: a part saved fewer tensors when it was run again") from None

    def _computed(self) -> dict[int, Tensor]:
        found: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            found.append(tensor)
            if self._stops and len(found) == self._count:
                raise _Enough
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with contextlib.suppress(_Enough), hooks, self._again(), torch.enable_grad():
            self._run()
        return dict(enumerate(found))


class _Enough(Exception):
    """Control flow: everything that was needed is computed."""
