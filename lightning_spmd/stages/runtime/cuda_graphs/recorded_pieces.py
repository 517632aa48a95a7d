"""Runs the pieces of a graph: recordings with memory of their own, and gaps as Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd import _private_api as private
from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.default_dtype import as_recorded
from lightning_spmd.ir.source import function_of
from lightning_spmd.stages.runtime.cuda_graphs.recordable import Piece, Plan

Values = dict[fx.Node, Any]


class Gap:
    """The nodes between two recordings, as one Python function.

    Operands of collectives that the next iteration waits for are copied out of the recordings' memory first, because
    recordings would overwrite them.

    Args:
        plan: the graph in pieces.
        piece: this one.
    """

    def __init__(self, plan: Plan, piece: Piece) -> None:
        inside = set(piece.nodes)
        self._inputs = list(dict.fromkeys(o for n in piece.nodes for o in n.all_input_nodes if o not in inside))
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {n: graph.placeholder(n.name) for n in self._inputs}
        for node in piece.nodes:
            if node in plan.going:
                for operand in node.all_input_nodes:
                    if plan.roots[operand] in plan.recorded:
                        made[operand] = graph.call_function(torch.ops.aten.clone.default, (made[operand],))
            made[node] = graph.node_copy(node, made.__getitem__)
        leaving = {value for value in plan.outputs if isinstance(value, fx.Node)}
        read = dict.fromkeys(n for n in piece.nodes if n in leaving or any(user not in inside for user in n.users))
        # whose memory recordings look at by way of others: it is copied as a whole
        looked_at = {r for p in plan.pieces for r in p.copied} | {plan.roots[n] for n in plan.recorded}
        read.update(dict.fromkeys(n for n in piece.nodes if n in looked_at))
        self._outputs = list(read)
        graph.output(tuple(made[n] for n in self._outputs))
        self._function = function_of(private.GraphModule({}, graph))

    def run(self, env: Values) -> None:
        """Run it on the values at hand."""
        env.update(zip(self._outputs, self._function(*[env[n] for n in self._inputs]), strict=True))


@dataclass(frozen=True)
class _Place:
    """How a value lies in the storage of another one."""

    root: fx.Node
    base: tuple[Any, Any]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, value: Tensor, root: fx.Node, base: Tensor) -> _Place:
        """The place of ``value`` in ``base``."""
        offset = int(value.storage_offset()) - int(base.storage_offset())
        lies = (tuple(base.shape), tuple(base.stride()))
        return cls(root, lies, tuple(value.shape), tuple(value.stride()), offset)

    def within(self, base: Tensor) -> Tensor:
        """The same place in another tensor that lies alike.

        Raises:
            VerificationError: it does not lie alike.
        """
        if (tuple(base.shape), tuple(base.stride())) != self.base:
            raise VerificationError(f"{self.root.name} lies in memory otherwise than when a CUDA graph was recorded")
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)


class Recorded:
    """A piece that is recorded.

    Args:
        plan: the graph in pieces.
        index: of the piece.
    """

    def __init__(self, plan: Plan, index: int) -> None:
        self.at: fx.Node | None = None
        self._plan = plan
        self._piece = plan.pieces[index]
        self._copies: dict[fx.Node, Tensor] = {}
        self._values: Values = {}
        self._kept: Values = {}
        self._places: dict[fx.Node, _Place] = {}
        self._launch: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ recording
    def work(self, env: Values) -> None:
        """The recorded nodes. Memory allocated here belongs to the recording, and values are freed as in Python.

        Args:
            env: available values.

        Raises:
            RuntimeError: a node cannot be recorded; :attr:`at` is that node.
        """
        for root in self._piece.copied:
            value = env[root]
            if _overlaps(value):
                raise RuntimeError(f"{root.name} has elements that share memory, and is copied in")
            self._copies[root] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        last = {o: n for n in self._piece.nodes for o in n.all_input_nodes}
        dying: dict[fx.Node, list[fx.Node]] = {}
        for operand, reader in last.items():
            dying.setdefault(reader, []).append(operand)
        kept = {*self._piece.kept, *self._piece.passed}

        def value_of(node: fx.Node) -> Any:
            if node not in self._values:
                self._values[node] = self._imported(node, env)
            return self._values[node]

        for node in self._piece.nodes:
            self.at = node
            target: Any = node.target
            args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)  # type: ignore[misc]
            self._values[node] = as_recorded(node, target)(*args, **kwargs)
            del args, kwargs
            for operand in dying.get(node, ()):
                if operand not in kept:
                    self._values.pop(operand, None)
            if node not in last and node not in kept:
                self._values.pop(node)
        self.at = None

    def _imported(self, node: fx.Node, env: Values) -> Any:
        """A value from outside: as it is, or its place in the copy."""
        root = self._plan.roots[node]
        if root not in self._copies:
            return env[node]
        return _Place.of(env[node], root, env[root]).within(self._copies[root])

    def recorded(self, launch: Callable[[], None], env: Values) -> None:
        """The recording is there; run it for the first time."""
        self._launch = launch
        passed = {n: self._values[n] for n in self._piece.passed}
        for node in self._piece.kept:
            root, value = self._plan.roots[node], self._values[node]
            if isinstance(value, Tensor) and self._is_loose(root):
                self._places[node] = _Place.of(value, root, self._copies[root] if root in self._copies else env[root])
            else:
                self._kept[node] = value
        self._values = {}
        self.replay(env)
        # later recordings take these from where they are; replayed, they need none
        env.update(passed)

    def _is_loose(self, root: fx.Node) -> bool:
        plan = self._plan
        return root not in plan.live and root not in plan.recorded and root not in plan.constants

    # ------------------------------------------------------------------ running
    def replay(self, env: Values) -> None:
        """Run it on the values at hand."""
        if self._copies:
            copies = self._copies
            private.copy_all(list(copies.values()), [env[root] for root in copies])
        self._launch()
        if self._piece.written:
            roots = list(self._piece.written)
            private.copy_all([env[r] for r in roots], [self._copies[r] for r in roots])
        env.update(self._kept)
        for node, place in self._places.items():
            env[node] = place.within(env[place.root])


def copied_out(plan: Plan, env: Values) -> Sequence[Any]:
    """The outputs of a run; those in the memory of recordings are copied, for the next step writes there."""
    made: dict[tuple[Any, ...], Tensor] = {}

    def outside(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        found = env[value]
        in_recording = plan.roots[value] in plan.recorded and value not in plan.going
        if not isinstance(found, Tensor) or not in_recording:
            return found
        place = (found.data_ptr(), found.dtype, tuple(found.shape), tuple(found.stride()))
        if place not in made:
            made[place] = _copy(found)
        return made[place]

    return tuple(outside(value) for value in plan.outputs)


def _copy(value: Tensor) -> Tensor:
    """A copy that lies as the tensor lies, overlaps and gaps included: what reads it expects its strides."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    if value.numel() == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    flat = value.as_strided((reach,), (1,), value.storage_offset())
    return flat.clone().as_strided(value.shape, value.stride(), 0)


def storages(tensors: Iterable[Any]) -> list[int]:
    """The start addresses of the tensors among these values."""
    return [t.untyped_storage().data_ptr() for t in tensors if isinstance(t, Tensor) and t.numel()]


def _overlaps(value: Tensor) -> bool:
    return any(bool(size > 1) and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True))
