"""One iteration on fake tensors under the recorder, with a given forward part, in Lightning's order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.ir.guards import ValueGuard
from lightning_spmd.ir.layout import densely
from lightning_spmd.ir.node_info import Section, TensorSpec
from lightning_spmd.ir.signature import InputRole, OutputRole
from lightning_spmd.stages.capture.batch.own_batch import OwnBatch
from lightning_spmd.stages.capture.optimizer.bf16_updates import in_float32
from lightning_spmd.stages.capture.optimizer.loss_scaling import LossScaling
from lightning_spmd.stages.capture.optimizer.optimizer_swap import OptimizerSwap, check_step
from lightning_spmd.stages.capture.optimizer.own_backward import check_backward
from lightning_spmd.stages.capture.record.inputs import InputTable
from lightning_spmd.stages.capture.record.packing import Outputs, in_memory_order_of, parameter_names
from lightning_spmd.stages.capture.record.recorder import Recorder, in_section
from lightning_spmd.stages.capture.record.surroundings import (
    hooks_guard,
    settings_guard,
    submodules_guard,
    tensor_kinds_guard,
    trained_guard,
)
from lightning_spmd.stages.capture.request import CaptureRequest


class IterationTrace:
    """The parts of one trace, and the iteration behind its forward part.

    Args:
        request: what is traced.

    Attributes:
        swaps: the optimizers that work on fake tensors in this trace, by number.
        own: what goes to all ranks of a batch that is a rank's own.
    """

    def __init__(self, request: CaptureRequest) -> None:
        self.request = request
        self.fake_mode = request.fake_mode()
        self.recorder = Recorder(self.fake_mode, split=request.rows is not None)
        self.inputs = InputTable(self.recorder, self.fake_mode)
        self.outputs = Outputs(self.recorder)
        self.names = parameter_names(request.module, request.update.optimizer)
        self.swaps: dict[int, OptimizerSwap] = {}
        self.scaling = LossScaling(request.update.scaler, request.update.device, self.inputs)
        self.own: OwnBatch | None = None

    def forward(self, batch: Any) -> Tensor | None:
        """Run the forward part. Returns the loss, or None if the batch is skipped."""
        raise NotImplementedError

    def twin(self, kind: str, fqn: str, tensor: Tensor) -> Tensor:
        """The graph input of a tensor of the module."""
        role = InputRole.PARAMETER if kind == "parameter" else InputRole.BUFFER
        name = self.names.get(id(tensor), fqn)
        return self.inputs.tensor(tensor, role, (name,), name)

    def trained_parameters(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        """(name, fake) of tensors that get gradients: the optimizer's parameters, or all of the module's in split mode.

        Also of what got one in earlier micro-batches, and is frozen by now.
        """
        wanted = {id(p) for g in optimizer.param_groups for p in g["params"]}
        found = []
        for live, name in self.inputs.live_parameters(self.names):
            fake = self.inputs.fake_of(live)
            if fake is not None and (self.request.variant.expose_gradients or id(fake) in wanted):
                found += [(name, fake)] if fake.requires_grad or name in self.request.update.accumulators else []
        return found

    def iteration(self, batch: Any, trained: list[tuple[str, Tensor]], optimizer: Optimizer) -> None:
        """Run the variant's part of an iteration, with the fake parameters that get gradients, by name."""
        request, variant = self.request, self.request.variant
        gradients: dict[str, Tensor] = {}
        loss: Tensor | None = None
        if variant.forward:
            with torch.enable_grad():
                loss = self.forward(batch)
                if loss is not None:
                    scaled = self.scaling.scaled(loss)
                    with in_section(self.recorder, Section.BACKWARD):
                        gradients = self.backward(scaled, [pair for pair in trained if pair[1].requires_grad])
        with torch.no_grad(), in_section(self.recorder, Section.BACKWARD):
            gradients = self._add_accumulated(gradients, trained)
        if not variant.apply:
            for name, gradient in gradients.items():
                if name not in request.update.accumulators:  # an accumulator is an input, updated in place
                    self.outputs.add(gradient, OutputRole.GRADIENT, (name,), f"gradient of {name}")
            return
        for name, gradient in gradients.items() if variant.pauses else ():
            self.outputs.add(gradient, OutputRole.SHOWN_GRADIENT, (name,), f"gradient of {name}")
        for name, parameter in trained:
            parameter.grad = gradients.get(name)
        self.swaps[0].check_is_there()
        with in_float32(request.update.bf16_updates, self.swaps[0], self.recorder):
            with in_section(self.recorder, Section.CLIP):
                self.scaling.unscale(optimizer, looked_already=variant.expose_gradients)
                if request.update.clip is not None:
                    request.update.clip(optimizer)
            check_step(optimizer)
            with in_section(self.recorder, Section.OPTIMIZER):
                self.scaling.step(optimizer, self._new_state, loss)
        if self.scaling.found is not None:
            self.outputs.add(self.scaling.found, OutputRole.FOUND_INF, (), "found_inf")

    def changes(self) -> Iterator[tuple[OutputRole, tuple[Any, ...], str, Any]]:
        """State and hyper-parameters that optimizers created or rebound."""
        return itertools.chain.from_iterable(swap.changes() for swap in self.swaps.values())

    def _new_state(self) -> list[Tensor]:
        """Tensors of the optimizer's state that the step made."""
        return [v for role, _, _, v in self.changes() if role is OutputRole.OPTIMIZER_STATE and isinstance(v, Tensor)]

    def backward(self, loss: Tensor, trained: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The gradients of the loss, by name of the parameter, in the layout that ``p.grad`` would have."""
        asked = [p for _, p in trained]
        others = self.asked_beside(loss, asked)
        if others is None:
            check_backward(loss, asked)
        found = torch.autograd.grad(loss, [*asked, *(others or ())], allow_unused=True)[: len(asked)]
        taken = self.inputs.storages()
        gradients: dict[str, Tensor] = {}
        with torch.no_grad():
            for (name, parameter), of_loss in zip(trained, found, strict=True):
                gradient = self.with_added(parameter, of_loss)
                if gradient is not None:
                    owned = in_memory_order_of(parameter, gradient)
                    if private.storage_of(owned) in taken:  # two parameters, one gradient tensor: clipping writes twice
                        owned = owned.clone()
                    taken.add(private.storage_of(owned))
                    gradients[name] = owned if self.own is None else self.own.gradient(name, owned)
                elif self.own is not None and name in self.request.needed:
                    gradients[name] = self.own.no_gradient(name, parameter)
        return gradients

    def with_added(self, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a parameter with what backward passes within that of the loss have added."""
        return gradient

    def asked_beside(self, loss: Tensor, trained: list[Tensor]) -> list[Tensor] | None:
        """Other tensors whose gradients are requested, so that everything runs that ``loss.backward()`` would run.

        None: the same runs without.
        """
        return None

    def _add_accumulated(self, gradients: dict[str, Tensor], trained: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
        for name, parameter in trained:
            if name in self.request.update.accumulators:
                held = self.inputs.fresh_tensor(
                    densely(TensorSpec.of(parameter)), InputRole.GRADIENT, (name,), f"gradient of {name}"
                )
                gradients[name] = self._accumulated(held, gradients.get(name))
        return gradients

    def _accumulated(self, held: Tensor, gradient: Tensor | None) -> Tensor:
        """The held gradient plus the new one; in place while gradients are only collected.

        What is applied must be a tensor of its own: clipping and optimizers may write into gradients, and what is
        held is this rank's share of them.
        """
        if not self.request.variant.apply:
            return held if gradient is None else held.add_(gradient)
        return held.clone() if gradient is None else held + gradient

    # ------------------------------------------------------------------ packing
    def has_stepped(self, number: int) -> bool:
        """Whether the graph holds a step of an optimizer."""
        return self.request.variant.apply

    def guards(self) -> list[ValueGuard]:
        """The guards of every graph of an iteration."""
        request, optimizer = self.request, self.request.update.optimizer
        return [
            submodules_guard(request.module),
            tensor_kinds_guard(request.module),
            settings_guard(),
            *([] if optimizer is None else [trained_guard(request.module, optimizer)]),
            *([hooks_guard(request.module, optimizer, request.trainer)] if request.variant.backward else []),
            *(guard for i, swap in self.swaps.items() for guard in swap.guards(stepped=self.has_stepped(i))),
            *([] if optimizer is None else self.scaling.guards()),
        ]
