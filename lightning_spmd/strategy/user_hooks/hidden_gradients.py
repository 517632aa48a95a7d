"""What ``p.grad`` is between two steps where eager training has a gradient, and a graph has kept none.

Training whose code names ``.grad`` behind the step runs in two graphs (``detectors.py``), but code does not show all
that reads it: computed names, ``optimizer.step()``, what libraries call. So a stand-in is there, any use of which is an
error with its place. Asking whether there is a gradient is no use of it, and neither is zeroing it. What a
backward pass adds to it is added to what graphs hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.stages.capture.user_code import user_location

Add = Callable[[Tensor, Tensor], None]
"""Takes a tensor and what a backward pass has found for its gradient."""


class HiddenGradients:
    """The stand-ins of one run."""

    def __init__(self) -> None:
        self._given: list[tuple[Tensor, HiddenGradient]] = []
        self._known: dict[int, HiddenGradient] = {}

    def put(
        self,
        tensors: Iterable[Tensor],
        kind: type[HiddenGradient] | None = None,
        *,
        stay: bool = False,
        add: Add | None = None,
    ) -> None:
        """From here to the next step, or for good, there are stand-ins in ``.grad`` of parameters or other leaves.

        Args:
            tensors: the parameters or leaves.
            kind: of the stand-ins.
            stay: for good.
            add: gets what a backward pass adds to a gradient; None: nobody will see that.
        """
        kind = kind or HiddenGradient
        for tensor in tensors:
            if tensor.grad is None and tensor.requires_grad:
                hidden = self._known.get(id(tensor))
                if hidden is None or type(hidden) is not kind or not _is_given(tensor, hidden):
                    hidden = tensor.grad = self._known[id(tensor)] = kind.like(tensor)
                hidden.takes = None if add is None else functools.partial(add, tensor)
                if not stay:
                    self._given.append((tensor, hidden))

    def take_away(self) -> list[Tensor]:
        """The next step begins; gives the parameters whose gradients were set to something else, or None."""
        changed: list[Tensor] = []
        for parameter, hidden in self._given:
            if isinstance(parameter.grad, HiddenGradient):
                parameter.grad = None
            else:
                changed.append(parameter)
            hidden.takes = None
        self._given.clear()
        return changed


class HiddenGradient(Tensor):
    """Stands for a gradient of its shape, dtype and device; has no values, and takes no memory.

    Attributes:
        takes: gets what a backward pass adds to it; None: that is lost, as eager training zeroes it before it is used.
    """

    takes: Callable[[Tensor], None] | None = None

    text = (
        "p.grad of the step before is used{}, which strategy='spmd' did not find in the code between two steps and so "
        "did not keep. Look at gradients in on_after_backward or on_before_optimizer_step, or write .grad in the hook "
        "itself: then it is found, and gradients are kept"
    )

    @classmethod
    def like(cls, parameter: Tensor) -> HiddenGradient:
        """One that stands for the gradient of a parameter."""
        # with the strides of the parameter, or autograd warns
        stride, dtype, device = parameter.stride(), parameter.dtype, parameter.device
        return private.make_wrapper(cls, parameter.shape, strides=stride, dtype=dtype, device=device)

    def __deepcopy__(self, memo: dict[int, Any]) -> HiddenGradient:
        return self  # with a parameter torch copies what is in p.grad

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What autograd does to it, which is to add a gradient; the rest is asked for above."""
        if func in _ADDS and isinstance(args[0], HiddenGradient):
            hidden, gradient = args[:2]
            if hidden.takes is not None:
                hidden.takes(gradient.detach())
            if func is torch.ops.aten.add_.Tensor:
                return hidden
            total = type(hidden).like(hidden)  # of a backward pass that has a graph itself
            total.takes = hidden.takes
            return total
        args, kwargs = private.pytree.tree_map_only(HiddenGradient, _zeros_like, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Attributes, and what moves a module; all else asks for values."""
        if func == _SET_DATA:
            return None
        if func in _ADDS and private.graph_task() != -1:  # autograd, behind a dispatch mode
            with private.no_torch_functions():
                return func(*args, **(kwargs or {}))
        if getattr(func, "__name__", None) == "__get__" or func in _WITHOUT_VALUES:
            with private.no_torch_functions():
                found = func(*args, **(kwargs or {}))
            return cls.like(found) if isinstance(found, Tensor) and not isinstance(found, cls) else found
        place = user_location()
        where = f" ({place})" if place else ""
        raise ConfigurationError(cls.text.format(where))


class HiddenLeafGradient(HiddenGradient):
    """The same of a tensor that is no parameter: of the batch, made in the step, or held by an attribute."""

    text = (
        "the gradient of a tensor that is no parameter of the module is used{}, which strategy='spmd' does not keep: "
        "call retain_grad() on it in training_step if it is of the batch or of the step, else make it a parameter"
    )


def _is_given(tensor: Tensor, hidden: HiddenGradient) -> bool:
    """Whether a stand-in from before is now the tensor's; torch refuses one of another shape, dtype or device."""
    try:
        tensor.grad = hidden
    except RuntimeError:
        return False
    return True


def _zeros_like(hidden: HiddenGradient) -> Tensor:
    return torch.zeros((), dtype=hidden.dtype, device=hidden.device).expand(hidden.shape)


_ADDS = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor))
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_MOVES = ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "requires_grad_", "detach", "detach_")
_SHAPES = ("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__hash__")
_WITHOUT_VALUES = frozenset((*(getattr(Tensor, name) for name in (*_MOVES, *_SHAPES)), private.have_kinds_in_common))
