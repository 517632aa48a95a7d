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
    FakeTensorMode,
)
from torch.distributed.constants import default_pg_timeout as default_process_group_timeout

# Nested arguments of operators are taken apart and put together at every recorded call; the public
# torch.utils.pytree is newer than 2.11.
from torch.utils import _pytree as pytree

# Capture sees operators below autograd through a dispatch mode; without it there is no graph at all.
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_spmd._private_api.fake_tensors import (
    new_fake,
    optimizers_accept_fake_tensors,
    storage_elements,
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
from lightning_spmd._private_api.inductor_names import (
    compile_with_inductor,
    compiler_settings,
    load_inductor_code,
    profiler_is_on,
)
from lightning_spmd._private_api.lightning_names import (
    SubprocessScriptLauncher,
    after_closure,
    default_backend,
    detects_anomaly,
    init_process_group,
    is_within_training_epoch,
    keep_states_apart,
    layer_sync,
    optimizers_to_device,
    reduce_over_ranks,
    set_rank_zero_only,
    shard_over,
    skips_backward,
    stop_signal_sent_by_lightning,
    told_to_stop,
)
from lightning_spmd._private_api.operator_names import (
    decide_shapes,
    draws,
    entry_of,
    is_composite,
    is_mutating,
    is_random,
    mutated_arguments,
    returns_alias,
)
from lightning_spmd._private_api.torch_names import (
    NAMES_OF_DTENSORS,
    GraphModule,
    autograd_hooks,
    child_tables,
    collectives_begun,
    copy_all,
    current_backward_sequence_number,
    default_generator,
    default_store,
    disable_autocast,
    disable_dispatch_modes,
    dtensor_strategies,
    function_modes,
    give_groups,
    global_forward_hooks,
    has_dtensor_strategy,
    is_shard_order_check,
    last_learning_rate_readers,
    last_learning_rates_replaced,
    local_tensor,
    mark_stepped,
    module_tensors_replaced,
    next_sequence_number,
    parameter_hooks,
    prepared_hooks,
    readers_of_settings,
    step_hooks,
    storage_of,
    tensor_slots,
)

__all__ = [
    "SCALERS",
    "check_gradients",
    "found_inf",
    "is_unscaled",
    "scaler_factors",
    "scaler_tensors",
    "scaler_works_on",
    "steps_with",
    "takes_found_inf",
    "unscale_parts",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GraphModule",
    "OpOverload",
    "SubprocessScriptLauncher",
    "TorchDispatchMode",
    "after_closure",
    "autograd_hooks",
    "child_tables",
    "collectives_begun",
    "compile_with_inductor",
    "compiler_settings",
    "copy_all",
    "current_backward_sequence_number",
    "decide_shapes",
    "default_backend",
    "default_generator",
    "default_process_group_timeout",
    "default_store",
    "detects_anomaly",
    "disable_autocast",
    "NAMES_OF_DTENSORS",
    "disable_dispatch_modes",
    "draws",
    "dtensor_strategies",
    "entry_of",
    "function_modes",
    "give_groups",
    "global_forward_hooks",
    "has_dtensor_strategy",
    "init_process_group",
    "is_composite",
    "is_mutating",
    "is_random",
    "is_shard_order_check",
    "is_within_training_epoch",
    "keep_states_apart",
    "last_learning_rate_readers",
    "last_learning_rates_replaced",
    "layer_sync",
    "load_inductor_code",
    "local_tensor",
    "mark_stepped",
    "module_tensors_replaced",
    "mutated_arguments",
    "new_fake",
    "next_sequence_number",
    "optimizers_accept_fake_tensors",
    "optimizers_to_device",
    "parameter_hooks",
    "profiler_is_on",
    "prepared_hooks",
    "readers_of_settings",
    "pytree",
    "reduce_over_ranks",
    "returns_alias",
    "set_rank_zero_only",
    "shard_over",
    "skips_backward",
    "step_hooks",
    "stop_signal_sent_by_lightning",
    "told_to_stop",
    "storage_elements",
    "storage_of",
    "suggested_memory_format",
    "tells_all",
    "tensor_slots",
    "zeros_like_fake",
]
