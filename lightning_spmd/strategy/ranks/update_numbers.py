"""Numbers beside a step that decide its update, compared among the ranks: those of optimizers' groups, and clipping.

They are inputs of the ranks' graphs, so a graph says nothing of them. A hash of them is part of what ranks compare
anyway when the Python of a step is done; it is computed where they change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from lightning_spmd.errors import RankDisagreementError
from lightning_spmd.ir.several_optimizers import SeveralOptimizers, parts_of
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.stages.runtime.agreement.control import ControlPlane

_AS_THEY_ARE = frozenset((float, int, bool, type(None)))


class UpdateNumbers:
    """Those of one run. Tensors are not looked at: a GPU would have to be waited for.

    Args:
        optimizer: of training; with None nothing is compared.
        trainer: the Trainer.
    """

    def __init__(self, optimizer: Optimizer | None, trainer: Any) -> None:
        self._optimizer, self._trainer = optimizer, trainer
        self._last: list[Any] | None = None
        self._hash = 0

    def hash(self) -> int:
        """A number that is equal on ranks with equal numbers."""
        if self._optimizer is None:
            return 0
        now = [
            self._trainer.gradient_clip_val,
            *[
                v if v.__class__ in _AS_THEY_ARE else _plain(v)
                for group in self._optimizer.param_groups
                for key, v in group.items()
                if key != "params"
            ],
        ]
        if now != self._last:
            self._last, self._hash = now, stable_hash(_plain(now))
        return self._hash

    def check(self, control: ControlPlane) -> None:
        """Compare them one by one; all ranks together.

        Raises:
            RankDisagreementError: on every rank, with the first that differs, and both sides.
        """
        sides = control.gather(dict(self._named()))
        for rank, side in enumerate(sides):
            for name in {**sides[0], **side}:
                mine, its = sides[0].get(name), side.get(name)
                if mine != its:
                    raise RankDisagreementError(
                        f"{name} is {mine} on rank 0 and {its} on rank {rank}: the ranks train one "
                        "model, and their copies of it would drift apart. Set it on all ranks alike (decide it from "
                        "what is logged, or from self.all_gather)"
                    )

    def _named(self) -> Iterator[tuple[str, str]]:
        """The user's name of each, and its value."""
        if self._optimizer is None:
            return
        yield "trainer.gradient_clip_val", str(_plain(self._trainer.gradient_clip_val))
        several = isinstance(self._optimizer, SeveralOptimizers)
        for number, part in enumerate(parts_of(self._optimizer)):
            name = f"{type(part).__name__}{f' (optimizer {number})' if several else ''}"
            for at, group in enumerate(part.param_groups):
                for key, value in group.items():
                    if key != "params" and (known := _plain(value)) is not None:
                        yield f"{name}.param_groups[{at}][{key!r}]", str(known)


def _plain(value: Any) -> Any:
    """A number as a float, numbers as a list of such; None of anything else."""
    if isinstance(value, (int, float)):
        return float(value)
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else None
