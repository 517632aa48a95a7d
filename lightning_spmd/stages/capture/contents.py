"""Values that are compared as a whole: arrays by their bytes, random number generators by their state."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_spmd import _private_api as private

MOST_ITEMS = 1000
"""A longer container is compared by its length and a few of its items."""
MOST_BYTES = 1 << 16
"""A larger array is compared by identity, shape and a few of its elements."""


def array_content(array: Any) -> tuple[Any, ...]:
    """What is compared of a NumPy array: everything if it is small, else identity, shape and a sample."""
    numpy = sys.modules["numpy"]
    head = (array.shape, str(array.dtype))
    if array.dtype == object:
        return ("all", *head, tuple(map(id, array.ravel().tolist())))
    if array.nbytes <= MOST_BYTES:
        return ("all", *head, array.tobytes())
    flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel("K")[:0]
    places = numpy.linspace(0, max(flat.size - 1, 0), 1024).astype("int64")
    return ("sample", *head, id(array), flat[places].tobytes() if flat.size else b"")


def refill_array(array: Any, saved: Any) -> None:
    """Bring an array's elements back; None: they were not saved."""
    if saved is not None and array.flags.writeable:
        array[...] = saved


def bytes_of_buffer(value: Any) -> bytes:
    """What an object of C keeps in memory that it lends: ``ctypes``, ``mmap``."""
    return memoryview(value).tobytes()


def level_of(logger: logging.Logger) -> tuple[Any, ...]:
    """What decides whether a logger does anything; its own caches do not count."""
    return logger.getEffectiveLevel(), logger.disabled, logger.manager.disable


def _decimal_settings(module: Any) -> tuple[Any, ...]:
    context = module.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax


SETTINGS_OF_MODULES: dict[str, Callable[[Any], Any]] = {"decimal": _decimal_settings}
"""What decides the results of a module's functions and is no global of it."""


def bytes_of_tensor(tensor: Any) -> Any:
    """What is compared of a tensor whose values become Python's; None if there is no such tensor any more."""
    if not isinstance(tensor, Tensor) or tensor.nbytes > MOST_BYTES:
        return None
    values = tensor.detach().cpu().contiguous()
    return tensor.dtype, tuple(tensor.shape), values.reshape(-1).view(torch.uint8).numpy().tobytes()


class RandomKind:
    """How a kind of generator is saved, compared and restored.

    Args:
        kinds: the types.
        save: gives a state that ``restore`` takes.
        compare: makes of a state something that can be compared.
        restore: sets a state.
    """

    def __init__(
        self,
        kinds: tuple[type, ...],
        save: Callable[[Any], Any],
        compare: Callable[[Any], Any],
        restore: Callable[[Any, Any], Any],
    ) -> None:
        self.kinds, self.save, self.restore = kinds, save, restore
        self.read: Callable[[Any], Any] = lambda generator: compare(save(generator))


def random_kinds() -> list[RandomKind]:
    """Of the standard library, torch and, if it is in use, NumPy."""
    found = [
        RandomKind((random.Random,), random.Random.getstate, lambda s: s, random.Random.setstate),
        RandomKind((torch.Generator,), _torch_state, lambda s: s.numpy().tobytes(), torch.Generator.set_state),
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        legacy, new = numpy.random.RandomState, (numpy.random.Generator, numpy.random.BitGenerator)
        found += [
            RandomKind((legacy,), legacy.get_state, lambda s: (s[0], s[1].tobytes(), s[2:]), legacy.set_state),
            RandomKind(new, lambda g: _bits(g).state, repr, lambda g, state: setattr(_bits(g), "state", state)),
        ]
    return found


def _torch_state(generator: torch.Generator) -> Tensor:
    with private.disable_dispatch_modes():
        return generator.get_state()


def _bits(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator)
