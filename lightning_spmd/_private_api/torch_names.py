"""Underscore names of torch."""

from __future__ import annotations

import functools
import linecache
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.optim.optimizer as _torch_optimizer
from torch import Tensor, UntypedStorage, fx, nn
from torch._C import _DisableAutocast
from torch._ops import _len_torch_dispatch_stack_pre_dispatch as _count_pre_dispatch_modes
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema

# Where the text of compiled graphs is kept.
from torch.fx.graph_module import _loader as _graph_sources
from torch.overrides import _get_current_function_mode_stack

# Capture computes on true values while its own modes are active (step counters); without it they would be recorded.
from torch.utils._python_dispatch import _disable_current_modes

# What is on every DTensor, and nobody's own.
NAMES_OF_DTENSORS = frozenset({"_local_tensor", "_spec"})
# The same where no tensor has a class of its own: modes stay where they are and are passed, in a third of the time.
BelowDispatchModes = torch._C._DisableTorchDispatch
# A graph holds the casts that autocast made; where a hook left it on, they would be made again.
disable_autocast = _DisableAutocast
# Autograd's switch alone; torch's context around it takes three times as long, at each read of a step.
set_grad_enabled = torch._C._set_grad_enabled
# A mode that a user entered may turn Python's calls of torch into others.
function_modes = _get_current_function_mode_stack


class disable_dispatch_modes:
    """A context without dispatch modes.

    Entered some hundred times in a step with experts in a loop, where torch's own takes 30 microseconds each time.
    """

    __slots__ = ("_modes", "_theirs")

    def __enter__(self) -> None:
        self._theirs: Any = None
        if _count_pre_dispatch_modes():  # under export alone
            self._theirs = _disable_current_modes()
            self._theirs.__enter__()
            return
        self._modes = [torch._C._pop_torch_dispatch_stack(None) for _ in range(torch._C._len_torch_dispatch_stack())]

    def __exit__(self, *error: object) -> None:
        if self._theirs is not None:
            self._theirs.__exit__(*error)
            return
        for mode in reversed(self._modes):
            torch._C._push_on_torch_dispatch_stack(mode)


# Into a list of tensors from another one, in as few launches as there can be.
copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


def leave_pool(device: int, pool: Any) -> None:
    """Let the caching allocator go on as before a CUDA graph whose recording CUDA broke off.

    ``CUDAGraph.capture_end`` raises then before it tells the allocator; every ``empty_cache`` would fail from there on.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # it has been told
    torch._C._cuda_releasePool(device, pool)


def allocations_in(profile: Any) -> list[tuple[int, int]]:
    """(time, bytes; negative: given back) of all that was allocated while torch's profiler recorded memory.

    Without it ``plan --measured`` cannot say what tensors take on a CPU: the public events have sums alone.
    """
    events = profile.profiler.kineto_results.events()
    return [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]


have_kinds_in_common = torch._has_compatible_shallow_copy_type  # pyright: ignore[reportPrivateImportUsage]
"""What ``Module.to`` asks of a gradient and the moved one; it looks at no value."""


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds, without autograd's detour; a plain tensor as it is.

    ``to_local`` costs 20 times as much for every tensor and step where gradients are enabled.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Give a DTensor another part, as ``p.data = x`` gives a plain tensor other memory, which torch ignores.

    Without it who keeps ``p.data`` for a while and puts it back has what was there meanwhile.
    """
    tensor._local_tensor = local.requires_grad_(tensor._local_tensor.requires_grad)


def become(tensor: DTensor, other: DTensor) -> None:
    """Give a DTensor the memory and the placements of another one; its history stays.

    Without it what a hook writes into a sum that it keeps is lost, where the ranks had still to add it up.
    """
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec


class GraphModule(fx.GraphModule):
    """A graph module whose source text is written at its first run, and ends with it.

    Most graphs are changed before they run, or only read: their texts took a tenth of a build. torch keeps the text of
    every graph that was ever compiled, for tracebacks: without this many fits in one process would keep all of their
    graphs as text, megabytes a fit for a large model.
    """

    def recompile(self) -> Any:
        """The graph is compiled when it runs next, or when its text is asked for."""
        type(self).forward = GraphModule._compile_and_run

    @property
    def code(self) -> str:
        """The text of the graph."""
        self._compile()
        return super().code

    def _compile_and_run(self, *args: Any) -> Any:
        self._compile()
        return self.forward(*args)

    def _compile(self) -> None:
        """Compile the graph if it is not; its text replaces the one before."""
        if type(self).forward is not GraphModule._compile_and_run:
            return
        super().recompile()
        before = self.__dict__.get("_text")
        if before is not None:
            before()
        text = weakref.finalize(self, _forget_source, type(self).forward.__code__.co_filename)
        text.atexit = False
        self.__dict__["_text"] = text


