"""Sees every torch call of a step. It follows known paths, records new calls, and computes nothing.

A call that torch functions do not show (``jit.script``) reaches the dispatcher, where it is followed or recorded like
others. A step that cannot be followed runs eagerly: first the calls up to there, then the rest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.ir.default_dtype import autocast_as
from lightning_spmd.ir.sizes import Dimension
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.ir.successors import Replaced, with_successors
from lightning_spmd.stages.capture.follow import placeholders
from lightning_spmd.stages.capture.follow.becoming import VIEWED_IN_PLACE, Becoming
from lightning_spmd.stages.capture.follow.copies import Copies
from lightning_spmd.stages.capture.follow.count_formulas import CountFormulas
from lightning_spmd.stages.capture.follow.counts import told_in
from lightning_spmd.stages.capture.follow.data_counts import DataCounts
from lightning_spmd.stages.capture.follow.eager_run import EagerRun
from lightning_spmd.stages.capture.follow.engine import EngineCall, Saving
from lightning_spmd.stages.capture.follow.follower import EARNED, Follower
from lightning_spmd.stages.capture.follow.functions import Functions
from lightning_spmd.stages.capture.follow.left_out import LeftOut
from lightning_spmd.stages.capture.follow.matching import MISSED, compiled, never, numbers_that_differ
from lightning_spmd.stages.capture.follow.memory import Memory, is_foreign, is_plain
from lightning_spmd.stages.capture.follow.notes import (
    Fresh,
    Given,
    Made,
    Note,
    Operand,
    Outside,
    Place,
    Source,
    around_now,
    kernels_now,
    leaves_by_place,
    mapped,
    sized,
    tensors_in,
    with_numbers,
)
from lightning_spmd.stages.capture.follow.own_generator import OwnGenerator
from lightning_spmd.stages.capture.follow.packed import RECURRENT, PackedSequences
from lightning_spmd.stages.capture.follow.queue import known
from lightning_spmd.stages.capture.follow.reads import Reads
from lightning_spmd.stages.capture.follow.recorder import CHECK, Checks, HasOwnBackward, Recorder
from lightning_spmd.stages.capture.follow.saved import Saved
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed, StepState
from lightning_spmd.stages.capture.follow.told import in_vain, tells, told_numbers
from lightning_spmd.stages.capture.follow.trial_runs import result_now
from lightning_spmd.stages.capture.user_code import class_in_words, location_of, not_in_graphs, user_location

_READS = {
    Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__complex__, Tensor.tolist,
    Tensor.numpy, Tensor.__array__, Tensor.__contains__, Tensor.__format__, Tensor.__repr__, Tensor.__reversed__,
    Tensor.equal, Tensor.allclose, Tensor.is_nonzero, torch.is_nonzero, torch.equal, torch.allclose,
}  # fmt: skip
_SIZES = frozenset(
    {"size", "dim", "is_floating_point", "is_complex", "numel", "__len__", "element_size", "nelement", "ndimension",
     "is_signed"}
)  # fmt: skip
_STRIDES = frozenset({"stride", "is_contiguous", "storage_offset", "is_non_overlapping_and_dense", "dim_order"})
_PROPERTIES = frozenset({"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_nested", "itemsize",
                         "is_quantized", "is_meta", "is_mkldnn", "is_cpu", "nbytes"})  # fmt: skip
_DATA = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
_MEMORY = {Tensor.storage, Tensor.untyped_storage, Tensor.data_ptr, Tensor.__dlpack__,
           Tensor.__dlpack_device__, Tensor.share_memory_, Tensor.set_, Tensor.apply_, Tensor.map_,
           Tensor.map2_}  # fmt: skip
"""What hands out the memory of a tensor, exchanges it, or walks over it in Python."""
_READ_OPERATORS = {
    CHECK,
    *(getattr(torch.ops.aten, name).default for name in ("_local_scalar_dense", "item", "equal", "is_nonzero")),
}
_NOWHERE = torch.device("meta")
NEW_PATH = "it takes a path that no step took before"
_SETS = ("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "grad")
_MEMORY_OF: Any = Tensor.data
_COPIES = "copies of the step's results, by what has the memory"
_OF_GENERATORS = frozenset({"get_rng_state", "set_rng_state", "manual_seed"})
_OTHER_KERNELS = (
    "a switch that kernels look at (torch.backends.mkldnn.flags, ...) is not in all of the step what it was before"
)
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
_POSITIONS = {torch.int8, torch.int16, torch.int32, torch.int64}


_NOTHING = contextlib.nullcontext()
_UNWRITTEN = torch.ops.aten.empty.memory_format


def _is_for_dimensions(index: Sequence[Any]) -> bool:
    """Whether torch takes a sequence for a tuple, of one index a dimension, and not for positions."""
    return len(index) < 32 and any(isinstance(i, Tensor | Sequence | slice | None | EllipsisType) for i in index)


def _values_of(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of their own with these values."""
    return tuple(tensor.clone() for tensor in tensors)


def _is_torchs(value: Any) -> bool:
    """Whether a function or class is torch's, or ours."""
    return (value.__module__ or "").partition(".")[0] in ("torch", "lightning_spmd")


def _is_called(value: Any) -> bool:
    """Whether an argument is Python that a function of torch calls back."""
    if isinstance(value, (FunctionType, MethodType, functools.partial, nn.Module)):
        return True
    return callable(value) and type(type(value).__call__) is FunctionType and not _is_torchs(type(value))


