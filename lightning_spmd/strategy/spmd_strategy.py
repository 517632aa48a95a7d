"""The strategy: Lightning's hooks in, hooks out. Which graph runs is decided in ``strategy.iteration``."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.first import first
from lightning_spmd.ir.steps import CapturedStep, Variant
from lightning_spmd.messages import tell
from lightning_spmd.parallel.axes import AXIS_KINDS, DATA, ParallelOptions
from lightning_spmd.parallel.parallel_plan import MeshPlan, ParallelPlan, check_data_parallel, options_in_parts
from lightning_spmd.stages import BuildOptions
from lightning_spmd.stages.capture.python_state import tensors_on_other_devices
from lightning_spmd.stages.runtime.control import Place
from lightning_spmd.stages.runtime.random_streams import RandomStreams
from lightning_spmd.strategy.boundary import names_lost_ranks
from lightning_spmd.strategy.eager_path import add_gradients, average_gradients, synced
from lightning_spmd.strategy.evaluating import EvaluatingStrategy
from lightning_spmd.strategy.evaluation import EvaluationSteps
from lightning_spmd.strategy.foreign_lightning import EXPLANATION
from lightning_spmd.strategy.iteration import TrainingIteration
from lightning_spmd.strategy.layer_sharing import LayerSharing
from lightning_spmd.strategy.memory import begin_alike, gradients_of
from lightning_spmd.strategy.modes import ModeOfRun
from lightning_spmd.strategy.newcomers import Newcomers
from lightning_spmd.strategy.options import checked_options
from lightning_spmd.strategy.overlap import FinishPendingWork, explain, finish_in_time, readers_between_batches
from lightning_spmd.strategy.places import (
    compare_training_batches,
    leave_borders,
    meet_after_backward,
    meet_at_borders,
    meet_in_training,
)
from lightning_spmd.strategy.run_context import BuildEvent, FellBack, RunContext
from lightning_spmd.strategy.sharding import ShardingStrategy
from lightning_spmd.strategy.support import Context, Mode


class SPMDStrategy(EvaluatingStrategy, ShardingStrategy):
    """Trains an unmodified LightningModule as one distributed graph an iteration, exactly as one device would.

    Forward, loss, backward, gradient clipping, optimizer step and logged values become one graph that every device runs
    on its part of the batch, split along dimension 0; ``docs/plans.md`` says what lies where. The result is that of one
    device on the concatenated global batch, also where DDP differs (losses with ``ignore_index``, batch norm, ragged
    batches).

    Args:
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer; any of Lightning's.
        checkpoint_io: set by the Trainer or given as plugin.
        precision_plugin: set by the Trainer.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default the one for the device.
        timeout: how long a collective may wait for the other ranks.
        data_parallel: what each rank keeps. ``"replicate"``: parameters, gradients and optimizer state, whole;
            ``"zero2"``: its part of gradients and optimizer state; ``"zero3"``: its part of the parameters too.
        data_parallel_size: number of ranks among which the batch is split; ``"auto"``: all that the other axes leave.
        data_parallel_shard_size: hybrid sharding: number of data-parallel neighbours among which ``"zero2"`` and
            ``"zero3"`` split state; each such row of ranks holds all of it. ``"node"``: the ranks of a node, so that
            gathers stay inside it. ``"auto"``: all data-parallel ranks.
        context_parallel_size: number of ranks that share each sequence; they see the same batch, and each works on its
            part of dimension 1. Attention alone looks at the others' parts.
        tensor_parallel_size: number of ranks that share each layer; they see the same batch.
        tensor_parallel_plan: how layers are shared: patterns on module paths (``fnmatch``, the last that matches is
            taken) to a style, or to a mapping with ``style`` and its options; ``"auto"``: found in the first batch's
            graph.
        sequence_parallel: between shared layers each rank works on a piece of the sequence (dimension 1).
        bucket_size_mb: largest communication bucket in MiB (2**20 bytes); ``"auto"`` takes it from the graph. No
            gradient is cut, so a larger one makes a larger bucket.
        reduce_dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"``: gradients are cast to it for their reduction and back; None
            leaves them as they are. The loss, logged values and statistics of batch norm are not cast.
        overlap_iterations: whether the end of an iteration (late gradients' reduction, their update) may run inside the
            next one, before the first reader. ``"auto"``: where that is faster by measurement, unless hooks that run
            between batches may look at weights; an info message says which. True: always. Weights seen by validation,
            checkpoints and hooks of an epoch's end are up to date in any case.
        save_distributed_checkpoint: write a checkpoint as a folder into which every rank writes its part, instead of a
            single file that rank 0 assembles. Either is read by every plan and number of devices.
        passes: names of the graph passes to run, in order, and ``GraphPass`` objects of your own; None: the default.
        dump_dir: folder that receives every graph after every stage as readable Python; None writes nothing.

    Example::

        trainer = L.Trainer(strategy="spmd", devices=2)
        trainer = L.Trainer(strategy=SPMDStrategy(dump_dir="graphs"), devices=2)

    Raises:
        ConfigurationError: at ``fit``, when a Trainer flag or callback cannot work with this strategy.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = private.default_process_group_timeout,
        data_parallel: Literal["replicate", "zero2", "zero3"] = "replicate",
        data_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_shard_size: int | Literal["auto", "node"] = "auto",
        context_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        tensor_parallel_plan: dict[str, Any] | Literal["auto"] | None = None,
        sequence_parallel: bool = False,
        bucket_size_mb: float | Literal["auto"] = "auto",
        reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        overlap_iterations: bool | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = False,
        passes: list[Any] | None = None,
        dump_dir: str | Path | None = None,
    ) -> None:
        check_data_parallel(data_parallel, data_parallel_shard_size)
        self.layer_sharing = LayerSharing(tensor_parallel_plan, tensor_parallel_size, sequence_parallel)
        super().__init__(
            process_group_backend,
            timeout,
            ParallelOptions(
                data_parallel=data_parallel,
                data_parallel_size=data_parallel_size,
                context_parallel_size=context_parallel_size,
                tensor_parallel_size=tensor_parallel_size,
                layers=self.layer_sharing.plan,
            ),
            data_parallel_shard_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.build_options = checked_options(passes, bucket_size_mb, reduce_dtype, overlap_iterations)
        self.dump_dir = None if dump_dir is None else Path(dump_dir)
        self._prepare_for_training()

    def _prepare_for_training(self) -> None:
        self.mode = Mode.EAGER
        self._listeners: list[Callable[[BuildEvent], None]] = []
        self._iteration: TrainingIteration | None = None
        self._stepping = False
        self._ran_forward = False
        self._sync_blocked = False
        self._backward_passes = 0  # of the current batch, on the eager path
        self._eager_apply = False
        self._modes = ModeOfRun()
        self._newcomers: Newcomers | None = None
        self._held: dict[str, Tensor] = {}

    # ------------------------------------------------------------------ setup
    @override
    def setup(self, trainer: Any) -> None:
        if self.accelerator is None or self.model is None:
            raise ConfigurationError("SPMDStrategy is not attached to a Trainer: pass it to Trainer(strategy=...)")
        self.accelerator.setup(trainer)
        self._materialize(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self.is_distributed:
            begin_alike(self.model)
        if self._mesh is not None and self.layer_sharing.size > 1:
            self.layer_sharing.resolve(self.model)
        if self._mesh is not None and self._mesh.shares_batches:
            self._sync_metrics(self.model, self._mesh.batch_group())
        self._shard_module(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._evaluation, self._newcomers = None, None
        self._modes.begin()
        meet_at_borders(trainer, self._control)
        if trainer.state.fn == TrainerFn.FITTING:
            private.optimizers_to_device(self.optimizers, self.root_device)
            self._shard_optimizers()
            self._setup_iteration(trainer)

    def _plan(self, variant: Variant) -> ParallelPlan:
        """The parallel plan of a variant's graph."""
        options = self.parallel_options
        plans = {
            kind.name: kind.plan(options, variant.expose_gradients)
            for kind in AXIS_KINDS
            if kind is DATA or kind.size(options) != 1
        }
        return MeshPlan(plans) if len(plans) > 1 else plans[DATA.name]

    @override
    def _evaluates_in_graphs(self) -> bool:
        mesh = self._mesh  # a sequence that needs several ranks would not fit on one
        return mesh is not None and (mesh.splits_sequences or self._plan(Variant()).shards_parameters)

    @override
    @contextlib.contextmanager
    def _eager_evaluation(self) -> Iterator[None]:
        with self.full_parameters():
            yield

    def _setup_iteration(self, trainer: Any) -> None:
        module = self.lightning_module
        if module is None:
            raise ConfigurationError("there is no LightningModule to train")
        self.mode = self._mode_of_all_ranks(trainer, module)
        elsewhere = tensors_on_other_devices(module, self.root_device)
        if elsewhere:
            raise ConfigurationError(
                f"tensors of the module are not on {self.root_device}: {', '.join(elsewhere[:5])}. Register them with "
                "register_buffer (or as parameters), so that they move with the module"
            )
        self._iteration = None
        self._newcomers = None if self._control is None else Newcomers(module, self._control)
        if self.mode is Mode.EAGER:
            return
        options = dataclasses.replace(self.build_options, overlap_iterations=self._overlaps(trainer, module))
        optimizer, streams = self.optimizers[0], self._new_streams()
        self._iteration = TrainingIteration(self._run_context(module, optimizer, streams, self.dump_dir, options))

    def _run_context(
        self,
        module: Any,
        optimizer: Optimizer | None,
        streams: RandomStreams | None,
        dump_dir: Path | None,
        options: BuildOptions,
    ) -> RunContext:
        """What graphs of training and of evaluation are made in."""
        return RunContext(
            module=module,
            optimizer=optimizer,
            trainer=module.trainer,
            mesh=self._mesh,
            control=self._control,
            streams=streams,
            tracing_context=self._tracing,
            listeners=self._listeners,
            dump_dir=dump_dir,
            options=options,
            plan=self._plan,
            newcomers=self._newcomers,
        )

    @override
    def _new_evaluation(self) -> EvaluationSteps:
        module = self.lightning_module
        if module is None:
            raise ConfigurationError("there is no LightningModule to evaluate")
        seed = self.broadcast(torch.initial_seed()) if self.is_distributed else 0
        return EvaluationSteps(
            self._run_context(
                module,
                None,
                self._streams_from(seed) if self.is_distributed else None,
                None if self.dump_dir is None else self.dump_dir / "evaluation",
                dataclasses.replace(self.build_options, overlap_iterations=False),
            )
        )

    def _overlaps(self, trainer: Any, module: Any) -> bool | str:
        """Whether iterations may overlap (``"auto"``: if it is faster), the same on all ranks."""
        if self._control is None or self.build_options.overlap_iterations is False:
            return False
        place = Place("the choice whether iterations overlap")
        readers = sum(self._control.gather(readers_between_batches(module, trainer.callbacks), place), [])
        if readers and self.mode is Mode.COMPILED:
            tell(explain(list(dict.fromkeys(readers)), insisted=self.build_options.overlap_iterations is True))
        if readers and self.build_options.overlap_iterations is not True:
            return False
        finish_in_time(trainer, self.flush)
        return self.build_options.overlap_iterations

    @override
    def flush(self) -> None:
        """Finish what the last iteration left for the next one: afterwards weights and optimizer state are up to date.

        Lightning's own readers (validation, checkpoints, hooks at an epoch's end) need no call.
        """
        if self._iteration is not None:
            self._iteration.flush()

    def _mode_of_all_ranks(self, trainer: Any, module: Any) -> Mode:
        context = Context(trainer, module, self.optimizers)
        in_parts = options_in_parts(self._plan(Variant())) if self.is_distributed else ""
        mode, self._eager_apply = self._modes.of_all_ranks(context, self._control, in_parts)
        return mode

    def _look_again(self) -> None:
        """Hooks that came after setup (``wandb.watch`` in ``on_fit_start`` or ``on_train_start``) count as well."""
        module = self.lightning_module
        if module is None or self._iteration is None:
            return
        self.mode = self._mode_of_all_ranks(module.trainer, module)
        if self.mode is Mode.EAGER:
            self._iteration = None

    def _new_streams(self) -> RandomStreams | None:
        if not self.is_distributed:
            return None
        seed = self.broadcast(torch.initial_seed())
        self._streams = self._streams_from(seed)
        return self._streams

    def _streams_from(self, seed: int) -> RandomStreams:
        several = self._mesh is not None and len(self._mesh.sizes) > 1
        return RandomStreams(seed, self._mesh.coordinates if self._mesh and several else self.global_rank)

    @override
    def model_to_device(self) -> None:
        if self.model is not None:
            self.model.to(self.root_device)

    def add_build_listener(self, listener: Callable[[BuildEvent], None]) -> None:
        """Call ``listener`` with a :class:`BuildEvent` at every stage of building a graph (for progress bars)."""
        self._listeners.append(listener)

    # ------------------------------------------------------------------ the training iteration
    @override
    @names_lost_ranks
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        iteration = self._compiled_iteration()
        self._backward_passes = 0
        if iteration is None:
            meet_in_training(self.lightning_module, self._control, self._newcomers)
            return self._eagerly("training_step", super().training_step, args, kwargs)
        variant = Variant(apply=self._stepping and self.mode is Mode.COMPILED, expose_gradients=self.mode is Mode.SPLIT)
        self._drop_zeroed_gradients(iteration)
        arguments = dict(inspect.signature(iteration.context.module.training_step).bind(*args, **kwargs).arguments)
        batch = arguments.pop(first(arguments, "argument of training_step"))
        if self.layer_sharing.is_sought and self._mesh is not None and self.layer_sharing.size > 1:
            iteration = self._share_layers(iteration, iteration.captured(batch, arguments, variant))
        try:
            output = iteration.run(batch, arguments, variant, self._clip)
        except FellBack:
            self._leave_graphs(iteration)
            return self._eagerly("training_step", super().training_step, args, kwargs)
        self._ran_forward = True
        self._replayed.add("training_step")
        if self.mode is Mode.SPLIT:
            self._held = dict(iteration.gradients)
            iteration.gradients.clear()
        return output

    def _share_layers(self, iteration: TrainingIteration, captured: CapturedStep) -> TrainingIteration:
        """Find the tensor-parallel plan in the first batch's graph; shard what exists already by it, and start anew."""
        self.layer_sharing.find(captured, iteration.context.module, self.broadcast)
        self._shard_again(iteration.context.module)
        self._setup_iteration(iteration.context.trainer)
        return self._iteration or iteration

    def _drop_zeroed_gradients(self, iteration: TrainingIteration) -> None:
        """Lightning zeroes gradients before the first backward of an accumulation, step or no step."""
        trainer = iteration.context.trainer
        if self.mode is Mode.COMPILED and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            iteration.gradients.clear()

    def _compiled_iteration(self) -> TrainingIteration | None:
        if self._iteration is None or self.lightning_module is None:
            return None
        # SWA's batch-norm epoch runs forward alone, with momentum=None (an average that depends on a counter)
        return None if private.skips_backward(self.lightning_module.trainer) else self._iteration

    def _clip(self, optimizer: Optimizer) -> None:
        """What the graph does between backward and step: Lightning's own hook, as ``Precision`` calls it."""
        module = self.lightning_module
        if module is not None:
            trainer = module.trainer
            module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

    def _leave_graphs(self, iteration: TrainingIteration) -> None:
        """From now on eagerly; gradients of micro-batches that already ran become ``p.grad``."""
        iteration.flush()
        self.mode = Mode.EAGER
        self._iteration = None
        scale = self.world_size  # each rank holds its share of the sum; the eager path takes the mean over the ranks
        parameters = dict(iteration.context.module.named_parameters())
        for name, gradient in iteration.gradients.items():
            parameters[name].grad = gradient * scale

    @override
    @names_lost_ranks
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        if module is None:
            raise ConfigurationError("there is no LightningModule to train")
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if self._iteration is not None and module.automatic_optimization:
            add_gradients(module, self._held)
            self._held = {}
        else:
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            if self._control is not None and not self._sync_blocked:
                self._backward_passes += 1
                meet_after_backward(module, self._control, self._backward_passes)
                average_gradients(list(module.parameters()))
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._sync_blocked = True
        try:
            yield
        finally:
            self._sync_blocked = False

    @override
    @names_lost_ranks
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self._iteration is None:
            return super().optimizer_step(
                optimizer, synced(closure) if self.is_distributed else closure, model, **kwargs
            )
        self._stepping, self._ran_forward = True, False
        try:
            result = closure()
        finally:
            self._stepping = False
        module = self.lightning_module
        if self._iteration is None:  # the closure fell back: its gradients are in p.grad, its step is still to come
            return super().optimizer_step(optimizer, lambda: result, model, **kwargs)
        if self.mode is Mode.SPLIT:
            private.after_closure(self.precision_plugin, module, optimizer)
            self._apply_gradients(optimizer)
        elif not self._ran_forward:
            self._iteration.apply(dict(self._iteration.gradients), self._clip, reduced=False)
        return result

    def _apply_gradients(self, optimizer: Optimizer) -> None:
        iteration = self._iteration
        module = self.lightning_module
        if iteration is None or module is None:
            return
        gradients = gradients_of(module, self._state)
        if not self._eager_apply:
            try:
                iteration.apply(gradients, None, reduced=True)
            except FellBack:
                self._eager_apply = True
        if self._eager_apply:
            optimizer.step()

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if module is not None:
            callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
            callbacks[:] = [c for c in callbacks if not isinstance(c, FinishPendingWork)]
            leave_borders(module.trainer)
        # Lightning moves the module to the host; one still on the meta device cannot go, and the error that kept
        # it there is on its way to the user
        unfinished = module is not None and any(t.is_meta for t in (*module.parameters(), *module.buffers()))
        with contextlib.suppress(NotImplementedError) if unfinished else contextlib.nullcontext():
            super().teardown()

    @override
    def on_train_start(self) -> None:
        self._look_again()
        compare_training_batches(self.lightning_module, self._control)
        super().on_train_start()

    def __repr__(self) -> str:
        # pytorch_lightning's Trainer prints this in its "invalid strategy" error
        return f"SPMDStrategy [{EXPLANATION}]" if "pytorch_lightning" in sys.modules else super().__repr__()

    @property
    def captures(self) -> int:
        """Number of graphs built since ``fit`` began; 0 when training runs eagerly."""
        return 0 if self._iteration is None else self._iteration.captures
