"""Captures the graphs of a recipe's training iteration in one process, with parameters that take no memory.

Lightning's own ``fit`` runs up to the first ``training_step``, so hooks, data, optimizers, schedulers, precision and
the mode of the run are those of training. The step is captured there, and the fit ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError, ConfigurationError
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.signature import OutputRole
from lightning_spmd.ir.steps import CapturedStep, Variant
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.once import FollowedOnce
from lightning_spmd.stages.capture.optimizer.bf16_updates import Updates
from lightning_spmd.stages.capture.record.packing import parameter_names
from lightning_spmd.stages.capture.request import CaptureRequest, UpdateRequest
from lightning_spmd.stages.capture.rewrites.reads import UnknownValueError
from lightning_spmd.strategy.graphs.run_context import RunContext, named_arguments
from lightning_spmd.strategy.spmd_strategy import SPMDStrategy
from lightning_spmd.strategy.support.detectors import Context, needs_closure
from lightning_spmd.strategy.support.feature import Mode

Build = Callable[[Any], tuple[L.Trainer, L.LightningModule, Any]]
"""Makes (Trainer, module, data) with the strategy that it is given; the Trainer has one device of the host."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One graph of the iteration.

    Args:
        variant: the part of the iteration that it holds.
        times: how often it runs in one iteration.
        captured: the global-view graph.
    """

    variant: Variant
    times: int
    captured: CapturedStep


@dataclasses.dataclass(frozen=True)
class Capture:
    """The graphs of one iteration.

    Args:
        parts: in order.
        module: the module, its parameters without memory.
        rows: rows of one rank's batch, as the data gives it.
        batches: number of such batches in the global batch.
        precision: the Trainer's.
    """

    parts: Sequence[Part]
    module: L.LightningModule
    rows: int
    batches: int
    precision: str

    @property
    def remarks(self) -> Sequence[str]:
        """Where the plan may differ from the real run."""
        kinds = (nn.LSTM, nn.GRU, nn.RNN)
        names = [f"{name} ({type(m).__name__})" for name, m in self.module.named_modules() if isinstance(m, kinds)]
        if not names:
            return []
        return [
            f"{', '.join(names[:3])}: counted operator by operator; a GPU has a kernel for all of it (cuDNN), and "
            "a CPU one for each layer of an LSTM (oneDNN)"
        ]

    @property
    def global_rows(self) -> int:
        """Rows of the global batch."""
        return self.rows * self.batches


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Inside, oneDNN is switched off. ``torch.backends.mkldnn.flags`` sets TF32 too, and warns that there is none."""
    if torch.backends.flags_frozen():
        with torch.backends.mkldnn.flags(enabled=False):
            yield
        return
    settings: Any = torch.backends.mkldnn
    before, settings.enabled = settings.enabled, False
    try:
        yield
    finally:
        settings.enabled = before


class _Captured(Exception):
    """Control flow: the step has been captured, and the fit may end."""


