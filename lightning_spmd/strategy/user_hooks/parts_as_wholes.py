"""The user's hooks compute with parameters in parts as if every rank had all of them.

Under ``zero3`` and tensor parallelism parameters are DTensors outside of steps. Most that hooks do with these, torch
does on the parts, without communication. The rest it refuses (plain tensors beside DTensors, operators without a rule),
or does to what is no part of the parameter, silently: numbers and arrays are one rank's, views across a cut are copies,
``p.data = x`` is nothing, drawn numbers are each rank's own. A torch-function mode sees each call and a dispatch mode
what torch makes of it; such calls get whole tensors, and what they write goes back into the parts.

All ranks run the same hooks. A hook that computes with parameters on one rank alone waits for the others, as any
collective does, and is named by them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from lightning_spmd import _private_api as private
from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.aliasing import aliased_values, written_values
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.parallel.state import OF_STATE, Placements, StateMesh
from lightning_spmd.stages.capture.follow.notes import tensors_in
from lightning_spmd.stages.capture.user_code import user_location
from lightning_spmd.strategy.support.detectors import is_overridden
from lightning_spmd.strategy.user_hooks.fence import SAY_NO_VALUES, FencedHooks
from lightning_spmd.strategy.user_hooks.hidden_gradients import HiddenGradient
from lightning_spmd.strategy.user_hooks.overlap import hooks_between_batches, may_read

_WITHOUT_OTHERS = ("on_exception",)
"""Hooks that run while other ranks may be lost: what is collective would wait for them."""
_IN_A_STEP = ("configure_gradient_clipping", "optimizer_zero_grad")
"""Methods of a module that Lightning calls within a step, and are not called ``on_``."""


class PartsAsWholes:
    """Around the hooks of one run.

    Args:
        state: gives the mesh for state; None where every rank has all of it.
    """

    def __init__(self, state: Callable[[], StateMesh | None]) -> None:
        self._state = state
        self._fenced = FencedHooks()
        self._calls: _Calls | None = None
        self._in_graph = False
        self._seen: Any = None  # what had hooks when fences were put around them

    def put_around(self, module: Any, trainer: Any) -> None:
        """The user's hooks, schedulers and loggers that are there now may take parts for wholes."""
        self._seen = _what_may_have_hooks(module, trainer)
        of_module = (*_hooks_of(LightningModule), *_IN_A_STEP)
        found = [(module, hook) for hook in of_module if is_overridden(hook, module, LightningModule)]
        found += [(c, hook) for c in trainer.callbacks for hook in _hooks_of(Callback) if may_read(c, hook)]
        found += [pair for pair in hooks_between_batches(module, trainer) if pair not in found]
        for owner, hook in found:
            if not self._fenced.has(self.call, owner, hook):
                self._fenced.put(self.call, owner, hook)

    def look_again(self, module: Any, trainer: Any) -> None:
        """Between two batches: callbacks and hooks may have come."""
        if self._seen is not None and self._seen != _what_may_have_hooks(module, trainer):
            self.put_around(module, trainer)

    def take_away(self) -> None:
        """Restore all hooks."""
        self._fenced.take_away()
        self._seen = None

    def call(self, hook: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a hook."""
        with self.inside():
            return hook(*args, **kwargs)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Around calls of the user's."""
        state = self._state()
        if state is None or self._calls is not None or self._in_graph:
            yield
            return
        try:
            with _Calls(state) as self._calls:
                yield
        finally:
            calls, self._calls = self._calls, None
            if calls is not None:
                calls.write_back()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Around what is none of a hook's calls, though within it: a step, or saving. Hooks within are their own."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.write_back()
            calls.is_off = True
        try:
            yield
        finally:
            self._calls = calls
            if calls is not None:
                calls.is_off = False

    @contextlib.contextmanager
    def in_graph(self) -> Iterator[None]:
        """Around a hook that becomes part of a graph, in which all is whole."""
        self._in_graph = True
        try:
            yield
        finally:
            self._in_graph = False


def _what_may_have_hooks(module: Any, trainer: Any) -> Any:
    hooks = [value for name, value in vars(module).items() if name.startswith("on_")]
    return [id(each) for each in (*trainer.callbacks, *trainer.loggers, *hooks)]


def _hooks_of(kind: type) -> list[str]:
    named = [name for name in dir(kind) if name.startswith("on_") and name not in _WITHOUT_OTHERS]
    return [name for name in named if inspect.isfunction(getattr(kind, name))]  # on_gpu is a property


class _NeedsWholes(BaseException):
    """What an operator would make of parts is not what it makes of wholes."""


@dataclass(eq=False)
class _Whole:
    """A whole tensor in a part's place, of which something else may be a view.

    Args:
        part: the DTensor.
        value: the whole tensor.
        version: of the whole, when both were equal.
        copy: its values then, where torch does not count writes: of inference mode, or over its memory an array's.
    """

    part: DTensor
    value: Tensor
    version: int = 0
    copy: Tensor | None = None

    def note(self) -> None:
        """Both are equal."""
        self.version = private.version_of(self.value)
        if self.copy is not None or self.value.is_inference():
            self.copy = self.value.detach().clone()

    @property
    def is_written(self) -> bool:
        """Whether the whole was written."""
        if private.version_of(self.value) != self.version:
            return True
        return self.copy is not None and not torch.equal(self.copy, self.value)


class _Calls(TorchFunctionMode):
    """The calls of one hook.

    Attributes:
        is_off: whether it leaves them alone for now.
    """

    def __init__(self, state: StateMesh) -> None:
        super().__init__()
        self._state = state
        self._kept: list[_Whole] = []
        self._sums: dict[int, tuple[DTensor, DTensor]] = {}
        self.is_off = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call on parts or on wholes."""
        kwargs = kwargs or {}
        if self.is_off or func in SAY_NO_VALUES:
            return func(*args, **kwargs)
        if func in (_SET_DATA, _SET_GRADIENT):
            return self._set(func, *args)
        tensors = tensors_in((args, kwargs))
        if self._kept:
            self.write_back()
            self._renew(tensors)
        parts = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        if not parts:
            result = func(*args, **kwargs)
        else:
            result = self._on_parts(func, args, kwargs, [part for part in parts if _is_sum(part)])
        if self._kept:
            self.write_back()
        return result

    def _on_parts(self, func: Any, args: Any, kwargs: Any, sums: list[DTensor]) -> Any:
        if func in _OF_OBJECTS:
            return func(*args, **kwargs)
        if sums and any(id(part) in self._sums for part in sums):
            args, kwargs = self._summed(sums, (args, kwargs))
            sums = []
        if self._is_beyond_parts(func, args, kwargs):
            return self._on_wholes(func, *self._summed(sums, (args, kwargs)))
        try:
            with _SeesOperators():
                result = func(*args, **kwargs)
        except _NeedsWholes:
            if sums:
                args, kwargs = self._summed(sums, (args, kwargs))
                return self._on_parts(func, args, kwargs, [])
        except Exception as error:  # torch's, of many kinds; what is the user's own error is one of wholes, too
            if "leaf Variable" in str(error):  # but for autograd's about writes, since the whole is no leaf
                raise
        else:
            if getattr(func, "__name__", None) == "__get__":
                return result
            if _is_global(result) and not (torch.is_grad_enabled() and self._mixes_graphs(args, kwargs, result)):
                return result
        return self._on_wholes(func, *self._summed(sums, (args, kwargs)))

    @staticmethod
    def _is_beyond_parts(func: Any, args: Any, kwargs: Any) -> bool:
        """Whether torch, asked to do it on parts, would end the process, never end, or give a part another size."""
        parts = [t for t in tensors_in((args, kwargs)) if isinstance(t, DTensor)]
        return func in _ON_THE_HOST or "out" in kwargs or any(part.numel() == 0 for part in parts)

    @staticmethod
    def _mixes_graphs(args: Any, kwargs: Any, result: Any) -> bool:
        """Whether a plain tensor would get a gradient in parts: torch takes a plain number beside parts for one."""
        is_part = any(t.grad_fn is not None for t in tensors_in(result) if isinstance(t, DTensor))
        return is_part and any(t.requires_grad for t in tensors_in((args, kwargs)) if not isinstance(t, DTensor))

    def _summed(self, parts: list[DTensor], values: Any) -> Any:
        """Values with totals in the place of what the ranks have still to add up, which from now on are these totals.

        Numbers are added up together: the norms of all gradients are one collective.
        """
        new = {id(part): part for part in parts if id(part) not in self._sums}
        groups: dict[Any, list[DTensor]] = {}
        for part in new.values():
            alone = part.ndim > 0 or part.requires_grad
            key = id(part) if alone else (part.device_mesh, tuple(part.placements), part.dtype, part.device)
            groups.setdefault(key, []).append(part)
        for group in groups.values():
            for part, total in zip(group, _totals(group), strict=True):
                private.become(part, total)  # what is written into it later is in both
                self._sums[id(part)] = part, total
        return private.pytree.tree_map_only(DTensor, lambda part: self._sums.get(id(part), (part, part))[1], values)

    def _on_wholes(self, func: Any, args: Any, kwargs: Any) -> Any:
        given: dict[int, _Whole] = {}

        def whole(part: DTensor) -> Tensor:
            if id(part) not in given:
                given[id(part)] = _Whole(part, self._whole_of(part))
                given[id(part)].note()
            return given[id(part)].value

        args, kwargs = private.pytree.tree_map_only(DTensor, whole, (args, kwargs))
        result = func(*args, **kwargs)
        places = [_memory(each.part) for each in given.values()]
        for each in given.values():
            # torch does not count all writes: not those of batch norm's statistics
            is_alone = self._state.is_state(each.part) and places.count(_memory(each.part)) == 1
            if is_alone or each.is_written:
                self._put(each.part, each.value)
                each.note()
        wholes = {id(each.value): each.part for each in given.values() if func is not Tensor.cpu}
        leaves = private.pytree.tree_leaves(result)
        memory = {_memory(leaf) for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in wholes}
        arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
        for each in given.values():
            if any(np.may_share_memory(array, each.value.detach().numpy()) for array in arrays):
                each.copy = each.value.detach().clone()
            if each.copy is not None or _memory(each.value) in memory:
                self._kept.append(each)
        return private.pytree.tree_map_only(Tensor, lambda t: wholes.get(id(t), t), result)

    def _whole_of(self, part: DTensor) -> Tensor:
        if self._state.is_state(part) and torch.is_grad_enabled() and part.requires_grad:
            return _Gathered.apply(part, self._state)
        return self._state.gathered(part)

    def _set(self, func: Any, tensor: Tensor, value: Any) -> None:
        """``p.data = x`` and ``p.grad = x``."""
        if func == _SET_DATA and isinstance(tensor, DTensor):
            self._rebind(tensor, value)
        elif not isinstance(value, Tensor) or isinstance(value, HiddenGradient):
            func(tensor, value)
        elif isinstance(value, DTensor) and not isinstance(tensor, DTensor):
            func(tensor, self._whole_of(value))
        elif isinstance(tensor, DTensor) and not isinstance(value, DTensor):
            func(tensor, self._state.part_like(tensor, value))
        else:
            func(tensor, value)

    @torch.no_grad()
    def _rebind(self, part: DTensor, value: Tensor) -> None:
        """Give a part the memory of another, or that of a whole's part; who holds the former's has it still."""
        if value.shape != part.shape or value.dtype != part.dtype:
            place = user_location()
            raise ConfigurationError(
                f"a hook{f' ({place})' if place else ''} assigns .data of shape {list(value.shape)} and {value.dtype} "
                f"to a tensor of shape {list(part.shape)} and {part.dtype}, of which each rank holds a part: assign "
                "another nn.Parameter to the module instead"
            )
        former = private.local_tensor(part)
        if isinstance(value, DTensor) and value.device_mesh is part.device_mesh:
            new = private.local_tensor(value).detach()
            if value.placements == part.placements and new.stride() == former.stride():
                private.set_local_tensor(part, new)
                return
        private.set_local_tensor(part, torch.empty_like(former))
        self._put(part, self._whole_of(value) if isinstance(value, DTensor) else value)

    @torch.no_grad()
    def _put(self, part: DTensor, whole: Tensor) -> None:
        if self._state.is_state(part):
            self._state.take(part, whole)
            return
        everywhere = [Replicate()] * part.device_mesh.ndim
        new = DTensor.from_local(whole.detach(), part.device_mesh, everywhere, run_check=False)
        private.local_tensor(part).copy_(private.local_tensor(new.redistribute(placements=part.placements)))

    @torch.no_grad()
    def write_back(self) -> None:
        """What was written into wholes goes into the parts."""
        for each in self._kept:
            if each.is_written:
                self._put(each.part, each.value)
                each.note()

    @torch.no_grad()
    def _renew(self, tensors: list[Tensor]) -> None:
        """Wholes of which some of these are views get what was written into the parts since; all ranks look."""
        memory = {_memory(tensor) for tensor in tensors if not isinstance(tensor, DTensor)}
        for each in self._kept:
            if _memory(each.value) in memory:
                now = self._whole_of(each.part)
                if not torch.equal(now, each.value):
                    each.value.detach().copy_(now)
                    each.note()


def _memory(tensor: Tensor) -> int:
    local = private.local_tensor(tensor)
    return private.storage_of(local) if local.layout is torch.strided else 0


def _is_sum(part: DTensor) -> bool:
    return any(placement.is_partial() for placement in part.placements)


def _totals(group: list[DTensor]) -> list[DTensor]:
    """Of tensors that the ranks have still to add up alike: one, or numbers without a graph."""
    part = group[0]
    mesh, after = part.device_mesh, [Replicate() if p.is_partial() else p for p in part.placements]
    if len(group) == 1:
        return [part.redistribute(placements=after)]
    rows = torch.stack([private.local_tensor(each) for each in group])
    total = DTensor.from_local(rows, mesh, part.placements, run_check=False).redistribute(placements=after)
    rows = private.local_tensor(total).unbind()
    return [DTensor.from_local(row.clone(), mesh, after, run_check=False) for row in rows]


def _is_global(result: Any) -> bool:
    """Whether a call on parts gave what it gives on wholes: no numbers, texts or arrays, and tensors of their shape."""
    leaves = (result,) if isinstance(result, Tensor) else private.pytree.tree_leaves(result)
    return all(
        leaf is None or (isinstance(leaf, Tensor) and private.local_tensor(leaf).ndim == leaf.ndim) for leaf in leaves
    )


_OF_OBJECTS = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward, Tensor.__deepcopy__))
"""Take tensors for places in graphs of autograd's, or for objects with a gradient and attributes."""
_ON_THE_HOST = frozenset((Tensor.cpu, Tensor.apply_, Tensor.map_, Tensor.map2_))
"""Python at each element, and copies for later or for what one rank does alone: best weights, a file."""
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SET_GRADIENT = Tensor.grad.__set__  # type: ignore[attr-defined]


class _SeesOperators(private.TorchDispatchMode):
    """Ends a call of which torch would make something else for parts than for wholes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if private.graph_task() != -1:  # autograd's own: nobody writes into these views, and gradients are summed up
            return func(*args, **kwargs)
        # of what the ranks have still to add up (norms, maxima) torch makes wrong sums now and then
        given = [t for t in tensors_in((args, kwargs)) if isinstance(t, DTensor)]
        if torch.Tag.nondeterministic_seeded in func.tags or any(map(_is_sum, given)):
            raise _NeedsWholes
        # of what is written into a plain tensor torch makes a part afterwards, and fails when it has been written
        written = tensors_in(written_values(func, args, kwargs)) if given else []
        if not all(isinstance(tensor, DTensor) for tensor in written) and not func.name().startswith("aten::_foreach"):
            raise _NeedsWholes
        result = func(*args, **kwargs)
        bases = [t for t in aliased_values(func, args, kwargs) if isinstance(t, DTensor)]
        if bases:
            memory = {_memory(base) for base in bases}
            views = [t for t in tensors_in(result) if isinstance(t, DTensor)]
            # across a cut: torch has gathered it, or has a placement for it with which few operators can do anything
            if any(_memory(t) not in memory or not _is_plain(t) for t in views):
                raise _NeedsWholes
        return result


def _is_plain(tensor: DTensor) -> bool:
    return all(type(placement) in OF_STATE or placement.is_partial() for placement in tensor.placements)


class _Gathered(torch.autograd.Function):
    """The whole of a part; its gradient is the mean of the ranks', who may have computed with their own rows."""

    @staticmethod
    def forward(ctx: Any, part: DTensor, state: StateMesh) -> Tensor:
        """Gather."""
        ctx.placements, ctx.state = state.placements_of(part), state
        return state.whole(part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The part of the mean."""
        return _PartOfMean.apply(grads[0], ctx.placements, ctx.state), None


class _PartOfMean(torch.autograd.Function):
    """This rank's part of the mean over the ranks; its gradient is the whole, for second derivatives."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, placements: Placements, state: StateMesh) -> Tensor:
        """Take the part."""
        ctx.state = state
        mean = whole.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        return state.wrap(state.part(mean, placements), TensorSpec.of(mean), placements)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The whole of the part."""
        part = grads[0]
        return _Gathered.apply(part, ctx.state) if isinstance(part, DTensor) else part, None, None
