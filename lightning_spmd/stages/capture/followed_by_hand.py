"""The graph of a followed step that optimizes manually: backward passes and steps of optimizers under the recorder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, fx

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.aliasing import written_arguments
from lightning_spmd.ir.node_info import Section, info_of
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.stages.capture.follow.worlds import Update
from lightning_spmd.stages.capture.optimizer.accumulation import BackwardPass, gradients_behind
from lightning_spmd.stages.capture.optimizer.given_closure import GivenClosure
from lightning_spmd.stages.capture.optimizer.optimizer_swap import OptimizerSwap
from lightning_spmd.stages.capture.record.around_trace import explained
from lightning_spmd.stages.capture.record.inputs import InputTable
from lightning_spmd.stages.capture.record.recorder import Recorder, in_section


class InGraph:
    """The world (``follow/worlds.py``) of the recorder.

    Args:
        recorder: records.
        swaps: the optimizers on fake tensors, by number; none where the step optimizes automatically.

    Attributes:
        stepped: numbers of the optimizers whose ``step`` ran.
        gradients: what is in ``p.grad`` at some time.
    """

    def __init__(self, recorder: Recorder, swaps: Sequence[OptimizerSwap] = ()) -> None:
        self.gradients: list[fx.Node] = []
        self.swaps, self.stepped = swaps, set[int]()
        self._recorder = recorder

    def backward(self, call: BackwardPass) -> tuple[Tensor | None, ...]:
        """As in every world."""
        with in_section(self._recorder, Section.BACKWARD):
            found = gradients_behind(call, self._recorder.storages())
        self._note(call.held)
        self._note(found)
        return found

    def step(self, number: int, update: Update) -> None:
        """As in every world."""
        if not self.swaps:
            raise CaptureError("an optimizer steps in a step that optimizes automatically")
        swap = self.swaps[number]
        swap.set(update.settings)
        self.stepped.add(number)
        self._note(update.gradients)
        for parameter, gradient in zip(update.parameters, update.gradients, strict=True):
            parameter.grad = gradient
        name = f"{type(swap.optimizer).__name__}.step"
        with in_section(self._recorder, Section.OPTIMIZER), explained(self._recorder, lambda: name):
            closures = [GivenClosure(swap.optimizer, loss, self._recorder) for loss in update.evaluated]
            private.step_without_hooks(swap.optimizer, *closures)
        for parameter in update.parameters:
            parameter.grad = None

    def _note(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients += [self._recorder.argument(gradient) for gradient in gradients if gradient is not None]


def mark_updates(
    nodes: Iterable[fx.Node], roots: Mapping[fx.Node, fx.Node], inputs: InputTable, of_gradients: set[fx.Node]
) -> None:
    """Mark writes into weights outside of ``step`` as updates, and computation on gradients as clipping.

    Updates work on chunks where state is in chunks.

    Args:
        nodes: of a step, in order.
        roots: whose memory each of its values has.
        inputs: its inputs.
        of_gradients: what is in ``p.grad`` at some time; what is computed of that is added.
    """
    parameters = inputs.nodes_of(InputRole.PARAMETER)
    for node in nodes:
        if node.op != "call_function":
            continue
        section = info_of(node).section
        if any(roots[written] in parameters for written in written_arguments(node)):
            section = Section.OPTIMIZER if section is Section.FORWARD else section
        elif of_gradients.intersection(node.all_input_nodes):
            section = Section.CLIP if section is Section.FORWARD else section
            of_gradients.update([node] if section is Section.CLIP else [])
        node.meta["info"] = replace(info_of(node), section=section)
