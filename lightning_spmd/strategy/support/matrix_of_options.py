"""Rows of the support matrix (``matrix.py``) for options of ``SPMDStrategy`` itself, and for what a step may read."""

from __future__ import annotations

from lightning_spmd.strategy.support.feature import Feature, Mode

OPTIONS: tuple[Feature, ...] = (
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
