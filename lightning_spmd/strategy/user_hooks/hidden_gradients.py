"""What ``p.grad`` is between two steps where eager training has a gradient, and a graph has kept none.

Training whose code names ``.grad`` behind the step runs in two graphs (``detectors.py``), but code does not show all
that reads it: computed names, ``optimizer.step()``, what libraries call. So a stand-in is there, any use of which is an
error with its place. Asking whether there is a gradient is no use of it, and neither is zeroing it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.stages.capture.user_code import user_location


class HiddenGradients:
    """The stand-ins of one run."""

    def __init__(self) -> None:
        self._given: list[tuple[Tensor, Tensor]] = []
        self._of_kind: dict[Any, HiddenGradient] = {}

    def put(self, tensors: Iterable[Tensor], kind: type[HiddenGradient] | None = None, *, stay: bool = False) -> None:
        """From here to the next step, or for good, there are stand-ins in ``.grad`` of parameters or other leaves."""
        kind = kind or HiddenGradient
        for tensor in tensors:
            if tensor.grad is None and tensor.requires_grad:
                key = kind, tensor.shape, tensor.dtype, tensor.device
                hidden = self._of_kind.get(key)
                if hidden is None:
                    hidden = self._of_kind[key] = kind.like(tensor)
                tensor.grad = hidden
                if not stay:
                    self._given.append((tensor, hidden))

    def take_away(self) -> list[Tensor]:
        """The next step begins; gives the parameters whose gradients were set to something else, or None."""
        changed: list[Tensor] = []
        for parameter, hidden in self._given:
            if parameter.grad is hidden:
                parameter.grad = None
            else:
                changed.append(parameter)
        self._given.clear()
        return changed


class HiddenGradient(Tensor):
    """Stands for a gradient of its shape, dtype and device; has no values, and takes no memory."""

    text = (
        "p.grad of the step before is used{}, which strategy='spmd' did not find in the code between two steps and so "
        "did not keep. Look at gradients in on_after_backward or on_before_optimizer_step, or write .grad in the hook "
        "itself: then it is found, and gradients are kept"
    )

    @classmethod
    def like(cls, parameter: Tensor) -> HiddenGradient:
        """One that stands for the gradient of a parameter."""
        return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Attributes, and what moves a module; all else asks for values."""
        if func == _SET_DATA:
            return None
        if func is Tensor.__deepcopy__:  # of a parameter in parts, with which torch copies what is in p.grad
            return args[0]
        if getattr(func, "__name__", None) == "__get__" or func in _WITHOUT_VALUES:
            with private.no_torch_functions():
                found = func(*args, **(kwargs or {}))
            return found.as_subclass(cls) if isinstance(found, Tensor) else found
        place = user_location()
        where = f" ({place})" if place else ""
        raise ConfigurationError(cls.text.format(where))


class HiddenLeafGradient(HiddenGradient):
    """The same of a tensor that is no parameter: of the batch, made in the step, or held by an attribute."""

    text = (
        "the gradient of a tensor that is no parameter of the module is used{}, which strategy='spmd' does not keep: "
        "call retain_grad() on it in training_step if it is of the batch or of the step, else make it a parameter"
    )


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_MOVES = ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "requires_grad_", "detach", "detach_")
_SHAPES = ("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__hash__")
_WITHOUT_VALUES = frozenset((*(getattr(Tensor, name) for name in (*_MOVES, *_SHAPES)), private.have_kinds_in_common))
