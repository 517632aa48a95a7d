"""Reads the live values of graph inputs and writes graph outputs back: modules, optimizer, counters.

Values are looked up by name each step, never kept: callbacks replace buffers (SWA), swap weights (EMA) and load
checkpoints in the middle of a run. The look-ups are prepared once a graph. Of a tensor that is sharded over the ranks
(a DTensor) the graph gets this rank's part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.guards import ValueGuard
from lightning_spmd.ir.layout import has_layout
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import Chunk, Placement, Shard
from lightning_spmd.ir.several_optimizers import group_of, optimizer_of
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.stages.runtime.random_streams import RandomStreams

_NO_STATE: Mapping[str, Any] = {}
Reader = Callable[[], Any]
ReadAll = Callable[[Sequence[Tensor], list[Any]], list[Any]]
Wrap = Callable[[Tensor, TensorSpec, tuple[Placement, ...]], Tensor]
ShardWhole = Callable[[Tensor, tuple[Placement, ...]], Tensor]


def in_parts(placements: tuple[Placement, ...]) -> bool:
    """Whether a rank holds a piece of the tensor (and not all of it, or a term of a sum)."""
    return any(isinstance(p, (Chunk, Shard)) for p in placements)


class _Entry:
    """Reads an entry of a table."""

    __slots__ = ("table", "key")

    def __init__(self, table: Mapping[str, Any], key: str) -> None:
        self.table, self.key = table, key

    def __call__(self) -> Any:
        return self.table[self.key]


class _StateEntry:
    """Reads an entry of a parameter's optimizer state.

    A look leaves no entry behind: the user may ask whether a parameter has state.
    """

    __slots__ = ("optimizer", "parameter", "key")

    def __init__(self, optimizer: Optimizer, parameter: Tensor, key: Any) -> None:
        self.optimizer, self.parameter, self.key = optimizer, parameter, key

    def __call__(self) -> Any:
        return self.optimizer.state.get(self.parameter, _NO_STATE)[self.key]


class _Part:
    """Reads this rank's part of a tensor."""

    __slots__ = ("read",)

    def __init__(self, read: Reader) -> None:
        self.read = read

    def __call__(self) -> Any:
        return private.local_tensor(self.read())


class _StatePart:
    """Reads this rank's part of an entry of optimizer state; a whole tensor that the user has put there is sharded."""

    __slots__ = ("entry", "placements", "shard")

    def __init__(self, entry: _StateEntry, placements: tuple[Placement, ...], shard: ShardWhole) -> None:
        self.entry, self.placements, self.shard = entry, placements, shard

    def __call__(self) -> Any:
        return self.of(self.entry.optimizer.state.get(self.entry.parameter, _NO_STATE))

    def of(self, state: Any) -> Tensor:
        """The part in a parameter's state."""
        value = state[self.entry.key]
        if not isinstance(value, DTensor):
            value = state[self.entry.key] = self.shard(value, self.placements)
        return private.local_tensor(value)


def read_all(readers: Sequence[Reader | int | None]) -> ReadAll:
    """One function for many readers, written out: a step reads hundreds of values, each in less time than a call takes.

    Args:
        readers: as :meth:`LiveState.readers` gives them.

    Returns:
        what takes the leaves of the batch and the pending values, the last one first, and gives what is read.
    """
    names: dict[int, str] = {}
    known: dict[str, Any] = {}
    states: dict[tuple[str, str], str] = {}

    def constant(value: Any) -> str:
        name = names.setdefault(id(value), f"c{len(names)}")
        known[name] = value
        return name

    def source(read: Reader | int | None) -> str:
        match read:
            case None:
                return "pending.pop()"
            case int():
                return f"batch[{read}]"
            case _Part():
                return f"{constant(private.local_tensor)}({source(read.read)})"
            case _Entry():
                return f"{constant(read.table)}[{read.key!r}]"
            case _StateEntry():
                return f"{state(read)}[{constant(read.key)}]"
            case _StatePart():
                return f"{constant(read.of)}({state(read.entry)})"
            case _:
                return f"{constant(read)}()"

    def state(read: _StateEntry) -> str:
        return states.setdefault((constant(read.optimizer), constant(read.parameter)), f"s{len(states)}")

    values = ", ".join(map(source, readers))
    lines = [f"{s} = {o}.state.get({p}, {constant(_NO_STATE)})" for (o, p), s in states.items()]
    exec("\n    ".join(["def read(batch, pending):", *lines, f"return [{values}]"]), known)
    return known["read"]