def without_memory() -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors are made without memory: a module of any size can be built."""
    return private.FakeTensorMode(allow_non_fake_inputs=True)


def capture_iteration(build: Build, batches: int, bf16_updates: Updates = "plain") -> Capture:
    """Capture the iteration of a training.

    Args:
        build: creates the training.
        batches: number of ranks with different batches.
        bf16_updates: how weights of bfloat16 are updated.

    Raises:
        ConfigurationError: the training does not run as a graph, or cannot run at all.
        CaptureError: naming the reason why the step is no graph.
    """
    strategy = _CapturingStrategy(batches, bf16_updates)
    trainer, module, data = build(strategy)
    if is_overridden("configure_model", module):
        module.configure_model = _made_without_memory(module.configure_model)  # type: ignore[method-assign]
    module.to = functools.partial(_converted, module)  # type: ignore[method-assign]
    with contextlib.suppress(_Captured):
        trainer.fit(module, data)
    if strategy.found is None:
        raise ConfigurationError("the training ends before its first batch: there is nothing to plan")
    return strategy.found


def _made_without_memory(configure_model: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(configure_model)
    def configure() -> Any:
        with without_memory():
            return configure_model()

    return configure


def _converted(module: L.LightningModule, *args: Any, **kwargs: Any) -> L.LightningModule:
    """``module.to``, of which the dtype alone counts; torch's own cannot convert tensors without memory in place."""
    dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), None)
    made: dict[int, Tensor] = {}  # what was shared stays shared
    for part in module.modules() if dtype is not None else ():
        for key, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            if tensor.is_floating_point() and id(tensor) not in made:
                plain = tensor.detach().to(dtype)
                kept = nn.Parameter(plain, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else plain
                made[id(tensor)] = made[id(kept)] = kept
            setattr(part, key, made.get(id(tensor), tensor))
    return module


class _CapturingStrategy(SPMDStrategy):
    """One device; at the first batch the iteration of many is captured instead of run."""

    def __init__(self, batches: int, bf16_updates: Updates) -> None:
        super().__init__(bf16_updates=bf16_updates)
        self.batches = batches
        self.found: Capture | None = None

    @override
    def model_to_device(self) -> None:
        """There is nothing to move."""

    @override
    def teardown(self) -> None:
        """There is nothing to move back."""
        if self.lightning_module is not None:
            self._training.end()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        iteration, module = self._training.iteration, self.lightning_module
        if iteration is None or module is None:
            raise ConfigurationError(
                "this training runs eagerly, so there is no graph to plan with; the message above says why"
            )
        optimizers = Context(module.trainer, module, module.trainer.optimizers, in_graphs=True)
        if (closure := needs_closure(optimizers)) is not None:
            raise ConfigurationError(f"an update of this training runs eagerly, so there is no graph of it: {closure}")
        arguments = named_arguments(inspect.signature(module.training_step), args, kwargs)
        tree = arguments.pop(first(arguments, "argument of training_step"))
        step = _Step(iteration.context, tree, arguments, self.batches, functools.partial(_clip, module))
        parts = [Part(variant, times, step.captured(variant)) for variant, times in self._variants()]
        rows = Batch(tree, part=self.batches > 1).rows() if self.batches > 1 else _rows(tree)
        precision = str(module.trainer.precision)
        self.found = Capture(parts, module, rows, self.batches, precision)
        raise _Captured

    def _variants(self) -> Iterator[tuple[Variant, int]]:
        """The parts of an iteration, as ``strategy/training.py`` asks for them."""
        module = self.lightning_module
        if module is not None and not module.automatic_optimization:
            yield Variant.optimized_by_hand(), 1
            return
        pieces = 1 if module is None else module.trainer.accumulate_grad_batches
        if self.mode is Mode.SPLIT:
            yield Variant(apply=False, expose_gradients=True), pieces
            yield Variant(forward=False, accumulated=True, expose_gradients=True), 1
            return
        if pieces > 1:
            yield Variant(apply=False), 1
        if pieces > 2:
            yield Variant(apply=False, accumulated=True), pieces - 2
        yield Variant(accumulated=pieces > 1), 1


def _clip(module: L.LightningModule, optimizer: Optimizer) -> None:
    """What Lightning calls between the backward pass and the step."""
    module.configure_gradient_clipping(
        optimizer,
        gradient_clip_val=module.trainer.gradient_clip_val,
        gradient_clip_algorithm=module.trainer.gradient_clip_algorithm,
    )


def _rows(tree: Any) -> int:
    """Rows of one device's batch, which may have no batch dimension."""
    batch = Batch(tree)
    sizes = [
        size for size, index in zip(batch.first_sizes(), batch.tensors, strict=False) if not batch.is_shared(index)
    ]
    return sizes[0] if sizes else 1


@dataclasses.dataclass
class _Step:
    """One micro-batch of the run, from which the graphs of its parts are captured; its Python runs once for all."""

    context: RunContext
    tree: Any
    arguments: dict[str, Any]
    batches: int
    clip: Callable[[Optimizer], None]
    followed: FollowedOnce | None = None

    @without_onednn()  # an LSTM is torch's own, whose products are counted: oneDNN's, and cuDNN's, are one operator
    def captured(self, variant: Variant) -> CapturedStep:
        """The graph of a part, as it is in every iteration but the first."""
        request = self._request(variant)
        try:
            if self.followed is None:
                self.followed = FollowedOnce(request)
            found = self.followed.captured(request)
        except UnknownValueError as error:
            raise CaptureError(
                "the step decides by the value of a tensor (.item(), int(), `if`), which only training knows: a plan "
                "computes nothing. Plan with that branch taken out",
                error.location,
            ) from None
        if variant.apply and self._give_state(found):
            with contextlib.suppress(CaptureError):
                return self.followed.captured(request)
        return found

    def _request(self, variant: Variant) -> CaptureRequest:
        context, forward = self.context, variant.forward
        batch = Batch(self.tree, part=self.batches > 1) if forward else None
        several = self.batches > 1
        return CaptureRequest(
            module=context.module,
            update=UpdateRequest(
                context.optimizer,
                self.clip if variant.apply and not variant.expose_gradients else None,
                context.trainer.accumulate_grad_batches,
                self._accumulators() if variant.accumulated else frozenset(),
                context.scaler,
                context.scaler.device,
                context.settings.bf16_updates,
            ),
            trainer=context.trainer,
            variant=variant,
            batch=batch,
            arguments=dict(self.arguments) if forward else {},
            rows=batch.rows() * self.batches if several and batch is not None else None,
            step_context=lambda: context.step_context(variant.method),
            tracing_context=lambda: context.settings.ranks.tracing((1,) * self.batches),
        )

    def _accumulators(self) -> frozenset[str]:
        """Names of the parameters that earlier micro-batches left gradients of: all that are trained."""
        module, optimizer = self.context.module, self.context.optimizer
        names = parameter_names(module, optimizer)
        groups = [] if optimizer is None else optimizer.param_groups
        return frozenset(names[id(p)] for group in groups for p in group["params"] if p.requires_grad)

    def _give_state(self, captured: CapturedStep) -> bool:
        """Let the optimizer have the state that its first step creates; whether there is any."""
        optimizer = self.context.optimizer
        if optimizer is None:
            return False
        names = parameter_names(self.context.module, optimizer)
        parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        mode = private.FakeTensorMode(allow_non_fake_inputs=True)
        created = False
        for _, entry in captured.signature.outputs_of(OutputRole.OPTIMIZER_STATE):
            owner, key = entry.key
            state = optimizer.state[parameters[owner]]
            if key not in state:
                state[key], created = _stands_for(entry.value, mode), True
        return created


def _stands_for(value: Any, mode: Any) -> Any:
    """State without memory; counters, which optimizers look at, are real and stand at 1."""
    if not isinstance(value, TensorSpec):
        return value
    if not value.shape:
        return torch.ones((), dtype=value.dtype)
    fake: Tensor = private.new_fake(mode, value)
    return fake
