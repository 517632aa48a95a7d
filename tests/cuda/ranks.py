"""One rank of several on GPUs that are not there: the strategy's own parts, from the module to the graphs it would run.

Everything here runs in the lane's process (``tests.helpers.fake_cuda``). Tensors are fake and lie on ``cuda:RANK``; the
process groups are torch's fake ones. What is real is the strategy: layout of state, capture, expansion, passes, phases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import default_collate

from lightning_spmd import _private_api as private
from lightning_spmd._private_api import pytree
from lightning_spmd.ir.counted import GRAPHS
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.several_optimizers import SeveralOptimizers
from lightning_spmd.ir.sizes import Counts, Dimension
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.parallel.axes import ParallelOptions
from lightning_spmd.parallel.mesh import make_mesh, mesh_sizes
from lightning_spmd.parallel.parallel_plan import ReplicatedPlan
from lightning_spmd.stages import BuildOptions
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.follow.count_formulas import samples_of_path
from lightning_spmd.stages.capture.follow.notes import Made, sources_in
from lightning_spmd.stages.capture.follow.program import Live, Program
from lightning_spmd.stages.capture.follow.step import Step as FollowedStep
from lightning_spmd.stages.capture.once import FollowedOnce
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.strategy.graphs.building import GraphBuilder
from lightning_spmd.strategy.graphs.run_context import GraphSettings, RunContext, StepRequest
from lightning_spmd.strategy.ranks.ranks import Processes, Ranks
from lightning_spmd.strategy.state.state_layout import StateLayout
from lightning_spmd.strategy.steps.by_hand import held_gradients
from lightning_spmd.strategy.steps.following import program_of_beginning
from tests.cuda.models import MODELS
from tests.cuda.steps import STEPS, Step, answer, on_gpu, optimize_by_hand
from tests.helpers.modules import samples


@dataclasses.dataclass
class Wanted:
    """A rank and its run.

    Args:
        model: name in ``models.MODELS`` or ``steps.STEPS``; the latter have optimizer and settings of their own.
        rank, count: which one of how many.
        plan: of the data axis.
        optimizer: name in ``modules.OPTIMIZERS``.
        bf16: whether under autocast.
        half: whether under autocast to float16, with loss scaling.
        true: whether everything is bfloat16.
        rematerialize, offload: the share of the activations' bytes to give back.
        clip: gradient clipping by norm.
        rows: of each rank.
        kernel: which attention kernel PyTorch would choose.
        settings: of the model.
    """

    model: str
    rank: int = 0
    count: int = 2
    plan: str = "replicate"
    optimizer: str = "adamw_fused"
    bf16: bool = False
    half: bool = False
    true: bool = False
    rematerialize: float | None = None
    offload: float | None = None
    clip: float | None = None
    rows: int = 4
    kernel: str = "flash"
    settings: dict[str, Any] = dataclasses.field(default_factory=lambda: {"dropout": 0.0})


@contextlib.contextmanager
def process_groups(rank: int, count: int) -> Iterator[None]:
    """Groups whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_device(module: nn.Module, device: torch.device) -> None:
    """Put fake tensors in place of parameters and buffers (inside a fake tensor mode)."""
    for part in module.modules():
        if isinstance(part, L.LightningModule):
            part._device = device  # what self.device says
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                    parameter = isinstance(tensor, nn.Parameter)
                    setattr(part, key, nn.Parameter(twin, tensor.requires_grad) if parameter else twin)


class _MadeOnDevice(private.TorchDispatchMode):
    """New tensors on a GPU are fake ones, those on the host real: the strategy reads step counters."""

    def __init__(self, fake: Any) -> None:
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        in_capture = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if in_capture or device is None or torch.device(device).type == "cpu":
            return func(*args, **kwargs)
        with self.fake:
            return func(*args, **kwargs)


def stand_in(precision: Precision, device: torch.device) -> Any:
    """What capture and building ask of a Trainer."""
    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=device),
        callbacks=[],
        lr_scheduler_configs=[],
        accumulate_grad_batches=1,
        precision_plugin=precision,
        global_step=0,
        current_epoch=0,
        is_global_zero=True,
    )


def clipped(precision: Precision, value: float, optimizer: Any) -> None:
    """What ``Trainer(gradient_clip_val=value)`` does."""
    precision.clip_gradients(optimizer, value)


@dataclasses.dataclass
class Built:
    """A rank's graphs.

    Args:
        executable: what would run.
        batch: what it was built for.
        ranks: the rank's view of the mesh.
        prefixes: graphs of what comes before a value that Python reads.
    """

    executable: Executable
    batch: Batch
    ranks: Ranks
    prefixes: list[ShardedStep] = dataclasses.field(default_factory=list)


