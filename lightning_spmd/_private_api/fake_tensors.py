"""Underscore names of torch's fake tensors: shapes and dtypes without values."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.optim.optimizer as _torch_optimizer
import torch.utils._foreach_utils as _torch_foreach
from torch import Tensor
from torch._C import _DisableTorchDispatch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def _is_of_others(record: logging.LogRecord) -> bool:
    """Whether what torch logs of a failed shape function is not of a mode below: its own frame catches the error."""
    caught = record.exc_info[2] if record.exc_info else None
    return caught is None or not isinstance(caught.tb_frame.f_locals.get("self"), FakeTensorMode)


class FakeTensorMode(_FakeTensorMode):
    """torch's, but torch logs no traceback of calls that fail: shapes are tried, and what fails has a message.

    A fake tensor's ``__dict__`` refers to its mode, so a copy of the tensor (torchmetrics' ``add_state``) would copy
    the mode and the ``StorageWeakRef`` objects in it. Each copy of these gives back the same weak reference, and then
    a storage is freed that is in use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _LOG.addFilter(_is_of_others)  # once: a logger knows its filters

    def __deepcopy__(self, memo: Any) -> FakeTensorMode:
        return self


@contextlib.contextmanager
def optimizers_accept_fake_tensors() -> Iterator[None]:
    """Let torch's optimizers and its gradient clipping choose foreach for fake tensors as they do for real ones.

    They decide by exact type, each by a list of its own; without this, capture would record one small kernel a
    parameter, and on CUDA sums in another order than eager's.
    """
    lists = (_torch_optimizer._foreach_supported_types, _torch_foreach._foreach_supported_types)
    for supported in lists:
        supported.append(FakeTensor)
    try:
        yield
    finally:
        for supported in lists:
            supported.remove(FakeTensor)


def storage_elements(tensor: Tensor) -> int:
    """Number of elements of the storage behind a (fake) tensor."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def new_fake(mode: FakeTensorMode, spec: Any, base: Tensor | None = None, offset: int = 0) -> Tensor:
    """A fake tensor as ``FakeTensorMode`` makes one for a call that it knows, in a tenth of the time of asking it.

    Args:
        mode: the mode.
        spec: shape, stride, dtype and device.
        base: a fake tensor whose storage it shares, if not its own.
        offset: elements of that storage between the first ones of the two.
    """
    if base is None:
        with _DisableTorchDispatch():
            elements = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
            return FakeTensor(mode, elements, spec.device)
    # under inference mode, too, a view is a tensor of autograd's where its base is one
    with torch.inference_mode(base.is_inference()), _DisableTorchDispatch():
        elements = torch.empty(0, dtype=spec.dtype, device="meta")
        elements.set_(base.untyped_storage(), base.storage_offset() + offset, spec.shape, spec.stride)
        return FakeTensor(mode, elements, spec.device)


def tells_all(tensor: Tensor) -> bool:
    """Whether shape, strides, dtype and device say all that shape functions ask of a tensor."""
    if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.layout is not torch.strided:
        return False
    return not tensor.dtype.is_complex and not tensor.is_neg()


def zeros_like_fake(fake: Tensor) -> Tensor:
    """A real tensor of zeros laid out as a fake one; only outside dispatch modes."""
    base = torch.zeros(storage_elements(fake), dtype=fake.dtype, device=fake.device)
    return base.as_strided(fake.shape, fake.stride(), fake.storage_offset())
