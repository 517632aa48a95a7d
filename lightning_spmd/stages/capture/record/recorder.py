"""Records what runs under it as one fx graph: a dispatch mode below autograd and above FakeTensorMode.

Why not ``make_fx``: it has no place for host numbers that stay inputs (optimizers take them as ``float`` and
``ScalarList`` arguments, where a ShapeEnv symbol is specialised), it cannot name the user's line when something
data-dependent happens, and it costs twice the time. This recorder keeps every operator exactly as eager autograd calls
it, in-place operators included, so the graph replayed on the same inputs is bitwise the eager program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd import _private_api as private
from lightning_spmd._private_api import pytree
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.default_dtype import default_dtype
from lightning_spmd.ir.node_info import NodeInfo, Section, TensorSpec
from lightning_spmd.ir.operators import onednn_lstm
from lightning_spmd.ir.reads import READ
from lightning_spmd.messages import the_step
from lightning_spmd.stages.capture.numbers.host_scalar import HostScalar, Number, scalar_of
from lightning_spmd.stages.capture.record.default_dtype import decided_dtype, saying
from lightning_spmd.stages.capture.record.fake_calls import FakeCalls, flat, mapped
from lightning_spmd.stages.capture.record.function_calls import FunctionCalls
from lightning_spmd.stages.capture.record.known_values import KnownValues, draw_key
from lightning_spmd.stages.capture.sizes.data_sizes import DataSizes
from lightning_spmd.stages.capture.user_code import user_location

aten = torch.ops.aten
_CAST = aten._to_copy.default  # noqa: SLF001 - an operator's public name
_DEVICE = torch.ops.prim.device.default

# Aliases without effect below autograd: recording them would only cost a call a step.
_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}

_LOOKS = {getattr(aten, name).default for name in ("size", "stride", "sym_size", "sym_stride") if hasattr(aten, name)}


class Recorder(private.TorchDispatchMode):
    """Dispatch mode that appends every operator to ``graph``.

    Args:
        fake_mode: the FakeTensorMode that computes shapes; must be active below this mode.
        split: whether ranks are going to have parts of the batch.
    """

    def __init__(self, fake_mode: Any, *, split: bool = False) -> None:
        super().__init__()
        self.calls = FakeCalls(fake_mode)
        self.graph = fx.Graph()
        self.section = Section.FORWARD
        self.module_path: list[str] = [""]
        self.decisions: list[tuple[fx.Node, Number, str]] = []
        self.constants: list[Tensor] = []
        self.on_constant: Callable[[Tensor], fx.Node] | None = None
        self._nodes: dict[int, tuple[Tensor, fx.Node]] = {}
        self.known = KnownValues()
        self._exposed: list[HostScalar] = []
        self.functions = FunctionCalls(by_dimensions=split)
        self.data_sizes = DataSizes(self.call, self._known_numbers)
        self._forward_info: dict[int, NodeInfo] = {}
        self._draws: dict[bytes, fx.Node] = {}
        self.failing = ""
        self.autocast: tuple[tuple[str, torch.dtype], ...] = ()

    # ------------------------------------------------------------------ values
    def bind(self, tensor: Tensor, node: fx.Node) -> None:
        """From now on ``tensor`` (a fake tensor) is what ``node`` produces."""
        self._nodes[id(tensor)] = (tensor, node)  # the reference keeps id() from being reused

    def node_of(self, tensor: Tensor) -> fx.Node | None:
        """The node that produces this tensor, or None if it is not part of the graph."""
        entry = self._nodes.get(id(tensor))
        return None if entry is None else entry[1]

    def storages(self) -> set[int]:
        """Identities of the storages of all values so far."""
        return {private.storage_of(tensor) for tensor, _ in self._nodes.values()}

    def lift_constant(self, tensor: Tensor) -> fx.Node:
        """A real tensor met in the code: a graph input of its own, read anew each step."""
        entry = self._nodes.get(id(tensor))
        if entry is not None:
            return entry[1]
        if self.on_constant is None:
            raise CaptureError("a tensor from outside reached the graph after capture ended")
        node = self.on_constant(tensor)
        self.constants.append(tensor)
        self.bind(tensor, node)
        with private.disable_dispatch_modes():
            self.calls.stand_in(tensor)
        if tensor.numel() == 1 and tensor.device.type == "cpu":
            with private.disable_dispatch_modes():
                self.known.note(tensor, tensor.detach().clone())
        return node

    def argument(self, value: Any) -> Any:
        """``value`` as it stands in a recorded call: nodes for tensors and recorded numbers."""
        if isinstance(value, Tensor):
            node = self.node_of(value)
            return node if node is not None else self.lift_constant(value)
        scalar = scalar_of(value)
        return value if scalar is None else scalar.argument()

    # ------------------------------------------------------------------ numbers
    def scalar_call(self, function: Callable[..., Any], operands: tuple[HostScalar, ...]) -> HostScalar:
        """Record arithmetic on host numbers and return its result."""
        result = function(*[o.value for o in operands])
        if all(o.node is None for o in operands):
            return HostScalar(result, None, self)
        node = self.graph.call_function(function, tuple(o.argument() for o in operands))
        node.meta.update(val=result, info=self.info())
        return HostScalar(result, node, self)

    def decide(self, scalar: HostScalar) -> Number:
        """Python code branches on a recorded number: remember the outcome as a guard."""
        if scalar.node is not None:
            place = user_location() or "<library code>"
            self.decisions.append((scalar.node, scalar.value, place))
        return scalar.value

    def expose(self, scalar: HostScalar, *, from_parser: bool) -> None:
        """A plain number is taken out of a recorded one, by torch's argument parser or by Python's ``float()``."""
        if from_parser:
            self._exposed.append(scalar)
        else:
            self.decide(scalar)

    def reclaim(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Put recorded numbers back where torch's parser turned them into ``float``/``int`` arguments of ``func``.

        By the names under which they were handed over where those are known, else by value; an ambiguous value freezes
        the number (a guard on it) instead. So does a value that others come to by chance (1 is its own inverse, which
        celu's gradient takes), and a call that autograd may remember with the plain number.
        """
        exposed, self._exposed = self._exposed, []
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in flat(args, kwargs)):
            for scalar in exposed:
                self.decide(scalar)
            return args, kwargs
        args, kwargs, named = self.functions.put_back(func, args, kwargs)
        return self._reclaim_by_value([s for s in exposed if s not in named], args, kwargs)

    def _reclaim_by_value(self, exposed: list[HostScalar], args: Any, kwargs: Any) -> tuple[Any, Any]:
        flat, tree = pytree.tree_flatten((args, kwargs))
        for value in {type(s.value)(s.value) for s in exposed}:
            same = [s for s in exposed if s.value == value]
            kinds = (float,) if isinstance(value, float) else (float, int)  # an int is handed on as either
            places = [i for i, a in enumerate(flat) if type(a) in kinds and a == value]
            if len(places) == len(same) and len({s.node for s in same}) == 1 and not _is_common(value):
                for i in places:
                    flat[i] = same[0].as_symbol()
            else:
                for scalar in same:
                    self.decide(scalar)
        return pytree.tree_unflatten(flat, tree)

    def __enter__(self) -> Any:
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.functions.__exit__(*error)

    # ------------------------------------------------------------------ recording
    def info(self) -> NodeInfo:
        """Facts of a node recorded now."""
        if self.section is Section.BACKWARD:
            sequence = private.current_backward_sequence_number()
            known = self._forward_info.get(sequence) if sequence is not None else None
            if known is not None:
                return NodeInfo(Section.BACKWARD, known.module, known.source)
            return NodeInfo(Section.BACKWARD, self.module_path[-1], "")
        if self.section is not Section.FORWARD:
            return NodeInfo(self.section, source=user_location() or "")
        info = NodeInfo(Section.FORWARD, self.module_path[-1], user_location() or "")
        # what autograd does not follow (batch norm's counter, a mask of dropout) has no number of its own
        self._forward_info.setdefault(private.next_sequence_number() - 1, info)
        return info

    def _place(self) -> str:
        """The module that runs now, for messages."""
        path = self.info().module
        return f" in module {path!r}" if path else ""

    def _location(self) -> str | None:
        """The user's line; that of the forward operator whose gradient is computed."""
        return self.info().source or user_location()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is private.FakeTensor:  # autograd asks twice a call
            return args[0].fake_device
        kwargs = kwargs or {}
        func, args = onednn_lstm.in_a_graph(func, args)
        if func.namespace in ("profiler", "prim") or func in _LOOKS:
            return func(*args, **kwargs)  # record_function of optimizers; reads of a tensor's device, layout, sizes
        if func in _ALIASES:
            node = self.node_of(args[0])
            if node is not None:
                return self._alias(func, args[0], node)
            if func is aten.lift_fresh.default:
                func = aten.clone.default  # torch.tensor(...): fresh each step, not the constant itself
        if func in (READ, aten.item.default):
            return self._item(args[0])
        if self._exposed:
            args, kwargs = self.reclaim(func, args, kwargs)
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise CaptureError(
                f"a collective ({func}) inside {the_step()}: the graph already sees the whole global batch; use "
                "self.all_gather, or drop the call",
                user_location(),
            )
        if func is aten.equal.default and (told := self.known.equal(args)) is not None:
            return told
        form = self.data_sizes.form_of(func, args, kwargs)
        return self._record(func, args, kwargs) if form is None else form()

    def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a call of an operator."""
        return self.__torch_dispatch__(func, (), args, kwargs)

    def _alias(self, func: Any, source: Tensor, node: fx.Node) -> Tensor:
        out = self.calls.make(func, (source,), {})
        self.bind(out, node)
        if (real := self.known.get(source)) is not None:
            self.known.note(out, real)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        entries = flat(args, kwargs)
        if any(isinstance(a, torch.Generator) for a in entries):
            raise CaptureError(
                f"{func} draws from a torch.Generator of its own, whose state is no part of the graph; leave the "
                "generator out (the graph then draws from the run's own random numbers, the same on every device), or "
                "draw in the data set",
                user_location(),
            )
        plain_args, plain_kwargs = args, kwargs
        if any(scalar_of(a) is not None for a in entries):
            for number in _numbers_of_shapes(func, args, kwargs):
                self.decide(number)
            plain_args, plain_kwargs = mapped(_plain_number, args), mapped(_plain_number, kwargs)
        node_args, node_kwargs = mapped(self.argument, args), mapped(self.argument, kwargs)
        try:
            out = self.calls.make(func, plain_args, plain_kwargs)
        except private.DataDependentOutputException as error:
            raise CaptureError(
                f"{func}{self._place()} reads the values of a tensor, which one graph cannot express",
                self._location(),
            ) from error
        except private.DynamicOutputShapeException as error:
            raise CaptureError(
                f"the shape of what {func}{self._place()} returns depends on the data, which one graph cannot express; "
                "use a masked form with a fixed shape (torch.where, multiplication by a mask)",
                self._location(),
            ) from error
        except Exception:
            self.failing = f"{func}{self._place()}: "
            raise
        for made in flat(out):
            if isinstance(made, Tensor) and made.layout is not torch.strided:
                raise CaptureError(
                    f"{func}{self._place()} makes a sparse tensor ({made.layout}), which graphs do not know; use a "
                    "dense one (sparse=False)",
                    self._location(),
                )
        key = draw_key(func, plain_args, plain_kwargs)
        if key is not None and key in self._draws:
            return self._repeat_draw(func, self._draws[key], args, out)
        if (dtype := decided_dtype(entries, out)) is not None:
            node_args, node_kwargs = self._under_any_default(func, args, kwargs, dtype, out)
        node = self.graph.call_function(func, node_args, node_kwargs)
        node.meta["info"] = self.info()
        if func.namespace != "aten":  # who knows what it makes inside
            default = torch.get_default_dtype()
            node.meta["info"] = dataclasses.replace(node.meta["info"], default=default, autocast=self.autocast)
        self._bind_outputs(node, out)
        if key is not None:
            self._draws[key] = node
        self.known.follow(func, plain_args, plain_kwargs, entries, out)
        return out

    def _under_any_default(self, func: Any, args: Any, kwargs: Any, dtype: torch.dtype, out: Any) -> tuple[Any, Any]:
        """The arguments of a call whose result has a dtype because of torch's default, which graphs do not have."""
        args, kwargs = saying(func, args, kwargs, dtype, lambda x, dtype: self._record(_CAST, (x,), {"dtype": dtype}))
        with default_dtype(torch.float32):
            again = self.calls.make(func, mapped(_plain_number, args), mapped(_plain_number, kwargs))
        if _specs(again) != _specs(out):
            raise CaptureError(
                f"{func}{self._place()} gives {dtype} because of torch's default dtype; convert its operands, as by "
                f"x.to({dtype})",
                self._location(),
            )
        return mapped(self.argument, args), mapped(self.argument, kwargs)

    def _bind_outputs(self, node: fx.Node, out: Any) -> None:
        if isinstance(out, Tensor):
            node.meta["val"] = TensorSpec.of(out)
            self.bind(out, node)
            return
        if not isinstance(out, (tuple, list)):
            node.meta["val"] = out
            return
        node.meta["val"] = pytree.tree_map_only(Tensor, TensorSpec.of, out)
        for index, item in enumerate(out):
            if isinstance(item, (Tensor, list)):
                child = self.graph.call_function(operator.getitem, (node, index))
                child.meta["info"] = node.meta["info"]
                self._bind_outputs(child, item)

    # ------------------------------------------------------------------ known values
    def _item(self, tensor: Tensor) -> Any:
        source = self.argument(tensor)
        real = self.known.get(tensor)
        if real is None:
            raise CaptureError(
                f"the value of a tensor is read in the {self.section} part of the iteration{self._place()}, which one "
                "graph cannot express; keep it a tensor (torch.where instead of `if`)",
                self._location(),
            )
        node = self.graph.call_function(READ, (source,))
        with private.disable_dispatch_modes():
            value = real.item()
        node.meta.update(val=value, info=self.info())
        return HostScalar(value, node, self).as_symbol()

    def _known_numbers(self, *tensors: Tensor) -> list[int]:
        scalars = [scalar_of(self._item(tensor)) for tensor in tensors]
        return [int(self.decide(scalar)) for scalar in scalars if scalar is not None]

    # ------------------------------------------------------------------ random numbers
    def _repeat_draw(self, func: Any, first: fx.Node, args: Any, out: Any) -> Any:
        """A recomputed draw takes the numbers of the first one, which are kept instead of drawn again."""
        if not private.is_mutating(func):
            self._bind_outputs(first, out)
            return out
        kept = next((u for u in first.users if u.target is aten.clone.default and u.meta.get("kept_draw")), None)
        if kept is None:
            with self.graph.inserting_after(first):
                kept = self.graph.call_function(aten.clone.default, (first,))
            kept.meta.update(first.meta, kept_draw=True)
        node = self.graph.call_function(aten.copy_.default, (self.argument(args[0]), kept))
        node.meta["info"] = self.info()
        self._bind_outputs(node, out)
        return out


def _is_common(value: Number) -> bool:
    """Whether a number is one that others are made equal to: a few halves, or none that is finite."""
    return isinstance(value, float) and (not math.isfinite(value) or (value * 64).is_integer())


def _specs(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, TensorSpec.of, value)


def _plain_number(value: Any) -> Any:
    scalar = scalar_of(value)
    return value if scalar is None else scalar.value


def _numbers_of_shapes(func: Any, args: Any, kwargs: Any) -> list[HostScalar]:
    """Numbers that decide shapes, guarded by value: all that follows has these shapes."""
    values = private.decide_shapes(func, args, kwargs)
    return [n for value in values for n in map(scalar_of, flat(value)) if n is not None]


@contextlib.contextmanager
def in_section(recorder: Recorder, section: Section) -> Iterator[None]:
    """Nodes recorded inside belong to ``section``; after an error the recorder still says in which it was raised."""
    before, recorder.section = recorder.section, section
    yield
    recorder.section = before
