"""CUDA graphs: parts of a final graph are recorded and launched as a whole; the rest runs between recordings.

A recording is a list of kernels with fixed addresses. Three rules make a replay compute what the graph would:

* Parameters, buffers and state must keep their addresses. Addresses are compared in every step; a graph with new
  addresses is recorded again, and after a few times no more.
* Tensors that come from elsewhere in each step (batches, held gradients, results of nodes that are not recorded,
  buffers that the step replaces) are copied in, and copied back if they are written.
* Tensors that leave the step are copied out, because the next step uses the recordings' memory again.

Random operators use the default generator, whose seed and offset a replay reads. Streams are selected between
recordings. One memory pool serves all graphs of a run, because nothing in it lives from one step to the next.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.node_info import TensorSpec, named
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.messages import tell
from lightning_spmd.stages.runtime.cuda_graphs.recordable import Piece, Plan, cut
from lightning_spmd.stages.runtime.cuda_graphs.recorded_pieces import Gap, Recorded, copied_out, storages
from lightning_spmd.stages.runtime.lowering import Lowering, as_python

WARM_UP = 1
"""Runs without recording: kernels are chosen and libraries make their workspaces."""
TRIES = 5
"""How often a graph is recorded before it stays unrecorded."""


class Recorder(Protocol):
    """Records kernels: a GPU's CUDA graphs, or a stand-in in tests.

    Args:
        generation: changes when everything that was recorded so far must not run any more.
    """

    generation: int

    def on_device(self, spec: TensorSpec) -> bool:
        """Whether a tensor is on the device of the recordings."""
        ...

    def prepare(self) -> None:
        """Called before pieces of a graph are recorded, and before recordings are dropped."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what ``work`` launches, without running it, and return a function that runs it.

        Raises:
            RuntimeError: something in it cannot be recorded. Nothing was run, and random states are unchanged.
        """
        ...


class CudaRecorder:
    """CUDA graphs of one device, all in one pool of memory.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.generation = 0
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._anchor: Any = None

    def on_device(self, spec: TensorSpec) -> bool:
        """Whether it is on the GPU."""
        return spec.device.type == "cuda"

    def prepare(self) -> None:
        """Free unused memory, since the pool is separate. Earlier recordings are no longer in use."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph of it."""
        if self._anchor is None:  # torch forgets a pool without graphs, and refuses its name from then on
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a graph without kernels
                self._anchor = self._recorded(lambda: None)
        return self._recorded(work).replay

    def _recorded(self, work: Callable[[], None]) -> Any:
        graph, problem = torch.cuda.CUDAGraph(), None
        drawn = private.default_generator(self._device).get_state()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # other threads (loaders that pin memory, NCCL's watchdog) go on with what they do
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException as error:
                problem = error
            try:
                graph.capture_end()
            except RuntimeError as error:
                self._recover(drawn)
                problem = problem or error
        if problem is not None:
            raise problem
        return graph

    def _recover(self, drawn: torch.Tensor) -> None:
        """A recording that CUDA broke off leaves allocator and generator as if it went on."""
        index = torch.cuda.current_device()
        private.leave_pool(index, self._pool)
        fresh = torch.Generator(self._device)
        fresh.set_state(drawn)
        torch.cuda.default_generators[index].graphsafe_set_state(fresh)
        self.generation += 1  # recordings draw from the state that was replaced


class CUDAGraphs:
    """A lowering that runs graphs as recordings where possible.

    Args:
        recorder: of this rank's device.
        say: called when a graph is recorded, or cannot be.
    """

    def __init__(self, recorder: Recorder, say: Callable[[str], None] = tell) -> None:
        self.recorder = recorder
        self.say = say
        self.programs: list[RecordedProgram] = []
        self._said: set[str] = set()

    def __call__(self, step: ShardedStep) -> RecordedProgram:
        """The program of a final graph."""
        program = RecordedProgram(step, self)
        self.programs.append(program)
        return program

    def say_once(self, what: str, text: str) -> None:
        """Not for every graph again."""
        if what not in self._said:
            self._said.add(what)
            self.say(text)


