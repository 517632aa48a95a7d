"""Runs hooks between batches behind a fence: pending work of the last iteration is completed before they read a weight.

A hook that runs between batches may read or write weights, and that is unknown until it has run. So a torch-function
mode and a dispatch mode see every operation on a tensor that pending work will change, under whatever name, and let the
work finish first. Finishing starts no collective, so a rank may finish alone. A hook that reads costs as much as
without overlap; one that does not read costs nothing.

Not seen: a NumPy array over a weight's memory that was made earlier, and reads by other threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_spmd import _private_api as private

_ABSENT = object()
Targets = Sequence[Any]
"""What pending work reads and writes, as it was when the work was put off; empty where there is none."""


class Fence:
    """Around the hooks of one run.

    Args:
        targets: of the work that is pending now.
        is_current: whether a run would find the very same objects there now.
        finish: does the work.
    """

    def __init__(
        self, targets: Callable[[], Targets], is_current: Callable[[], bool], finish: Callable[[], None]
    ) -> None:
        self._targets = targets
        self._is_current = is_current
        self._finish = finish

    def call(self, hook: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a hook behind the fence."""
        targets = self._targets()
        if not targets:
            return hook(*args, **kwargs)
        watch = _Watch(targets, self._finish)
        with _SeesFunctions(watch), _SeesOperators(watch):
            result = hook(*args, **kwargs)
        if self._targets() is targets and not self._is_current():
            self._finish()  # something else was put in the place of a tensor; the work is the former one's
        return result


CallsHooks = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""The ``call`` of a fence of some kind."""


class FencedHooks:
    """Hooks of one run that are called by fences."""

    def __init__(self) -> None:
        self._fenced: list[FencedHook] = []

    def put(self, fence: CallsHooks, owner: Any, hook: str) -> None:
        """Run a hook behind a fence from now on."""
        vars(owner)[hook] = fenced = FencedHook(fence, owner, hook)
        self._fenced.append(fenced)

    def has(self, fence: CallsHooks, owner: Any, hook: str) -> bool:
        """Whether a fence is around a hook already, others around it or within it."""
        now = vars(owner).get(hook)
        return isinstance(now, FencedHook) and now.is_behind(fence)

    def take_away(self) -> None:
        """Restore all hooks."""
        for fenced in self._fenced:
            fenced.restore()
        self._fenced.clear()


class FencedHook:
    """A hook of a callback or module, behind a fence. Copies and pickles of its owner have the plain hook."""

    def __init__(self, fence: CallsHooks, owner: Any, hook: str) -> None:
        inner = getattr(owner, hook)
        functools.update_wrapper(self, inner)  # first: another fence's attributes come with it
        # Lightning looks for the user's method in one step
        self.__wrapped__ = inner.__wrapped__ if isinstance(inner, FencedHook) else inner
        self._before, self._inner = vars(owner).get(hook, _ABSENT), inner
        self._fence, self._owner, self._hook = fence, owner, hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The hook."""
        return self._fence(self._inner, args, kwargs)

    def is_behind(self, fence: CallsHooks) -> bool:
        """Whether a fence is around it, or around a hook within it."""
        return self._fence == fence or (isinstance(self._inner, FencedHook) and self._inner.is_behind(fence))

    def __reduce__(self) -> Any:
        if self._before is _ABSENT:
            return getattr, (self._owner, self._hook)
        return _itself, (self._before,)

    def restore(self) -> None:
        """Restore the owner's hook, unless something else was put in its place."""
        attributes = vars(self._owner)
        if attributes.get(self._hook) is not self:
            return
        del attributes[self._hook]
        if self._before is not _ABSENT:
            attributes[self._hook] = self._before


def _itself(value: Any) -> Any:
    return value


class _Watch:
    """Finishes pending work when a tensor that it changes is seen for the first time."""

    def __init__(self, targets: Targets, finish: Callable[[], None]) -> None:
        self._targets = targets
        self._finish = finish
        self._storages: set[int] | None = None
        self._done = False

    def see(self, arguments: Iterable[Any]) -> None:
        """Look at the arguments of an operation that has not begun."""
        if not self._done and any(self._is_pending(tensor) for tensor in _tensors(arguments)):
            self._done = True  # first: finishing is made of operations, too
            with torch.no_grad(), private.disable_dispatch_modes(), private.no_torch_functions():
                self._finish()

    def _is_pending(self, tensor: Tensor) -> bool:
        if self._storages is None:
            self._storages = {s for t in self._targets if isinstance(t, Tensor) for s in _storages(t)}
        return not self._storages.isdisjoint(_storages(tensor))


def _storages(tensor: Tensor) -> list[int]:
    with private.no_torch_functions():
        local = private.local_tensor(tensor)
        return [private.storage_of(local)] if local.layout is torch.strided else []


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in private.pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]


_ATTRIBUTES = ("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "ndim", "layout", "is_cuda")
SAY_NO_VALUES = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.element_size, Tensor.__hash__, Tensor.__len__),
    )
)
"""What callbacks do to weights without looking at them."""


class _SeesFunctions(TorchFunctionMode):
    """Sees torch functions, including those that reach no kernel, such as ``data_ptr``."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in SAY_NO_VALUES:
            self._watch.see((args, kwargs))
        return func(*args, **kwargs)


class _SeesOperators(private.TorchDispatchMode):
    """Kernels: also those that C++ calls."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._watch.see((args, kwargs))
        return func(*args, **kwargs)
