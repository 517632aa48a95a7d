"""The strategy: Lightning's hooks in, hooks out. Which graph runs is decided in ``strategy.steps.iteration``."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.parallel.axes import ParallelOptions
from lightning_spmd.parallel.parallel_plan import check_data_parallel
from lightning_spmd.stages.capture.optimizer.bf16_updates import KINDS
from lightning_spmd.strategy.checkpoints.saving import SavingStrategy
from lightning_spmd.strategy.checkpoints.whole_steps import OnlyWhole, save_as_ever
from lightning_spmd.strategy.graphs.run_context import BuildEvent, GraphSettings
from lightning_spmd.strategy.options import (
    check_offload,
    check_processes,
    check_sizes,
    check_switches,
    checked_choice,
    checked_folder,
    checked_options,
)
from lightning_spmd.strategy.ranks.alike import check_same_tensors
from lightning_spmd.strategy.ranks.places import Borders, meet_at_borders
from lightning_spmd.strategy.ranks.ranks import Ranks
from lightning_spmd.strategy.ranks.requeue import Requeue, begin_requests
from lightning_spmd.strategy.state.layer_sharing import ExpertSharing, LayerSharing
from lightning_spmd.strategy.state.memory import begin_alike, check_initialized
from lightning_spmd.strategy.state.replaced_tensors import moving
from lightning_spmd.strategy.steps.evaluating import Evaluation, FinishTurns
from lightning_spmd.strategy.steps.evaluation import EvaluationSteps
from lightning_spmd.strategy.steps.own_batches import BATCH_MODES
from lightning_spmd.strategy.steps.replay import StepsInGraphs
from lightning_spmd.strategy.support.feature import Mode
from lightning_spmd.strategy.support.foreign_lightning import EXPLANATION
from lightning_spmd.strategy.training import Training
from lightning_spmd.strategy.user_hooks.overlap import FinishPendingWork
from lightning_spmd.strategy.user_hooks.parts_as_wholes import PartsAsWholes

_ONE_AT_A_TIME = threading.RLock()
"""A step is followed by what is the process's own: the fit of another thread waits."""


