"""Underscore names of torch behind co-execution: tensors without memory, and what comes past torch functions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, TypedStorage, UntypedStorage, _utils, nn
from torch._C import DisableTorchFunction
from torch._functorch import eager_transforms as _transforms
from torch._functorch import vmap as _vmap_package
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad as _forward_ad
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint as _checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric, MetricCollection

from lightning_spmd._private_api.held_back import MISSES

_vmap = sys.modules["torch._functorch.vmap"] if callable(_vmap_package) else _vmap_package
_KINDS = ("cpu", "cuda")
# What looks at a call of torch must not see its own calls; without it a fence would meet itself.
no_torch_functions = DisableTorchFunction
# The user's code that runs within such calls is to be seen again; without it its calls would show as operators alone.
with_torch_functions = torch._C._EnableTorchFunction
# What stands for a gradient has the shape and strides of one, and no memory; without it autograd warns of its layout.
make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass


is_autocast_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any type of device; itself and no function around it, for every call of a step asks."""


def autocast_state() -> tuple[tuple[str, torch.dtype], ...] | None:
    """Device types for which autocast is on, with its dtype; None where it is off. Asked at every call of a step."""
    if not is_autocast_on():
        return None
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in _KINDS if torch.is_autocast_enabled(kind))


def without_memory(spec: Any) -> Tensor:
    """A tensor of torch's own class with a size and memory for one element, which is an error to write to.

    Kernels that only read do not ask; these a dispatch mode must catch. In other threads, where there is none,
    they read NaN (of integers the least one) over and over, and not memory that is nobody's.
    """
    value = float("nan") if spec.dtype.is_floating_point or spec.dtype.is_complex else 0
    if not value and spec.dtype is not torch.bool:
        value = torch.iinfo(spec.dtype).min
    made = torch.full((1,), value, dtype=spec.dtype, device=spec.device).as_strided(spec.shape, (0,) * len(spec.shape))
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def with_strides(spec: Any) -> Tensor:
    """The same with strides of its own, as transforms of torch.func show them to Python and to kernels' wrappers.

    It has memory that nobody touches, and whoever reads there reads anything.
    """
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor is one of :func:`without_memory`."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


def is_memory_its_own(tensor: Tensor, others: int = 0) -> bool:
    """Whether at most this many others share a tensor's memory, by reference counts. False if unknown."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return False
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # sparse, or wrapped by a transform
        return True
    return torch._C._storage_Use_Count(storage._cdata) <= 2 + others


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; -1 of inference mode's, of which torch does not know."""
    return -1 if tensor.is_inference() else tensor._version


_SWAP = torch._C._swap_tensor_impl


def dispatch_layers() -> tuple[Any, Any]:
    """Which layers of torch's dispatcher see calls now beside those that tensors ask for, and which do not."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def layers_as(layers: tuple[Any, Any]) -> contextlib.AbstractContextManager[Any]:
    """The same layers see calls inside a dispatch mode; autograd and autocast, which are passed there, else do not.

    ``torch.overrides.enable_reentrant_dispatch`` lets calls without tensors look for a mode that is not there.
    """
    return torch._C._ForceDispatchKeyGuard(*layers)


def exchange(one: Tensor, other: Tensor) -> None:
    """Let two tensors be each other, with history and all. ``torch.utils.swap_tensors`` refuses weak references."""
    _SWAP(one, other)


def history_of(tensor: Tensor) -> Any:
    """``grad_fn``; None where torch will not tell: of a view that was made without gradients of what was written since.

    Writing into rows of a parameter under ``no_grad`` makes such views.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_tied(tensor: Tensor) -> bool:
    """Whether autograd ties a tensor to others, which live as long as it does: by its history, or as a view of one."""
    return tensor._is_view() or tensor.grad_fn is not None


