"""The support matrix: the mode of each Lightning feature, and its detection at setup.

One row per feature: *compiled* (one graph), *split* (a graph up to ``p.grad``, the user's hooks, a graph for the
update), *eager* (plain autograd, gradients averaged over the ranks as in DDP; only with replicated parameters) or
*rejected*. Rows with a detector decide the mode of a run. ``docs/support_matrix.md`` is written from this table
(``python -m lightning_spmd.report.support_matrix``), and every row names the test that backs it.
"""

from __future__ import annotations

from lightning_spmd.strategy.support.detectors import (
    Context,
    autograd_hooks,
    averaging_of_parts,
    backward_override,
    by_hand_eagerly,
    clipping_override,
    dataloader_iter,
    detect_anomaly,
    foreign_accelerator,
    foreign_layer_sync,
    foreign_precision,
    foreign_scaler,
    gradient_hooks,
    late_gradient_readers,
    needs_closure,
    no_optimizer,
    optimizer_hooks,
    own_optimizer,
    pruning,
    scripted,
    zero_grad_override,
)
from lightning_spmd.strategy.support.feature import Feature, Finding, Mode


def classify(context: Context) -> tuple[Mode, list[Finding]]:
    """The mode of a run and the findings that decided it, worst first."""
    findings = [
        Finding(feature, found)
        for feature in FEATURES
        if feature.detect is not None and (found := feature.detect(context)) is not None
    ]
    findings.sort(key=lambda f: -list(Mode).index(f.feature.mode))
    return (findings[0].feature.mode if findings else Mode.COMPILED), findings


