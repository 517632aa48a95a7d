"""Tensors of transforms of ``torch.func``, which what ``vjp`` returns holds until the user lets it go."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.stages.capture.follow.notes import tensors_in
from lightning_spmd.stages.capture.user_code import user_location


class Wrapped:
    """Results inside of transforms. Behind them are placeholders, which only Python that runs again gets rid of."""

    def __init__(self) -> None:
        self._step = 0
        self._held: dict[int, tuple[int, weakref.ref[Tensor]]] = {}

    def new_step(self) -> None:
        """Another step begins."""
        self._step += 1
        if self._held:
            self._let_go()

    def note(self, out: Any) -> None:
        """Note the results of a call in a transform that is under way."""
        for tensor in tensors_in(out):
            if private.is_wrapped(tensor):
                self._held[id(tensor)] = self._step, weakref.ref(tensor)

    @property
    def are_noted(self) -> bool:
        """Whether there have been any in this step, or are still from earlier ones."""
        return bool(self._held)

    @property
    def are_held(self) -> bool:
        """Whether somebody has any, when all transforms are over."""
        self._let_go()
        return bool(self._held)

    def check_step(self, arguments: Any) -> None:
        """Check that a call has none of an earlier step.

        Raises:
            RuntimeError: it has, and nothing is there any more of what autograd has saved.
        """
        for tensor in tensors_in(arguments):
            step, reference = self._held.get(id(tensor), (0, lambda: None))
            if reference() is tensor and step != self._step:
                raise RuntimeError(
                    f"what torch.func.vjp has returned in an earlier step is called ({user_location()}), but its "
                    "history has ended with that step; call torch.func.vjp in this step"
                )

    def _let_go(self) -> None:
        self._held = {key: noted for key, noted in self._held.items() if noted[1]() is not None}