def _forget_source(filename: str) -> None:
    _graph_sources.eval_cache.pop(filename, None)
    linecache.cache.pop(filename, None)


def collectives_begun(group: Any) -> int:
    """How many collectives this rank has begun in a process group; unequal numbers mean that one of them hangs.

    0 of backends that do not count: MPI's, and those of others.
    """
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def frames_of_threads() -> dict[int, FrameType]:
    """The innermost frame of each thread. Without it nobody knows where a rank waits alone."""
    return sys._current_frames()


def default_store() -> Any:
    """The key-value store in which the default process group found its ranks: messages without a collective."""
    return _get_default_store()


def give_groups(mesh: Any, other: Any) -> None:
    """Let a device mesh work on the process groups of an equal one; they end with the default group, not with it.

    A mesh is a constant of every DTensor on it and of torch's cache of DTensor operators, groups may have to change.
    """
    mesh._dim_group_names = other._dim_group_names
    mesh._pg_registry = dict(other._pg_registry)
    groups = [weakref.ref(group) for group in mesh._pg_registry.values()]
    weakref.finalize(torch.distributed.group.WORLD, _drop_groups, mesh, groups).atexit = False


def _drop_groups(mesh: Any, groups: list[Any]) -> None:
    for name, group in list(mesh._pg_registry.items()):
        if any(group is known() for known in groups):
            del mesh._pg_registry[name]


def next_sequence_number() -> int:
    """Number that the next autograd node gets: ties a backward node to the module and line of its forward.

    Without it backward nodes have no module name in dumps and messages; nothing else breaks.
    """
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def number_nodes_from(number: int) -> None:
    """The next nodes of autograd's on this thread get higher numbers; each thread counts by itself.

    Without it a backward pass through a history that another thread has made adds gradients in another order.
    """
    with torch.enable_grad(), torch._C.DisableTorchFunction(), disable_dispatch_modes():
        leaf = torch.zeros((), requires_grad=True)
        for _ in range(number - next_sequence_number()):
            leaf.view(())


def current_backward_sequence_number() -> int | None:
    """Sequence number of the autograd node whose backward runs now, or None. Same use as above."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on ``device`` draw from when none is given."""
    if device.type == "cpu":
        return torch.default_generator
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]


def tensor_slots(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """(dictionary, key) of every parameter and buffer by fully qualified name, so that a step reads what is live now.

    Attribute look-up through ``nn.Module.__getattr__`` costs five times as much, for every tensor and step.
    """
    slots: dict[str, tuple[dict[str, Any], str]] = {}
    for path, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):
            for key in tensors:
                slots[f"{path}.{key}" if path else key] = (tensors, key)
    return slots


def tensor_tables(module: nn.Module) -> list[dict[str, Any]]:
    """The dictionaries in which ``module`` and everything below it keep their parameters and buffers.

    Without them what a hook keeps of a parameter could not be told from what it has registered, at a step's pace.
    """
    return [table for part in module.modules() for table in (part._parameters, part._buffers)]


def child_tables(module: nn.Module) -> list[dict[str, nn.Module | None]]:
    """The dictionaries in which ``module`` and everything below it keep their submodules.

    Without them a layer that a hook replaces would not be noticed; ``named_modules`` walks names too, at ten times the
    cost, and a step asks each time.
    """
    return [part._modules for part in module.modules()]


def autograd_hooks(module: nn.Module) -> list[tuple[str, Any]]:
    """(parameter, hook) of every hook that only autograd calls; without it they would be silently skipped.

    Those of modules are hooks on nodes of autograd's graph and functions, which are followed.
    """
    return [(name, hook) for name, p in module.named_parameters() for hook in parameter_hooks(p)]