OWN_OPTIMIZER = "optimizers that are none of torch's own, LBFGS, Adafactor"
_FIT = "tests/strategy/runs/test_features.py"
_HOOKS = "tests/strategy/hooks/test_gradient_hooks.py"
_MORE = "tests/strategy/runs/test_more_features.py"
_PACKED = "tests/strategy/batches/test_packed_sequences.py"
_SCALING = "tests/strategy/optimizers/test_loss_scaling.py"
_WIDE = "tests/strategy/optimizers/test_bf16_updates.py"
_EQUAL = "tests/equality/test_one_device.py"
_SPLIT_NOTE = "p.grad is real and reduced when the hook runs; the update is a graph of its own"
FEATURES: tuple[Feature, ...] = (
    Feature(
        "automatic optimization, one optimizer",
        Mode.COMPILED,
        "the whole iteration is one graph",
        f"{_EQUAL}::test_world_size_one_is_bitwise_the_eager_trainer",
    ),
    Feature(
        "accumulate_grad_batches, GradientAccumulationScheduler",
        Mode.COMPILED,
        "graphs that accumulate and graphs that apply; gradients are reduced at the apply only",
        f"{_FIT}::test_gradient_accumulation_scheduler_equals_eager",
    ),
    Feature(
        "gradient_clip_val by norm and by value",
        Mode.COMPILED,
        "Lightning's own clipping, in the graph",
        f"{_EQUAL}::test_world_size_one_is_bitwise_the_eager_trainer",
    ),
    Feature(
        "LR schedulers, LearningRateMonitor",
        Mode.COMPILED,
        "lr, betas and momentum are graph inputs: a scheduler never needs another graph",
        f"{_FIT}::test_one_cycle_never_recaptures",
    ),
    Feature(
        "self.log, self.log_dict, torchmetrics",
        Mode.COMPILED,
        "queued in each step, made when its graph has run; logged values are global on every rank",
        f"{_EQUAL}::test_several_ranks_equal_one_device",
    ),
    Feature(
        "precision 32-true, bf16-mixed, bf16-true, 64-true",
        Mode.COMPILED,
        "followed under the precision plugin",
        f"{_FIT}::test_precision_equals_eager",
    ),
    Feature(
        "precision 16-mixed",
        Mode.COMPILED,
        "loss scaling and skipped steps are in the graph; the scaler's state is in checkpoints as Lightning's",
        f"{_SCALING}::test_losses_scale_and_weights_are_those_of_one_device",
    ),
    Feature(
        "precision 16-mixed with a GradScaler of another class than torch's",
        Mode.EAGER,
        "its decisions are its own",
        f"{_SCALING}::test_a_scaler_of_the_users_own_runs_eagerly",
        foreign_scaler,
    ),
    Feature(
        "precision bf16-true with float32 masters, or with stochastic rounding",
        Mode.COMPILED,
        "SPMDStrategy(bf16_updates=...): the user's optimizer updates float32 tensors, whichever it is",
        f"{_WIDE}::test_masters_are_the_loop_written_by_hand",
    ),
    Feature(
        "precision transformer-engine, bitsandbytes and others",
        Mode.REJECTED,
        "use 32-true, bf16-true, bf16-mixed, 16-mixed or 64-true",
        f"{_FIT}::test_foreign_precision_is_rejected",
        foreign_precision,
    ),
    Feature(
        "accelerators other than cpu and cuda",
        Mode.REJECTED,
        "use accelerator='cpu' or 'gpu'",
        f"{_FIT}::test_foreign_accelerator_is_rejected",
        foreign_accelerator,
    ),
    Feature(
        "on_before_zero_grad, on_before_backward, on_after_backward, on_before_optimizer_step",
        Mode.SPLIT,
        "p.grad is real and reduced when the hook asks; two graphs, or one that pauses where iterations can overlap",
        f"{_HOOKS}::test_gradient_hooks_see_and_change_gradients",
        gradient_hooks,
    ),
    Feature(
        "hooks, schedulers and loggers between two steps that read p.grad",
        Mode.SPLIT,
        "found in their code, and in what it reaches; p.grad is real until the next step; what is not found, an error",
        "tests/strategy/hooks/test_gradients_between_steps.py::test_gradients_read_after_the_step",
        late_gradient_readers,
    ),
    Feature(
        "configure_gradient_clipping overridden",
        Mode.SPLIT,
        _SPLIT_NOTE,
        f"{_HOOKS}::test_overridden_clipping_is_honoured",
        clipping_override,
    ),
    Feature(
        "optimizer_zero_grad overridden",
        Mode.SPLIT,
        _SPLIT_NOTE,
        f"{_HOOKS}::test_overridden_zero_grad_is_honoured",
        zero_grad_override,
    ),
    Feature(
        "optimizer step hooks",
        Mode.SPLIT,
        "gradients come from a graph, optimizer.step() itself runs eagerly",
        f"{_HOOKS}::test_optimizer_step_hooks_run_each_step",
        optimizer_hooks,
    ),
    Feature(
        "optimizer_step overridden",
        Mode.COMPILED,
        "delegating to optimizer.step(closure) is one graph; calling closure() first gives two",
        f"{_HOOKS}::test_optimizer_step_that_calls_the_closure_itself",
    ),
    Feature(
        "backward overridden",
        Mode.EAGER,
        "user code runs autograd",
        f"{_FIT}::test_eager_features_train",
        backward_override,
    ),
    Feature(
        "hooks on parameters (wandb.watch)",
        Mode.EAGER,
        "autograd must call them",
        f"{_FIT}::test_eager_features_train",
        autograd_hooks,
    ),
    Feature(
        "backward hooks of modules, hooks on tensors and their grad_fn",
        Mode.COMPILED,
        "they run once in each step, when training_step has returned",
        "tests/strategy/hooks/test_followed_module_hooks.py::test_hooks_on_backward_passes_of_modules_are_in_graphs",
    ),
    Feature(
        OWN_OPTIMIZER,
        Mode.SPLIT,
        "gradients come from a graph, optimizer.step(closure) itself runs; each call of the closure runs that graph",
        "tests/strategy/optimizers/test_own_optimizers.py::test_an_optimizer_of_the_users_own_runs_in_every_step",
        own_optimizer,
    ),
    Feature(
        "LBFGS and other optimizers that re-evaluate the closure, with sharded state or bf16_updates",
        Mode.EAGER,
        "the closure runs several times a step",
        "tests/strategy/optimizers/test_own_optimizers.py::test_a_closure_is_not_called_in_parts",
        needs_closure,
    ),
    Feature(
        "manual optimization",
        Mode.COMPILED,
        "backward passes and steps in training_step are part of its graph; weights change in the middle of it",
        "tests/strategy/by_hand/test_by_hand.py::test_one_device_is_bitwise_the_eager_trainer",
    ),
    Feature(
        "manual optimization with hooks on gradients or steps, 16-mixed, or a parameter in two optimizers",
        Mode.EAGER,
        "gradients are averaged over the ranks",
        "tests/strategy/by_hand/test_by_hand.py::test_what_is_no_graph_runs_eagerly",
        by_hand_eagerly,
    ),
    Feature(
        "configure_optimizers returns None",
        Mode.EAGER,
        "nothing to optimize",
        f"{_FIT}::test_eager_features_train",
        no_optimizer,
    ),
    Feature(
        "training_step(dataloader_iter)",
        Mode.EAGER,
        "the step fetches its own data",
        f"{_FIT}::test_eager_features_train",
        dataloader_iter,
    ),
    Feature(
        "detect_anomaly",
        Mode.EAGER,
        "anomaly detection watches autograd at work",
        f"{_FIT}::test_eager_features_train",
        detect_anomaly,
    ),
    Feature(
        "tensor.data = x where something else has the memory, hooks on parameters, torch.save of results, "
        "torch.distributed in training_step",
        Mode.EAGER,
        "that step runs without a graph, announced with file:line; after eight of them in a row all do",
        "tests/strategy/following/test_assigned_data.py::test_assigned_data_runs_eagerly",
    ),
    Feature(
        "StochasticWeightAveraging",
        Mode.COMPILED,
        "its batch-norm epoch runs eagerly",
        f"{_FIT}::test_weight_callbacks_equal_eager",
    ),
    Feature(
        "EMAWeightAveraging, callbacks that write weights",
        Mode.COMPILED,
        "parameters are the live storage",
        f"{_FIT}::test_weight_callbacks_equal_eager",
    ),
    Feature(
        "BackboneFinetuning, add_param_group, freezing",
        Mode.COMPILED,
        "another structure has another graph",
        f"{_FIT}::test_unfreezing_recaptures",
    ),
    Feature(
        "state anywhere in Python: objects, lists, files, clocks, random numbers of Python and NumPy",
        Mode.COMPILED,
        "training_step runs in every step, once; numbers that differ are inputs, other calls are other graphs",
        "tests/strategy/following/test_python_state.py::test_what_changes_is_seen",
    ),
    Feature(
        "StochasticWeightAveraging, WeightAveraging with sharded parameters",
        Mode.REJECTED,
        "they keep a whole copy of the model; use data_parallel='replicate' or 'zero2'",
        "tests/strategy/following/test_attacked.py::test_weight_averaging_of_parts_is_refused",
        averaging_of_parts,
    ),
    Feature(
        "ModelPruning",
        Mode.REJECTED,
        "it reparametrises modules while training; prune before or after",
        f"{_FIT}::test_pruning_is_rejected",
        pruning,
    ),
    Feature(
        "sync_batchnorm",
        Mode.COMPILED,
        "batch-norm statistics are those of the global batch anyway",
        f"{_FIT}::test_sync_batchnorm_changes_nothing",
    ),
    Feature(
        "tied, frozen, unused parameters; shared modules",
        Mode.COMPILED,
        "one input a tensor; no gradient, no update",
        f"{_FIT}::test_special_parameters_equal_eager",
    ),
    Feature(
        "varying shapes, ragged last batch",
        Mode.COMPILED,
        "one graph for all sizes from the second one on; on several ranks one for each split of the rows",
        "tests/strategy/reads_and_sizes/test_varying_sizes.py::test_a_hundred_lengths_take_two_graphs",
    ),
    Feature(
        "pack_padded_sequence", Mode.COMPILED, "a graph for all lengths", f"{_PACKED}::test_all_lengths_have_a_graph"
    ),
    Feature(
        "gradient checkpointing (torch.utils.checkpoint)",
        Mode.COMPILED,
        "recomputation is followed, and part of the graph",
        f"{_FIT}::test_activation_checkpointing_equals_eager",
    ),
    Feature(
        "self.all_gather, strategy.reduce in training_step",
        Mode.COMPILED,
        "the graph sees the global batch: all_gather is a view of it, reduce is the identity",
        f"{_FIT}::test_all_gather_in_training_step",
    ),
    Feature(
        "limits, max_*, min_*, fast_dev_run, overfit_batches, val_check_interval, deterministic, profiler",
        Mode.COMPILED,
        "nothing special; a profiler sees the graph as one call",
        f"{_FIT}::test_trainer_flags_equal_eager",
    ),
    Feature(
        "ModelSummary, EarlyStopping, Timer, DeviceStatsMonitor, progress bars, LambdaCallback",
        Mode.COMPILED,
        "callbacks that look at anything but gradients",
        f"{_MORE}::test_callbacks_that_look_equal_eager",
    ),
    Feature(
        "LearningRateFinder, BatchSizeFinder",
        Mode.COMPILED,
        "each batch size gets its graph",
        f"{_MORE}::test_tuners_train",
    ),
    Feature(
        "CheckpointIO and ClusterEnvironment plugins, OnExceptionCheckpoint",
        Mode.COMPILED,
        "used as they are",
        f"{_MORE}::test_plugins_are_used",
    ),
    Feature(
        "layer-sync plugins other than Lightning's own",
        Mode.REJECTED,
        "remove the plugin: batch-norm statistics are global anyway",
        f"{_MORE}::test_a_foreign_layer_sync_is_rejected",
        foreign_layer_sync,
    ),
    Feature(
        "print, self.print, logging, texts, NumPy in training_step",
        Mode.COMPILED,
        "Python's own, in every step; what they read of tensors is waited for",
        f"{_MORE}::test_print_runs_each_step",
    ),
    Feature(
        "self.logger, self.loggers in training_step",
        Mode.COMPILED,
        "called in every step; on several ranks give them `loss.item()`, for a tensor is read by rank 0 alone",
        "tests/strategy/logging/test_logger_calls.py::test_loggers_are_told_what_eager_training_tells",
    ),
    Feature(
        "training_step returns None",
        Mode.COMPILED,
        "a graph that skips the batch, eager under loss scaling; on several devices Lightning itself forbids it",
        "tests/strategy/following/test_skipped_batches.py::test_skipped_batches_are_graphs",
    ),
    Feature(
        "submodules wrapped in torch.compile",
        Mode.COMPILED,
        "followed as written; their own compilation is not used in training",
        f"{_MORE}::test_a_compiled_submodule_equals_eager",
    ),
    Feature(
        "submodules compiled by torch.jit",
        Mode.EAGER,
        "they run without Python, and their tensors cannot be exchanged",
        "tests/strategy/following/test_attacked.py::test_a_scripted_submodule_trains_eagerly",
        scripted,
    ),
    Feature(
        "lazy modules (nn.LazyLinear)",
        Mode.REJECTED,
        "set the sizes, or run the layer once in __init__ or configure_model",
        "tests/strategy/following/test_attacked.py::test_lazy_parameters_are_named",
    ),
    Feature(
        "configure_model",
        Mode.COMPILED,
        "parameters are made there as usual; meta tensors must be materialised by it",
        f"{_MORE}::test_configure_model_equals_eager",
    ),
    Feature(
        "notebooks",
        Mode.COMPILED,
        "one process; several devices need a script",
        f"{_MORE}::test_one_device_needs_no_launcher",
    ),
    Feature(
        "validate, test, predict with replicated parameters",
        Mode.EAGER,
        "plain eager steps on each rank's share of the data",
        f"{_FIT}::test_evaluation_equals_eager",
    ),
    Feature(
        "validate, test, predict with sharded parameters",
        Mode.COMPILED,
        "forward alone as a graph; logged values are global, metrics and predictions stay with their rows",
        "tests/strategy/evaluation/test_evaluation.py::test_two_ranks_equal_one_device",
    ),
    Feature(
        "ModelCheckpoint, resume, load_from_checkpoint",
        Mode.COMPILED,
        "plain Lightning checkpoints plus the state of the random numbers",
        "tests/strategy/checkpoints/test_checkpoint.py::test_resume_is_bitwise",
    ),
    Feature(
        "batches that are no parts of one (molecules, padded by rank): batch='auto', 'local' of SPMDStrategy",
        Mode.COMPILED,
        "each rank follows its own Python, with graphs of its own; gradients and logged values are means weighted by "
        "batch size; hooks on gradients run between two graphs; no overlap, no lowering",
        "tests/strategy/batches/test_local_batches.py::test_molecules_train_as_by_the_weighted_mean",
    ),
    Feature(
        ".item(), `if tensor:`, int(tensor), tolist() in training_step",
        Mode.COMPILED,
        "the global batch's value: the graph runs up to it and waits; a graph for each way in which Python goes on",
        "tests/strategy/reads_and_sizes/test_reads.py::test_a_value_is_that_of_the_global_batch",
    ),
    Feature(
        "lightning_spmd.StepStatistics, step time and MFU in the Trainer's loggers",
        Mode.COMPILED,
        "medians every log_every_n_steps steps; eagerly time and memory alone; with CUDA graphs no waiting time",
        "tests/strategy/following/test_step_statistics.py::test_one_device_logs_each_row_and_keeps_its_bits",
    ),
    Feature(
        "SLURM: srun, several nodes, SLURMEnvironment(auto_requeue=True)",
        Mode.COMPILED,
        "its signal is answered at the end of a batch: a checkpoint, a requeue, and on, bit for bit; docs/slurm.md",
        "tests/strategy/ranks/test_requeue.py::test_goes_on_bitwise",
    ),
    Feature(
        "torchrun, and processes started by hand with MASTER_ADDR, NODE_RANK, LOCAL_RANK",
        Mode.COMPILED,
        "one process a device",
        "tests/strategy/ranks/test_launchers.py::test_equal_one_device",
    ),
    Feature(
        "lowering='inductor' and 'auto' of SPMDStrategy",
        Mode.COMPILED,
        "chains of pointwise operators and reductions are compiled by Inductor, kept on disk; needs a C++ compiler",
        "tests/strategy/plans/test_lowering.py::test_lowered_training_is_training_and_a_second_start_compiles_nothing",
    ),
    Feature(
        "CUDA graphs (SPMDStrategy(cuda_graphs=True))",
        Mode.COMPILED,
        "what an iteration computes is recorded and launched as a few graphs; off by default",
        "tests/stages/runtime/test_cuda_graphs.py::test_recorded_training_is_bitwise_unrecorded_training",
    ),
    Feature(
        "offload_activations=",
        Mode.COMPILED,
        "on GPUs; an error on the CPU and with cuda_graphs",
        "tests/stages/passes/test_offload_activations.py::test_training_keeps_its_bits",
    ),
    Feature(
        "loss_chunks=",
        Mode.COMPILED,
        "equal up to rounding; a message says why a loss stays whole; does nothing in the eager path",
        "tests/strategy/plans/test_loss_chunks.py::test_training_on_one_device",
    ),
    Feature(
        "rematerialize=, torch.utils.checkpoint in the module",
        Mode.COMPILED,
        "one or both; the strategy's option does nothing in the eager path",
        "tests/strategy/plans/test_rematerialize.py::test_training_on_one_device_keeps_its_bits",
    ),
)