class _Below(private.TorchDispatchMode):
    """Sees calls in the dispatcher that no torch function showed."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        step = self._step
        if step.is_eager and step.eager.stale:  # C++ code above holds what placeholders were
            args, kwargs = mapped(step.eager.current, args), mapped(step.eager.current, kwargs)
        if step.is_apart or step.is_eager or func.namespace in ("prim", "profiler"):
            with self._autocast(func):
                return func(*args, **kwargs)
        if kwargs.get("device") == _NOWHERE or any(t.is_meta for t in tensors_in((args, kwargs))):
            return func(*args, **kwargs)  # torch asks how large a result is
        before, step.is_below, calls = step.is_below, True, len(step.notes)
        try:
            with private.no_torch_functions():  # what is asked here is not the user's
                step.look_behind(args, kwargs)
                reads = func in _READ_OPERATORS and step.concerns(args[0])
                is_steps = reads or any(step.concerns(t) for t in tensors_in((args, kwargs)))
                out = self._followed(func, args, kwargs, reads=reads) if is_steps else None
                if func is _UNWRITTEN:  # C++ code may write there past the dispatcher, as TorchScript's torch.tensor
                    return func(*args, **kwargs)
            if not is_steps:  # so far: as one that makes a tensor, it comes to the other mode
                out = func(*args, **kwargs)
        finally:
            step.is_below = before
        same = step.is_eager or len(step.notes) == calls or func in VIEWED_IN_PLACE  # these give what they were given
        return out if same else step.fresh(out)

    def _followed(self, func: Any, args: Any, kwargs: Any, *, reads: bool) -> Any:
        step = self._step
        if reads:
            return step.reads.read(func, args, kwargs)
        if func.namespace == "c10d":  # what torch.distributed does cannot be tried out, and computes nothing
            step.eagerly(f"torch.distributed's {func.name().partition('::')[2].strip('_')} in the step")
            return func(*mapped(step.eager.current, args), **mapped(step.eager.current, kwargs))
        if func in VIEWED_IN_PLACE:
            return step.becoming.viewed_in_place(func, args, kwargs)
        with self._autocast(func):
            return step.called(func, args, kwargs)

    def _autocast(self, func: Any) -> contextlib.AbstractContextManager[None]:
        """Autocast is off in a mode of the dispatcher; torch's own operators are below it already."""
        return _NOTHING if func.namespace == "aten" or not self._step.autocast else autocast_as(self._step.autocast)