class LiveState:
    """The live objects behind one graph's inputs and outputs.

    Args:
        module: the LightningModule.
        optimizer: its optimizer; None for graphs without one.
        names: fully qualified name of every parameter, by ``id``, as capture saw it.
        host_values: readers of host values by name (``batch_idx``, ``trainer.global_step``).
        gradients: gradients held between micro-batches, by parameter name.
        streams: random numbers of several ranks, or None.
        wrap: makes a DTensor from this rank's part: ``(part, spec of the whole, placements)``.
        shard: makes one from the whole tensor.
        loss_scale: reads a tensor of loss scaling by its name.
        named: readers of parameters and buffers that the step itself passes to a call, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        names: dict[int, str],
        host_values: dict[str, Reader],
        gradients: MutableMapping[str, Tensor],
        streams: RandomStreams | None,
        wrap: Wrap | None = None,
        shard: ShardWhole | None = None,
        loss_scale: Callable[[str], Tensor] | None = None,
        named: Mapping[str, Reader] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self.host_values = host_values
        self.gradients = gradients
        self.streams = streams
        self.wrap = wrap
        self._shard = shard
        self._loss_scale = loss_scale
        self._named = named or {}
        self._slots = private.tensor_slots(module)
        groups = [] if optimizer is None else optimizer.param_groups
        self._parameters = {names[id(p)]: p for g in groups for p in g["params"] if id(p) in names}

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of a graph that has roles for it."""
        if self._optimizer is None:
            raise ValueError("a graph with an optimizer's inputs or outputs was built without one")
        return self._optimizer

    # ------------------------------------------------------------------ inputs
    def readers(self, inputs: Sequence[GraphInput], constants: Sequence[Reader]) -> list[Reader | int | None]:
        """For each graph input: a function that reads its live value, a batch leaf's position, or None if pending."""
        return [self._part(self._reader(entry, constants), entry) for entry in inputs]

    def _part(self, read: Reader | int | None, entry: GraphInput) -> Reader | int | None:
        """What lies in parts is read as this rank's part."""
        if isinstance(read, int) or read is None or not in_parts(entry.placements):
            return read
        if isinstance(read, _StateEntry) and self._shard is not None:
            return _StatePart(read, entry.placements, self._shard)
        return _Part(read)

    def _reader(self, entry: GraphInput, constants: Sequence[Reader]) -> Reader | int | None:
        key = entry.key
        match entry.role:
            case InputRole.PENDING | InputRole.KEPT:
                return None
            case InputRole.BATCH | InputRole.SHARED_BATCH:
                return int(key[0])
            case InputRole.PARAMETER | InputRole.BUFFER if key[0] in self._named:
                return self._named[key[0]]
            case InputRole.PARAMETER | InputRole.BUFFER:
                if key[0] in self._slots:
                    tensors, name = self._slots[key[0]]
                    return _Entry(tensors, name)
                parameter = self._parameters[key[0]]
                return lambda: parameter
            case InputRole.CONSTANT:
                return constants[key[0]]
            case InputRole.OPTIMIZER_STATE:
                parameter = self._parameters[key[0]]
                return _StateEntry(optimizer_of(self.optimizer, parameter), parameter, key[1])
            case InputRole.HYPER_PARAMETER:
                return self._hyper_parameter(key)
            case InputRole.HOST_VALUE:
                return self.host_values[key[0]]
            case InputRole.GRADIENT:
                return _Entry(self.gradients, key[0])
            case InputRole.LOSS_SCALE if self._loss_scale is not None:
                return functools.partial(self._loss_scale, key[0])
            case InputRole.RNG:
                return lambda: self.streams
        raise ValueError(f"graph input {entry.name!r} of role {entry.role} has no live value")

    def _hyper_parameter(self, key: tuple[Any, ...]) -> Reader:
        optimizer, group = group_of(self.optimizer, key[0])
        if len(key) == 3:
            _, name, index = key
            return lambda: optimizer.param_groups[group][name][index]
        name = key[1]
        return lambda: optimizer.param_groups[group][name]

    def misplaced(self, step: ShardedStep, *, parts: bool) -> list[str]:
        """Parameters and buffers of which the module has this rank's part, or all, and the graph wants the other.

        Args:
            step: this rank's graph.
            parts: of which the module has parts.
        """
        kinds = (InputRole.PARAMETER, InputRole.BUFFER)
        entries = [e for _, e in step.signature.inputs_of(*kinds) if in_parts(e.placements) is not parts]
        reads = [self._reader(entry, ()) for entry in entries]
        found = zip(entries, reads, strict=True)
        return [entry.name for entry, read in found if callable(read) and isinstance(read(), DTensor) is parts]

    def layout_guard(self, step: ShardedStep) -> ValueGuard:
        """A guard on the memory layouts of parameters, buffers and state, on which kernels and views depend.

        Args:
            step: this rank's graph.

        Raises:
            VerificationError: a tensor does not have the layout that the graph expects now.
        """
        kept = (InputRole.PARAMETER, InputRole.BUFFER, InputRole.OPTIMIZER_STATE)
        entries = [entry for _, entry in step.signature.inputs_of(*kept) if getattr(entry.value, "shape", ())]
        reads = [read for read in self.readers(entries, ()) if callable(read)]

        read_them = read_all(reads)

        def strides() -> list[tuple[int, ...]]:
            return [tensor.stride() for tensor in read_them((), [])]

        for entry, read in zip(entries, reads, strict=True):
            if not has_layout(read(), entry.value):
                raise VerificationError(
                    f"{entry.name} lies in memory with strides {read().stride()}, and its graph expects "
                    f"{entry.value.stride}"
                )
        return ValueGuard("the memory layout of parameters, buffers or optimizer state", strides, strides())

    # ------------------------------------------------------------------ outputs
    def writers(self, step: CapturedStep, local: ShardedStep) -> list[tuple[int, Callable[[Any], None]]]:
        """(output position, function that stores the value) for every output that is state.

        Args:
            step: the captured step.
            local: this rank's graph, whose signature says which part of each value this rank has.
        """
        found = []
        for position, (entry, mine) in enumerate(zip(step.signature.outputs, local.signature.outputs, strict=False)):
            writer = self._writer(entry)
            if writer is not None:
                found.append((position, self._whole(writer, entry, mine.placements)))
        return found

    def _whole(
        self, write: Callable[[Any], None], entry: GraphOutput, placements: tuple[Placement, ...]
    ) -> Callable[[Any], None]:
        """Store this rank's part as what it is a part of; accumulated partial sums stay as they are.

        State that is a view into a bucket gets memory of its own: torch saves a part with all the memory that it is a
        view into.
        """
        wrap = self.wrap
        if wrap is None or not in_parts(placements):
            return write
        if entry.role is OutputRole.GRADIENT:
            return lambda value: write(wrap(value, entry.value, placements))

        def stored(value: Tensor) -> None:
            write(wrap(value.clone() if value.storage_offset() else value, entry.value, placements))

        return stored

    def _writer(self, entry: GraphOutput) -> Callable[[Any], None] | None:
        key = entry.key
        if entry.role is OutputRole.OPTIMIZER_STATE:
            parameter, name = self._parameters[key[0]], key[1]
            owner = optimizer_of(self.optimizer, parameter)
            return lambda value: owner.state[parameter].__setitem__(name, value)
        if entry.role is OutputRole.HYPER_PARAMETER:
            optimizer, group = group_of(self.optimizer, key[0])
            return lambda value: optimizer.param_groups[group].__setitem__(key[1], value)
        if entry.role is OutputRole.GRADIENT:
            return lambda value: self.gradients.__setitem__(key[0], value)
        if entry.role is OutputRole.BUFFER:
            tensors, name = self._slots[key[0]]
            return lambda value: tensors.__setitem__(name, value)
        return None
