"""All ranks of a mesh in one process: every rank's graph runs in its own thread, collectives meet at a barrier.

Nothing is shared but what a collective exchanges, so a graph that forgets a reduction shows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from lightning_spmd.ir.layout import has_layout
from lightning_spmd.ir.node_info import BALANCED, TensorSpec
from lightning_spmd.ir.placement import REPLICATE, Chunk, Partial, Placement, Shard, ShardAxis, block_sizes
from lightning_spmd.ir.signature import GraphInput
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.ir.verify import verify_captured, verify_sharded
from lightning_spmd.stages.expand import expand
from lightning_spmd.stages.runtime.trial_runs.first_run import LayoutCheck

_functional = torch.ops._c10d_functional
_expand_module = importlib.import_module("lightning_spmd.stages.expand.expand")


def axes_for(split: Sequence[int], name: str = "data_parallel") -> list[ShardAxis]:
    """The axis as each rank sees it."""
    return [axes[0] for axes in meshes_for({name: split})]


def meshes_for(mesh: Mapping[str, Sequence[int]], shard: int | None = None) -> list[tuple[ShardAxis, ...]]:
    """Every rank's axes of a mesh given as name → split; the last axis varies fastest.

    With ``shard``, chunks on the last axis lie on that many neighbours (hybrid sharding).
    """
    ranks = []
    for coordinates in itertools.product(*(range(len(split)) for split in mesh.values())):
        axes = []
        for i, (name, split) in enumerate(mesh.items()):
            others = (*coordinates[:i], "*", *coordinates[i + 1 :])
            axes.append(ShardAxis(name, len(split), coordinates[i], f"sim {others}", tuple(split)))
        ranks.append((*axes[:-1], axes[-1] if shard is None else _hybrid(axes[-1], shard)))
    return ranks


def _hybrid(axis: ShardAxis, shard: int) -> ShardAxis:
    row, place = divmod(axis.rank, shard)
    rows = axis.size // shard
    within = ShardAxis("shard", shard, place, f"{axis.group} row {row}", (1,) * shard)
    across = ShardAxis("replica", rows, row, f"{axis.group} column {place}", (1,) * rows)
    return dataclasses.replace(axis, within=within, across=across)


# As gloo and NCCL compare: a NaN wins or loses as the ranks happen to be ordered.
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": lambda a, b: torch.where(a < b, b, a),
    "min": lambda a, b: torch.where(b < a, b, a),
}


class Rendezvous:
    """Where the ranks' threads exchange the operands of their collectives."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.count = 0

    def exchange(self, rank: int, what: Any) -> list[Any]:
        self.slots[rank] = what
        self.barrier.wait(timeout=60)
        everyone = list(self.slots)
        self.barrier.wait(timeout=60)
        return everyone


class RankInterpreter(LayoutCheck):
    """Runs one rank's graph; every value must lie in memory as its node says, as after the runtime's first run."""

    def __init__(self, step: ShardedStep, meetings: Mapping[str, Rendezvous]) -> None:
        super().__init__(step.graph_module)
        self.ranks = {part.group: part.rank for axis in step.axes for part in axis.parts}
        self.meetings = meetings

    def run_node(self, n: fx.Node) -> Any:
        value, spec = super().run_node(n), n.meta.get("val")
        if isinstance(value, Tensor) and isinstance(spec, TensorSpec):
            rows = 1 if BALANCED in n.meta else 0  # how many there are, the values say
            assert value.shape[rows:] == spec.shape[rows:], f"{n.name}: {value.shape} where {spec.shape} is written"
            assert rows or has_layout(value, spec), f"{n.name}: {value.stride()} where {spec.stride} is written"
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _functional.wait_tensor.default:
            return args[0]
        if getattr(target, "namespace", "") != "_c10d_functional":
            return super().call_function(target, args, kwargs)
        operand, *rest = args
        assert not operand.is_conj(), f"{target} on what is conjugated when read"
        assert not operand.is_neg(), f"{target} on what is negated when read"
        rank, meeting = self.ranks[rest[-1]], self.meetings[rest[-1]]
        splits = rest[:2] if target is _functional.all_to_all_single.default else []
        everyone = meeting.exchange(rank, (str(target), tuple(map(str, rest[len(splits) :])), operand, splits))
        if len({e[:2] for e in everyone}) != 1:
            raise AssertionError(f"ranks disagree on a collective: {[e[:2] for e in everyone]}")
        tensors = [e[2] for e in everyone]
        if target in (_functional.all_reduce.default, _functional.all_reduce_.default):
            result = functools.reduce(_REDUCTIONS[rest[0]], tensors).to(operand.dtype)
        elif target is _functional.all_gather_into_tensor.default:
            result = torch.cat(tensors)
        elif target is _functional.reduce_scatter_tensor.default:
            result = torch.stack(tensors).sum(0).chunk(len(tensors))[rank].clone()
        elif target is _functional.all_to_all_single.default:
            result = _exchanged(tensors, [e[3] for e in everyone], rank)
        else:
            raise AssertionError(f"unknown collective {target}")
        meeting.exchange(rank, None)
        return operand.copy_(result) if target is _functional.all_reduce_.default else result


