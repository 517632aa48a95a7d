"""A rank's own batch: the values that it contributes to all ranks, and their weights.

The step is captured on the rank's own batch, as one device would run it. Then the loss is multiplied, before its
backward pass, by this rank's share of all ranks' rows; so the sum of the ranks' gradients is the gradient of the mean
over all rows. Gradients, loss and logged values are marked as terms of reductions over the ranks
(:class:`~lightning_spmd.ir.node_info.Term`), which expansion writes; on one rank a term is its own sum. All other
results stay with their rank: inputs of metrics, outputs, buffers.

The rows of a batch are the ``batch_size=`` of the step's first ``self.log`` that has one, else those of the batch's
first tensor, as in Lightning; a batch without tensors counts 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, fx

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.node_info import TERM, Term
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.steps import OutputRef, OwnBatchFacts, RecordedCall
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.follow.program import Log
from lightning_spmd.stages.capture.record.packing import in_memory_order_of

LOG_ARGUMENTS = tuple(inspect.signature(LightningModule.log).parameters)[1:]
_BY_NAME: Mapping[Any, str] = {torch.sum: "sum", torch.max: "max", torch.min: "min", torch.mean: "mean"}
_NUMBERS: tuple[Any, ...] = (int, float, torch.SymInt, torch.SymFloat)
_OPERATIONS = ("sum", "max", "min")
AddOutput = Callable[[Any, OutputRole, tuple[Any, ...], str], int]


@dataclass(frozen=True)
class _Count:
    """How many rows something stands for: here, on all ranks, and this rank's share of them."""

    total: Tensor
    share: Tensor


class OwnBatch:
    """The values that a capture of a rank's own batch contributes to all ranks.

    Args:
        batch: this rank's.
        device: where training is.
        node_of: the node that produces a tensor.
        add_output: makes a value an output of the graph.
    """

    def __init__(
        self,
        batch: Batch,
        device: torch.device,
        node_of: Callable[[Tensor], fx.Node | None],
        add_output: AddOutput,
    ) -> None:
        self.facts: OwnBatchFacts | None = None
        self._batch = batch
        self._device = device
        self._node_of = node_of
        self._add_output = add_output

    def gradient(self, name: str, value: Tensor) -> Tensor:
        """The gradient of a parameter as this rank's term."""
        return self.term(value, f"gradient of {name}", is_gradient=True)

    def no_gradient(self, name: str, parameter: Tensor) -> Tensor:
        """The term of a rank whose batch does not reach a parameter that another rank's does."""
        zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        return self.gradient(name, in_memory_order_of(parameter, zeros))

    def term(self, value: Tensor, name: str, op: str = "sum", *, is_gradient: bool = False) -> Tensor:
        """``value`` as this rank's term of a reduction over all ranks."""
        with torch.no_grad():
            term = value.detach().view(value.shape)  # a node of its own; passes drop it
        node = self._node_of(term)
        if node is None:
            raise CaptureError(f"{name} is no value of {the_step()}'s graph")
        node.meta[TERM] = Term(op, name, is_gradient)  # pyright: ignore[reportArgumentType]
        return term

    def weigh(
        self, loss: Tensor, logs: Sequence[tuple[Log, Any, Any]], fakes: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Any]]:
        """Weigh the loss by this rank's share of the rows.

        Args:
            loss: of this rank's batch.
            logs: calls of ``self.log``, each with the value and the rows in the graph, if it has them.
            fakes: the tensors of the batch in the graph.

        Returns:
            the loss for the backward pass, the loss of all ranks, and of each call the outputs that are value and rows
            of all ranks.
        """
        size, why = self._size(logs, fakes)
        counts = self._counts([size, *(rows for _, _, rows in logs if rows is not None)])
        main, others = counts[0], iter(counts[1:])
        with torch.no_grad():
            position = self._add_output(main.total, OutputRole.LOGGED, (), "rows of all ranks")
            joined: list[Any] = []
            for index, (log, value, rows) in enumerate(logs):
                count = main if rows is None else next(others, main)
                joined.append(self._joined(log, value, count, index, has_rows=rows is not None))
            shown = self.term(loss.detach() * main.share, "loss").to(loss.dtype)  # shares are float64
        self.facts = OwnBatchFacts(position, why)
        return loss * main.share, shown, joined

    # ------------------------------------------------------------------ pieces
    def _size(self, logs: Sequence[tuple[Log, Any, Any]], fakes: Sequence[Tensor]) -> tuple[Any, str]:
        for log, _, rows in logs:
            if rows is not None:
                return rows, f"by batch_size= of self.log ({log.source})"
        batch = self._batch
        sizes = [(batch.paths[i], 1 if t.ndim == 0 else t.shape[0]) for i, t in zip(batch.tensors, fakes, strict=True)]
        if not sizes:
            return 1, "alike on all ranks, for no tensor in it says how many rows it has"
        path, size = sizes[0]
        text = f"by the first dimension of batch{path}, its first tensor"
        if any(other != size for _, other in sizes):
            text += ", as Lightning counts rows; where these are no samples, self.log(..., batch_size=n) says how many"
        return size, text

    def _counts(self, sizes: Sequence[Any]) -> list[_Count]:
        """Record all counts before the first is read, so that one collective adds them up."""
        with torch.no_grad():
            own = [torch.full((), size, dtype=torch.int64, device=self._device) for size in sizes]
            totals = [self.term(count.clone(), f"rows {index}") for index, count in enumerate(own)]
            return [_Count(t, n.to(torch.float64) / t) for n, t in zip(own, totals, strict=True)]

    def _joined(
        self, log: Log, here: Any, count: _Count, index: int, *, has_rows: bool
    ) -> tuple[OutputRef | None, OutputRef | None]:
        """The value of all ranks of a ``self.log``, and its rows."""
        dtype = _logged_dtype(here)
        if isinstance(here, _NUMBERS) and not isinstance(here, bool):
            here = torch.full((), here, dtype=torch.float64, device=self._device)
        if not isinstance(here, Tensor):  # a metric, which syncs by itself, or a number that is the same on all ranks
            return None, None
        here = here.detach()
        if not here.is_floating_point():
            here = here.to(torch.get_default_dtype())
        name = f"log {index} {log.name}"
        weighted = here if log.operation in _OPERATIONS else here * count.share
        joined = self.term(weighted, name, log.operation if log.operation in ("max", "min") else "sum").to(dtype)
        value = OutputRef(self._add_output(joined, OutputRole.LOGGED, (), name))
        if not has_rows:
            return value, None
        return value, OutputRef(self._add_output(count.total, OutputRole.LOGGED, (), f"rows of {name}"))


def operation_of(said: Mapping[str, Any]) -> str:
    """The reduction of the ranks' values of a ``self.log``."""
    operation = said.get("reduce_fx", "mean")
    operation = operation if isinstance(operation, str) else _BY_NAME.get(operation, "mean")
    return operation if operation in _OPERATIONS else "mean"


def said_in(call: RecordedCall) -> dict[str, Any]:
    """The arguments of a ``self.log`` by name; nothing for other calls."""
    if call.method != "log":
        return {}
    return {**dict(zip(LOG_ARGUMENTS, call.args, strict=False)), **call.kwargs}


def _logged_dtype(value: Any) -> torch.dtype:
    """The dtype in which one device logs a value."""
    return value.dtype if isinstance(value, Tensor) and value.is_floating_point() else torch.get_default_dtype()
