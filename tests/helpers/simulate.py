"""All ranks of a mesh axis in one process: every rank's graph runs in its own thread, collectives meet at a barrier.

Nothing is shared but what a collective exchanges, so a graph that forgets a reduction shows it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import Partial, Placement, Shard, ShardAxis
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.ir.verify import verify_captured, verify_sharded
from lightning_spmd.stages.expand import expand

_functional = torch.ops._c10d_functional


def axes_for(split: Sequence[int], name: str = "data_parallel") -> list[ShardAxis]:
    """The axis as each rank sees it."""
    return [ShardAxis(name, len(split), r, "sim", tuple(split)) for r in range(len(split))]


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


class RankInterpreter(fx.Interpreter):
    """Runs one rank's graph."""

    def __init__(self, step: ShardedStep, rank: int, meeting: Rendezvous) -> None:
        super().__init__(step.graph_module)
        self.rank, self.meeting = rank, meeting

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _functional.wait_tensor.default:
            return args[0]
        if getattr(target, "namespace", "") != "_c10d_functional":
            return super().call_function(target, args, kwargs)
        operand, *rest = args
        everyone = self.meeting.exchange(self.rank, (str(target), tuple(map(str, rest)), operand))
        if len({e[:2] for e in everyone}) != 1:
            raise AssertionError(f"ranks disagree on a collective: {[e[:2] for e in everyone]}")
        tensors = [e[2] for e in everyone]
        if target in (_functional.all_reduce.default, _functional.all_reduce_.default):
            stacked = torch.stack(tensors)
            result = stacked.sum(0) if rest[0] == "sum" else stacked.amax(0) if rest[0] == "max" else stacked.amin(0)
            result = result.to(operand.dtype)
        elif target is _functional.all_gather_into_tensor.default:
            result = torch.cat(tensors)
        elif target is _functional.reduce_scatter_tensor.default:
            result = torch.stack(tensors).sum(0).chunk(len(tensors))[self.rank].clone()
        else:
            raise AssertionError(f"unknown collective {target}")
        self.meeting.exchange(self.rank, None)
        return operand.copy_(result) if target is _functional.all_reduce_.default else result


def piece(tensor: Tensor, placement: Placement, axis: ShardAxis) -> Tensor:
    """The part of a global tensor that a rank holds."""
    if isinstance(placement, Partial):
        return tensor.clone() if axis.rank == 0 else torch.zeros_like(tensor)
    if not isinstance(placement, Shard):
        return tensor.clone()
    blocks = tensor.unflatten(placement.dim, (placement.outer, -1))
    size = blocks.shape[placement.dim + 1]
    part = blocks.narrow(placement.dim + 1, axis.offset(size), axis.local_size(size))
    return part.flatten(placement.dim, placement.dim + 1).clone()


def whole(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The global tensor of what the ranks hold."""
    if isinstance(placement, Partial):
        return torch.stack(list(parts)).sum(0)
    if not isinstance(placement, Shard):
        for other in parts[1:]:
            torch.testing.assert_close(other, parts[0], rtol=0, atol=0, equal_nan=True)
        return parts[0]
    blocks = [p.unflatten(placement.dim, (placement.outer, -1)) for p in parts]
    return torch.cat(blocks, placement.dim + 1).flatten(placement.dim, placement.dim + 1)


def run_global(captured: CapturedStep, live: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(outputs, inputs afterwards) of the one-device program on copies of ``live``."""
    inputs = [v.clone() if isinstance(v, Tensor) else v for v in live]
    with torch.no_grad():
        outputs = fx.Interpreter(captured.graph_module).run(*inputs)
    return list(outputs), inputs


def run_ranks(steps: Sequence[ShardedStep], live: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(outputs, inputs afterwards) as global tensors, of the ranks' programs on their pieces of ``live``."""
    meeting = Rendezvous(len(steps))
    results: list[Any] = [None] * len(steps)
    locals_: list[list[Any]] = []
    for step in steps:
        entries = zip(live, step.signature.inputs, strict=True)
        locals_.append([piece(v, e.placements[0], step.axes[0]) if isinstance(v, Tensor) else v for v, e in entries])
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = RankInterpreter(steps[rank], rank, meeting).run(*locals_[rank])
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(r,)) for r in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    signature = steps[0].signature
    outputs = [
        whole([r[i] for r in results], e.placements[0]) if isinstance(e.value, TensorSpec) else results[0][i]
        for i, e in enumerate(signature.outputs)
    ]
    inputs = [
        whole([r[i] for r in locals_], e.placements[0]) if isinstance(e.value, TensorSpec) else locals_[0][i]
        for i, e in enumerate(signature.inputs)
    ]
    return outputs, inputs


def expand_all(captured: CapturedStep, split: Sequence[int], plan: Any = None) -> list[ShardedStep]:
    """Every rank's verified program."""
    verify_captured(captured)
    steps = [expand(captured, (axis,), plan) for axis in axes_for(split)]
    for step in steps:
        verify_sharded(step)
    return steps


def assert_equals_one_device(
    captured: CapturedStep,
    live: Sequence[Any],
    split: Sequence[int],
    *,
    rtol: float = 1e-5,
    floor: float = 1e-2,
    plan: Any = None,
) -> list[ShardedStep]:
    """The ranks' programs give what the one-device program gives, in outputs and in mutated inputs.

    Differences are relative to the largest element of the tensor, at least ``floor``: the gradient of a key bias is
    rounding around a true zero.
    """
    steps = expand_all(captured, split, plan)
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