def _exchanged(tensors: Sequence[Tensor], splits: Sequence[Any], rank: int) -> Tensor:
    """What ``rank`` gets of all ranks' operands, each with its (output, input) split sizes."""
    parts = [tensor.split(list(inputs))[rank] for tensor, (_, inputs) in zip(tensors, splits, strict=True)]
    assert [len(part) for part in parts] == list(splits[rank][0]), "ranks disagree on what they send each other"
    return torch.cat(parts)


def piece(tensor: Tensor, placement: Placement, axis: ShardAxis) -> Tensor:
    """The part of a tensor that a rank of an axis holds."""
    if isinstance(placement, Chunk):
        return tensor.narrow(placement.dim, *axis.chunk(tensor.shape[placement.dim])).clone()
    if isinstance(placement, Partial):
        return tensor.clone() if axis.rank == 0 else torch.zeros_like(tensor)
    if not isinstance(placement, Shard):
        return tensor.clone()
    sizes = block_sizes(tensor.shape[placement.dim], placement.outer)
    assert sizes is not None
    blocks = tensor.split(list(sizes), placement.dim)
    mine = [b.narrow(placement.dim, *p) for b, n in zip(blocks, sizes, strict=True) for p in axis.pieces(n)]
    return torch.cat(mine, placement.dim)


def whole(parts: Sequence[Tensor], placement: Placement, axis: ShardAxis) -> Tensor:
    """The tensor of which the ranks of an axis hold parts."""
    if isinstance(placement, Chunk):
        rows = [torch.cat(list(row), placement.dim) for row in _rows(parts, axis.chunks.size)]
        return whole(rows, REPLICATE, axis)
    if isinstance(placement, Partial):
        return torch.stack(list(parts)).sum(0)
    if not isinstance(placement, Shard):
        for other in parts[1:]:
            torch.testing.assert_close(other, parts[0], rtol=0, atol=0, equal_nan=True)
        return parts[0]
    dim = placement.dim
    total = sum(part.shape[dim] for part in parts)
    result = parts[0].new_empty((*parts[0].shape[:dim], total, *parts[0].shape[dim + 1 :]))
    sizes = block_sizes(total, placement.outer)
    assert sizes is not None
    for rank, part in enumerate(parts):
        taken, before = 0, 0
        for size in sizes:
            for start, length in axis.pieces(size, rank):
                result.narrow(dim, before + start, length).copy_(part.narrow(dim, taken, length))
                taken += length
            before += size
    return result


def _rows(parts: Sequence[Tensor], length: int) -> list[Sequence[Tensor]]:
    return [parts[i : i + length] for i in range(0, len(parts), length)]


def pieces(tensor: Tensor, placements: Sequence[Placement], axes: Sequence[ShardAxis]) -> Tensor:
    """The part of a global tensor that a rank of a mesh holds."""
    for placement, axis in zip(placements, axes, strict=True):
        tensor = piece(tensor, placement, axis)
    return tensor


def laid_out(tensor: Tensor, entry: GraphInput, axes: Sequence[ShardAxis]) -> Tensor:
    """A rank's part of the live value of an input, in memory as the rank's graph expects it."""
    spec: TensorSpec = entry.value
    storage = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    new = torch.full((max(storage, 0),), math.nan if spec.dtype.is_floating_point else 0, dtype=spec.dtype)
    return new.as_strided(spec.shape, spec.stride).copy_(pieces(tensor, entry.placements, axes))


def assembled(parts: Sequence[Tensor], placements: Sequence[Placement], axes: Sequence[ShardAxis]) -> Tensor:
    """The global tensor of what all ranks of a mesh hold, in the order of :func:`meshes_for`."""
    for placement, axis in reversed(list(zip(placements, axes, strict=True))):
        parts = [whole(row, placement, axis) for row in _rows(parts, axis.size)]
    return parts[0]


