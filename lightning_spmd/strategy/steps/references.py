"""Tensors in parts that the user's code keeps of parameters, as steps see them: whole.

No counter tells all writes into a part (those through ``.data``, of foreach operators, into an array over its memory),
and the part of one rank may change alone. So all ranks compare their parts with the wholes, and tell each other.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_spmd import _private_api as private
from lightning_spmd.parallel.pieces import local_piece
from lightning_spmd.parallel.state import Placements, StateMesh


@dataclass(eq=False, slots=True)
class _Reference:
    """One of them.

    Args:
        part: what the user's code keeps.
        whole: all of it. Nothing else has its memory: the steps' search for tensors that share some passes it by.
        placements: of the part.
        then: of a result of torch's, whose whole does not tell what this rank's part was, the part.
        is_met: whether a step has met it since ranks compared.
    """

    part: weakref.ref[DTensor]
    whole: Tensor
    placements: Placements
    then: Tensor | None
    is_met: bool = False


class References:
    """Of one run.

    Args:
        state: gives the mesh for state.
    """

    def __init__(self, state: StateMesh) -> None:
        self._state = state
        self._known: list[_Reference] = []
        """The same on all ranks, in this order."""
        self._by_id: dict[int, _Reference] = {}
        self._are_compared = False

    def begin(self) -> None:
        """A step begins; since the last one references may have been written to."""
        self._are_compared = False

    def whole_of(self, part: DTensor) -> Tensor:
        """The whole of one, gathered by all ranks where it is new or was written to; they compare once a step."""
        with torch.no_grad(), private.disable_dispatch_modes(), private.no_torch_functions():
            if not self._are_compared:
                self._compare(private.local_tensor(part).device)
                self._are_compared = True
            found = self._by_id.get(id(part))
            if found is None or found.part() is not part:
                (found,) = self._gathered([part])
                self._known.append(found)
                self._by_id[id(part)] = found
        found.is_met = True
        return found.whole

    def let_go(self) -> None:
        """The run is over."""
        self._known, self._by_id = [], {}

    def _compare(self, device: torch.device) -> None:
        """Gather what has changed on any rank, and forget what no rank has any more; all ranks call this."""
        if not self._known:
            return
        parts = [each.part() for each in self._known]  # which live as long as this takes
        mine = [[self._has_changed(each), each.part() is not None, each.part() is None] for each in self._known]
        anywhere = torch.tensor(mine, dtype=torch.int32, device=device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        kept: list[_Reference] = []
        again: list[DTensor] = []
        for each, part, (is_changed, is_there, is_gone) in zip(self._known, parts, anywhere.tolist(), strict=True):
            if is_there and not is_changed:
                kept.append(each)
            elif part is not None and not is_gone and each.is_met:  # in the step before: likely in this one, too
                again.append(part)
        self._known = kept + self._gathered(again)
        for each in self._known:
            each.is_met = False
        self._by_id = {id(part): each for each in self._known if (part := each.part()) is not None}

    def _has_changed(self, reference: _Reference) -> bool:
        """Whether something has been written into this rank's part."""
        part = reference.part()
        if part is None:
            return False
        then = reference.then
        if then is None:
            then = local_piece(reference.whole, reference.placements, self._state.axes)
        return not torch.equal(_bits(private.local_tensor(part)), _bits(then))

    def _gathered(self, parts: Sequence[DTensor]) -> list[_Reference]:
        found: list[_Reference] = []
        for part, whole in zip(parts, self._state.gathered_together(parts), strict=True):
            is_state = self._state.is_state(part)
            placements = self._state.placements_of(part) if is_state else ()
            then = None if is_state else private.local_tensor(part).detach().clone()
            found.append(_Reference(weakref.ref(part), whole.detach(), placements, then))
        return found


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """As integers, of which each is equal to itself alone: NaN to NaN, and 0.0 not to -0.0."""
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    return parts.view(_INTEGERS[parts.element_size()])