def no_view(tensor: Tensor) -> Tensor:
    """The tensor; if it is a view, a tensor with its memory that is none.

    Autograd forbids to write what has a history into a view that was made without gradients.
    """
    return tensor.detach() if tensor._is_view() else tensor


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def saved_for(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """What autograd still keeps for the backward passes of tensors, as its nodes show it (``node._saved_self``)."""
    seen, nodes = set[Any](), list(map(history_of, tensors))
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                with contextlib.suppress(RuntimeError):  # it has been freed
                    saved = getattr(node, name)
                    yield from filter(_is_tensor, saved if isinstance(saved, (list, tuple)) else [saved])


def as_parameter(tensor: Tensor, kind: type) -> Tensor:
    """The tensor itself as a parameter, or without the class's own name for it optimizers and modules refuse it.

    It is an attribute, so that no other step gets this placeholder.
    """
    tensor.__class__ = kind
    tensor._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


_OF_CUDA = (
    "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "get_rng_state", "get_rng_state_all",
    "set_rng_state", "set_rng_state_all",
)  # fmt: skip


class UnseenCalls:
    """What no mode of torch functions sees, replaced: calls in a step are told to that step.

    The first step replaces, and once a run has ended torch has its own again. A step is short, and a change of a class
    undoes what the interpreter knows of it and all below it: Python 3.13 stops to learn anew after a thousand.
    """

    def __init__(self) -> None:
        self._step: Any = None
        self._saved: Any = None
        self._thread = 0
        self.on_metric: Callable[[Any], None] | None = None
        """Told of metrics that are made."""

        def enter(hooks: Any) -> None:
            _ENTER(hooks) if self._of_step() is None else self._saved.enter(hooks, _ENTER)

        def leave(hooks: Any, *error: object) -> None:
            _LEAVE(hooks, *error) if self._of_step() is None else self._saved.leave(hooks, _LEAVE)

        @functools.wraps(_CHECKPOINTED)
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if self._of_step() is None:
                return _CHECKPOINTED(*args, **kwargs)
            return self._saved.checkpointed(_CHECKPOINTED, args, kwargs)

        def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
            step = self._of_step() if issubclass(kind, torch.autograd.Function) else None  # else a part of a transform
            return applied(kind, args, kwargs) if step is None else step.apply(kind, *args, **kwargs)

        places: list[tuple[Any, str, Any]] = [
            (_Applied, "apply", classmethod(apply)),
            (torch.autograd.graph.saved_tensors_hooks, "__enter__", enter),
            (torch.autograd.graph.saved_tensors_hooks, "__exit__", leave),
            (_checkpoint, "_checkpoint_without_reentrant_generator", checkpointed),
            (Tensor, "__copy__", self._after(_copied, "__copy__")),
        ]
        for owner, name in (
            (torch, "manual_seed"),
            (torch, "seed"),
            (torch, "load"),
            (torch, "clear_autocast_cache"),
            (torch, "get_rng_state"),
            (torch, "set_rng_state"),
            (torch, "initial_seed"),
            (torch.random, "manual_seed"),
            (torch.random, "get_rng_state"),
            (torch.random, "set_rng_state"),
            (torch.random, "initial_seed"),
            (torch.random, "seed"),
            (nn.Parameter, "__new__"),
            (torch._C, "_swap_tensor_impl"),
            (torch.autograd.graph, "_get_grad_fn_or_grad_acc"),
            (Tensor, "_reduce_ex_internal"),
            (Tensor, "as_subclass"),
            (Tensor, "_make_subclass"),
            (_forward_ad, "enter_dual_level"),
            (TorchDispatchMode, "__enter__"),
            (_utils, "_rebuild_tensor"),
            (_vmap, "_vmap_increment_nesting"),
            (_transforms, "_grad_increment_nesting"),
            (_transforms, "_jvp_increment_nesting"),
            (_transforms, "_func_increment_nesting"),
        ):
            places.append((owner, name, self._after(vars(owner).get(name, getattr(owner, name)), name)))
        for owner, name in itertools.product((torch.cuda, torch.cuda.random), _OF_CUDA):
            places.append((owner, name, self._after(vars(owner)[name], f"torch.cuda.{name}")))
        for owner, name in ((nn.Module, "_apply"), (nn.Module, "zero_grad"), (torch.optim.Optimizer, "zero_grad")):
            places.append((owner, name, self._after(vars(owner)[name], f"gradients.{name}")))
        of_storages = [(UntypedStorage, n) for n in ("copy_", "fill_", "__getitem__", "__setitem__")]
        for owner, name in (*of_storages, (TypedStorage, "_getitem"), (TypedStorage, "_setitem")):
            places.append((owner, name, self._after(getattr(owner, name), f"storage.{name}")))
        places += [(kind, "__init__", self._making(kind.__init__)) for kind in (Metric, MetricCollection)]
        self._places = places
        self._before: list[Any] = []

    def begin(self, step: Any, saved: Any) -> None:
        """From here on calls are a step's.

        Args:
            step: its ``apply`` is called with the class and the arguments in place of what
                ``torch.autograd.Function.apply`` ends in. Its ``instead`` is given the name of a function, and that,
                before it is called, and gives what is called in its place; these read, or change, what is computed so
                far: random state, memory of a tensor that becomes a parameter.
            saved: told of what is around what autograd saves: ``enter`` and ``leave`` hooks, and ``checkpointed``
                instead of the generator that ``torch.utils.checkpoint`` runs around a part; each with the original.
        """
        if not self._before:
            self._before = [vars(owner).get(name, self) for owner, name, _ in self._places]
            for owner, name, replacement in self._places:
                setattr(owner, name, replacement)
        self._step, self._saved, self._thread = step, saved, threading.get_ident()

    def _of_step(self) -> Any:
        """The step that a call belongs to; of other threads none, but autograd's, which have the step's modes."""
        if self._thread == threading.get_ident() or torch._C._len_torch_function_stack():
            return self._step
        return None

    def is_here(self) -> bool:
        """Whether what runs now belongs to a step."""
        return self._of_step() is not None

    def end(self) -> None:
        """The step is over."""
        self._step = self._saved = None

    def leave(self) -> None:
        """End the run and restore torch's functions, except those that other code has replaced meanwhile."""
        MISSES.end()
        before, self._before = self._before, []
        for (owner, name, replacement), value in zip(self._places, before, strict=False):
            if vars(owner).get(name) is replacement:
                delattr(owner, name) if value is self else setattr(owner, name, value)

    def _making(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def made(metric: Any, *args: Any, **kwargs: Any) -> None:
            init(metric, *args, **kwargs)
            if self.on_metric is not None and self._of_step() is not None:
                self.on_metric(metric)

        return made

    def _after(self, function: Any, name: str) -> Any:
        original = function.__func__ if isinstance(function, staticmethod) else function

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            step = self._of_step()
            return (original if step is None else step.instead(name, original))(*args, **kwargs)

        return staticmethod(replacement) if isinstance(function, staticmethod) or name == "__new__" else replacement


reduced = Tensor._reduce_ex_internal
"""Gives what a tensor is pickled as, of whatever class; without it pickled would be what has no memory."""


def _copied(tensor: Tensor) -> Tensor:
    """``copy.copy`` of a tensor, which has the same memory."""
    found = tensor.__reduce_ex__(4)
    return found[0](*found[1])


def generators() -> list[torch.Generator]:
    """Those of torch itself: the host's, and the current GPU's once it is in use."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def generator_states() -> list[tuple[Any, Tensor]]:
    """The states of torch's own generators."""
    return [(generator, generator.get_state()) for generator in generators()]


def set_generator_states(states: list[tuple[Any, Tensor]]) -> None:
    """They are set."""
    for generator, state in states:
        generator.set_state(state)


def error_of_backward(text: str) -> Callable[[Tensor], Any]:
    """Gives a tensor a history in which a backward pass is this error; in Python that takes four times as long."""
    return torch._C._functions.DelayedError(text, 1)  # pyright: ignore[reportAttributeAccessIssue]


ErrorOfBackward: type = torch._C._functions.Error  # pyright: ignore[reportAttributeAccessIssue]
"""The class of its nodes."""


def applied(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``kind.apply`` as torch has it."""
    return super(_Applied, kind).apply(*args, **kwargs)  # type: ignore[misc]


# Below what a program may have kept from before (``function = MyFunction.apply``), which must be seen as well.
_Applied: Any = torch.autograd.function._SingleLevelFunction
_ENTER, _LEAVE = (vars(torch.autograd.graph.saved_tensors_hooks)[name] for name in ("__enter__", "__exit__"))
_CHECKPOINTED = _checkpoint._checkpoint_without_reentrant_generator
UNSEEN = UnseenCalls()
ReentrantCheckpoint = _checkpoint.CheckpointFunction
"""What ``torch.utils.checkpoint`` applies in its older form."""
no_checkpoint_contexts = _checkpoint.noop_context_fn
"""What stands for no contexts around a checkpointed part."""


def stops_early(given: bool) -> bool:
    """Whether a checkpointed part stops as soon as all is there that was saved; a context may decide for all."""
    return given if _checkpoint._enable_checkpoint_early_stop is None else _checkpoint._enable_checkpoint_early_stop


def optimize_scripts(wanted: bool) -> bool:
    """Let scripted functions be optimized or not on this thread. Returns how it was.

    Without it they lose their gradients from the second call on. ``torch.jit.optimized_execution`` takes four times
    as long, in every step.
    """
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(wanted)
    return before


TRANSFORMS = ("_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting")
"""What begins a transform of ``torch.func``; a dispatch mode sees what that computes, on the tensors that it wraps."""


def in_transforms() -> bool:
    """Whether a transform of ``torch.func`` is under way."""
    return torch._C._are_functorch_transforms_active()


def graph_task() -> int:
    """The number of the backward pass that runs on this thread; a checkpointed part is computed again once in each."""
    return torch._C._current_graph_task_id()


def nodes_since(tensors: Sequence[Tensor], number: int) -> list[Any]:
    """The nodes of autograd's graph behind tensors that were made since the next one's number was this.

    Without it nobody sees what an operator of somebody's own has left there: Python, or numbers in C++.
    """
    found = dict[Any, None]()
    waiting: list[Any] = list(map(history_of, tensors))
    while waiting:
        node = waiting.pop()
        if node is None or hasattr(node, "variable"):  # what adds gradients up has no number
            continue
        if node not in found and node._sequence_nr() >= number:
            found[node] = None
            waiting += [following for following, _ in node.next_functions]
    return list(found)


def is_of_extension(node: Any) -> bool:
    """Whether a node is none of torch's own, but of a ``torch::autograd::Function`` in somebody's C++."""
    return type(node).__name__ == "CppFunction"


def found_no_memory(error: BaseException) -> bool:
    """Whether it is the error of a kernel that has asked for the memory of one of :func:`without_memory`."""
    return isinstance(error, RuntimeError) and str(error).startswith("Cannot access data pointer of Tensor")


def is_wrapped(tensor: Tensor) -> bool:
    """Whether it belongs to a transform of ``torch.func`` under way, or is no plain tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def is_another_class(kind: type) -> bool:
    """Whether calls on objects of a class are made by that class, or give results of it: what graphs do not know.

    Torch's parameters and their subclasses leave both to torch.
    """
    if kind in (Tensor, DTensor, FakeTensor) or kind.__module__.startswith("lightning_spmd."):
        return False
    own = (getattr(kind, name, None) for name in ("__torch_function__", "__torch_dispatch__"))
    return any(one not in (None, *_OF_NO_CLASS) for one in own)


_OF_NO_CLASS = torch._C._disabled_torch_function_impl, torch._C._disabled_torch_dispatch_impl


def are_torch_functions_off() -> bool:
    """Whether no mode is told of torch's functions, as C++ code and ``DisableTorchFunction`` want."""
    return torch._C._is_torch_function_all_disabled()


def is_of_profiler(func: Any) -> bool:
    """Whether an operator says where a profiler is and computes nothing; overloads and packets have this in common."""
    return getattr(func, "__module__", "") == "torch._ops.profiler"


def are_torchs_own(generators: Sequence[torch.Generator]) -> bool:
    """Whether one is of those from which torch draws where none is given: what was drawn so far comes first."""
    return any(g is torch.default_generator or g in torch.cuda.default_generators for g in generators)


def host_random_state() -> bytes:
    """The state of torch's generator on the host; what its own methods do to it shows nowhere else.

    Asked in every step, within its modes: by no call that these see.
    """
    with no_torch_functions():
        state = torch.default_generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())


def host_seed() -> int:
    """From which torch's generator on the host was seeded last; asked in a tenth of a microsecond."""
    return torch.default_generator.initial_seed()
