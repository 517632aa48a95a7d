"""The closure that an optimizer of the user's own gets where its step is part of a graph.

    loss = closure()      # gradients at the weights that they were computed for: there already, so nothing happens
    p.add_(perturbation)
    closure()             # gradients at other weights: another forward and backward pass, which the graph has not

A step without a closure would take another path in optimizers that ask for one (``if closure is not None``), silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.messages import place_of
from lightning_spmd.stages.capture.record.recorder import Recorder


class GivenClosure:
    """Returns the loss once, before the weights change.

    Args:
        optimizer: whose step gets it.
        loss: what the user's closure has returned; None where it is not part of the graph.
        recorder: records the step; None if the step runs on real tensors.
    """

    def __init__(self, optimizer: Any, loss: Tensor | None, recorder: Recorder | None = None) -> None:
        self._optimizer = optimizer
        self._loss = None if loss is None else loss.detach()
        weights: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._have_changed = _by_versions(weights) if recorder is None else _by_record(weights, recorder)
        self._is_over = False

    def __call__(self) -> Tensor | None:
        """What the user's closure has returned.

        Raises:
            CaptureError: it is called again, or behind a write into weights.
        """
        if self._is_over or self._have_changed():
            kind = type(self._optimizer)
            raise CaptureError(
                f"{kind.__name__}.step{place_of(kind.step)} evaluates its closure again, or at weights that it has "
                "changed, and a graph of the step has the gradients of one evaluation: call both backward passes in "
                "training_step (manual optimization), and let step do updates only"
            )
        self._is_over = True
        return self._loss


def _by_versions(weights: list[Tensor]) -> Callable[[], bool]:
    """Tells whether real tensors have been written."""
    before = [p._version for p in weights]  # noqa: SLF001 - documented in torch's notes
    return lambda: before != [p._version for p in weights]  # noqa: SLF001


def _by_record(weights: list[Tensor], recorder: Recorder) -> Callable[[], bool]:
    """Tells whether writes into fake tensors have been recorded; ``_foreach`` operators leave their versions alone."""
    before = len(recorder.graph.nodes)

    def have_changed() -> bool:
        nodes, roots = list(recorder.graph.nodes), storage_roots(recorder.graph)
        ours = {roots[node] for p in weights if (node := recorder.node_of(p)) is not None}
        return any(roots[w] in ours for node in nodes[before:] for w in written_arguments(node))

    return have_changed