def build(wanted: Wanted) -> Built:
    """The graph of a training step, as the strategy builds it; under ``stand_ins.gpus`` and :func:`process_groups`."""
    fake = private.FakeTensorMode(allow_non_fake_inputs=True)
    device = torch.device("cuda", wanted.rank)
    step = STEPS.get(wanted.model) or _step_of_model(wanted)
    options = ParallelOptions(wanted.plan, "auto", 1, 1, lambda: ReplicatedPlan())
    ranks = Ranks(options, "auto", None)
    if wanted.count > 1:
        ranks._processes = Processes(wanted.count, wanted.rank, wanted.count, device, "fake")
        ranks.mesh = make_mesh(mesh_sizes(options, wanted.count), wanted.rank, "cuda", "fake")
    mixed = "bf16-mixed" if wanted.bf16 else "16-mixed"
    precision = MixedPrecision(mixed, "cuda") if wanted.bf16 or wanted.half else Precision()  # type: ignore[arg-type]
    precision = HalfPrecision("bf16-true") if wanted.true else precision
    module: Any = precision.convert_module(step.make())
    layout = StateLayout(ranks, save_distributed=False)
    with fake:
        on_device(module, device)
        layout.shard(module)
    module._trainer = stand_in(precision, device)
    optimizer = _optimizer(module, layout)
    options_of_run = BuildOptions(
        rematerialize=wanted.rematerialize,
        offload_activations=wanted.offload,
        overlap_iterations=step.variant.pauses,
    )
    settings = GraphSettings(ranks, options_of_run, None)
    context = RunContext(settings, module, optimizer, ranks.streams(0), options_of_run, None)
    real = precision.convert_input(step.batch(wanted.rank, wanted.rows))

    def laid(batch: Any) -> Batch:
        with fake:
            return Batch(pytree.tree_map(functools.partial(on_gpu, device=device), batch))

    batch = laid(real)
    clip = None if wanted.clip is None else functools.partial(clipped, precision, wanted.clip)
    sizes = {(leaf, dim): batch.tensor_values[leaf].shape[dim] for leaf, dim in step.vary}
    request = StepRequest(batch, step.variant, {"batch_idx": 0}, clip, vary=sizes)
    builder = GraphBuilder(context, held_gradients(module, optimizer))
    split = () if step.variant.own_batch else (wanted.rows,) * wanted.count
    prefixes: list[ShardedStep] = []

    def without_memory(spec: TensorSpec) -> Tensor:
        with private.disable_dispatch_modes(), private.no_torch_functions(), fake:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)

    with mock.patch.object(private, "without_memory", without_memory):
        program = _followed(builder, request, split, step, prefixes, laid(_shorter(real, step.vary)))
    with _MadeOnDevice(fake):  # the optimizer's first state
        executable = builder.build(dataclasses.replace(request, program=program), split)
    return Built(executable, batch, ranks, prefixes)


def _shorter(batch: Any, vary: Sequence[Dimension]) -> Any:
    """A batch in which these sizes are a little smaller."""
    leaves, structure = pytree.tree_flatten(batch)
    for leaf, dim in vary:
        leaves[leaf] = leaves[leaf].narrow(dim, 0, leaves[leaf].shape[dim] - 3)
    return pytree.tree_unflatten(leaves, structure)


def _followed(
    builder: GraphBuilder,
    request: StepRequest,
    split: tuple[int, ...],
    kind: Step,
    prefixes: list[ShardedStep],
    shorter: Batch,
) -> Program:
    """The path of a step, for all sizes that vary; graphs of what comes before reads are collected.

    Args:
        builder: of graphs.
        request: of the step.
        split: rows of the global batch by rank.
        kind: of step.
        prefixes: where graphs are collected.
        shorter: a batch of other sizes, with which an earlier step was made.
    """
    steps: list[FollowedStep] = []

    def read(step: FollowedStep) -> list[Tensor]:
        steps.append(step)
        program = program_of_beginning(step, Live())
        beginning = builder.beginning(dataclasses.replace(request, program=program), split)
        prefixes.append(beginning.executable.graphs.main)
        read = step.notes[-1]
        sources = sources_in((read.args, read.kwargs))
        fake = step.recorder.fake_of
        return answer(kind.answers, [fake(s) if type(s) is Made else step.tensor_of(s) for s in sources])

    earlier = None
    if kind.vary:
        before = dataclasses.replace(request, batch=shorter, vary={})
        earlier = FollowedOnce(builder._capture_request(before, split), read)
    program = FollowedOnce(builder._capture_request(request, split), read, kind.vary, earlier).program
    assert program.for_all_sizes == bool(kind.vary), program.why_not
    if not steps or not steps[0].counts:
        return program
    counts, samples = Counts(len(steps[0].counts)), samples_of_path(steps[0].notes, len(steps[0].counts), {})[:GRAPHS]
    program.live.counts = steps[0].counts
    return dataclasses.replace(program, counts=counts, samples=samples)


def _step_of_model(wanted: Wanted) -> Step:
    kind = "conv" if wanted.model == "conv" else "gpt"
    make = functools.partial(MODELS[wanted.model], optimizer=wanted.optimizer, **wanted.settings)
    return Step(make, lambda _, rows: default_collate(samples(kind, rows)))


def _optimizer(module: Any, layout: StateLayout) -> Any:
    """All that the module's hook gives, as graphs take it."""
    made = module.configure_optimizers()
    made, schedulers = made if isinstance(made, tuple) else (made, [])
    optimizers = made if isinstance(made, list) else [made]
    layout.shard_optimizers(module, optimizers)
    if module.automatic_optimization:
        return optimizers[0]
    configs = [SimpleNamespace(scheduler=scheduler) for scheduler in schedulers]
    optimize_by_hand(module.trainer.strategy, module, optimizers, configs)
    return SeveralOptimizers(optimizers)
