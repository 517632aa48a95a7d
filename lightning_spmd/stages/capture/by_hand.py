"""Optimization by hand (``automatic_optimization = False``): all that ``training_step`` does is one graph.

``backward`` is autograd on the trace, and gradients lie in ``p.grad`` of the fake parameters as they do in eager
training: those of earlier batches come in as inputs, what is there in the end goes out. ``optimizer.step()`` and
``zero_grad()`` run as they are, in any order and number. What Lightning and schedulers do beside (counting steps,
``scheduler.step()``) are recorded calls, made again after each run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.guards import PresentGradients
from lightning_spmd.ir.layout import densely
from lightning_spmd.ir.node_info import Section, TensorSpec, info_of
from lightning_spmd.ir.signature import InputRole, OutputRole
from lightning_spmd.messages import batch_hook, the_step
from lightning_spmd.stages.capture.accumulation import accumulated
from lightning_spmd.stages.capture.inputs import InputTable
from lightning_spmd.stages.capture.log_recorder import LogRecorder
from lightning_spmd.stages.capture.optimizer_swap import OptimizerSwaps, has_step_of_its_own
from lightning_spmd.stages.capture.own_backward import leaves_of
from lightning_spmd.stages.capture.packing import Outputs
from lightning_spmd.stages.capture.recorder import in_section
from lightning_spmd.stages.capture.request import CaptureRequest
from lightning_spmd.stages.capture.stepped_schedulers import SteppedSchedulers
from lightning_spmd.stages.capture.user_code import user_location

OPTIMIZER_STEP = "optimizer_step"
"""The recorded call of a step: number of the optimizer, and whether Lightning counts it."""


def check_by_hand(request: CaptureRequest) -> None:
    """Raise for options of a run that are about automatic optimization alone.

    Raises:
        CaptureError: naming the option.
    """
    if request.bf16_updates != "plain":
        raise CaptureError(f"bf16_updates={request.bf16_updates!r} needs automatic optimization")
    if request.variant.own_batch:
        raise CaptureError("optimization by hand on batches that are a rank's own is no graph")


class ByHand:
    """What one capture of a module that optimizes by hand adds to a capture.

    Args:
        trainer: the Trainer.
        swaps: the optimizers on fake tensors.
        names: fully qualified name of every live parameter, by ``id``.
        inputs: where fake twins come from.
        logs: keeps recorded calls.
        presumed: names of parameters that are taken to have a gradient when the step begins.
    """

    def __init__(
        self,
        trainer: Any,
        swaps: OptimizerSwaps,
        names: dict[int, str],
        inputs: InputTable,
        logs: LogRecorder,
        presumed: frozenset[str],
    ) -> None:
        self._presumed = presumed
        self.steps = 0
        """Steps so far that Lightning counts."""
        self._trainer = trainer
        self._swaps = swaps
        self._names = names
        self._inputs = inputs
        self._recorder = inputs.recorder
        self._recorder.reads.behind = (Section.BACKWARD,)
        self._logs = logs
        self._schedulers = SteppedSchedulers(trainer, logs)
        self._before: dict[str, Tensor | None] = {}
        self._parameters: list[tuple[str, Tensor, Tensor]] = []
        self._trained: list[bool] = []
        self._gradients: list[fx.Node] = []

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The live ones."""
        return self._swaps.optimizers

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, calls of ``backward``, ``step`` and of schedulers are the capture's."""
        self._begin()
        strategy = getattr(self._trainer, "strategy", None)
        with contextlib.ExitStack() as stack:
            for index, optimizer in enumerate(self._swaps.optimizers):
                if has_step_of_its_own(optimizer):
                    raise CaptureError(
                        f"optimizer.step was replaced on the {type(optimizer).__name__} itself; override `step` in a "
                        "subclass"
                    )
                stack.enter_context(private.step_replaced(optimizer, self._step_of(index, optimizer)))
            stack.enter_context(private.backward_replaced(self._backward))
            if strategy is not None:
                stack.enter_context(private.optimization_replaced(strategy, _backward_of, _step_of, self._count))
            stack.enter_context(self._schedulers.recorded())
            yield

    def _begin(self) -> None:
        """Give the fake parameters the gradients that the live ones have."""
        for live, name in self._inputs.live_parameters(self._names):
            fake = self._inputs.fake_of(live)
            if fake is None:
                continue
            held = None
            if live.grad is not None or name in self._presumed:
                spec = densely(TensorSpec.of(fake))
                held = self._inputs.fresh_tensor(spec, InputRole.GRADIENT, (name,), f"gradient of {name}")
                self._gradients.append(self._node(held))
            fake.grad = self._before[name] = held
            self._parameters.append((name, live, fake))
        self._trained = [fake.requires_grad for _, _, fake in self._parameters]

    def _node(self, tensor: Tensor) -> fx.Node:
        return self._recorder.argument(tensor)

    # ------------------------------------------------------------------ backward
    def _backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """``torch.autograd.backward``: gradients of all leaves, added to their ``.grad``."""
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        weights = grad_variables if grad_tensors is None else grad_tensors
        leaves = leaves_of(roots) if inputs is None else ([inputs] if isinstance(inputs, Tensor) else list(inputs))
        if not leaves:
            raise CaptureError("what backward is called on does not depend on any trained parameter", user_location())
        taken = self._recorder.storages()
        with in_section(self._recorder, Section.BACKWARD):
            found = torch.autograd.grad(
                roots, leaves, weights, create_graph or retain_graph, create_graph, allow_unused=True
            )
            with torch.set_grad_enabled(create_graph):
                for leaf, gradient in zip(leaves, found, strict=True):
                    if gradient is not None:
                        self._accumulate(leaf, gradient, taken, in_place=not create_graph)

    def _accumulate(self, leaf: Tensor, gradient: Tensor, taken: set[int], *, in_place: bool) -> None:
        now = accumulated(leaf, leaf.grad, gradient, taken, in_place=in_place)
        if now is not leaf.grad:
            leaf.grad = now
        self._gradients.append(self._node(now))

    # ------------------------------------------------------------------ step
    def _step_of(self, index: int, optimizer: Optimizer) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            def inside() -> Any:
                with in_section(self._recorder, Section.FORWARD):
                    return None if closure is None else closure()

            self._schedulers.check(optimizer)
            self._swaps.stepped.add(index)
            with in_section(self._recorder, Section.OPTIMIZER):
                given = () if closure is None else (inside,)
                result = type(optimizer).step(optimizer, *given, *args, **kwargs)
            self._record(OPTIMIZER_STEP, index, False)
            return result

        return step

    def _count(self, index: int) -> None:
        """A step that was called through Lightning's optimizer is over."""
        self.steps += 1
        self._record(OPTIMIZER_STEP, index, True)

    def _record(self, method: str, *args: Any) -> None:
        self._logs.record("", method, OutputRole.STEP_OUTPUT, args, {})

    # ------------------------------------------------------------------ afterwards
    def collect(self, outputs: Outputs) -> tuple[str, ...]:
        """Hand out what ``p.grad`` is now; gives the names of parameters that have none any more.

        Raises:
            CaptureError: the step leaves something else changed on parameters.
        """
        self._schedulers.put_back()
        cleared: list[str] = []
        for (name, _, fake), trained in zip(self._parameters, self._trained, strict=True):
            if fake.requires_grad != trained:
                raise CaptureError(
                    f"{the_step()} changes {name}.requires_grad and leaves it so; untoggle_optimizer puts it back, or "
                    f"do it in {batch_hook('end')}"
                )
            before, now = self._before[name], fake.grad
            if now is None:
                cleared += [] if before is None else [name]
            elif now is not before:
                outputs.add(now.detach(), OutputRole.GRADIENT, (name,), f"gradient of {name}")
        return tuple(cleared)

    def mark_updates(self, graph: fx.Graph) -> None:
        """What is done to weights outside of ``step`` is an update too."""
        mark_updates(graph, self._inputs, self._gradients)

    def present(self) -> PresentGradients:
        """The gradients with which the step begins."""
        lives = {name: live for name, live, _ in self._parameters}
        return PresentGradients(lives, frozenset(name for name, held in self._before.items() if held is not None))