class RecordedProgram:
    """One graph: runs as Python at first, is recorded, then replayed.

    Args:
        step: the graph.
        owner: whose recorder it uses.
    """

    def __init__(self, step: ShardedStep, owner: CUDAGraphs) -> None:
        self.step = step
        self.replays = 0
        self.times_recorded = 0
        self.given_up: str | None = None
        self._owner = owner
        self._python = as_python(step)
        self._runs = 0
        self.plan: Plan | None = None
        self._gaps: dict[int, Gap] = {}
        self._recorded: dict[int, Recorded] = {}
        self._addresses: list[int] | None = None
        self._generation = owner.recorder.generation
        self._live: list[int] = []
        self._loose: list[int] = []
        self._writes_copies = False
        self._occupied: set[int] = set()
        self._refused: set[fx.Node] = set()

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the graph."""
        self._runs += 1
        if self.given_up is not None or self._runs <= WARM_UP:
            return self._python(*inputs)
        plan = self.plan or self._make_plan()
        if self.given_up is None:
            self._look_where(inputs)
        if self.given_up is not None or self._shares_memory(inputs):
            return self._python(*inputs)
        self.replays += bool(self._recorded)
        return self._run(plan, inputs)

    # ------------------------------------------------------------------ the plan
    def _make_plan(self) -> Plan:
        plan = cut(self.step, self._owner.recorder.on_device, self._refused)
        used = {plan.roots[o] for p in plan.pieces if p.recorded for n in p.nodes for o in n.all_input_nodes}
        self._live = [i for i, n in enumerate(plan.placeholders) if n in plan.live and n in used]
        self._loose = [i for i, n in enumerate(plan.placeholders) if n not in plan.live and n in used]
        self._writes_copies = any(piece.written for piece in plan.pieces)
        self._gaps = {i: Gap(plan, p) for i, p in enumerate(plan.pieces) if not p.recorded}
        if not plan.recordings:
            first = [f": {named(node)} {why}" for node, why in plan.left_out.items()][:1]
            self._give_up("".join(["nothing in it can be recorded", *first]))
        self.plan = plan
        return plan

    def _give_up(self, reason: str) -> None:
        self.given_up = reason
        self._drop()
        self._owner.say_once(reason, f"strategy='spmd' runs a graph without CUDA graphs: {reason}")

    def _look_where(self, inputs: Sequence[Any]) -> None:
        """Forget what was recorded if parameters, buffers or state lie elsewhere in memory than they did."""
        addresses = [inputs[i].data_ptr() for i in self._live]
        generation, self._generation = self._generation, self._owner.recorder.generation
        if addresses == self._addresses:
            if generation != self._generation:
                self._drop()
            return
        before, self._addresses = self._addresses, addresses
        self._drop()
        entries = self.step.signature.inputs
        self._occupied = set(storages(inputs[i] for i in self._live if self._writes_copies or entries[i].mutated))
        if before is not None and self.times_recorded >= TRIES:
            moved = [entries[i].name for i, a, b in zip(self._live, before, addresses, strict=True) if a != b]
            self._give_up(f"it was recorded {self.times_recorded} times, and {moved[0]} lies elsewhere in memory again")

    def _shares_memory(self, inputs: Sequence[Any]) -> bool:
        """Whether something that is copied in is a piece of memory that the step also uses otherwise: not this time."""
        found = storages(inputs[i] for i in self._loose)
        return not self._occupied.isdisjoint(found) or (self._writes_copies and len(set(found)) < len(found))

    def _drop(self) -> None:
        if self._recorded:
            self._owner.recorder.prepare()  # nobody runs them any more
            self._recorded = {}

    # ------------------------------------------------------------------ a run
    def _run(self, plan: Plan, inputs: Sequence[Any]) -> Sequence[Any]:
        env: dict[fx.Node, Any] = {**plan.constants, **dict(zip(plan.placeholders, inputs, strict=True))}
        records = not self._recorded
        with self._recording() if records else contextlib.nullcontext():
            for index, piece in enumerate(plan.pieces):
                if not piece.recorded:
                    self._gaps[index].run(env)
                elif index in self._recorded:
                    self._recorded[index].replay(env)
                elif not records or not self._record(plan, index, piece, env):
                    records = False
                    self._gaps.setdefault(index, Gap(plan, piece)).run(env)
                for node in plan.dies.get(index, ()):
                    env.pop(node, None)
        outputs = copied_out(plan, env)
        if records:
            self._owner.say_once(
                "recorded",
                f"strategy='spmd' launches {plan.kernels} of {len(plan.left_out) + plan.kernels} operators of an "
                f"iteration as {plan.recordings} CUDA graph{'s' * (plan.recordings > 1)}",
            )
        return outputs

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """The collector must not free a GPU's memory while something is recorded."""
        self.times_recorded += 1
        self._owner.recorder.prepare()
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()

    def _record(self, plan: Plan, index: int, piece: Piece, env: dict[fx.Node, Any]) -> bool:
        """Record a piece and run it; False: it could not be, and nothing of it has been run."""
        recorded = Recorded(plan, index)
        try:
            launch = self._owner.recorder.record(lambda: recorded.work(env))
        except RuntimeError as error:
            self._cannot(recorded.at, piece, error)
            return False
        recorded.recorded(launch, env)
        self._recorded[index] = recorded
        return True

    def _cannot(self, node: fx.Node | None, piece: Piece, error: RuntimeError) -> None:
        """What cannot be recorded runs in Python from now on; the next step records anew."""
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        where = "" if node is None else f"{named(node)}: "
        self._refused.update(piece.nodes if node is None else [node])
        self._drop()
        self.plan, self._addresses = None, None
        text = f"strategy='spmd' keeps an operator out of its CUDA graphs, because recording failed: {where}{said}"
        self._owner.say_once(text, text)
        if isinstance(error, torch.OutOfMemoryError) or self.times_recorded >= TRIES:
            self._give_up(f"recording failed {self.times_recorded} times, last with {where}{said}")


def of_device(device: torch.device) -> Lowering | None:
    """The lowering for a device; None if the device has no CUDA graphs."""
    return CUDAGraphs(CudaRecorder(device)) if device.type == "cuda" else None
