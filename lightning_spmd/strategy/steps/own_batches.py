"""``SPMDStrategy(batch=...)``: whether the ranks' batches form a global one or are local, and the messages about it."""

from __future__ import annotations

from typing import Literal

from lightning_spmd.ir.signature import InputRole
from lightning_spmd.messages import tell, warn
from lightning_spmd.stages.runtime.executor import Executable

BatchMode = Literal["auto", "global", "local"]
BATCH_MODES: tuple[BatchMode, ...] = ("auto", "global", "local")


class NoGlobalBatch(Exception):
    """Control flow, on all ranks together: the step cannot be one on the batches of all ranks."""


class OwnBatches:
    """The choice of one run.

    Args:
        mode: what the user asks for.

    Attributes:
        are_used: steps run on each rank's own batch.
    """

    def __init__(self, mode: BatchMode) -> None:
        self.are_used = mode == "local"
        self._mode = mode
        self._reason: str | None = None
        self._told = False

    @property
    def may_be_used(self) -> bool:
        """Whether they may take the place of a global batch."""
        return self._mode == "auto" and not self.are_used

    def begin(self, reason: str) -> None:
        """From now on each rank has a batch of its own."""
        self.are_used = True
        self._reason = reason

    def refused(self, reason: str) -> str:
        """Why a step is no graph, neither on each rank's own batch, for ``reason``, nor on the batch of all ranks."""
        if self._told or self._reason is None or self._reason == reason:
            return reason
        return f"{self._reason}. And on each rank's own batch: {reason}"

    def announce(self, executable: Executable) -> None:
        """Say so once there is a graph of such a batch."""
        facts = executable.captured.own_batch
        if self._told or facts is None:
            return
        self._told = True
        text = f"each rank's batch is one graph, and gradients are averaged over the ranks, weighed {facts.weighed}"
        written = [e.name for _, e in executable.captured.signature.inputs_of(InputRole.BUFFER) if e.mutated]
        if written:
            more = f" and {len(written) - 3} others" if len(written) > 3 else ""
            text += (
                f". {', '.join(written[:3])}{more} are each rank's own from here on; a checkpoint has those of rank 0"
            )
        if self._reason is None:
            tell(f"strategy='spmd' trains on local batches: {text}")
        else:
            warn(f"strategy='spmd' trains on local batches from here on: {text}. Reason: {self._reason}")
