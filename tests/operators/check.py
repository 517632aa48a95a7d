"""One sample as a training step: eager on one device, and as graphs on two simulated ranks.

::

    tensors = (batch + parameter of its shape), parameters, buffers      every element's gradient shows
    outputs = operator(*tensors)
    loss    = sum of (output * fixed random weights)                     permutations and lost gradients show

What one device computes is the eager step, not its captured graph. One device's graph after the passes, as the Python
that runs, is compared with the captured one beside it: bit for bit.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_spmd._private_api import OpOverload, is_random
from lightning_spmd.errors import CaptureError, ExpansionError
from lightning_spmd.ir.placement import REPLICATE, Shard
from lightning_spmd.ir.source import function_of
from lightning_spmd.ir.steps import CapturedStep, ShardedStep
from lightning_spmd.ir.verify import verify_captured
from lightning_spmd.parallel.tensor_parallel import ResolvedPlan, TensorParallelPlan
from lightning_spmd.stages import build
from lightning_spmd.stages.capture.record.packing import remove_dead_nodes
from lightning_spmd.stages.capture.rewrites.simplify import simplify_strided_gradients
from lightning_spmd.stages.expand.expand import ReplicationWarning
from lightning_spmd.stages.runtime.agreement.same_graphs import describe
from lightning_spmd.stages.runtime.random_streams import RandomStreams
from tests.helpers.simulate import expand_all, meshes_for, run_global, run_ranks
from tests.helpers.tiny_capture import capture_function
from tests.operators.cases import Sample, Split

EQUAL, REPLICATED, ARBITRARY, SKIPPED, FORMULA = "equal", "replicated", "arbitrary", "skipped", "formula"
REFUSED, SLOW, CRASHED, WRONG = "refused", "slow", "crashed", "wrong"
SECONDS = 10.0
"""Processor time that a step may take to capture, expand and run, at most."""

_UNINITIALISED = {
    "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted", "resize_", "resize_as_",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What came of a check.

    Args:
        kind: ``equal``; ``replicated``: equal, on gathered tensors, with the warning; ``arbitrary``: random numbers or
            uninitialised memory, of which only shapes were compared; ``skipped``: one device cannot do it either;
            ``formula``: equal to one device's graph, for whose gradient autograd takes another formula than eagerly;
            ``refused``: an error of ours that names the reason; ``slow``, ``crashed`` and ``wrong`` must not be.
        reason: why it is not simply equal.
        seconds: processor time.
    """

    kind: str
    reason: str = ""
    seconds: float = 0.0


class Step:
    """A sample as a training step.

    Args:
        sample: the sample.
        batch: positions of the tensors that are the batch.
        learnt: of each tensor, whether it gets a gradient.
    """

    def __init__(self, sample: Sample, batch: Sequence[int], learnt: Sequence[bool]) -> None:
        self.sample = sample
        self.batch = list(batch)
        self.parameters: dict[str, Tensor] = {"anchor": torch.ones((), dtype=torch.float64).requires_grad_()}
        self.buffers: dict[str, Tensor] = {}
        for i, (tensor, is_learnt) in enumerate(zip(sample.tensors, learnt, strict=True)):
            value = tensor.clone() if i not in self.batch else torch.zeros_like(tensor)
            if is_learnt:
                self.parameters[f"t{i}"] = value.requires_grad_()
            elif i not in self.batch:
                self.buffers[f"t{i}"] = value
        self.rows = [sample.tensors[i].clone() for i in self.batch]
        self.weights: list[Tensor] = []

    def __call__(self, p: dict[str, Tensor], b: dict[str, Tensor], *rows: Tensor) -> Any:
        """(loss, outputs) of the step."""
        tensors: list[Tensor] = []
        for i in range(len(self.sample.tensors)):
            name = f"t{i}"
            if i in self.batch:
                row = rows[self.batch.index(i)]
                tensors.append(row + p[name] if name in p else row)
            else:
                value = p[name] if name in p else b[name]
                tensors.append(value.clone() if i == 0 and self.sample.in_place else value)
        if self.sample.in_place and 0 in self.batch and "t0" not in p:
            tensors[0] = tensors[0].clone()
        outputs = self.sample.call(tensors)
        loss = p["anchor"] * 1.0
        for k, output in enumerate(outputs):
            loss = loss + self._weighted(k, output)
        return (loss, *[o.detach() for o in outputs])

    def _weighted(self, number: int, output: Tensor) -> Tensor:
        if output.is_complex():
            output = torch.view_as_real(output.resolve_conj())
        if len(self.weights) == number:
            generator = torch.Generator().manual_seed(number)
            self.weights.append(torch.rand(output.shape, generator=generator, dtype=torch.float64) + 0.5)
        return (output * self.weights[number]).sum()

    def one_device(self) -> dict[str, Tensor]:
        """Loss, outputs, gradients and buffers after the eager step, by the names that graphs give them."""
        buffers = {n: b.clone() for n, b in self.buffers.items()}
        loss, *outputs = self(self.parameters, buffers, *[r.clone() for r in self.rows])
        found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        gradients = {f"gradient of {n}": g for n, g in zip(self.parameters, found, strict=True) if g is not None}
        numbered = {f"output {i}": o for i, o in enumerate(outputs)}
        return {"loss": loss.detach(), **numbered, **gradients, **buffers}

    def capture(self) -> tuple[CapturedStep, list[Tensor]]:
        """The captured step, as the product makes it, and its inputs."""
        captured, live = capture_function(self, self.parameters, self.buffers, self.rows)
        simplify_strided_gradients(captured.graph_module.graph)
        remove_dead_nodes(captured.graph_module.graph)
        captured.graph_module.recompile()
        return captured, live