def run_global(captured: CapturedStep, live: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(outputs, inputs afterwards) of the one-device program on copies of ``live``."""
    inputs = [v.clone() if isinstance(v, Tensor) else v for v in live]
    with torch.no_grad():
        outputs = fx.Interpreter(captured.graph_module).run(*inputs)
    return list(outputs), inputs


def run_locally(steps: Sequence[ShardedStep], locals_: Sequence[Sequence[Any]]) -> list[Any]:
    """What the ranks' programs return, given each rank's inputs."""
    meetings = {part.group: Rendezvous(part.size) for step in steps for axis in step.axes for part in axis.parts}
    results: list[Any] = [None] * len(steps)
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = RankInterpreter(steps[rank], meetings).run(*locals_[rank])
        except BaseException as error:
            errors.append(error)
            for meeting in meetings.values():
                meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(r,)) for r in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def run_ranks(steps: Sequence[ShardedStep], live: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(outputs, inputs afterwards) as global tensors, of the ranks' programs on their pieces of ``live``."""
    locals_: list[list[Any]] = []
    for step in steps:
        entries = zip(live, step.signature.inputs, strict=True)
        locals_.append([laid_out(v, e, step.axes) if isinstance(v, Tensor) else v for v, e in entries])
    results = run_locally(steps, locals_)
    signature, axes = steps[0].signature, steps[0].axes
    outputs = [
        assembled([r[i] for r in results], e.placements, axes) if isinstance(e.value, TensorSpec) else results[0][i]
        for i, e in enumerate(signature.outputs)
    ]
    inputs = [
        assembled([r[i] for r in locals_], e.placements, axes) if isinstance(e.value, TensorSpec) else locals_[0][i]
        for i, e in enumerate(signature.inputs)
    ]
    return outputs, inputs


class _LearntOnce:
    """What the first rank finds out about the others' sizes, the others need not find out again.

    A rank writes the program for every size of a piece, to know which forms all can take (``expand._longer_forms``):
    ranks times sizes. Here each later rank writes its own, which must not need a longer form anywhere else. That real
    ranks find the same without a message shows ``test_every_rank_finds_the_same_forms_by_itself``.
    """

    def __init__(self) -> None:
        self._find = _expand_module._longer_forms
        self._attempts: dict[object, int] = {}
        self._learnt: dict[int, set[tuple[str, int]]] = {}
        self._given: list[tuple[set[Any], int]] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with mock.patch.object(_expand_module, "_longer_forms", self._forms):
            yield
        assert all(len(given) == size for given, size in self._given), "a rank cannot make a call that the first can"

    def _forms(self, graph: fx.Graph, signature: Any, plans: Any) -> Any:
        rank = tuple(plan.axis for plan in plans)
        attempt = self._attempts[rank] = self._attempts.get(rank, 0) + 1
        if all(axis.is_even for axis in rank):  # nobody has another size
            return self._find(graph, signature, plans)
        if attempt not in self._learnt:  # an error is everybody's: the next rank finds it out again
            longer, written = self._find(graph, signature, plans)
            self._learnt[attempt] = {(node.name, number) for node, number in longer}
            return longer, written
        named = {node.name: node for node in graph.nodes}
        longer = {(named[name], number) for name, number in self._learnt[attempt]}
        self._given.append((longer, len(longer)))
        return longer, {}


def expand_all(
    captured: CapturedStep,
    split: Sequence[int] | Mapping[str, Sequence[int]],
    plan: Any = None,
    shard: int | None = None,
) -> list[ShardedStep]:
    """Every rank's verified program; ``split`` of the batch over one axis, or name → split of every axis of a mesh."""
    verify_captured(captured)
    mesh = split if isinstance(split, Mapping) else {"data_parallel": split}
    with _LearntOnce().active():
        steps = [expand(captured, axes, plan) for axes in meshes_for(mesh, shard)]
    for step in steps:
        verify_sharded(step)
    return steps


def assert_equals_one_device(
    captured: CapturedStep,
    live: Sequence[Any],
    split: Sequence[int] | Mapping[str, Sequence[int]],
    *,
    rtol: float = 1e-5,
    floor: float = 1e-2,
    plan: Any = None,
    shard: int | None = None,
) -> list[ShardedStep]:
    """The ranks' programs give what the one-device program gives, in outputs and in mutated inputs.

    Differences are relative to the largest element of the tensor, at least ``floor``: the gradient of a key bias is
    rounding around a true zero.
    """
    steps = expand_all(captured, split, plan, shard)
    wanted, wanted_inputs = run_global(captured, live)
    outputs, inputs = run_ranks(steps, live)
    names = [e.name for e in captured.signature.outputs] + [e.name for e in captured.signature.inputs]
    for name, got, want in zip(names, [*outputs, *inputs], [*wanted, *wanted_inputs], strict=True):
        if isinstance(want, Tensor):
            assert got.shape == want.shape, f"{name}: {got.shape} for {want.shape}"
            if want.dtype.is_floating_point:
                scale = max(want.abs().max().item() if want.numel() else 0.0, floor)
                difference = (got.double() - want.double()).abs().max().item() if want.numel() else 0.0
                assert difference <= rtol * scale or torch.equal(got, want), f"{name}: off by {difference / scale:.2e}"
            else:
                assert torch.equal(got, want), name
        else:
            assert got == want, name
    return steps