class Step(StepState, TorchFunctionMode):
    """One step.

    Args:
        follower: the known paths of such steps.
        given: the tensors of the batch.
        vary: the sizes of tensors of the batch that differ from step to step.
        batch: the user's own, where ``given`` stands in for them.

    Attributes:
        recorder: records calls that are new.
        data_counts: the data-dependent sizes of results.
        reads: what Python reads.
        eager: the step, once it runs eagerly.
        left_out: calls that are not of this step, but of one rank alone.
        left_at: ``file:line`` of the first call that no step has made there before.
        added: (parameter, gradient) of backward passes within the backward pass of the loss.
        needed: the number of first calls that the step itself needs, for its loss and logged values; later calls
            are for kept results.
    """

    def __init__(
        self,
        follower: Follower,
        given: Sequence[Tensor],
        vary: Sequence[Dimension] = (),
        batch: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__(follower, given, vary, batch)
        self.functions = Functions(self, follower.begins)
        self.saved = Saved(self, self.functions, follower.saving)
        self.memory = Memory(self, follower.holders)
        self.recorder = Recorder(self)
        self.generator = OwnGenerator(self)
        self._copies = Copies(self, self.recorder, self.generator)
        self.data_counts = DataCounts(self, self.recorder, self._copies, self.generator)
        self.reads = Reads(self, self.recorder, self._copies, self.generator)
        self.becoming = Becoming(self, self.recorder)
        self.left_out = LeftOut(self)
        self._packed = PackedSequences(self)
        self.eager = EagerRun(self, self.recorder, self._copies, self.left_out)
        self._below = _Below(self)
        self.kernels = kernels_now()
        self._wholes: dict[int, Tensor] = {}  # of tensors in parts
        self._lent: dict[int, tuple[Tensor, Tensor]] | None = None  # what an operator gets for what asks for gradients
        self._expected: list[bool] = []
        self._expects_grad = True  # as Python has set it
        self._made_parameters = set[int]()
        self.added: list[tuple[Source, Source]] = []
        self.left_at: str | None = None
        self.needed = 0

    # ------------------------------------------------------------------ around the user's code
    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A context in which calls are followed."""
        if not self.memory.begin(self.follower.bound.values()):
            self.follower.forget_objects()
        self.layers = private.dispatch_layers()
        self.random_before = private.generator_states() if self.may_run_again else None
        packed = self._packed
        private.replace_packing(packed)
        strange = next(filter(None, map(not_in_graphs, self.follower.given)), None)
        # what is optimized has a history of its own, and its operators see none
        were_optimized = private.optimize_scripts(False)
        try:
            with self._below, self:
                private.UNSEEN.begin(self, self.saved)
                if strange is not None:
                    self.eagerly(f"the batch has {strange}")
                yield
                self._look_at_what_stays()
                self.generator.watch()
                self.memory.look()
                self.memory.sync()
        finally:
            private.optimize_scripts(were_optimized)
            private.replace_packing(None)
            private.UNSEEN.end()
            packed.end()
            self.is_apart = self.is_over = True
            self.eager.stale.clear()

    def apply(self, kind: type, *args: Any, **kwargs: Any) -> Any:
        """A call of a user's ``autograd.Function``."""
        if self.is_apart:
            self.applied.add(kind)
        elif self._lent is not None:
            return self._apply_of_operator(kind, args, kwargs)
        if self.is_apart or self.is_eager or (self.has_transforms and private.in_transforms()):
            return private.applied(kind, args, kwargs)
        if kind is private.ReentrantCheckpoint:
            return self.saved.reentrant(*args)
        return self.functions.apply(kind, args, kwargs)

    def instead(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of a function that no mode sees."""
        if self.is_apart or self.is_eager:
            return original
        if original is private.reduced:
            return functools.partial(self._reduced, original)
        if name == "__copy__":
            return functools.partial(self._copied_shallow, original)
        if name == "__enter__":
            return functools.partial(self._entered, original)
        if name == "clear_autocast_cache":
            self.block += 1
            return original
        if name == "enter_dual_level":
            if not private.in_transforms():  # else ``torch.func.jvp``, which is followed below it
                self.eagerly("torch.autograd.forward_ad in the step")
            return original
        if name in ("load", "_rebuild_tensor", "__new__", "as_subclass", "_make_subclass"):
            make = functools.partial(self._made_beside, name, original)
            return functools.partial(self._parameter, make) if name == "__new__" else make
        if name.startswith("gradients."):  # it looks at gradients to change them alone
            return functools.partial(self._without_a_look, name, original)
        if name.startswith("storage."):
            return functools.partial(self._of_storage, name, original)
        if name in private.TRANSFORMS:  # what they compute is seen below them
            if not (self.has_transforms or self.may_run_again or self.must_be_graph):
                self.follower.may_transform = True
                self.eagerly("the first transform of torch.func, in a step that is not the first")
                self.follower.show_strides((), ())
            elif not self.has_transforms:
                self.follower.may_transform = self.has_transforms = self.looks_closer = True
                with self.beside(), private.disable_dispatch_modes(), private.no_torch_functions():
                    self.follower.show_strides(self.notes, self.stand_ins)
            return original
        if self.draws_as_eager and name in _OF_GENERATORS:
            return functools.partial(self.generator.of, name, original)
        self.eagerly(f"{name} in the step")
        return original

    def _reduced(self, original: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
        """A tensor is pickled, which reads its values."""
        with private.no_torch_functions():
            return self.reads.read(original, (tensor, *args), {})

    def _parameter(self, make: Callable[..., Any], kind: type, data: Any = None, requires_grad: bool = True) -> Any:
        """``nn.Parameter``, of a result a call."""
        if id(data) not in self.sources:
            return make(kind, data, requires_grad)
        made = private.as_parameter(data.detach().requires_grad_(requires_grad), kind)
        self._made_parameters.add(id(made))
        return made

    def _look_at_what_stays(self) -> None:
        """Parameters that the step made may have joined the module or its optimizer, which train them from here on."""
        made = self._made_parameters if not self.is_eager else ()
        joined = [self.sources[id(p)] for p in self.parameters() if id(p) in made and self.asks(p)] if made else []
        if joined:
            place = self._line_of(joined[0])
            self.eagerly("a parameter of what the step has computed joins the module or its optimizer", place)
        if (apart := self.becoming.apart) and not self.is_eager:
            place = self._line_of(apart[0][1])
            if self.becoming.is_seen():
                self.eagerly("tensor.data = ... in the step, of a tensor that is kept", place)

    def _line_of(self, source: Source) -> str | None:
        """``file:line`` that made a result."""
        return self.notes[source.depth].source or None if type(source) is Made else None

    def _made_beside(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What gives the user's own tensor, unless it is made of the step's results: a parameter, one of a file."""
        with private.no_torch_functions():
            if any(id(t) in self.sources for t in tensors_in((args, kwargs))):
                self.eagerly(f"{name} in the step")
                return original(*args, **kwargs)
            with self.beside():
                return original(*args, **kwargs)

    def _entered(self, original: Callable[..., Any], mode: Any) -> Any:
        # one of fake tensors has tensors of its own, and computes nothing
        if not isinstance(mode, private.FakeTensorMode):
            self.eagerly(f"{type(mode).__qualname__}, a mode that sees operators, in the step")
        return original(mode)

    def _without_a_look(self, name: str, original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.reads_gradients
        if name.endswith("zero_grad"):
            groups = [{"params": owner.parameters()}] if isinstance(owner, nn.Module) else owner.param_groups
            self.on_zeroed([p for group in groups for p in group["params"]])
        try:
            return original(owner, *args, **kwargs)
        finally:
            self.reads_gradients = before

    def _of_storage(self, name: str, original: Callable[..., Any], storage: Any, *args: Any) -> Any:
        """Storages have values of their own, as those of a file that is written, unless the step's are replaced."""
        with private.no_torch_functions():
            if not name.endswith(("__getitem__", "_getitem")) and any(private.is_in(t, storage) for t in self.outside):
                self.eagerly(f"{name} in the step")
            with self.beside():
                return original(storage, *args)

    def _copied_shallow(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        """``copy.copy``, which shares the memory."""
        with private.no_torch_functions():
            if id(tensor) in self.sources and type(tensor) is Tensor and not self.asks(tensor):
                return self.called(_MEMORY_OF.__get__, (tensor,), {})  # a version of its own, as a copy has
            self.eagerly("copy.copy of a tensor in the step")
            return original(tensor)

    # ------------------------------------------------------------------ operators of others
    def _found_own_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The first call of an operator whose backward pass is Python."""
        if self.is_below:
            self.eagerly(f"code in C++ calls {func}, in whose backward pass runs Python", again=True)
        if isinstance(func, Saving):  # the function packs what it saves itself
            return self._found_own_backward(func.function, args[1:], kwargs), ()
        self.follower.kinds[func] = "own"
        return self._with_own_backward(func, args, kwargs)

    def _with_own_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of an operator whose backward pass is Python, given tensors that ask for gradients as results do."""
        if not torch.is_grad_enabled() or not any(map(self.asks, tensors_in((args, kwargs)))):
            return self.called(func, args, kwargs)
        lent: dict[int, tuple[Tensor, Tensor]] = {}

        def asking(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.requires_grad or not self.asks(value):
                return value
            made = value.detach().requires_grad_()
            lent[id(made)] = made, value
            return made

        with private.no_torch_functions():
            with self.beside():
                given = mapped(asking, args), mapped(asking, kwargs)
            before, self._lent, self.autocast = self._lent, lent, private.autocast_state() or ()
            try:
                out = func(*given[0], **given[1])
            finally:
                self._lent, self.autocast = before, ()
            if not self.is_eager and any(id(t) not in self.sources for t in tensors_in(out)):
                self.eagerly(f"results of {getattr(func, '__name__', func)} that the step does not know", again=True)
        return out

    def _apply_of_operator(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function that such an operator is."""
        lent, self._lent = self._lent or {}, None

        def own(value: Any) -> Any:
            return lent[id(value)][1] if id(value) in lent else value

        try:
            with private.with_torch_functions(), self:  # the user's code in it is seen
                return self.apply(kind, *mapped(own, args), **mapped(own, kwargs))
        finally:
            self._lent = lent

    def look_behind(self, args: Any, kwargs: Any) -> None:
        """Run a step again, and eagerly, where C++ hides how results depend on the operands of an operator.

        A ``torch::autograd::Function`` switches gradients off around its forward; ``torch.no_grad`` is seen.
        """
        if (lent := self._lent) and any(id(t) in lent for t in tensors_in((args, kwargs))):
            self.eagerly("an operator of an extension calls others on what asks for gradients", again=True)
        if not self._expects_grad or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return
        # within calls of which the mode was told it does not see what Python sets
        is_told = self in private.function_modes() and not private.in_transforms()
        if is_told and any(map(self.asks, tensors_in((args, kwargs)))):
            self.eagerly("code in C++ that torch does not dispatch and that has gradients of its own", again=True)

    @contextlib.contextmanager
    def in_unseen_code(self) -> Iterator[None]:
        """The user's code, of which C++ may ask for the memory of placeholders, and make other errors of ours."""
        try:
            yield
        except Exception as error:
            if self.eager.ended is None and not self.is_eager and private.found_no_memory(error):
                place = location_of(error)
                self.eagerly("code that torch does not dispatch takes the memory of a tensor", place, again=True)
            if self.eager.ended is None:
                raise
        if self.eager.ended is not None:
            raise self.eager.ended

    @override
    def __enter__(self) -> Any:
        self._expected.append(self._expects_grad)
        self._expects_grad = torch.is_grad_enabled()
        return super().__enter__()

    @override
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self._expects_grad = self._expected.pop()
        super().__exit__(exc_type, exc_val, exc_tb)

    # ------------------------------------------------------------------ what others ask
    def asks(self, tensor: Tensor) -> bool:
        """Whether a tensor requires gradients."""
        return self.recorder.asks(tensor)

    def fake_made(self, placeholder: Tensor) -> Tensor:
        """A result as recorded, if no call writes into it."""
        return self.recorder.fake_made(placeholder)

    def live_node(self, token: Tensor) -> Any:
        """The node of autograd's graph behind a token, in a step that runs eagerly."""
        return self.eager.node(token)

    # ------------------------------------------------------------------ calls
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(issubclass(kind, Replaced) for kind in types):
            args, kwargs = with_successors((args, kwargs))
            types = [kind for kind in types if not issubclass(kind, Replaced)]
        if self.reason is not None or self.is_apart:
            if self.memory.is_apart and not self.is_apart:
                return self.for_good(func, args, kwargs or {})
            self.autocast = private.autocast_state() or () if self.reason is not None else self.autocast
            return func(*args, **kwargs) if kwargs else func(*args)
        if types and any(map(private.is_another_class, types)):
            return self._of_another_class(func, types, args, kwargs or {})
        if self.looks_closer:
            if self.memory.is_shared:
                if self.memory.look((args, kwargs or {})):
                    return self.for_good(func, args, kwargs or {})
                if self.follower.kinds.get(func) == "call":  # what writes is compared there
                    return self.called(func, args, kwargs or {})
            if self.has_transforms and private.in_transforms():
                out = func(*args, **kwargs) if kwargs else func(*args)
                self.wrapped.note(out)
                return out
            if self.wrapped.are_noted and any(map(private.is_wrapped, tensors_in((args, kwargs)))):
                self.wrapped.check_step((args, kwargs))
                self.eagerly("a call of what a transform of torch.func has returned", again=True)
            if self._is_looked_at(func):
                return self.called(func, args, kwargs or {})
        for note in reversed(children := self.here.children):
            if note.func is func and note.take is not None:
                found = note.take(self, args, kwargs)
                if found is not MISSED:
                    if children[-1] is not note and self.here is note:
                        children.remove(note)
                        children.append(note)
                    return found
        kind = self.follower.kinds.get(func)
        if kind is None:
            kind = self._kind_of(func)
        if kind == "gradient" and self.by_hand is not None:  # asked often
            return self.by_hand.gradient(args[0])
        if kind == "about":  # no operator runs
            if func is private.set_grad_enabled:
                self._expects_grad = args[0]
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        return self.called(func, args, kwargs) if kind == "call" else self._otherwise(kind, func, args, kwargs)

    def _of_another_class(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """A call with objects whose class makes it: of tensors for good, of others by calls that are followed."""
        theirs = [kind for kind in types if private.is_another_class(kind)]
        if any(issubclass(kind, Tensor) for kind in theirs):
            self.eagerly(class_in_words(theirs[0]))
            return self.for_good(func, args, kwargs)
        with self:
            for kind in theirs:
                if (found := kind.__torch_function__(func, types, args, kwargs)) is not NotImplemented:
                    return found
        return func(*args, **kwargs)

    def _as_python(self, value: Any) -> Any:
        """Numbers of NumPy as Python's; what stands in for a tensor, or is a part of one, as the tensor."""
        if isinstance(value, DTensor):
            return self._as_whole(value)
        if hasattr(type(value), "is_tree_leaf"):
            with self:  # what a metric computes are calls of the step, too
                return known(value)
        return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value

    def _is_reference(self, value: Any) -> bool:
        """Whether it is a tensor in parts that is none of the module's: what a hook has kept of a weight."""
        if not isinstance(value, DTensor) or value.requires_grad:  # a leaf that would get a gradient is refused
            return False
        return self.gathered is not None and not self.owns(value)

    def _as_whole(self, value: Any) -> Any:
        """What stands for such a tensor in calls; anything else as it is."""
        if self.gathered is None or not self._is_reference(value):
            return value
        with self.beside():
            whole = self.gathered(value)
        self._wholes[id(whole)] = whole
        return whole

    def _is_looked_at(self, func: Any) -> bool:
        """Whether a call is to be looked at more closely than one that is known from before."""
        looks = self.saved.hooks or self.becoming.apart
        return bool(looks and self.follower.kinds.get(func) == "call" and not isinstance(func, EngineCall))

    def _kind_of(self, func: Any) -> str:
        """How to treat calls of a function, found at its first call."""
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if self.by_hand is not None and self.by_hand.handles(name, owner):
            kind = "gradient" if (owner, name) == ("grad", "__get__") else "by hand"
        elif private.is_of_profiler(func):  # ``record_function``, which all optimizers call
            kind = "about"
        elif func in _READS:
            kind = "read"
        elif func in _DATA:
            kind = "data"
        elif func is Tensor.__deepcopy__:
            kind = "copy"
        elif func in RECURRENT:
            kind = "recurrent"
        elif func in (torch.ctc_loss, nn.functional.ctc_loss):
            kind = "lengths"
        elif func in _MEMORY:
            kind = "set"
        elif func in VIEWED_IN_PLACE:
            kind = "in place"
        elif name == "__get__" and owner in _PROPERTIES or name in _SIZES or name == "_set_grad_enabled":
            kind = "about"
        elif name == "__set__" or name in _SETS:
            kind = "set"
        elif name == "__get__" and owner in ("T", "mT", "H", "mH", "data", "real", "imag"):
            kind = "call"
        elif name == "__get__" or name in _STRIDES:
            kind = "history"
        else:
            return "unknown"
        self.follower.kinds[func] = kind
        return kind

    def _otherwise(self, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        if kind in ("read", "data"):
            args, kwargs = mapped(self._as_whole, args), mapped(self._as_whole, kwargs)
        if kind == "read":
            return self.reads.read(func, args, kwargs)
        if kind == "data":
            return self._data(func, args, kwargs)
        if kind == "history":
            return self._about_history(func, args, kwargs)
        if kind == "copy":
            return self._deepcopy(func, args, kwargs)
        if kind == "in place":
            return self.becoming.viewed_in_place(func, args, kwargs)
        if kind == "checks":  # operator by operator: one of them is a read
            with private.no_torch_functions():
                return func(*args, **kwargs)
        if kind == "own":
            return self._with_own_backward(func, args, kwargs)
        if kind == "lengths":
            args, kwargs = self._with_lengths(args, kwargs)
        for tensor in self._to_be_sized(args, kwargs, func) if kind == "recurrent" else ():
            self.__torch_function__(sized, (), (tensor, *tensor.shape))
        if kind == "recurrent" and (open_ := self._packed.for_all_lengths(func, args, kwargs)) is not None:
            return self.__torch_function__(open_[0], (), open_[1], {})
        if kind == "by hand" and self.by_hand is not None:
            return self.by_hand.called(func, args, kwargs)
        return self._set(func, args, kwargs) if kind == "set" else self.called(func, args, kwargs)

    # ------------------------------------------------------------------ following and recording
    @override
    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if type(func) is FunctionType and not _is_torchs(func):  # it may be overridden, as torch's own are
            return self._otherwise("checks", func, args, kwargs)  # with the very objects that it was given
        if self.follower.refused and (func, *map(type, args)) in self.follower.refused:
            return NotImplemented
        if func in _INDEXING:
            args = (args[0], self._index(args[1]), *args[2:])
            if self.is_eager:
                return self.for_good(func, args, kwargs)
        args, kwargs = mapped(self._as_python, args), mapped(self._as_python, kwargs)
        if self.is_eager:  # a metric's value lets the step
            return self.for_good(func, args, kwargs)
        if func in self.follower.numbers:
            args, kwargs = self._with_numbers(func, args, kwargs)
            if self.is_eager:
                return self.for_good(func, args, kwargs)
        if (out := kwargs.get("out")) is not None and self.becoming.takes_the_size_of(out, args, kwargs):
            return self.becoming.made_as(out, func, args, kwargs)
        if self.memory.look((args, kwargs)):
            return self.for_good(func, args, kwargs)
        if any(isinstance(v, torch.Generator) for _, v in leaves_by_place((args, kwargs))):
            if kwargs.get("generator") is not torch.default_generator:
                return self._with_generator(func, args, kwargs)
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        if self.saved.hooks and func is not sized and not isinstance(func, EngineCall) and torch.is_grad_enabled():
            return self.saved.call(func, args, kwargs)
        around = around_now(self.block)
        if around.kernels != self.kernels:
            self.eagerly(_OTHER_KERNELS)
            return self.for_good(func, args, kwargs)
        if type(func) is FunctionType and any(_is_called(leaf) for _, leaf in leaves_by_place((args, kwargs))):
            args, kwargs = mapped(self._with_calls_seen, args), mapped(self._with_calls_seen, kwargs)
            return self._otherwise("checks", func, args, kwargs)
        likely = self.here.children[-1] if self.here.children and func is not sized else self.root
        if (
            likely.func is sized
            and not in_vain(self, sized, likely.source)
            and (new := self._to_be_sized(args, kwargs))
        ):
            return self._with_size(new[0], func, args, kwargs)
        known, others, with_other_counts, lists_differ = len(self.outside), list[Note](), list[Note](), False
        for note in reversed(self.here.children):
            if note.func != func or note.around != around or note.reads:
                continue
            found, has_counts, is_it = self._compared(note, args, kwargs)
            if not has_counts:
                with_other_counts += [note] if found is not None else []
                lists_differ = lists_differ or bool(found)
            elif is_it and found is not None:
                if found and not found.keys() <= note.free:
                    note.free |= found.keys()
                    note.take = None
                elif note.take is not None and not found:  # of other objects each time: none are kept to compare with
                    note.take = never if note.anew else None
                    note.anew = True
                return self.take(note, args, kwargs)
            elif found:
                others.append(note)
            self.recorder.unmet(known)
        if func is not sized and (new := self._to_be_sized(args, kwargs, func)):
            return self._with_size(new[0], func, args, kwargs)
        # what Python has read may be what it computes with
        are_read = (others or lists_differ) and self.reads.decide_sizes(lists_alone=not others)
        by_python = {} if are_read else told_numbers(self, [*others, *with_other_counts], func, args, kwargs)
        if self.generator.watch():
            return self.called(func, args, kwargs)
        if self.knows_too_many() and not self.must_be_graph:
            self.eagerly(f"{getattr(func, '__name__', func)} is called with other arguments in every step")
            return self.for_good(func, args, kwargs)
        if self.knows_many_paths:  # decided once
            self.knows_many_paths = False
            if not self.follower.records_another():
                self.eagerly(NEW_PATH)
                return self.for_good(func, args, kwargs)
        places = len(self.follower.numbers.get(func, ()))
        try:
            note = self.recorder.record(func, args, kwargs, around, self.data_counts.counts_first, by_python)
        except CannotBeFollowed as error:
            self.recorder.failed = func, args, kwargs
            # autograd has been passed by where the dispatcher alone sees a call
            again = self.is_below and torch.is_grad_enabled() and any(map(self.asks, tensors_in((args, kwargs))))
            self.eagerly(str(error), again=again)
            return self.for_good(func, args, kwargs)
        except HasOwnBackward:
            self.recorder.unmet(known)
            return self._found_own_backward(func, args, kwargs)
        except Checks:
            self.recorder.unmet(known)
            self.follower.kinds[func] = "checks"
            return self._otherwise("checks", func, args, kwargs)
        except private.DataDependentOutputException:
            self.recorder.unmet(known)
            if len(self.follower.numbers.get(func, ())) > places:
                return self.called(func, args, kwargs)
            if self.is_below:
                return self.reads.asks_for_values(func, args, kwargs)
            self.follower.kinds[func] = "checks"
            return self._otherwise("checks", func, args, kwargs)
        self.left_at = self.left_at or (None if note is None else note.source)
        if note is None:
            self.recorder.unmet(known)
            refused = (func, *map(type, args)) in self.follower.refused
            return NotImplemented if refused else self._about_history(func, args, kwargs)
        return self.take(note, args, kwargs)

    def _compared(self, note: Note, args: Any, kwargs: Any) -> tuple[dict[Place, Any] | None, bool, bool]:
        """Of a call and a known one: numbers that differ, whether this step has its counts, whether it is this one."""
        told, known = note.numbers_told(args, kwargs), len(self.counts)
        if told is None:
            return None, True, False
        self.counts += told
        try:
            found = numbers_that_differ(note, args, kwargs, self)
            if not self.data_counts.may_be(note):
                return found, False, False
            if found and (tells(self, note, found) or not self.recorder.is_alike(note, args, kwargs, found)):
                return found, True, False
            return found, True, found is not None
        finally:
            del self.counts[known:]

    def _to_be_sized(self, args: Any, kwargs: Any, func: Any = None) -> list[Tensor]:
        """Tensors from outside whose sizes the step tells before a call.

        Args:
            args: of the call.
            kwargs: likewise.
            func: what is called, if those alone are meant that have had other sizes there.
        """
        found, places = list[Tensor](), self.follower.sizes_outside
        new = [(place, leaf) for place, leaf in leaves_by_place((args, kwargs)) if self.may_be_sized(leaf)]
        source = user_location() or "" if new and func is not None else ""
        for place, tensor in new if not in_vain(self, sized, source) else ():
            if func is not None and (seen := places.setdefault((func, source, place), tensor.shape)) is not None:
                if seen == tensor.shape:
                    continue
                places[func, source, place] = None
            found.append(tensor)
        return found

    def _with_size(self, tensor: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of which a tensor from outside is told the size of first."""
        self.__torch_function__(sized, (), (tensor, *tensor.shape))
        return self.called(func, args, kwargs)

    def _with_calls_seen(self, value: Any) -> Any:
        """A function of the user's as a function of torch may call it: what it calls is followed."""
        if not _is_called(value):
            return value

        @functools.wraps(value, updated=())
        def seen(*args: Any, **kwargs: Any) -> Any:
            with private.with_torch_functions(), self:
                return value(*args, **kwargs)

        return seen

    def _index(self, index: Any) -> Any:
        """An index as torch takes it: one number as Python's, lists of them as a tensor, and not one number each."""
        is_list = isinstance(index, Sequence) and not isinstance(index, (tuple, str))
        return self._index_in(tuple(index) if is_list and _is_for_dimensions(index) else index)

    def _index_in(self, index: Any) -> Any:
        if type(index) is tuple:
            return tuple(map(self._index_in, index))
        if isinstance(index, Tensor) and index.ndim == 0 and index.dtype in _POSITIONS:
            return self.reads.read(Tensor.item, (index,), {})
        index = list(index) if isinstance(index, Sequence) and not isinstance(index, (tuple, str)) else index
        numbers = type(index) is list and index and all(type(i) in (int, bool) for i in index)
        if numbers or type(index).__module__ == "numpy" and getattr(index, "ndim", 0):
            return torch.as_tensor(index)
        return index

    def _with_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The arguments; tensors that torch takes as numbers are read."""
        places = self.follower.numbers[func]
        leaves = leaves_by_place((args, kwargs))
        found = [(p, v) for p, v in leaves if p in places and isinstance(v, Tensor) and v.ndim == 0]
        return with_numbers((args, kwargs), {p: self.reads.read(Tensor.item, (v,), {}) for p, v in found})

    def of_engine(self, func: Any, args: Any, kwargs: Any, *, create: bool) -> Any:
        """A call of autograd's engine."""
        if create:
            self._packed.unroll()
        if self.functions.are_there:
            return self.functions.through_engine(func, args, kwargs, create=create)
        return self.called(func, args, kwargs)

    def fresh(self, out: Any) -> Any:
        """Placeholders for the dispatcher. Autograd above may make views of them, once."""
        note = self.notes[-1]
        replaced: dict[int, Tensor] = {}
        for index, mould in enumerate(note.moulds):
            was = note.handed[index]
            with private.no_torch_functions():
                replaced[id(was)] = note.handed[index] = made = mould.detach()
            self.sources[id(made)] = self.sources.pop(id(was))
        return mapped(lambda leaf: replaced.get(id(leaf), leaf), out)

    def takes(self, note: Note, tensor: Any, number: int) -> bool:
        """Whether an object that is new in each step may be the note's operand of this number."""
        is_new = isinstance(tensor, Tensor) and id(tensor) not in self.sources and not is_foreign(tensor)
        return is_new and not self._is_reference(tensor) and self.accepts(note, tensor, number)

    def hand_out(self, note: Note) -> None:
        """Make new placeholders for results whose placeholder is missing or still referenced."""
        with self.beside():
            placeholders.handed_out(note)

    @override
    def take(self, note: Note, args: Any, kwargs: Any) -> Any:
        if self.memory.refuses(note):
            self.eagerly(f"{note.name} writes into memory that may be an array's or a storage's as well")
            return self.for_good(note.func, args, kwargs)
        if self.becoming.apart and self.becoming.is_seen(note.writes):
            self.eagerly(f"{note.name} writes into memory that tensor.data = ... has given to two tensors")
            return self.for_good(note.func, args, kwargs)
        if self._wholes and any(type(s) is Outside and id(self.outside[s.number]) in self._wholes for s in note.writes):
            self.eagerly(f"{note.name} writes into a tensor in parts that is no parameter or buffer of the module")
            return self.for_good(note.func, args, kwargs)
        if note.draws and not self.generator.may_draw():
            return self.called(note.func, args, kwargs)
        counts = bool(note.counts) and not note.reads  # where Python reads it has been looked, and is counted behind
        if counts and self.memory.look():
            return self.for_good(note.func, args, kwargs)
        if counts and self.generator.watch():
            return self.called(note.func, args, kwargs)
        if note.met and max(note.met) >= len(self.outside):
            for tensor in tensors_in((args, kwargs)):
                self.source_of(tensor)
        self.notes.append(note)
        self.held[note.depth] = args, kwargs
        known_before = len(self.counts)
        self.counts += note.numbers_told(args, kwargs) or ()
        if note.counts or self.counts:
            before, self.here, known_counts = self.here, note, len(self.counts)
            reason = None
            try:
                if counts:
                    self.data_counts.count(note, args, kwargs)
                is_another = counts and not self.data_counts.may_be(note)
                if not is_another:
                    self.data_counts.fit(note)
            except CannotBeFollowed as error:
                is_another, reason = True, str(error)
            self.here = before
            if not (note.is_fitted or is_another):  # nor is it ever, if this step ends eagerly
                note.pins = dict(enumerate(self.counts))
            if is_another:
                self.notes.pop()
                del self.held[note.depth]
                told = self.data_counts.take_back(known_counts)
                del self.counts[known_before:]
                if reason is not None:
                    self.eagerly(reason)
                    return note.func(*args, **kwargs)
                if note.met:
                    self.recorder.unmet(min(note.met))
                with self.data_counts.counted_already(note, told):
                    return self.called(note.func, args, kwargs)
        self.hand_out(note)
        for placeholder, source in zip(note.handed, note.made, strict=True):
            self.sources[id(placeholder)] = source
        siblings = self.here.children
        if siblings[-1] is not note:
            siblings.remove(note)
            siblings.append(note)
        self.here = note
        return self.results(note, args, kwargs)

    def results(self, note: Note, args: Any, kwargs: Any) -> Any:
        """The results of a call."""
        handed = note.handed
        operands: list[Tensor] | None = None

        def leaf(value: Any) -> Any:
            nonlocal operands
            if type(value) is Fresh:
                return handed[value.index]
            if type(value) is Operand:
                operands = tensors_in((args, kwargs)) if operands is None else operands
                return operands[value.index]
            return value

        return mapped(leaf, note.results)

    # ------------------------------------------------------------------ other things than calls
    def _about_history(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A question about a tensor's autograd history, answered by the recorded tensor: a placeholder has none."""
        source = self.sources.get(id(args[0])) if args else None
        of = getattr(getattr(func, "__self__", None), "__name__", "")
        if of == "requires_grad" and type(source) is Made:
            return self.asks(args[0])
        known, question = self.here.asking, (of, source)
        if question in known:
            return known[question]
        subject = self.recorder.fake_now(source) if type(source) is Made else None
        if of in ("grad_fn", "is_leaf") and subject is not None and (of == "is_leaf" or subject.grad_fn is None):
            known[question] = getattr(subject, of)
            return known[question]
        if of == "grad_fn" and subject is not None:
            return self.functions.node(args[0], subject)
        if type(source) is Made and getattr(func, "__name__", "") in _STRIDES:
            note = self.notes[source.depth]
            if note.sizes is not None:
                spec = note.specs_at(self.counts)[source.index]
                if getattr(func, "__name__", "") == "storage_offset" or any(size < 2 for size in spec.shape):
                    subject = result_now(self, source)
                else:
                    with self.beside():
                        subject = torch.empty_strided(spec.shape, spec.stride, device="meta")
        with self.beside():
            if subject is None:
                return func(*args, **kwargs)
            found = func(subject, *args[1:], **kwargs)
        if not _is_plain(found):  # what is done to it, or with it, would be lost
            self.eagerly(f"{of or getattr(func, '__name__', func)} of a tensor of the step")
            return func(*args, **kwargs)
        return found

    def _set(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Hooks, ``requires_grad_`` and the like: at once on the user's own tensors, else a noted call or eager."""
        name = getattr(func, "__name__", "")
        if name in ("grad",):
            create = args[4] if len(args) > 4 else kwargs.get("create_graph")
            return self.of_engine(func, args, kwargs, create=bool(create))
        if name in ("register_hook", "retain_grad") and type(self.sources.get(id(args[0]))) in (Made, Given):
            if not self.asks(args[0]):
                raise RuntimeError(f"cannot {name.replace('_', ' ')} of a tensor that doesn't require gradient")
            return self.functions.hook(*args, **kwargs) if name == "register_hook" else self.functions.retain(args[0])
        if name == "requires_grad_" and type(self.sources.get(id(args[0]))) is Made:
            return self.called(func, args, kwargs)
        mine = [t for t in tensors_in((args, kwargs)) if id(t) in self.sources]
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if (owner, name) == ("data", "__set__") and (args[0] is args[1] or self.becoming.is_all_of(args[0], args[1])):
            return None
        if (owner, name) == ("data", "__set__") and self.becoming.can_be_written(args[0], args[1]):
            return self.becoming.give_data(args[0], args[1])
        if mine or name in ("backward",):
            what = f"tensor.{owner} = ..." if name == "__set__" else f"{name} of {owner or 'a tensor'}"
            self.eagerly(f"{what} in the step")
        if func in _MEMORY and not self.is_eager:
            self.memory.hand_out(args[0])
        with self.beside():
            return func(*args, **kwargs)

    def _data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Tensors made of Python's data are the user's own; made of a placeholder they are a call."""
        if func is Tensor.new_tensor and not isinstance(args[1] if len(args) > 1 else kwargs.get("data"), Tensor):
            given = {name: value for name, value in kwargs.items() if value is not None}
            return self._data(torch.tensor, args[1:], {"dtype": args[0].dtype, "device": args[0].device, **given})
        if args and isinstance(args[0], Tensor):
            return self.called(func, args, kwargs)
        is_number = args and type(args[0]) in (int, float, bool)
        own = () if is_number else tensors_in((args, kwargs))
        if any(id(t) in self.sources for t in own):
            return self.reads.read(func, args, kwargs)
        self.is_apart = True
        try:
            with contextlib.nullcontext() if own else private.BelowDispatchModes():
                return func(*args, **kwargs)
        finally:
            self.is_apart = False

    def _with_lengths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Two lists of lengths as tensors, whose values may be others in each step. Torch's kernels take either."""
        leaves = [*args, *kwargs.values()]
        lists = [at for at, leaf in enumerate(leaves) if isinstance(leaf, list | tuple)]
        if len(lists) == 1:  # which torch refuses
            return args, kwargs
        for at in lists:
            leaves[at] = self._data(torch.tensor, (leaves[at],), {})
        return tuple(leaves[: len(args)]), dict(zip(kwargs, leaves[len(args) :], strict=True))

    def _deepcopy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``copy.deepcopy``, which keeps copies in a dictionary. The copy of a result is a call."""
        tensor, memo = args
        if id(tensor) in memo:
            return memo[id(tensor)]
        source = self.sources.get(id(tensor))
        fake = self.recorder.fake_of(source) if type(source) is Made else tensor
        if source is None or fake.requires_grad or type(tensor) is not Tensor:
            if source is not None:
                self.eagerly("a deep copy of a tensor with a gradient")
            self.on_values()
            with self.beside():
                return func(*args, **kwargs)
        memo[id(tensor)] = self._copied_with_its_memory(tensor, source, memo.setdefault(_COPIES, {}))
        return memo[id(tensor)]

    def _copied_with_its_memory(self, tensor: Tensor, source: Source, copies: dict[Source, Tensor]) -> Any:
        """A copy of a result; copies of what has memory in common have theirs in common."""
        root = self.root_of(source)
        fake, whole = (self.recorder.fake_of(s) if type(s) is Made else self.tensor_in_hand(s) for s in (source, root))
        if root == source or fake.dtype != whole.dtype or not whole.is_contiguous():
            copy = copies.get(root)
            copies[root] = self.called(torch.clone, (tensor,), {}) if copy is None else copy
            return copies[root]
        if root not in copies:
            alone = self.called(Tensor.detach, (self.tensor_in_hand(root),), {})
            copies[root] = self.called(torch.clone, (alone,), {})
        begin = fake.storage_offset() - whole.storage_offset()
        return self.called(torch.as_strided, (copies[root], fake.shape, fake.stride(), begin), {})

    def _with_generator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A draw from a generator of the user's own happens when it is called, with values of the step's tensors."""
        used = [v for _, v in leaves_by_place((args, kwargs)) if isinstance(v, torch.Generator)]
        mine = [t for t in tensors_in((args, kwargs)) if id(t) in self.sources]
        if private.are_torchs_own(used) or any(map(self.asks, mine)):
            self.eagerly(f"{getattr(func, '__name__', func)} draws with a generator, and into a tensor of the step")
        values = self.reads.read(_values_of, tuple(mine), {}) if mine and not self.is_eager else ()
        if self.is_eager or not values:
            with self.beside():
                return func(*args, **kwargs)
        true = {id(t): value for t, value in zip(mine, values, strict=True)}
        args, kwargs = mapped(lambda leaf: true.get(id(leaf), leaf), (args, kwargs))
        with self.beside():
            found = func(*args, **kwargs)
        written = [t for t, value in zip(mine, values, strict=True) if found is value]
        return self.called(Tensor.copy_, (written[0], found), {}) if written else found

    # ------------------------------------------------------------------ the other end: for good, as eager training
    @override
    def eagerly(self, why: str, place: str | None = None, *, again: bool = False) -> None:
        self.eager.begin(why, place, again=again)

    @override
    def for_good(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.eager.call(func, args, kwargs)

    def of_loss(self, loss: Tensor, divisor: int) -> None:
        """Run the user's Python in the backward pass of the loss."""
        if self.by_hand is not None:
            self.by_hand.zero()
        self.functions.of_loss(loss, divisor)
        if self.by_hand is not None and not self.is_eager:
            pairs = [(self.sources.get(id(t)), self.sources.get(id(g))) for t, g in self.by_hand.added()]
            self.added = [(of, added) for of, added in pairs if of is not None and added is not None]

    # ------------------------------------------------------------------ the end
    @property
    def numbers(self) -> dict[tuple[int, Place], Any]:
        """The numbers of calls that differ in other steps, once Python is done."""
        return self.known_numbers or {}

    def end(self) -> None:
        """End the step: its calls are compiled, so that the next step follows fast."""
        if not self.is_eager and kernels_now() != self.kernels:
            self.eagerly(_OTHER_KERNELS)
        self._copies.forget()
        self.recorder.forget()
        if self.is_eager:
            self.eager.end()
            self.memory.let_go()
            return
        self.follower.searched = max(0.0, self.follower.searched - EARNED * len(self.notes))
        if self.has_counts:
            loss = self.notes[self.loss.depth] if isinstance(self.loss, Made) else None
            if not all(note.is_fitted for note in self.notes) or (loss is not None and loss.behind is None):
                CountFormulas(self).end()
            elif self.tree is not None:
                self.tree.ended(self.notes, self.path, tuple(self.counts[: self.opened]))
        free = [self.notes[depth] for depth in self.held if self.notes[depth].free]
        self.known_numbers = {(n.depth, p): v for n in free for p, v in self.numbers_of(n).items()}
        for depth, (args, kwargs) in self.held.items():
            note = self.notes[depth]
            if note.take is None and not note.reads:
                is_call = self.follower.kinds.get(note.func) == "call"  # what is not has more to do where it is called
                arguments = args, kwargs, self.sources, self.notes, self.follower.given
                met = {number: self.outside[number] for number in note.met}
                is_bound = is_call and not self.memory.has(list(met.values()))
                note.take = compiled(note, *arguments) if is_bound else never
                if is_bound and not note.anew:
                    self.follower.bound |= {(note.number, n): t for n, t in met.items() if is_plain(t)}
        self.memory.let_go()

    @property
    def mark(self) -> int:
        """A hash of the path so far, and of its numbers that differ in other steps."""
        numbers = self.numbers_between(0, len(self.notes)) if self.known_numbers is None else self.known_numbers
        told = [self.counts[i] for i in told_in(self.notes)] if self.has_data_counts else []
        known = sorted(numbers.items(), key=repr), told
        return stable_hash((self.here.mark, known)) if numbers or told else self.here.mark

    @property
    def is_first(self) -> bool:
        """Whether no path is known yet."""
        return not self.here.children

    def kept(self) -> list[Made | Given]:
        """The results that are still referenced, and on several ranks the stand-ins of batch tensors."""
        self.held.clear()
        self.functions.forget()
        retained = self._retained()
        if self.by_hand is not None:
            self.by_hand.let_go(self.sources)
        self.sources.clear()
        given = [Given(i) for i in placeholders.kept(self.follower.given) if i in self.stand_ins]
        if self.has_transforms:
            placeholders.end_histories(self.notes)
        made = placeholders.still_had(self.notes)
        for of, gradient in retained:
            if isinstance(of, Given) or of in made:
                self.functions.keep(self.tensor_now(of), self.tensor_now(gradient))
                made.append(gradient)
        return given + list(dict.fromkeys(made))

    def _retained(self) -> list[tuple[Made | Given, Made]]:
        """The retained gradients with their tensors."""
        pairs = [(self.sources.get(id(t)), self.sources.get(id(g))) for t, g in self.functions.retained.values()]
        self.functions.retained.clear()
        return [(of, g) for of, g in pairs if isinstance(of, (Made, Given)) and isinstance(g, Made)]

    def fill(self, source: Made | Given, value: Tensor) -> None:
        """Give a kept result, or the stand-in of a batch tensor, its value."""
        if isinstance(source, Given):
            given = self.follower.given[source.position]
            placeholders.fill(given, value, trained=given.requires_grad)
            return
        note = self.notes[source.depth]
        placeholder, fake = note.handed[source.index], note.fakes[source.index]
        is_retained = id(placeholder) in self.functions.retained  # its gradient is asked of a leaf
        made_at = None if fake.is_leaf or is_retained else note.source or note.name
        value, trained = self.memory.of_kept(source, value), self.recorder.is_trained(source)
        placeholders.fill(placeholder, value, trained=trained, made_at=made_at)
        if trained and fake.is_leaf and not is_retained:
            self.leaves.append(placeholder)
        del placeholder
        note.handed[source.index] = note.moulds[source.index].detach()


_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_plain(value: Any) -> bool:
    """Whether an answer is a plain value that cannot change and through which nothing can be changed."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
