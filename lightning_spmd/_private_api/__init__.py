"""Every underscore name of torch and Lightning that this package uses: why, and what breaks without it.

Seen to work on torch 2.11 and 2.13 and lightning 2.6. A name that disappears fails here, at import, and nowhere else.
"""

# Sharding rules are looked up by operator; rules for unknown overloads need its packet and tags.
from torch._ops import OpOverload

# Kernels lay results out in the memory format that they read off the strides of an operand.
from torch._prims_common import suggest_memory_format as suggested_memory_format

# What capture runs on: shapes and dtypes without values.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.distributed.constants import default_pg_timeout as default_process_group_timeout

# Whether anything still holds the memory of a tensor; without it what follows no longer is not found.
from torch.multiprocessing.reductions import StorageWeakRef as WeakStorage

# Nested arguments of operators are taken apart and put together at every recorded call; the public
# torch.utils.pytree is newer than 2.11.
from torch.utils import _pytree as pytree

# Capture sees operators below autograd through a dispatch mode; without it there is no graph at all.
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_spmd._private_api.co_execution import (
    TRANSFORMS,
    UNSEEN,
    ErrorOfBackward,
    ReentrantCheckpoint,
    applied,
    are_torch_functions_off,
    are_torchs_own,
    as_parameter,
    autocast_state,
    dispatch_layers,
    error_of_backward,
    exchange,
    found_no_memory,
    generator_states,
    generators,
    graph_task,
    has_no_memory,
    history_of,
    host_random_state,
    host_seed,
    in_transforms,
    is_another_class,
    is_autocast_on,
    is_memory_its_own,
    is_of_extension,
    is_of_profiler,
    is_tied,
    is_wrapped,
    layers_as,
    make_wrapper,
    no_checkpoint_contexts,
    no_torch_functions,
    no_view,
    nodes_since,
    optimize_scripts,
    reduced,
    saved_for,
    set_generator_states,
    stops_early,
    version_of,
    with_strides,
    with_torch_functions,
    without_memory,
)
from lightning_spmd._private_api.fake_tensors import (
    FakeTensorMode,
    new_fake,
    optimizers_accept_fake_tensors,
    tells_all,
    zeros_like_fake,
)
from lightning_spmd._private_api.grad_scaler import (
    SCALERS,
    check_gradients,
    found_inf,
    is_unscaled,
    scaler_factors,
    scaler_tensors,
    scaler_works_on,
    steps_with,
    takes_found_inf,
    unscale_parts,
)
from lightning_spmd._private_api.held_back import METHODS, MISSES, HeldBack
from lightning_spmd._private_api.inductor_names import (
    compile_with_inductor,
    compiler_settings,
    load_inductor_code,
    profiler_is_on,
)
from lightning_spmd._private_api.lightning_names import (
    SubprocessScriptLauncher,
    accumulates,
    after_closure,
    around_training_loop,
    default_backend,
    detects_anomaly,
    end_after_this_batch,
    goes_on_as_ever,
    init_process_group,
    is_attached,
    is_fit,
    is_no_optimizer,
    is_within_training_epoch,
    keep_states_apart,
    layer_sync,
    logs_this_step,
    no_requeued_checkpoint,
    optimizers_to_device,
    reduce_over_ranks,
    requeue_checkpoint,
    set_rank_zero_only,
    shard_over,
    skips_backward,
    step_of_log,
    stop_signal_sent_by_lightning,
    told_to_stop,
    training_loaders,
    validate_from_the_start,
    watched_metrics,
    when_signals_are_answered,
)
from lightning_spmd._private_api.mixed_lists import take_mixed_tensors
from lightning_spmd._private_api.operator_names import (
    decide_shapes,
    draws,
    entry_of,
    function_bindings_of,
    is_composite,
    is_mutating,
    is_operator,
    is_random,
    method_binding_of,
    returns_alias,
)
from lightning_spmd._private_api.optimization_by_hand import (
    backward_replaced,
    copy_of_optimizer,
    step_without_hooks,
    true_backward,
)
from lightning_spmd._private_api.packing import (
    ORIGINAL_PACKING,
    leave_packing,
    replace_packing,
    weights_of,
)
from lightning_spmd._private_api.symbolic_sizes import (
    SymbolicSizes,
    is_symbol,
    symbols_as_numbers,
)
from lightning_spmd._private_api.torch_names import (
    ATTENTION_SWITCHES,
    KERNEL_SWITCHES,
    NAMES_OF_DTENSORS,
    BelowDispatchModes,
    GraphModule,
    allocations_in,
    autograd_hooks,
    become,
    child_tables,
    collectives_begun,
    copy_all,
    current_backward_sequence_number,
    default_generator,
    default_store,
    disable_autocast,
    disable_dispatch_modes,
    dtensor_strategies,
    frames_of_threads,
    function_modes,
    give_groups,
    has_dtensor_strategy,
    have_kinds_in_common,
    is_immutable,
    is_in,
    leave_order_of_shards_alone,
    leave_pool,
    local_tensor,
    mark_stepped,
    next_sequence_number,
    number_nodes_from,
    parameter_hooks,
    prepared_hooks,
    readers_of_settings,
    set_grad_enabled,
    set_local_tensor,
    step_hooks,
    storage_of,
    tensor_slots,
    tensor_tables,
)
