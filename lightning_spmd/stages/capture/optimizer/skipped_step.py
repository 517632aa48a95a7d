"""Takes back the writes of an optimizer's step that should not have run, without reading a value on the host.

Before, as the optimizer runs::

    exp_avg.lerp_(grad, 0.1); param.addcdiv_(exp_avg, denom)

After::

    kept = exp_avg.clone(); exp_avg.lerp_(grad, 0.1)
    kept_1 = param.clone(); param.addcdiv_(exp_avg, denom)
    where(found, kept, exp_avg, out=exp_avg); where(found, kept_1, param, out=param)

Bitwise, and for every optimizer: what is written is read off the operators. The copy stands right in front of the first
write, also of state that the step itself makes, so that the first step is like the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.effects import draws_random
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.stages.capture.record.inputs import InputTable


class StepTakenBack:
    """One step; made right before it runs.

    Args:
        inputs: those of the capture.
        found: 0-dimensional; other than 0 where the step must change nothing.
        what: the optimizer, for messages.
    """

    def __init__(self, inputs: InputTable, found: Tensor, what: str) -> None:
        self._inputs = inputs
        self._graph = inputs.recorder.graph
        self._what = what
        self._skipped = found != 0
        self._on: dict[torch.device, Tensor] = {}
        self._begins = self._graph.call_function(torch.ops.aten.alias.default, ())  # a mark, gone in the end

    def take(self, made: Sequence[Tensor]) -> None:
        """Take back what the step wrote into inputs, and into the state that it made.

        Raises:
            CaptureError: the step does something else that lasts.
        """
        nodes = list(self._graph.nodes)
        step = nodes[nodes.index(self._begins) + 1 :]
        self._graph.erase_node(self._begins)
        if any(draws_random(node) for node in step):
            raise CaptureError(f"{self._what}.step draws random numbers, which a step that is skipped would not draw")
        roots = storage_roots(self._graph)
        lasting = {node for node in nodes if node.op == "placeholder"}
        lasting |= {roots[node] for t in made if (node := self._inputs.recorder.node_of(t)) is not None}
        first_writer: dict[fx.Node, fx.Node] = {}
        result: dict[fx.Node, fx.Node] = {}  # of the last write, which passes follow
        for node in step:
            for written in written_arguments(node):
                root = roots[written]
                if root in lasting:
                    first_writer.setdefault(root, node)
                    whole = roots[node] is root and node.meta["val"] == root.meta["val"]
                    result[root] = node if whole else result.get(root, root)
        for target, writer in first_writer.items():
            with self._graph.inserting_before(writer):
                kept = self._fake(target).clone()
            now = self._fake(result[target])
            torch.where(self._skipped_on(now.device, step[0]), kept, now, out=now)

    def _skipped_on(self, device: torch.device, begins: fx.Node) -> Tensor:
        """Whether the step is skipped, where a counter on the host asks: a copy from the device, as eager's read is.

        In front of the step: then the device works on that while the host goes on.
        """
        if device not in self._on:
            with self._graph.inserting_before(begins):
                self._on[device] = self._skipped.to(device)
        return self._on[device]

    def _fake(self, node: fx.Node) -> Tensor:
        """A fake tensor that stands for a node."""
        spec: TensorSpec = node.meta["val"]
        return self._inputs.stand_in(spec, node)
