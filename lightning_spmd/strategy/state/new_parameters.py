"""New parameters and buffers during a run: a layer that a hook replaces, a head that grows.

Each rank initialises its own, and these differ unless all ranks draw the same numbers. So all ranks get rank 0's
values, as at the start of the run.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_spmd.errors import RankDisagreementError
from lightning_spmd.messages import tell
from lightning_spmd.stages.runtime.agreement.control import ControlPlane
from lightning_spmd.strategy.state.memory import broadcast_from_first


class NewParameters:
    """Finds parameters and buffers that joined a module since the last look.

    Args:
        module: the LightningModule.
        control: exchanges with the other ranks.
    """

    def __init__(self, module: nn.Module, control: ControlPlane) -> None:
        self._module = module
        self._control = control
        self._known: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._remember(_tensors(module))

    def among_parameters(self) -> bool:
        """Whether this rank has new parameters. Buffers are rebound by many an eager step."""
        return any(self._known.get(id(p)) is not p for p in self._module.parameters())

    def share(self, later: Collection[int] = ()) -> None:
        """Give all ranks rank 0's values of new tensors; all ranks together.

        Args:
            later: the ``id`` of tensors that a graph will set, equally on all ranks.

        Raises:
            RankDisagreementError: on every rank, if their new tensors differ.
        """
        found = {name: t for name, t in _tensors(self._module) if self._known.get(id(t)) is not t}
        new = {name: t for name, t in found.items() if id(t) not in later}
        self._remember(found.items())
        everyone = self._control.gather([(name, tuple(t.shape), str(t.dtype)) for name, t in new.items()])
        other = next((rank for rank, side in enumerate(everyone) if side != everyone[0]), None)
        if other is not None:
            raise RankDisagreementError(
                "since the start of the run the ranks' modules have got different parameters or buffers:\n"
                f"  rank 0: {_listed(everyone[0])}\n  rank {other}: {_listed(everyone[other])}\n"
                "layers must be replaced or added on all ranks alike"
            )
        if new:
            for tensor in new.values():
                broadcast_from_first(tensor)
            tell(f"strategy='spmd' gave all ranks rank 0's values of what is new in the module: {', '.join(new)}")

    def _remember(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in tensors:
            self._known[id(tensor)] = tensor


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those of which every rank has all."""
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            if not isinstance(tensor, DTensor):
                yield name, tensor


def _listed(entries: Sequence[tuple[str, tuple[int, ...], str]]) -> str:
    return ", ".join(f"{name}: {dtype.removeprefix('torch.')}{list(shape)}" for name, shape, dtype in entries) or "none"
