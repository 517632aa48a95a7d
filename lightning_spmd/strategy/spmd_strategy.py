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
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.steps import Variant
from lightning_spmd.parallel.mesh import data_parallel_axis
from lightning_spmd.stages import BuildOptions
from lightning_spmd.stages.capture.python_state import tensors_on_other_devices
from lightning_spmd.stages.passes import KNOWN_PASSES, PASSES, REDUCE_DTYPES, select
from lightning_spmd.stages.runtime.random_streams import RandomStreams
from lightning_spmd.strategy.eager_path import average_gradients, mean_loss
from lightning_spmd.strategy.foreign_lightning import EXPLANATION
from lightning_spmd.strategy.iteration import BuildEvent, FellBack, TrainingIteration
from lightning_spmd.strategy.overlap import FinishPendingWork, explain, readers_between_batches
from lightning_spmd.strategy.random_state import pack_random_state, restore_random_state
from lightning_spmd.strategy.ranks import RankedStrategy
from lightning_spmd.strategy.support import Context, Mode, classify

_CHECKPOINT_KEY = "lightning_spmd"


class SPMDStrategy(RankedStrategy):
    """Trains an unmodified LightningModule as one distributed graph an iteration, exactly as one device would.

    Forward, loss, backward, gradient clipping, optimizer step and logged values become one graph that every device runs
    on its part of the batch. Parameters are replicated; the batch is split along dimension 0. The result is that of one
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
        bucket_size_mb: largest communication bucket in MiB (2**20 bytes); ``"auto"`` takes it from the graph. No
            gradient is cut, so a larger one makes a larger bucket.
        reduce_dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"``: gradients are cast to it for their reduction and back; None
            leaves them as they are. The loss, logged values and statistics of batch norm are not cast.
        overlap_iterations: whether the end of an iteration (late gradients' reduction, their update) may run inside the
            next one, before the first reader. ``"auto"``: where that is faster by measurement, unless hooks that run
            between batches may look at weights; an info message says which. True: always. Weights seen by validation,
            checkpoints and hooks of an epoch's end are up to date in any case.
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
        bucket_size_mb: float | Literal["auto"] = "auto",
        reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        overlap_iterations: bool | Literal["auto"] = "auto",
        passes: list[Any] | None = None,
        dump_dir: str | Path | None = None,
    ) -> None:
        super().__init__(
            process_group_backend,
            timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if bucket_size_mb != "auto" and (isinstance(bucket_size_mb, str) or not bucket_size_mb > 0):
            raise ConfigurationError(f"bucket_size_mb={bucket_size_mb!r}: give a number of MiB above 0, or 'auto'")
        chosen = PASSES if passes is None else select(passes, KNOWN_PASSES)
        if reduce_dtype not in (None, *REDUCE_DTYPES):
            raise ConfigurationError(f"reduce_dtype={reduce_dtype!r}: known are {list(REDUCE_DTYPES)}, or None")
        self.build_options = BuildOptions(chosen, bucket_size_mb, reduce_dtype)
        if overlap_iterations not in (True, False, "auto"):
            raise ConfigurationError(f"overlap_iterations={overlap_iterations!r}: give True, False or 'auto'")
        self.overlap_iterations: bool | str = overlap_iterations
        self.dump_dir = None if dump_dir is None else Path(dump_dir)
        self.mode = Mode.EAGER
        self._listeners: list[Callable[[BuildEvent], None]] = []
        self._iteration: TrainingIteration | None = None
        self._streams: RandomStreams | None = None
        self._stepping = False
        self._ran_forward = False
        self._sync_blocked = False
        self._eager_apply = False
        self._announced: Mode | None = None
        self._held: dict[str, Tensor] = {}
        self._resumed: dict[str, Any] | None = None

    # ------------------------------------------------------------------ setup
    @override
    def setup(self, trainer: Any) -> None:
        if self.accelerator is None or self.model is None:
            raise ConfigurationError("SPMDStrategy is not attached to a Trainer: pass it to Trainer(strategy=...)")
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self.is_distributed:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(tensor.detach(), 0)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            private.optimizers_to_device(self.optimizers, self.root_device)
            self._setup_iteration(trainer)

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
        if self.mode is Mode.EAGER:
            return
        self._iteration = TrainingIteration(
            module=module,
            optimizer=self.optimizers[0],
            trainer=trainer,
            axis=self._axis if self.is_distributed else None,
            control=self._control,
            streams=self._new_streams(),
            tracing_context=self._tracing,
            listeners=self._listeners,
            dump_dir=self.dump_dir,
            options=dataclasses.replace(self.build_options, overlap_iterations=self._overlaps(trainer, module)),
        )

    def _overlaps(self, trainer: Any, module: Any) -> bool | str:
        """Whether iterations may overlap (``"auto"``: if it is faster), the same on all ranks."""
        if self._control is None or self.overlap_iterations is False:
            return False
        readers = sum(self._control.gather(readers_between_batches(module, trainer.callbacks)), [])
        if readers and self.mode is Mode.COMPILED:
            rank_zero_info(explain(list(dict.fromkeys(readers)), insisted=self.overlap_iterations is True))
        overlap = self.overlap_iterations is True or not readers
        if overlap and not any(isinstance(c, FinishPendingWork) for c in trainer.callbacks):
            trainer.callbacks.insert(0, FinishPendingWork(self.flush))
        return self.overlap_iterations if overlap else False

    def flush(self) -> None:
        """Finish what the last iteration left for the next one: afterwards weights and optimizer state are up to date.

        Lightning's own readers (validation, checkpoints, hooks at an epoch's end) need no call.
        """
        if self._iteration is not None:
            self._iteration.flush()

    def _mode_of_all_ranks(self, trainer: Any, module: Any) -> Mode:
        """How to run, the worst of what the ranks find: ``wandb.watch`` hooks the modules of rank 0 alone."""
        mode, findings = classify(Context(trainer, module, self.optimizers))
        reasons = [str(finding) for finding in findings]
        step_hooks = any(f.feature.name == "optimizer step hooks" for f in findings)
        if self._control is not None:
            everyone = self._control.gather((mode, reasons, step_hooks))
            mode, reasons, step_hooks = max(everyone, key=lambda found: list(Mode).index(found[0]))
        if mode is Mode.REJECTED:
            raise ConfigurationError(f"strategy='spmd' cannot train this: {reasons[0]}")
        if reasons and mode is not self._announced:
            rank_zero_info(f"strategy='spmd' runs this training {mode}: {reasons[0]}")
            self._announced = mode
        self._eager_apply = step_hooks
        return mode

    def _look_again(self) -> None:
        """Hooks that came after setup (``wandb.watch`` in ``on_fit_start`` or ``on_train_start``) count as well."""
        module = self.lightning_module
        if module is None or self._iteration is None:
            return
        self.mode = self._mode_of_all_ranks(module.trainer, module)
        if self.mode is Mode.EAGER:
            self._iteration = None

    def _axis(self, split: tuple[int, ...]) -> Any:
        return data_parallel_axis(split, self.global_rank, self._group.group_name)

    def _new_streams(self) -> RandomStreams | None:
        if not self.is_distributed:
            return None
        seed = self.broadcast(torch.initial_seed())
        self._streams = RandomStreams(seed, self.global_rank)
        return self._streams

    @override
    def model_to_device(self) -> None:
        if self.model is not None:
            self.model.to(self.root_device)

    def add_build_listener(self, listener: Callable[[BuildEvent], None]) -> None:
        """Call ``listener`` with a :class:`BuildEvent` at every stage of building a graph (for progress bars)."""
        self._listeners.append(listener)

    # ------------------------------------------------------------------ the training iteration
    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        iteration = self._compiled_iteration()
        if iteration is None:
            return super().training_step(*args, **kwargs)
        variant = Variant(apply=self._stepping and self.mode is Mode.COMPILED, expose_gradients=self.mode is Mode.SPLIT)
        self._drop_zeroed_gradients(iteration)
        arguments = self._named_arguments(args, kwargs)
        batch = arguments.pop(next(iter(arguments)))
        try:
            output = iteration.run(batch, arguments, variant, self._clip)
        except FellBack:
            self._leave_graphs(iteration)
            return super().training_step(*args, **kwargs)
        self._ran_forward = True
        if self.mode is Mode.SPLIT:
            self._held = dict(iteration.gradients)
            iteration.gradients.clear()
        return output

    def _drop_zeroed_gradients(self, iteration: TrainingIteration) -> None:
        """Lightning zeroes gradients before the first backward of an accumulation, step or no step."""
        trainer = iteration.trainer
        if self.mode is Mode.COMPILED and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            iteration.gradients.clear()

    def _compiled_iteration(self) -> TrainingIteration | None:
        if self._iteration is None or self.lightning_module is None:
            return None
        # SWA's batch-norm epoch runs forward alone, with momentum=None (an average that depends on a counter)
        return None if private.skips_backward(self.lightning_module.trainer) else self._iteration

    def _named_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.lightning_module is None:
            raise ConfigurationError("there is no LightningModule to train")
        return dict(inspect.signature(self.lightning_module.training_step).bind(*args, **kwargs).arguments)

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
        parameters = dict(iteration.module.named_parameters())
        for name, gradient in iteration.gradients.items():
            parameters[name].grad = gradient * scale

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        if module is None:
            raise ConfigurationError("there is no LightningModule to train")
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if self._iteration is not None and module.automatic_optimization:
            self._put_gradients(module)
        else:
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            if self.is_distributed and not self._sync_blocked:
                average_gradients(list(module.parameters()))
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _put_gradients(self, module: Any) -> None:
        """Split mode: add what the graph computed to ``p.grad``, as autograd would at this moment."""
        parameters = dict(module.named_parameters())
        for name, gradient in self._held.items():
            parameter = parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._held = {}

    @override
    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._sync_blocked = True
        try:
            yield
        finally:
            self._sync_blocked = False

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self._iteration is None:
            return super().optimizer_step(optimizer, self._synced(closure), model, **kwargs)
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
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        if not self._eager_apply:
            try:
                iteration.apply(gradients, None, reduced=True)
            except FellBack:
                self._eager_apply = True
        if self._eager_apply:
            optimizer.step()

    def _synced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Eager path: every rank sees the mean loss, so optimizers that look at it (LBFGS) decide alike."""
        return (lambda: mean_loss(closure())) if self.is_distributed else closure

    @contextlib.contextmanager
    def _tracing(self, rows: int) -> Iterator[None]:
        """While training_step is traced: it sees the global batch, and compiled submodules run as written."""
        self._tracing_rows = rows
        torch.compiler.set_stance("force_eager")
        # torch's own LSTM instead of oneDNN's, which cannot be captured; one device keeps eager's and runs eagerly
        native = torch.backends.mkldnn.flags(enabled=False) if self.is_distributed else contextlib.nullcontext()
        try:
            with native:
                yield
        finally:
            self._tracing_rows = None
            torch.compiler.set_stance("default")

    # ------------------------------------------------------------------ checkpoints
    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.flush()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.flush()
        return super().optimizer_state(optimizer)

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if module is not None:
            callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
            callbacks[:] = [c for c in callbacks if not isinstance(c, FinishPendingWork)]
        super().teardown()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            within = private.is_within_training_epoch(module.trainer)
            checkpoint[_CHECKPOINT_KEY] = {"random_state": pack_random_state(self._streams), "within_epoch": within}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        self._resumed = checkpoint.get(_CHECKPOINT_KEY)
        return checkpoint

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # The last hook before Lightning makes the training iterator, which draws a shuffle seed as the next epoch of an
        # uninterrupted run would. In mid-epoch that run draws none, so there the state is restored after it.
        self._restore_random_state(within_epoch=False)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        self._look_again()
        self._restore_random_state(within_epoch=True)

    def _restore_random_state(self, *, within_epoch: bool) -> None:
        module = self.lightning_module
        if self._resumed is None or module is None or not module.trainer.training:
            return
        if self._resumed["within_epoch"] == within_epoch:
            restore_random_state(self._resumed["random_state"], self._streams)
            self._resumed = None

    def __repr__(self) -> str:
        # pytorch_lightning's Trainer prints this in its "invalid strategy" error
        return f"SPMDStrategy [{EXPLANATION}]" if "pytorch_lightning" in sys.modules else super().__repr__()

    @property
    def captures(self) -> int:
        """Number of graphs built since ``fit`` began; 0 when training runs eagerly."""
        return 0 if self._iteration is None else self._iteration.captures
