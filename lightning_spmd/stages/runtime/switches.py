"""The switches of torch under which graphs run, whatever the user's are where a step begins or reads."""

from __future__ import annotations

import torch

from lightning_spmd import _private_api as private


class GraphSwitches:
    """A context without autograd and autocast in which calls without ``dtype`` make float32, as graphs were recorded.

    Entered at each read of a step: three contexts of torch's take four times as long.
    """

    __slots__ = ("_autocast", "_dtype", "_grad")

    def __enter__(self) -> None:
        self._grad, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self._autocast = private.disable_autocast()
        self._autocast.__enter__()
        private.set_grad_enabled(False)
        if self._dtype is not torch.float32:
            torch.set_default_dtype(torch.float32)

    def __exit__(self, *error: object) -> None:
        if self._dtype is not torch.float32:
            torch.set_default_dtype(self._dtype)
        private.set_grad_enabled(self._grad)
        self._autocast.__exit__(*error)