def _differentiable_step(sample: Sample, batch: Sequence[int]) -> tuple[Step, dict[str, Tensor]]:
    """The step with as many gradients as torch has, and what one device computes.

    Raises:
        Exception: what torch says where one device cannot do it without gradients either.
    """
    no_gradients = (False,) * len(sample.tensors)
    for learnt in dict.fromkeys([sample.learnt, no_gradients]):
        step = Step(sample, batch, learnt)
        try:
            return step, step.one_device()
        except Exception:
            if learnt == no_gradients:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


class _AnyStream(RandomStreams):
    """Random numbers are not compared, so neither are they reproducible."""

    def __init__(self) -> None:
        super().__init__(0, {})

    def select(self, axes: tuple[str, ...] | None, draw: int) -> None:
        """Draw on."""


class Checker:
    """One sample with one choice of its batch: eager once, captured once, expanded for every split.

    Args:
        sample: the sample.
        batch: positions of the tensors that are the batch.
        quick: expansion alone, without passes and without finding out whether each rank alone comes to the same.
    """

    def __init__(self, sample: Sample, batch: Sequence[int], *, quick: bool = False) -> None:
        self._quick = quick
        self._problem: Outcome | None = None
        started = time.process_time()
        try:
            self._step, self._wanted = _differentiable_step(sample, batch)
        except Exception as error:
            self._problem = Outcome(SKIPPED, f"one device: {_gist(error)}")
            return
        try:
            self._captured, self._live = self._step.capture()
        except CaptureError as error:
            self._problem = Outcome(REFUSED, _gist(error))
        except Exception as error:
            self._problem = Outcome(CRASHED, f"capture: {_gist(error)}")
        else:
            self._problem = None if quick else self._one_device_after_passes()
        self._seconds = time.process_time() - started

    def _one_device_after_passes(self) -> Outcome | None:
        """What is wrong with the graph of one device, which must be the captured one to the last bit."""
        if _draws(self._captured) or self._step.sample.operator in _UNINITIALISED:
            return None
        try:
            step = build(self._captured, ()).main
            inputs = [v.clone() if isinstance(v, Tensor) else v for v in self._live]
            with torch.no_grad():
                outputs = function_of(step.graph_module)(*inputs)
        except Exception as error:
            return Outcome(CRASHED, f"one device, after passes: {_gist(error)}")
        expected = [value for values in run_global(self._captured, self._live) for value in values]
        pairs = zip([*outputs, *inputs], expected, strict=True)
        same = all(_same_bits(a, b) for a, b in pairs if isinstance(b, Tensor))
        return None if same else Outcome(WRONG, "one device, after passes: other bits than the captured graph")

    def check(self, split: Split) -> Outcome:
        """What two ranks make of it."""
        if self._problem is not None:
            return self._problem
        started = time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kind, reason = self._compare(split)
        seconds = self._seconds + time.process_time() - started
        told = [str(w.message) for w in caught if issubclass(w.category, ReplicationWarning)]
        if kind == EQUAL and any("its rule does not know this call" in line for line in told):
            kind, reason = CRASHED, told[0]
        if kind == EQUAL and told:
            kind, reason = REPLICATED, told[0]
        if kind in (EQUAL, REPLICATED) and seconds > SECONDS:
            kind, reason = SLOW, f"{seconds:.0f} seconds"
        return Outcome(kind, reason, seconds)

    def _compare(self, split: Split) -> tuple[str, str]:
        try:
            steps = self._steps(split)
        except ExpansionError as error:
            return REFUSED, _gist(error)
        except Exception as error:
            return CRASHED, f"expansion: {_gist(error)}"
        one, other = map(describe, steps)
        if one != other:
            different = next((f"{a} | {b}" for a, b in zip(one, other, strict=False) if a != b), "their lengths")
            return WRONG, f"the ranks' graphs differ: {different}"
        arbitrary = self._step.sample.operator in _UNINITIALISED or _draws(self._captured)
        try:
            outputs, inputs = run_ranks(steps, self._inputs(steps))
        except AssertionError as error:
            return (ARBITRARY, "") if arbitrary else (WRONG, _gist(error))
        except Exception as error:
            return CRASHED, f"run: {_gist(error)}"
        if arbitrary:
            return ARBITRARY, ""
        got = self._named(outputs, inputs)
        problem = _first_difference(got, self._wanted)
        if problem is None:
            return EQUAL, ""
        alone = self._named(*run_global(self._captured, self._live))
        return (WRONG if _first_difference(got, alone) else FORMULA), problem

    def _steps(self, split: Split) -> list[ShardedStep]:
        if split.dim is None:
            mesh, plan = {"data_parallel": split.shares}, None
        else:
            name, values = f"t{split.tensors[0]}", {**self._step.parameters, **self._step.buffers}
            placements = {n: Shard(split.dim) if n == name else REPLICATE for n in values}
            mesh = {"tensor_parallel": split.shares}
            plan = TensorParallelPlan(ResolvedPlan(placements, {n: tuple(v.shape) for n, v in values.items()}))
        if self._quick:
            return expand_all(self._captured, mesh, plan)
        verify_captured(self._captured)
        return [build(self._captured, axes, plan=plan).main for axes in meshes_for(mesh)]

    def _inputs(self, steps: Sequence[ShardedStep]) -> list[Any]:
        streams = len(steps[0].signature.inputs) - len(self._live)
        return [*self._live, *[_AnyStream()] * streams]

    def _named(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        signature = self._captured.signature
        found: dict[str, Tensor] = {}
        for entry, value in zip(signature.outputs, outputs, strict=True):
            found[f"gradient of {entry.name}" if entry.role == "gradient" else entry.name] = value
        after = zip(signature.inputs, inputs, strict=False)
        return found | {entry.name: value for entry, value in after if entry.name in self._step.buffers}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [torch.empty(t.numel(), dtype=t.dtype).copy_(t.flatten()) for t in (one, other)]  # with plain strides
    return torch.equal(*(t.view(torch.uint8) for t in flat))


def _draws(captured: CapturedStep) -> bool:
    return any(isinstance(n.target, OpOverload) and is_random(n.target) for n in captured.graph_module.graph.nodes)


def _first_difference(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    if set(got) != set(wanted):
        return f"{', '.join(sorted(set(got) ^ set(wanted)))} on one side alone"
    for name, value in got.items():
        problem = difference(value, wanted[name])
        if problem is not None:
            return f"{name}: {problem}"
    return None


def difference(got: Tensor, want: Tensor) -> str | None:
    """What is different, or None; NaN and infinities must be in the same places."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)} for {want.dtype}{list(want.shape)}"
    if not (want.is_floating_point() or want.is_complex()):
        return None if torch.equal(got, want) else "other numbers"
    if want.is_complex():
        got, want = torch.view_as_real(got.resolve_conj()), torch.view_as_real(want.resolve_conj())
    if not torch.equal(got.isnan(), want.isnan()):
        return f"NaN in {int(got.isnan().sum())} places for {int(want.isnan().sum())}"
    infinite, finite = want.isinf(), want.isfinite()
    if not torch.equal(got.isinf(), infinite) or not torch.equal(got[infinite], want[infinite]):
        return "other infinities"
    if not finite.any():
        return None
    tolerance = max(1e-8, 16 * torch.finfo(want.dtype).eps)
    got, want = got[finite].double(), want[finite].double()
    off = float((got - want).abs().max()) / max(float(want.abs().max()), 1e-3)
    return None if off <= tolerance else f"off by {off:.1e}"


def _gist(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]