class SPMDStrategy(SavingStrategy):
    """Trains an unmodified LightningModule as one distributed graph an iteration, exactly as one device would.

    Forward pass, loss, backward pass, gradient clipping, optimizer step and logged values become one graph. Every
    device runs it on its part of the batch, split along dimension 0; ``docs/plans.md`` shows what each device keeps.
    The result is that of one device on the concatenated global batch, also where DDP differs (losses with
    ``ignore_index``, batch norm, ragged batches).

    Args:
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer; any of Lightning's.
        checkpoint_io: set by the Trainer or given as plugin.
        precision_plugin: set by the Trainer.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default the one for the device.
        timeout: how long a collective may wait for the other ranks.
        batch: ``"global"``: the batches of all data-parallel ranks are one batch, and training is that of one device on
            it. ``"local"``: each rank's batch, of any shape, has a graph of its own, and gradients are averaged over
            the ranks, weighted by batch size (``batch_size=`` of ``self.log`` in the step, else the first tensor's
            first dimension): DDP's semantics, weighted. ``"auto"``: global if possible, else local, with a warning.
        data_parallel: what each rank keeps. ``"replicate"``: all parameters, gradients and optimizer state;
            ``"zero2"``: its shard of gradients and optimizer state; ``"zero3"``: its shard of the parameters too.
        data_parallel_size: number of ranks among which the batch is split; ``"auto"``: all that the other axes leave.
        data_parallel_shard_size: hybrid sharding: number of neighbouring data-parallel ranks among which ``"zero2"``
            and ``"zero3"`` shard state; the groups are replicas of each other. ``"node"``: the ranks of a node, so that
            gathers stay inside it. ``"auto"``: all data-parallel ranks.
        context_parallel_size: number of ranks that share each sequence. They see the same batch, and each works on its
            part of dimension 1; only attention needs the others' parts.
        tensor_parallel_size: number of ranks that share each layer; they see the same batch.
        tensor_parallel_plan: how layers are shared: a mapping of patterns on module paths (``fnmatch``; the last match
            counts) to a style, or to a mapping with ``style`` and its options. ``"auto"``: found in the first batch's
            graph.
        expert_parallel_size: number of neighbouring data-parallel ranks among which experts are split: each holds and
            updates its part of every stack of expert weights, and tokens go to the ranks of their experts and come back
            (all-to-all). Under ``"zero2"`` and ``"zero3"`` other state is split among the same ranks.
        expert_parallel_plan: patterns on the paths of modules with stacked expert weights, shape (experts, in, out) or
            (experts, out, in). ``"auto"``: every module with a three-dimensional parameter of its own that the ranks
            divide.
        sequence_parallel: between shared layers each rank works on a piece of the sequence (dimension 1).
        bucket_size_mb: largest communication bucket in MiB (2**20 bytes); ``"auto"`` derives it from the graph. A
            gradient is never split, so a larger one makes a larger bucket.
        reduce_dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"``: the dtype in which gradients are reduced; None keeps theirs.
            The loss, logged values and batch norm statistics are not cast.
        bf16_updates: how weights are updated with ``precision="bf16-true"``. ``"plain"``: in bfloat16, as Lightning
            does, which loses updates of less than 1/256 of a weight. ``"master"``: in float32, on a float32 copy of the
            weights kept with the optimizer's state (float32 too), rounded to nearest. ``"stochastic"``: in float32 with
            stochastic rounding; the state is float32, and no copy is kept.
        overlap_iterations: whether the end of an iteration (reduction of the last gradients and their update) may run
            inside the next one, before its first reader. ``"auto"``: where that is measured to be faster; True: always.
            Hooks that look at weights find them up to date; where that cannot be ensured (an overridden
            ``optimizer_step``) ``"auto"`` is off, and an info message says why.
        rematerialize: activations to recompute in the backward pass. A number above 0 and at most 1: the share of their
            bytes to free; a string such as ``"512MiB"`` (KiB, MiB or GiB): the bytes that they may take on each device;
            None: none. Losses stay bitwise equal; an info message says what is reached and how much of the forward pass
            runs twice.
        offload_activations: activations to move from a GPU to the host's memory between the forward and the backward
            pass; values as for ``rematerialize``, which may be combined with it. Copies overlap with kernels; an info
            message says what is reached and how many bytes are copied a step. An error without a GPU.
        loss_chunks: number of chunks of rows in which a head over many classes, its loss and their gradients are
            computed, so that the logits never exist as a whole; or the bytes that a chunk may take, a string such as
            ``"256MiB"``. Losses are equal up to rounding; an info message says what is reached, or why nothing is done.
        lowering: ``"inductor"``: compile chains of pointwise operators and reductions in each graph's second run.
            ``"auto"``: only those that are worth the compile time and measured to be faster. ``"none"``: none.
        cuda_graphs: on a GPU, run an iteration as a few CUDA graphs: less work for the host, more memory. What
            cannot be recorded runs without; an info message says how much is recorded.
        save_distributed_checkpoint: write checkpoints as folders into which every rank writes its shard, instead of
            single files that rank 0 assembles. Any plan on any number of devices reads either.
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
        batch: Literal["auto", "global", "local"] = "auto",
        data_parallel: Literal["replicate", "zero2", "zero3"] = "replicate",
        data_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_shard_size: int | Literal["auto", "node"] = "auto",
        context_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        tensor_parallel_plan: dict[str, Any] | Literal["auto"] | None = None,
        expert_parallel_size: int = 1,
        expert_parallel_plan: list[str] | Literal["auto"] = "auto",
        sequence_parallel: bool = False,
        bucket_size_mb: float | Literal["auto"] = "auto",
        reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        bf16_updates: Literal["plain", "master", "stochastic"] = "plain",
        overlap_iterations: bool | Literal["auto"] = "auto",
        rematerialize: float | str | None = None,
        offload_activations: float | str | None = None,
        loss_chunks: int | str | None = None,
        lowering: Literal["auto", "inductor", "none"] = "none",
        cuda_graphs: bool = False,
        save_distributed_checkpoint: bool = False,
        passes: list[Any] | None = None,
        dump_dir: str | Path | None = None,
    ) -> None:
        check_data_parallel(data_parallel, data_parallel_shard_size)
        check_processes(process_group_backend, timeout)
        check_switches(sequence_parallel=sequence_parallel, save_distributed_checkpoint=save_distributed_checkpoint)
        check_sizes(
            context_parallel_size=context_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            expert_parallel_size=expert_parallel_size,
        )
        self.expert_sharing = ExpertSharing(expert_parallel_plan, expert_parallel_size)
        self.layer_sharing = LayerSharing(
            tensor_parallel_plan, tensor_parallel_size, sequence_parallel, self.expert_sharing.shapes
        )
        sizes = (data_parallel_size, context_parallel_size, tensor_parallel_size)
        self.parallel_options = ParallelOptions(
            data_parallel, *sizes, self.layer_sharing.plan, expert_parallel_size, self.expert_sharing.shapes
        )
        ranks = Ranks(self.parallel_options, data_parallel_shard_size, timeout)
        super().__init__(
            ranks,
            process_group_backend,
            timeout,
            save_distributed_checkpoint=save_distributed_checkpoint,
            wide_state=bf16_updates != "plain",
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.build_options = checked_options(
            passes, bucket_size_mb, reduce_dtype, overlap_iterations, rematerialize, lowering, cuda_graphs,
            offload_activations, loss_chunks,
        )  # fmt: skip
        self.dump_dir = checked_folder(dump_dir)
        updates = checked_choice("bf16_updates", bf16_updates, KINDS)
        batches = checked_choice("batch", batch, BATCH_MODES)
        self._settings = GraphSettings(ranks, self.build_options, self.dump_dir, [], updates, batches)
        steps = StepsInGraphs()
        self._wholes = PartsAsWholes(lambda: self._layout.state if self._layout.plan.needs_graphs else None)
        self._training = Training(self._settings, self._layout, self.layer_sharing, steps, self._random, self._wholes)
        self.accounts = self._training.accounts
        self._evaluation = Evaluation(self._layout, self.layer_sharing, steps, self._wholes, self._new_evaluation)

    # ------------------------------------------------------------------ from setup to teardown
    @override
    def lay_out_module(self) -> None:
        module = self.lightning_module
        if self.accelerator is None or self.model is None or module is None:
            raise ConfigurationError("SPMDStrategy is not attached to a Trainer: pass it to Trainer(strategy=...)")
        trainer: Any = module.trainer
        self.accelerator.setup(trainer)
        check_offload(self.build_options.offload_activations, self.root_device)
        if self.is_distributed or trainer.state.fn == TrainerFn.FITTING:
            check_initialized(self.model)
        self._layout.materialize(self.model, self.root_device)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self.is_distributed:
            check_same_tensors(self.model, self._ranks.control)
            begin_alike(self.model)
            self.expert_sharing.resolve(self.model)
        self.layer_sharing.resolve(self.model)
        if self.is_distributed:
            self._ranks.sync_metrics(self.model)
        self._layout.shard(self.model)
        if self.is_distributed:
            self._wholes.put_around(module, trainer)

    @override
    def setup(self, trainer: Any) -> None:
        self.lay_out_once()
        if trainer.state.fn == TrainerFn.FITTING:
            with self._wholes.inside():  # functions of schedulers run for the first time
                self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._evaluation.begin()
        self._training.forget()
        if trainer.state.fn == TrainerFn.FITTING:
            in_parts = lambda: self._layout.plan.needs_graphs or self._layout.save_distributed  # noqa: E731
            only = OnlyWhole(lambda: self._training.iteration, alone=self.is_distributed, in_parts=in_parts)
            trainer.callbacks.insert(0, only)
        meet_at_borders(trainer, self._ranks.control)
        self._folder_locks.begin(trainer, self._ranks.control)
        self.requests, self._requeue = begin_requests(trainer, self._ranks.control, self._random)
        if self.is_distributed:
            self._wholes.put_around(self.lightning_module, trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            private.optimizers_to_device(self.optimizers, self.root_device)
            self._layout.shard_optimizers(self._running_module, self.optimizers)
            self._training.begin(self._running_module)

    @property
    def _running_module(self) -> LightningModule:
        if self.lightning_module is None:
            raise ConfigurationError("there is no LightningModule to run")
        return self.lightning_module

    def _new_evaluation(self) -> EvaluationSteps:
        streams = self._ranks.streams(self.broadcast(torch.initial_seed())) if self.is_distributed else None
        return EvaluationSteps(self._settings.of_evaluation(self._running_module, streams))

    @override
    def teardown(self) -> None:
        self._folder_locks.end()
        private.UNSEEN.leave()
        private.leave_packing()
        module = self.lightning_module
        if module is not None and private.is_attached(module):
            trainer: Any = module.trainer
            own = (FinishPendingWork, FinishTurns, Borders, OnlyWhole, Requeue)
            trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, own)]
            private.stop_signal_sent_by_lightning(trainer, True)
            save_as_ever(trainer)
            for name in ("on_advance_end", "on_run_start"):
                private.around_training_loop(trainer, name, None)
            self._resumed = None
            self._random.end_run()
            self._training.end()
            self._wholes.take_away()
        # Lightning moves the module to the host; one still on the meta device cannot go, and the error that kept
        # it there is on its way to the user
        unfinished = module is not None and any(t.is_meta for t in (*module.parameters(), *module.buffers()))
        with contextlib.ExitStack() as stack:
            if unfinished:
                stack.enter_context(contextlib.suppress(NotImplementedError))
            if module is not None:
                stack.enter_context(moving(module))
            super().teardown()

    # ------------------------------------------------------------------ training
    @override
    def on_train_start(self) -> None:
        self._training.look_again()
        super().on_train_start()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        training, eager = self._training, super().training_step
        self._wholes.look_again(self._running_module, self._running_module.trainer)
        with _ONE_AT_A_TIME, self._wholes.apart():
            return training.accounts.step(
                lambda: training.step(eager, args, kwargs),
                lambda: (training.mode, training.ran),
            )

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module, given = self._running_module, closure_loss
        history = closure_loss.grad_fn if module.automatic_optimization else None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        is_of_step = not module.automatic_optimization or given.grad_fn is history
        if not self._training.give_gradients(module, is_of_step=is_of_step):
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            self._training.average_gradients(module)
        with self._layout.mixed_placements_allowed(module):
            closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._training.sync_blocked = True
        try:
            yield
        finally:
            self._training.sync_blocked = False

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with _ONE_AT_A_TIME, self._wholes.apart():
            return self._training.optimizer_step(super().optimizer_step, optimizer, closure, model, kwargs)

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._wholes.apart():  # ranks write parts of their own
            super().save_checkpoint(*args, **kwargs)

    @override
    def flush(self) -> None:
        """Finish the work that the last iteration deferred: afterwards weights and optimizer state are up to date.

        Validation, checkpoints and hooks at the end of an epoch do this by themselves.
        """
        self._training.flush()

    @override
    def on_train_end(self) -> None:
        self.flush()  # a tuner trains without the callback that finishes an epoch's work
        super().on_train_end()
        self._training.accounts.tell()

    # ------------------------------------------------------------------ evaluation
    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("validation_step", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("test_step", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("predict_step", super().predict_step, args, kwargs)

    def _evaluated(self, method: str, eager: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._evaluation.in_graphs:
            self.flush()
        return self._evaluation.step(self.lightning_module, method, eager, args, kwargs)

    @override
    def on_validation_start(self) -> None:
        trainer = self._running_module.trainer
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._evaluation.compare("validation", batches)

    @override
    def on_test_start(self) -> None:
        self._evaluation.compare("test", self._running_module.trainer.num_test_batches)

    @override
    def on_predict_start(self) -> None:
        self._evaluation.begin_prediction(self._running_module.trainer)

    # ------------------------------------------------------------------ reporting
    def add_build_listener(self, listener: Callable[[BuildEvent], None]) -> None:
        """Call ``listener`` with a :class:`BuildEvent` at every stage of building a graph (for progress bars)."""
        self._settings.listeners.append(listener)

    @property
    def mode(self) -> Mode:
        """How the current or last fit runs: compiled, split or eager."""
        return self._training.mode

    @property
    def captures(self) -> int:
        """Number of graphs built since ``fit`` began; 0 if training runs eagerly."""
        return 0 if self._training.iteration is None else self._training.iteration.captures

    @property
    def evaluation_captures(self) -> int:
        """Number of graphs built for evaluation since the Trainer started; 0 if it runs eagerly."""
        return 0 if self._evaluation.graphs is None else self._evaluation.graphs.captures

    def __repr__(self) -> str:
        # pytorch_lightning's Trainer prints this in its "invalid strategy" error
        return f"SPMDStrategy [{EXPLANATION}]" if "pytorch_lightning" in sys.modules else super().__repr__()
