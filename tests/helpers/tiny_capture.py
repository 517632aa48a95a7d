"""A captured step of a plain function: what the capture stage makes, without Lightning.

``capture_function(function, parameters, buffers, batch)`` records ``function(parameters, buffers, *batch)``, which
returns a loss (or a tuple: loss, then outputs), its backward pass, and optionally an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.guards import Guards
from lightning_spmd.ir.node_info import Section, TensorSpec
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole, Signature
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages.capture.record.around_trace import explained
from lightning_spmd.stages.capture.record.recorder import Recorder


class TinyCapture:
    """A captured step plus the live tensors of its inputs, in order."""

    def __init__(self) -> None:
        self.mode = private.FakeTensorMode(allow_non_fake_inputs=True)
        self.recorder = Recorder(self.mode)
        self.recorder.on_constant = self._constant
        self.inputs: list[GraphInput] = []
        self.nodes: list[fx.Node] = []
        self.live: list[Tensor] = []

    def add(self, tensor: Tensor, role: InputRole, name: str) -> Tensor:
        node = self._placeholder(tensor, role, name)
        fake = self.mode.from_tensor(tensor)
        self.recorder.bind(fake, node)
        return fake

    def _placeholder(self, tensor: Tensor, role: InputRole, name: str) -> fx.Node:
        graph = self.recorder.graph
        first = next((n for n in graph.nodes if n.op != "placeholder"), None)
        with graph.inserting_before(first) if first is not None else graph.inserting_after(None):
            node = graph.placeholder(f"{role}_{len(self.inputs)}")
        spec = TensorSpec.of(tensor)
        node.meta["val"] = spec
        self.inputs.append(GraphInput(role, (name,), name, spec))
        self.nodes.append(node)
        self.live.append(tensor)
        return node

    def _constant(self, tensor: Tensor) -> fx.Node:
        return self._placeholder(tensor, InputRole.CONSTANT, f"constant {len(self.inputs)}")


def capture_function(
    function: Callable[..., Any],
    parameters: dict[str, Tensor],
    buffers: dict[str, Tensor],
    batch: Sequence[Tensor],
    *,
    update: Callable[[list[Tensor], list[Tensor]], None] | None = None,
) -> tuple[CapturedStep, list[Tensor]]:
    """Record forward, backward and ``update(parameters, gradients)``; outputs: loss, other outputs, gradients."""
    tiny = TinyCapture()
    graph = tiny.recorder.graph
    fakes = {
        n: tiny.add(p.detach(), InputRole.PARAMETER, n).requires_grad_(p.requires_grad) for n, p in parameters.items()
    }
    fake_buffers = {n: tiny.add(b, InputRole.BUFFER, n) for n, b in buffers.items()}
    fake_batch = [tiny.add(b, InputRole.BATCH, f"[{i}]") for i, b in enumerate(batch)]
    outputs: list[tuple[OutputRole, str, Tensor]] = []
    with explained(tiny.recorder), torch.autograd.set_multithreading_enabled(False), tiny.mode, tiny.recorder:
        result = function(fakes, fake_buffers, *fake_batch)
        loss, *others = result if isinstance(result, tuple) else (result,)
        tiny.recorder.section = Section.BACKWARD
        wanted = {n: f for n, f in fakes.items() if f.requires_grad}
        gradients = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True), strict=True))
        gradients = {n: g for n, g in gradients.items() if g is not None}
        if update is not None:
            tiny.recorder.section = Section.OPTIMIZER
            with torch.no_grad():
                update([fakes[n] for n in gradients], list(gradients.values()))
    outputs.append((OutputRole.LOSS, "loss", loss))
    outputs += [(OutputRole.STEP_OUTPUT, f"output {i}", o) for i, o in enumerate(others)]
    if update is None:
        outputs += [(OutputRole.GRADIENT, n, g) for n, g in gradients.items()]
    nodes = [tiny.recorder.argument(t) for _, _, t in outputs]
    graph.output(tuple(nodes))
    roots = storage_roots(graph)
    written = {roots[o] for node in graph.nodes for o in written_arguments(node)}
    signature = Signature(
        tuple(
            GraphInput(e.role, e.key, e.name, e.value, n in written)
            for e, n in zip(tiny.inputs, tiny.nodes, strict=True)
        ),
        tuple(GraphOutput(r, (n,), n, TensorSpec.of(t)) for r, n, t in outputs),
    )
    ordered = [n for n in graph.nodes if n.op == "placeholder"]
    order = [tiny.nodes.index(n) for n in ordered]
    signature = Signature(tuple(signature.inputs[i] for i in order), signature.outputs)
    module = fx.GraphModule(torch.nn.Module(), graph)
    return CapturedStep(module, signature, Guards()), [tiny.live[i] for i in order]


def capture_module(
    module: torch.nn.Module,
    step: Callable[..., Any],
    batch: Sequence[Tensor],
    *,
    update: Callable[[list[Tensor], list[Tensor]], None] | None = None,
) -> tuple[CapturedStep, list[Tensor]]:
    """``capture_function`` of ``step(module, *batch)`` with the module's parameters and buffers as inputs."""
    owned = dict(module.named_parameters())
    buffers = {n: b for n, b in module.named_buffers() if n not in owned}

    def run(parameters: dict[str, Tensor], replaced: dict[str, Tensor], *values: Tensor) -> Any:
        class Holder(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = module

            def forward(self, *args: Tensor) -> Any:
                return step(self.inner, *args)

        tensors = {f"inner.{n}": t for n, t in {**parameters, **replaced}.items()}
        with torch.nn.utils.stateless._reparametrize_module(Holder(), tensors, tie_weights=True):
            return step(module, *values)

    return capture_function(run, owned, buffers, batch, update=update)
