"""Rows of matrices that ``.ci/run`` runs as well: ``pytest -m matrix``.

The README's command takes five minutes on two cores, and of each matrix the rows that differ most. What is left out
here is run before a change goes in all the same; ``long`` is what takes longer still.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROWS: dict[str, tuple[str, ...]] = {
    "tests/cli/test_recipe_mistakes.py": (
        "test_what_a_recipes_classes_refuse_is_one_line",
        "test_what_data_and_checkpoints_refuse_is_one_line",
    ),
    "tests/cli/test_recipes.py": ("this_package[gpt2]", "this_package[own_module/recipe]"),
    "tests/cost/test_sharded_memory.py": ("test_measured_memory_is_what_was_counted",),
    "tests/cuda/test_kernels.py": ("[{'half': True}]", "[{'bf16': True}]"),
    "tests/cuda/test_more_steps.py": ("[by hand Gan-way2]",),
    "tests/cuda/test_offloaded.py": ("[gpt-",),
    "tests/cuda/test_recordings.py": ("[llama]", "[experts]", "[cudnn]", "[efficient]", "[lstm]"),
    "tests/docs/test_blocks.py": (
        "test_commands_take_their_options[docs/",
        "test_python_runs_on_two_ranks[docs/spmd_from_scratch.md]",
    ),
    "tests/equality/test_one_device.py": (
        "test_several_ranks_equal_one_device[4-",
        "test_several_ranks_equal_one_device[2-gpt-plain-",
        "test_several_ranks_equal_one_device[2-gpt-clip_value-",
        "test_several_ranks_equal_one_device[2-mlp-",
        "test_world_size_one_is_bitwise_the_eager_trainer[gpt-clip_value-",
        "test_world_size_one_is_bitwise_the_eager_trainer[gpt-plain-",
        "test_world_size_one_is_bitwise_the_eager_trainer[mlp-",
    ),
    "tests/strategy/logging/test_metric_losses.py": ("test_ranks_train", "[Set]"),
    "tests/stages/expand/test_context_parallel.py": ("test_beside_sharded_state[3]",),
    "tests/stages/expand/test_layouts.py": ("[norm-adamw_fused-zero2]", "[dp2 tp2]"),
    "tests/stages/expand/test_models.py": ("[sequence_first-",),
    "tests/stages/passes/test_offload_activations.py": ("[0.3-", "test_on_ranks"),
    "tests/strategy/batches/test_local_batches.py": ("[Turned]",),
    "tests/strategy/reads_and_sizes/test_varying_sizes.py": (
        "[Convolution-",
        "test_one_row_is_a_size_of_its_own",
        "{'data_parallel': 'zero3'}",
    ),
    "tests/strategy/by_hand/test_by_hand.py": (
        "test_rare_ways",
        "trainer[ZeroedInPlace]",
        "trainer[LooksAtGradients]",
        "trainer[Joint]",
        "trainer[Toggled]",
    ),
    "tests/strategy/optimizers/test_bf16_updates.py": (
        "test_checkpoints_of_other_updates_go_on[auto-",
        "test_checkpoints_of_other_updates_go_on[{'bf16_updates': 'stochastic'}-",
        "test_ranks_round_alike_what_they_both_hold",
        "test_replicas_of_a_piece_round_alike",
    ),
    "tests/stages/runtime/test_cuda_graphs.py": ("[metrics]", "[clip]", "[counter on the host]"),
    "tests/stages/runtime/test_cuda_graphs_by_hand.py": ("[InHooks]",),
    "tests/stages/runtime/test_cuda_graphs_in_runs.py": (
        "test_other_precisions[",
        "test_callbacks_that_average_weights[",
        "test_a_recurrent_model",
        "test_hooks_on_gradients[plain]",
    ),
    "tests/strategy/checkpoints/test_checkpoint_matrix.py": (
        "test_another_models_checkpoint_is_refused_by_name[zero3 folder]",
    ),
    "tests/strategy/optimizers/test_loss_scaling.py": (
        "test_resume_is_exact_from_and_to_eager[auto-auto]",
        "'gradient_clip_val': 0.01",
        "{'accumulate_grad_batches': 3}]",
        "test_losses_scale_and_weights_are_those_of_one_device[adam]",
    ),
    "tests/strategy/optimizers/test_loss_scaling_on_ranks.py": (
        "test_parts_on_two_axes",
        "test_the_scale_goes_through_checkpoints_of_parts",
    ),
    "tests/strategy/hooks/test_fence.py": ("sees_the_same[logger]",),
    "tests/strategy/plans/test_lowering.py": ("test_lowered_training_is_training_and_a_second_start_compiles_nothing",),
    "tests/cuda/test_rematerialized.py": ("test_on_gpus_bytes_are_given_back",),
    "tests/strategy/following/test_drawn_numbers.py": ("eagers[Generators]", "eagers[Numbers]", "eagers[Mixup]"),
    "tests/strategy/following/test_printed_values.py": ("in_graphs[Texts]",),
    "tests/strategy/logging/test_logger_calls.py": ("[Usual-clipped]", "[Asking-accumulated]", "[by hand]"),
    "tests/strategy/by_hand/test_decisions_by_hand.py": ("-zero2]", "[LooksAtTheLoss-zero3]"),
    "tests/strategy/following/test_objects_of_the_step.py": ("[_Copied]", "[_Bound]"),
    "tests/strategy/following/test_step_statistics.py": ("test_a_csv_file", "test_a_step_is_all_batches"),
    "tests/strategy/evaluation/test_evaluation.py": ("test_two_ranks_equal_one_device[24]",),
    "tests/strategy/batches/test_memory_layouts.py": (
        "test_gradients_that_a_hook_replaces_may_lie_as_they_like[replicate]",
    ),
    "tests/strategy/plans/test_sharded_modules.py": ("test_recurrent_layers[zero2]",),
}
"""By file, what the ids of such rows contain."""

LONG: dict[str, tuple[str, ...]] = {
    "tests/cli/test_plan.py": ("test_two_processes_tell_where_they_wait",),
    "tests/cli/test_compare.py": ("test_two_processes_train_under_each_strategy_in_turn",),
    "tests/cli/test_recipe_mistakes.py": (
        "test_a_checkpoint_of_another_model_is_named",
        "is_one_line[gpt2-arguments0-",
        "is_one_line[gpt2-arguments1-",
        "is_one_line[fine_tune-arguments8-",
        "is_one_line[fine_tune-arguments9-",
        "is_one_line[_longer-",
        "is_one_line[_no_text-",
        "`val_check_interval` (99)",
        "--data.path='/nowhere' does",
    ),
    "tests/cli/test_recipes.py": (
        "this_package[fine_tune]",
        "this_package[image_classifier]",
        "this_package[long_context]",
        "planned[gpt2]",
        "planned[image_classifier]",
        "planned[fine_tune]",
        "planned[long_context]",
        "test_two_processes_find_the_class_beside_the_recipe",
    ),
    "tests/compatibility/test_rows.py": ("[SegformerForSemanticSegmentation]",),
    "tests/cost/test_sharded_memory.py": ("test_measured_memory_is_what_was_counted[512]",),
    "tests/cuda/test_five_models.py": (
        "test_ranks_agree_whatever_the_number_of_their_device[gpt]",
        "[llama]",
        "[lstm]",
    ),
    "tests/cuda/test_more_steps.py": ("[open sizes-way5]", "[pauses-way4]"),
    "tests/docs/test_blocks.py": (
        "test_commands_take_their_options[docs/recipes.md]",
        "test_commands_take_their_options[docs/slurm.md]",
        "test_python_runs_on_two_ranks[docs/extending.md]",
        "test_python_runs_on_two_ranks[docs/migration.md]",
        "test_python_runs_on_two_ranks[docs/plans.md]",
        "test_python_runs_on_two_ranks[docs/quickstart.md]",
    ),
    "tests/equality/test_code_as_users_write_it.py": ("test_molecules_on_one_rank",),
    "tests/equality/test_context_parallel.py": (
        "test_a_checkpoint_goes_on_beside_other_plans",
        "test_dropout_is",
        "[cp2 zero3-",
    ),
    "tests/equality/test_one_device.py": (
        "[2-gpt-clip_norm-adamw]",
        "[2-gpt-plain-rmsprop]",
        "[2-gpt-plain-sgd]",
        "[2-gpt-clip_value-rmsprop]",
        "[2-mlp-plain-adamw_fused]",
        "[2-mlp-accumulate-rmsprop]",
        "[2-mlp-clip_value-adamw]",
        "[2-conv-accumulate-sgd]",
        "test_what_ddp_gives_in_the_same_place",
        "[4-conv-clip_value-adamw_fused]",
        "[2-gpt-accumulate-adamw_fused]",
        "[2-gpt-clip_value-sgd]",
    ),
    "tests/equality/test_plans.py": (
        "[zero3-2-gpt_llama-accumulate_clip]",
        "[hybrid zero3-gpt_tied-plain]",
        "test_dropout_is_reproducible[tp2 sequence]",
        "[zero3 tp2-mlp-accumulate_clip]",
        "[zero3-4-conv-accumulate_clip]",
        "test_dropout_is_reproducible[zero3]",
        "[dp2 tp2 sequence-gpt_tied-plain]",
        "[zero2-2-gpt_tied-plain]",
        "[tp2-conv-accumulate_clip]",
        "[zero3-2-gpt_tied-plain]",
        "[zero3-adagrad]",
    ),
    "tests/examples/test_fine_tuning.py": ("test_two_ranks_with_parameters_in_parts",),
    "tests/gpu/test_script.py": ("test_it_trains_where_jsonargparse_is_missing",),
    "tests/operators/test_sweep.py": ("[1]", "[2]"),
    "tests/planning/test_allocated_memory.py": ("[attention-",),
    "tests/stages/expand/test_layouts.py": (
        "[sgd_fused-zero2]",
        "[zero2 tp2]",
        "[sgd_fused-replicate]",
        "[adamw_fused-zero2]",
    ),
    "tests/stages/runtime/test_cuda_graphs.py": ("[conv small buckets]", "[gpt zero3 overlaps]"),
    "tests/stages/runtime/test_cuda_graphs_in_runs.py": (
        "test_ranks[zero2]",
        "test_ranks[accumulate]",
        "test_ranks[tensor]",
        "weights[swa]",
        "[bf16-true]",
        "[bf16-mixed]",
        "test_ranks[evaluated]",
    ),
    "tests/strategy/optimizers/test_bf16_updates.py": (
        "[auto-auto]",
        "[{'bf16_updates': 'stochastic'}-{'bf16",
        "test_masters_on_two_ranks[{'data_parallel': 'zero2'}]",
        "hold[{}]",
        "hold[{'data_parallel': 'zero2'}]",
        "test_pieces_round_on_their_own[{}]",
        "test_masters_on_two_ranks[{}]",
        "test_masters_on_two_ranks[{'tensor",
        "hold[{'tensor",
    ),
    "tests/strategy/by_hand/test_by_hand.py": (
        "in_all_ways",
        "test_four_ranks_equal_one_device[Accumulated]",
        "test_four_ranks_equal_one_device[Averaged]",
        "test_four_ranks_equal_one_device[Penalized]",
        "test_four_ranks_equal_one_device[Gan]",
    ),
    "tests/strategy/checkpoints/test_checkpoint_matrix.py": (
        "test_a_file_holds_plain_tensors[zero2]",
        "test_a_plain_trainer_resumes[zero2]",
        "resumes[replicate]",
    ),
    "tests/strategy/reads_and_sizes/test_data_sizes.py": ("global_batch[Kinds]", "global_batch[Transcribes]"),
    "tests/strategy/following/test_drawn_numbers.py": ("draws[Decides]", "eagers[Chooses]"),
    "tests/strategy/hooks/test_fence.py": ("[one rank, accumulated]", "[all look]", "[every third]", "[no look]"),
    "tests/strategy/batches/test_local_batches.py": (
        "weighted_mean[zero2]",
        "[Sometimes]",
        "weighted_mean[zero3]",
        "test_accumulated_and_clipped_gradients",
    ),
    "tests/strategy/optimizers/test_loss_scaling_on_ranks.py": (
        "[hybrid]",
        "test_the_scale_goes_through_checkpoints_of_parts[False]",
        "[clipped-zero2]",
        "fused-replicate]",
        "fused-zero2]",
        "[split-replicate]",
        "[split-zero3]",
        "[accumulated, fused-tp2]",
        "[accumulated, fused-",
        "[clipped-replicate]",
        "[split-",
        "[split, accumulated, fused-tp2]",
    ),
    "tests/strategy/plans/test_lowering.py": (
        "1e_4[gpt-adamw-inductor]",
        "on_two_ranks_is_within_1e_4[gpt-zero3]",
        "[gpt-sgd-inductor]",
        "1e_4[gpt-adamw-auto]",
        "1e_4[gpt-adamw_fused-inductor]",
        "1e_4[conv-sgd-inductor]",
        "1e_4[conv-adamw-",
        "1e_4[conv-adamw_fused-auto]",
        "1e_4[mlp-sgd-auto]",
        "1e_4[mlp-adamw-inductor]",
        "1e_4[mlp-adamw_fused-",
        "1e_4[mlp-zero3]",
        "1e_4[mlp-replicate]",
        "waits_for_nobody[auto]",
        "1e_4[conv-adamw_fused-inductor]",
    ),
    "tests/strategy/runs/test_many_fits.py": (
        "test_a_module_outlives_its_trainer",
        "test_after_one_rank_failed_alone[replicate]",
    ),
    "tests/strategy/batches/test_memory_layouts.py": (
        "replaces_may_lie_as_they_like[zero3]",
        "test_what_nobody_updates_may_overlap[replicate]",
        "sees_lie_as_their_parameters[replicate]",
        "[zero2-adam_foreach-flags1]",
        "mid_run_is_seen[RelaidState]",
        "one_device[replicate-adamw_fused-flags0]",
    ),
    "tests/strategy/logging/test_metric_losses.py": ("[KeptLosses]",),
    "tests/strategy/hooks/test_overlap.py": (
        "[mlp-radam-plain]",
        "'val_check_interval': 3",
        "[conv-sgd-accumulate]",
        "[mlp-adamw_amsgrad_foreach-plain]",
    ),
    "tests/strategy/hooks/test_pauses.py": ("[one rank-2]", "[loss-1]", "[halve-2]", "[rate-3]", "[zero2-read]"),
    "tests/strategy/following/test_printed_values.py": ("global_batch[Numbers]",),
    "tests/strategy/plans/test_rematerialize.py": ("test_training_on_two_ranks_keeps_its_bits",),
    "tests/strategy/ranks/test_requeue.py": ("end[flags",),
    "tests/strategy/plans/test_sharded_modules.py": (
        "test_configure_model_gives_the_values_of_one_device[zero2]",
        "test_evaluation_under_every_plan[zero2]",
        "test_hooks_see_gradients[zero2-conv]",
    ),
    "tests/strategy/following/test_step_statistics.py": ("test_iterations_that_pause",),
    "tests/strategy/optimizers/test_whole_state.py": ("waits_for_nobody[zero2]",),
    "tests/strategy/reads_and_sizes/test_varying_sizes.py": (
        "test_two_ranks_equal_one_device[{'overlap",
        "test_graphs_that_were_not_used",
        "test_rows_and_lengths_vary_together",
        "[Writes-",
        "[Asks-",
    ),
    "tests/cuda/test_loss_chunks.py": ("[2-replicate-half]",),
    "tests/stages/expand/test_own_batches.py": ("[_clip-replicate]", "[None-zero2]"),
    "tests/strategy/by_hand/test_decisions_by_hand.py": (
        "[SkipsLargeNorms-zero2]",
        "[CollectsUntilLarge-zero3]",
        "[LooksAtTheLoss-replicate]",
        "[LooksAtTheLoss-zero2]",
        "[SkipsLargeNorms-replicate]",
        "[CollectsUntilLarge-replicate]",
    ),
    "tests/strategy/plans/test_followed_in_parts.py": ("[tp2-KeepsGradients]", "test_optimization_by_hand[zero2-"),
    "tests/strategy/ranks/test_followed_on_ranks.py": (
        "one_device[Retaining-zero2]",
        "one_device[Keeping-replicate]",
        "one_device[Counted-zero2]",
        "one_device[Keeping-zero2]",
    ),
    "tests/strategy/logging/test_logger_calls.py": (
        "one_devices_values[zero2]",
        "one_devices_values[paused]",
        "one_devices_values[evaluated]",
    ),
    "tests/strategy/reads_and_sizes/test_chosen_rows.py": (
        "test_nor_among_four_ranks[Experts]",
        "test_nor_does_one_with_parameters_in_parts[Experts]",
    ),
    "tests/strategy/plans/test_loss_chunks.py": (
        "stay_whole_on_two_ranks[{'data_parallel': 'zero3'}]",
        "test_ranks_with_unequal_numbers_of_rows[32KiB]",
        "test_training_on_two_ranks[replicated, uneven chunks]",
    ),
    "tests/strategy/reads_and_sizes/test_followed_counts.py": (
        "test_they_are_those_of_all_ranks[Experts]",
        "all_ranks[Bins]",
        "all_ranks[Writes]",
    ),
    "tests/strategy/reads_and_sizes/test_same_masks.py": (
        "test_chosen_rows_stay_on_their_rank[ByName]",
        "test_nor_are_masks_mixed_up_among_ranks[MaskWritten]",
    ),
    "tests/stages/runtime/test_cuda_graphs_by_hand.py": ("[ZeroedInPlace]", "[Penalized]"),
    "tests/stages/expand/test_models.py": ("[sequence_first-sgd-", "[sequence_first-None-"),
    "tests/stages/passes/test_fuse_optimizer_training.py": ("[clip_value]", "[nadam]"),
    "tests/stages/passes/test_sharded_collectives.py": ("[8-60",),
    "tests/strategy/hooks/test_ahead.py": ("leave_no_trace[Net]",),
    "tests/stages/expand/test_tensor_parallel_zoo.py": ("[t5-",),
    "tests/stages/expand/test_context_parallel.py": ("[llama-cp4-True]", "[encoder-cp2 dp2-False]"),
    "tests/stages/expand/test_tensor_parallel.py": ("-zero2-",),
    "tests/stages/expand/test_chosen.py": (
        "test_no_activation_moves[_experts-(1, 11)]",
        "test_no_activation_moves[_experts-(6, 6)]",
        "test_no_activation_moves[_experts-(7, 5)]",
        "test_no_activation_moves[_chosen_twice-(7, 5)]",
        "test_no_activation_moves[_counted_in_place-(7, 5)]",
        "test_no_activation_moves[_looked_up-(7, 5)]",
        "test_no_activation_moves[_masked_elements-(7, 5)]",
        "test_no_activation_moves[_masked_mean-(7, 5)]",
        "test_no_activation_moves[_shapes-(7, 5)]",
        "test_no_activation_moves[_the_same_for_all-(7, 5)]",
        "test_no_activation_moves[_written_back-(7, 5)]",
    ),
    "tests/stages/expand/test_experts.py": (
        "test_rows_of_each_data_rank_are_sorted_there[gpt_oss-replicate]",
        "weights_gradient[deepseek_v3]",
        "weights_gradient[qwen3_moe]",
    ),
    "tests/strategy/runs/test_features.py": ("test_ragged_last_batch_on_two_ranks_equals_one_device[conv]",),
    "tests/strategy/reads_and_sizes/test_reads.py": (
        "global_batch[CountedColumns]",
        "global_batch[LogsNumbers]",
        "global_batch[Retries]",
        "global_batch[Lists]",
    ),
    "tests/strategy/reads_and_sizes/test_kept_alone.py": (
        "to_all[zero2 more]",
        "to_all[zero2 average]",
        "to_all[more]",
    ),
    "tests/strategy/reads_and_sizes/test_read_alone.py": ("to_all[zero3 computes]", "to_all[zero2]"),
    "tests/scale/test_two_hosts.py": ("test_two_hosts_measure_the_simulated_accelerator",),
    "tests/strategy/following/test_python_state.py": ("test_some_kinds_on_two_ranks_equal_one_device",),
    "tests/equality/test_experts.py": ("test_experts_on_two_ranks_equal_one_device[deepseek_v3]",),
    "tests/stages/passes/test_regather_parameters.py": (
        "bitwise_the_same[whole matrix-(1, 3, 2)]",
        "bitwise_the_same[lists-(1, 3, 2)]",
    ),
    "tests/stages/phases/test_phases.py": ("any_moment[gpt_tied]",),
    "tests/stages/passes/test_rematerialize.py": (
        "move_no_activation_more[zero3, uneven]",
        "move_no_activation_more[tp2]",
    ),
    "tests/strategy/batches/test_followed_local_batches.py": ("every_step[Gathering-replicate]",),
    "tests/strategy/logging/test_metric_collections.py": (
        "computes_in_the_step[formatted]",
        "computes_in_the_step[subtracted]",
    ),
    "tests/untidy/test_untidy.py": (
        "eagerly[Attention]",
        "eagerly[BestSoFar]",
        "eagerly[CachedProperty]",
        "eagerly[CopiedState]",
        "eagerly[CutMix]",
        "eagerly[Experts]",
        "eagerly[Formula]",
        "eagerly[GetAttr]",
        "eagerly[Gumbel]",
        "eagerly[IndexesLists]",
        "eagerly[KeyedByValue]",
        "eagerly[KindsKept]",
        "eagerly[NumpyNumbers]",
        "eagerly[OwnArithmetic]",
        "eagerly[Packed]",
        "eagerly[Phases]",
        "eagerly[Properties]",
        "eagerly[SortedRows]",
        "eagerly[SortedTensors]",
        "eagerly[StochasticDepth]",
        "eagerly[UniqueLabels]",
        "eagerly[WhileLarge]",
    ),
}
"""By file, rows of either part that ``.ci/run`` has no time for: ``pytest -m long``."""


def is_row(test: str, rows: dict[str, tuple[str, ...]] = ROWS) -> bool:
    """Whether a test, by its id, is one of them."""
    file, _, name = test.partition("::")
    return any(part in f"::{name}" for part in rows.get(file, ()))


def check(tests: Iterable[str]) -> None:
    """Every file must exist, and every part occur in a test of its file, where that file is among ``tests``.

    Raises:
        ValueError: naming the file or the part.
    """
    names: dict[str, list[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        names.setdefault(file, []).append(f"::{name}")
    for rows in (ROWS, LONG):
        for file in rows:
            if not (Path(__file__).parents[1] / file).is_file():
                raise ValueError(f"tests/matrices.py: there is no {file}")
        for file in rows.keys() & names.keys():
            for part in rows[file]:
                if not any(part in name for name in names[file]):
                    raise ValueError(f"tests/matrices.py: no test of {file} contains {part!r}")