def _backward_of(loss: Tensor, _optimizer: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """``Strategy.backward``."""
    loss.backward(*args, **kwargs)
    return loss


def _step_of(optimizer: Optimizer, closure: Callable[[], Any], _model: Any = None, **kwargs: Any) -> Any:
    """``Strategy.optimizer_step``."""
    return optimizer.step(closure, **kwargs)


def mark_updates(graph: fx.Graph, inputs: InputTable, gradients: Sequence[fx.Node]) -> None:
    """What is done to weights outside of ``step`` is an update too, and what is computed of gradients is clipping.

    Updates work on chunks where state is in chunks.

    Args:
        graph: of a step.
        inputs: its inputs.
        gradients: what is in ``p.grad`` at some time.
    """
    roots = storage_roots(graph)
    parameters = {node for node in inputs.nodes_of(InputRole.PARAMETER) if node in roots}
    of_gradients = set(gradients)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        section = info_of(node).section
        if any(roots[written] in parameters for written in written_arguments(node)):
            section = Section.OPTIMIZER if section is Section.FORWARD else section
        elif of_gradients.intersection(node.all_input_nodes):
            section = Section.CLIP if section is Section.FORWARD else section
            of_gradients.update([node] if section is Section.CLIP else [])
        node.meta["info"] = replace(info_of(node), section=section)
