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

import dataclasses
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
from lightning_spmd.ir.tree import map_leaves
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.batch.batch import Batch
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
        self, loss: Tensor, returned: Any, calls: list[RecordedCall], outputs: Sequence[Any], fakes: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Any]:
        """Weigh the loss by this rank's share of the rows.

        Args:
            loss: of this rank's batch.
            returned: what ``training_step`` returned.
            calls: recorded in it; logged values in them become those of all ranks.
            outputs: the values that leave the graph so far; the list grows.
            fakes: the tensors of the batch in the graph.

        Returns:
            the loss for the backward pass, the loss of all ranks, and ``returned`` with that in it.
        """
        said = [said_in(call) for call in calls]
        explicit = [_value(one.get("batch_size"), outputs) for one in said]
        size, why = self._size(explicit, calls, fakes)
        counts = self._counts([size, *(n for n in explicit if n is not None)])
        main, others = counts[0], iter(counts[1:])
        with torch.no_grad():
            position = self._add_output(main.total, OutputRole.LOGGED, (), "rows of all ranks")
            for index, call in enumerate(calls):
                count = main if explicit[index] is None else next(others, main)
                if said[index]:
                    calls[index] = self._joined(call, said[index], count, index, outputs)
            shown = self.term(loss.detach() * main.share, "loss").to(loss.dtype)  # shares are float64
        self.facts = OwnBatchFacts(position, why)
        return loss * main.share, shown, map_leaves(lambda _, leaf: shown if leaf is loss else leaf, returned)

    # ------------------------------------------------------------------ pieces
    def _size(self, explicit: Sequence[Any], calls: Sequence[RecordedCall], fakes: Sequence[Tensor]) -> tuple[Any, str]:
        for size, call in zip(explicit, calls, strict=True):
            if size is not None:
                return size, f"by batch_size= of self.log ({call.source})"
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
        self, call: RecordedCall, said: dict[str, Any], count: _Count, index: int, outputs: Sequence[Any]
    ) -> RecordedCall:
        """A recorded ``self.log`` with the value of all ranks."""
        here: Any = _value(said["value"], outputs)
        operation = operation_of(said)
        dtype = _logged_dtype(here)
        if isinstance(here, _NUMBERS) and not isinstance(here, bool):
            here = torch.full((), here, dtype=torch.float64, device=self._device)
        if not isinstance(here, Tensor):  # a metric, which syncs by itself, or a number that is the same on all ranks
            return call
        here = here.detach()
        if not here.is_floating_point():
            here = here.to(torch.get_default_dtype())
        name = f"log {index} {said['name']}"
        weighted = here if operation in _OPERATIONS else here * count.share
        joined = self.term(weighted, name, operation if operation in ("max", "min") else "sum").to(dtype)
        said = {**said, "value": OutputRef(self._add_output(joined, OutputRole.LOGGED, (), name))}
        if said.get("batch_size") is not None:
            said["batch_size"] = OutputRef(self._add_output(count.total, OutputRole.LOGGED, (), f"rows of {name}"))
        return dataclasses.replace(call, args=(), kwargs=said)


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


def _value(value: Any, outputs: Sequence[Any]) -> Any:
    """The value of a recorded argument."""
    return outputs[value.position] if type(value) is OutputRef else value