def parameter_hooks(tensor: Tensor) -> list[Any]:
    """Hooks that autograd calls when this tensor gets its gradient."""
    return [hook for table in _PARAMETER_HOOKS for hook in (getattr(tensor, table, None) or {}).values()]


_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def step_hooks(optimizer: Any) -> list[Any]:
    """Pre- and post-hooks of ``optimizer.step``, which a graph would run once, at capture."""
    return [hook for table in _step_hook_tables(optimizer) for hook in table.values()]


def _step_hook_tables(optimizer: Any) -> list[dict[int, Any]]:
    tables = [getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
    tables += [_torch_optimizer._global_optimizer_pre_hooks, _torch_optimizer._global_optimizer_post_hooks]
    return [table for table in tables if table is not None]


_WAYS_OF_FLOAT32 = (
    ("generic", "all"),
    *((backend, of) for backend in ("cuda", "mkldnn") for of in ("all", "matmul", "conv", "rnn")),
)


def float32_precision() -> tuple[Any, ...]:
    """How precisely products of float32 are computed (TF32, bfloat16), by whichever of torch's interfaces it was set.

    ``get_float32_matmul_precision`` raises where somebody used the newer one, ``backends.cuda.matmul.fp32_precision``.
    """
    c: Any = torch._C
    try:
        return c._get_float32_matmul_precision(), c._get_cudnn_allow_tf32()
    except RuntimeError:
        return tuple([c._get_fp32_precision_getter(*of) for of in _WAYS_OF_FLOAT32])


def _switches_of_kernels() -> list[tuple[Callable[[], bool], Callable[[bool], None]]]:
    c: Any = torch._C
    names = ["mkldnn_enabled", "mkldnn_deterministic"]
    if torch.backends.cuda.is_built():
        names += ["cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"]

    def set_deterministic(on: bool) -> None:
        c._set_deterministic_algorithms(on, warn_only=c._get_deterministic_algorithms_warn_only())

    found = [(getattr(c, f"_get_{name}"), getattr(c, f"_set_{name}")) for name in names]
    return [*found, (c._get_deterministic_algorithms, set_deterministic)]


def _switches_of_attention() -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    c: Any = torch._C
    names = ["flash", "mem_efficient", "math", *(["cudnn", "overrideable"] if torch.backends.cuda.is_built() else [])]
    found: list[Any] = [(getattr(c, f"_get_{name}_sdp_enabled"), getattr(c, f"_set_sdp_use_{name}")) for name in names]
    if torch.backends.cuda.is_built():
        found.append((lambda: tuple(c._get_sdp_priority_order()), lambda order: c._set_sdp_priority_order(list(order))))
    return found


ATTENTION_SWITCHES = _switches_of_attention()
"""Readers and setters of what chooses the operator that attention becomes (``torch.nn.attention.sdpa_kernel``): a call
is recorded under its own, and its graph has that operator."""

KERNEL_SWITCHES = _switches_of_kernels()
"""Readers and setters of what kernels look at when they run (``torch.backends.mkldnn.flags``). Autocast decides what is
called; these are in no recorded call, so a graph would run under whatever holds at its own time."""


def readers_of_settings() -> tuple[Callable[[], Any], ...]:
    """Functions of C that read torch's switches; each step asks, and Python ones cost thrice.

    Default dtype and autocast are not among them: every call has its own, and a precision changes them for a part of
    the step, in which Python may read.
    """
    c: Any = torch._C
    return (
        c._get_deterministic_algorithms,
        c._get_deterministic_algorithms_warn_only,
        float32_precision,
        torch.is_anomaly_enabled,
        c._get_flash_sdp_enabled,
        c._get_mem_efficient_sdp_enabled,
        c._get_math_sdp_enabled,
        c._get_cudnn_sdp_enabled,
    )


def prepared_hooks(module: nn.Module, optimizer: Any) -> Callable[[], list[Any]]:
    """Reads, fast, every hook that autograd or ``step`` calls: one that comes in mid-run would be skipped."""
    slots = tensor_slots(module).values()
    parts: Sequence[Any] = () if optimizer is None else getattr(optimizer, "parts", (optimizer,))
    tables = [table for part in parts for table in _step_hook_tables(part)]

    def hooks() -> list[Any]:
        tensors = [t for table, key in slots if (t := table.get(key)) is not None]
        on_tensors = [h for t in tensors for h in (t._backward_hooks, t._post_accumulate_grad_hooks)]
        return [hook for table in (*tables, *on_tensors) if table for hook in table.values()]

    return hooks


def mark_stepped(optimizer: Any) -> None:
    """Tell LR schedulers that the optimizer stepped: its Python ``step`` never ran, and they would warn."""
    optimizer._opt_called = True


def is_immutable(tensor: Tensor) -> bool:
    """Whether it has no memory, since autograd knows it to be zeros. Without: graphs write there, which raises."""
    return tensor._is_zerotensor()


def storage_of(tensor: Tensor) -> int:
    """Identity of the tensor's storage, or its part's; fake tensors have no data pointer to compare."""
    local = local_tensor(tensor)
    try:
        return local.untyped_storage()._cdata
    except NotImplementedError:  # sparse, or wrapped by a transform
        return -id(local)


def is_in(tensor: Tensor, storage: UntypedStorage) -> bool:
    """Whether the tensor's memory is that storage."""
    return storage_of(tensor) == storage._cdata


# DTensor keeps the strategies that it and users register per operator in its dispatcher's propagator; there is no
# public way to ask for them. Without these two, custom operators with `register_sharding` run replicated.
def _dtensor_propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator


def has_dtensor_strategy(op: Any) -> bool:
    """Whether DTensor has a strategy function for the operator (nothing is searched)."""
    return op in _dtensor_propagator().op_strategy_funcs


def dtensor_strategies(
    op: Any, args: Any, kwargs: Any, describe: Callable[[fx.Node], Any], size: int
) -> list[tuple[list[tuple[str, Any]], list[tuple[str, Any]]]]:
    """(placements of inputs, placements of outputs) of every registered choice on a one-dimensional mesh of ``size``.

    Args:
        op: the operator.
        args: its positional arguments, with nodes for values.
        kwargs: its keyword arguments, likewise.
        describe: gives (TensorSpec, placement) for a tensor node, anything else for a number.
        size: ranks of the mesh; no process group is needed.
    """
    mesh = DeviceMesh("cpu", torch.arange(size), _init_backend=False, _rank=0)

    def spec(node: fx.Node) -> Any:
        seen = describe(node)
        if not isinstance(seen, tuple) or len(seen) != 2 or not hasattr(seen[0], "stride"):
            return seen
        tensor, placement = seen
        placed = Shard(placement.dim) if hasattr(placement, "dim") and placement.outer == 1 else Replicate()
        return DTensorSpec(mesh, (placed,), TensorMeta(torch.Size(tensor.shape), tensor.stride, tensor.dtype))

    def named(placed: Any) -> tuple[str, Any]:
        placement = placed.placements[0]
        if type(placement) is Shard:
            return ("shard", placement.dim)
        if type(placement) is Partial:
            return ("partial", placement.reduce_op)
        return ("replicate", None) if isinstance(placement, Replicate) else ("unknown", None)

    propagator = _dtensor_propagator()
    schema = OpSchema(op, fx.map_arg(tuple(args), spec), fx.map_arg(dict(kwargs), spec))
    try:
        strategy = propagator.op_strategy_funcs[op](propagator._wrap_with_op_strategy(schema))
    except Exception:  # a strategy that cannot handle this call is no strategy
        return []
    found: list[tuple[list[tuple[str, Any]], list[tuple[str, Any]]]] = []
    for choice in getattr(strategy, "strategies", []):
        outputs = choice.output_specs if isinstance(choice.output_specs, (tuple, list)) else [choice.output_specs]
        if choice.input_specs is not None and all(o is not None for o in outputs):
            found.append(([named(i) for i in choice.input_specs], [named(o) for o in outputs]))
    return found


def leave_order_of_shards_alone(kind: type) -> None:
    """Let ``DTensorSpec`` not check the order of shards where a placement of this class is among them.

    It compares each with a plain shard, as of which ``kind`` is none (its operator cache compares as well, and must be
    told the truth); it makes the same exception for its own strided shards. Without this no tensor could lie in blocks.
    """
    check = DTensorSpec._verify_shard_order

    @functools.wraps(check)
    def checked(self: Any, shard_order: Any) -> None:
        if not any(isinstance(placement, kind) for placement in self.placements):
            check(self, shard_order)

    DTensorSpec._verify_shard_order = checked
