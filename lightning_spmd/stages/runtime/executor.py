"""Runs iteration graphs on live state."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from lightning_spmd.ir.reads import ReadMiss, checks_of
from lightning_spmd.ir.signature import InputRole, OutputRole
from lightning_spmd.ir.sizes import Sizes
from lightning_spmd.ir.source import ErrorsNamePlaces, function_of
from lightning_spmd.ir.steps import CapturedStep, IterationGraphs, ShardedStep
from lightning_spmd.stages.runtime.ahead import Question, asking
from lightning_spmd.stages.runtime.live_state import LiveState, ReadAll, Reader, read_all
from lightning_spmd.stages.runtime.lowering import Lowering, Together, as_python, is_settled
from lightning_spmd.stages.runtime.random_streams import draws_numbers
from lightning_spmd.stages.runtime.switches import GraphSwitches
from lightning_spmd.stages.runtime.trial_runs.trial_runs import Finish, FirstRun, Measurement
from lightning_spmd.stages.runtime.undo import collectives_ended, random_numbers_kept

OF_THE_OPTIMIZER = (OutputRole.OPTIMIZER_STATE, OutputRole.HYPER_PARAMETER)
MOST_FOLLOWED = 16
"""Other graphs for which one keeps the program that ends their iteration inside its own."""


class Program:
    """One graph with the readers of its inputs.

    Args:
        step: the graph.
        readers: of its inputs in order: a function, the position of a batch leaf, or None for a pending value.
        lower: makes a callable of the graph.
    """

    def __init__(self, step: ShardedStep, readers: Sequence[Reader | int | None], lower: Lowering) -> None:
        self.step = step
        self._lower = lower
        self._readers = readers

    @functools.cached_property
    def run(self) -> Callable[..., Sequence[Any]]:
        """The callable; made when it is first wanted, for the first runs, node by node, may still change the graph."""
        return self._lower(self.step)

    @property
    def is_settled(self) -> bool:
        """Whether there is a callable that changes no more."""
        return "run" in vars(self) and is_settled(self.run)

    @functools.cached_property
    def talk(self) -> Callable[..., Generator[Sequence[Sequence[Tensor]], Any, Sequence[Any]]]:
        """Makes a generator of a run: it yields what Python reads, and is sent the numbers that Python has then."""
        return function_of(self.step.graph_module, talks=True, again=self._hyper_parameters())

    def _hyper_parameters(self) -> dict[fx.Node, Reader]:
        """What reads numbers of the optimizer's groups, by placeholder: Python may change them in the step."""
        nodes = self.step.graph_module.graph.find_nodes(op="placeholder")
        found = {nodes[i]: self._readers[i] for i, _ in self.step.signature.inputs_of(InputRole.HYPER_PARAMETER)}
        return {node: read for node, read in found.items() if callable(read)}

    @functools.cached_property
    def _read_all(self) -> ReadAll:
        return read_all(self._readers)

    def inputs(self, batch: Sequence[Tensor], pending: Sequence[Any] = ()) -> list[Any]:
        """The values of the graph's inputs now."""
        return self._read_all(batch, list(reversed(pending)))

    def looked_at(self, batch: Sequence[Tensor]) -> LiveInputs:
        """The same, each read when it is asked for."""
        return LiveInputs(self._readers, batch)


class LiveInputs(Sequence[Any]):
    """The values of a graph's inputs, each read when it is asked for.

    Args:
        readers: of the inputs; none is pending.
        batch: tensor leaves of the batch, in order.
    """

    def __init__(self, readers: Sequence[Reader | int | None], batch: Sequence[Tensor]) -> None:
        self._readers, self._batch = readers, batch

    def __getitem__(self, index: Any) -> Any:
        read = self._readers[index]
        return read() if callable(read) else self._batch[read]

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True)
class Pending:
    """Work that an iteration deferred to the next one.

    Args:
        owner: the executable whose ``cleanup`` does the work.
        values: inputs from its own iteration; each tensor is in a list of one element, from which it is taken.
        inputs: all inputs of ``cleanup``: these values, and the state that it changes as it was at the end of the
            iteration. A tensor that replaces one of these later is not changed.
    """

    owner: Executable
    values: tuple[Any, ...]
    inputs: Sequence[Any]

    def is_current(self) -> bool:
        """Whether the tensors to be changed are still the same."""
        return self.owner.finds_now(self)


class Executable:
    """A captured step, the graphs made from it, and the access to their live inputs.

    Before its graphs are final it has trial runs: one checks memory layouts, three
    measure if the order can be improved.

    Attributes:
        decides: whether Python decides something by values of the step, so that a run may end with ``ReadMiss``.

    Args:
        captured: signature, guards and recorded calls.
        graphs: the graphs to begin with: one graph, nothing deferred.
        state: the live objects.
        finish: makes the final graphs after the measurement; None keeps the first ones.
        follow: joins a cleanup and a setup to one iteration that does both.
        lower: turns the final graphs into callables.
        on_repairs: as of :class:`FirstRun`.
        asks: whether graphs of several ranks can ask a question after they have begun.
        sizes: the counts that the graphs leave open, those of batches first; None if they serve one batch size.

    Attributes:
        products: floating-point operations of products by dtype, for some counts; None where that is not known.
    """

    def __init__(
        self,
        captured: CapturedStep,
        graphs: IterationGraphs,
        state: LiveState,
        finish: Finish | None = None,
        follow: Callable[[ShardedStep, ShardedStep], ShardedStep] | None = None,
        lower: Lowering = as_python,
        on_repairs: Callable[[Sequence[fx.Node]], None] = lambda _nodes: None,
        *,
        asks: bool = True,
        sizes: Sizes | None = None,
    ) -> None:
        self.captured = captured
        self.sizes = sizes
        self.products: Callable[[Sequence[int]], Mapping[torch.dtype, float]] | None = None
        self.graphs = graphs
        self.state = state
        self._follow = follow
        self._lower = lower
        self._asks = asks and bool(graphs.main.axes)
        self._writers = state.writers(captured, graphs.main)
        self._found_inf = skips_state(captured)
        self._draws = draws_numbers(captured.graph_module.graph)
        self.decides = bool(checks_of(captured.graph_module.graph))
        self._main = self._program(graphs.main)
        self._cleanup: Program | None = None
        self._after: dict[int, tuple[Executable, Program]] = {}
        self._trials: list[FirstRun | Measurement] = [FirstRun(graphs, self._form, on_repairs)]
        if finish is not None:
            self._trials.append(Measurement(graphs, self._form, finish))
        self._question: Question | None = None

    def inputs(self, batch: Sequence[Tensor]) -> list[Any]:
        """The inputs of the captured graph for this batch (tensor leaves, in order)."""
        return self._main.inputs(batch)

    def looked_at(self, batch: Sequence[Tensor]) -> LiveInputs:
        """The same, each read when it is asked for: guards ask for few."""
        return self._main.looked_at(batch)

    def can_follow(self, pending: Pending) -> bool:
        """Whether a run can take over the deferred work of another iteration."""
        decided = not isinstance(self._lower, Together) or self._main.is_settled
        return self.is_final and decided and pending.owner.graphs.cleanup is not None

    @property
    def is_final(self) -> bool:
        """Whether the graphs have their final form: checked, measured, arranged."""
        return not self._trials

    def can_ask(self, pending: Pending | None) -> bool:
        """Whether a run can ask a question once it has begun; all that ranks do together to get there is done.

        Args:
            pending: as of :meth:`run`.
        """
        ready = self._asks and self.is_final and (pending is None or self.can_follow(pending))
        return ready and self._taking_over(pending)[0].is_settled

    @property
    def can_talk(self) -> bool:
        """Whether a run can hand values to Python and wait; first runs and lowered graphs begin when Python is done."""
        return self.is_final and self.decides and isinstance(self._main.run, FunctionType)

    @property
    def draws(self) -> bool:
        """Whether a run draws random numbers."""
        return self._draws

    def talk(
        self, batch: Sequence[Tensor], pending: Pending | None = None
    ) -> Generator[Sequence[Sequence[Tensor]], Any, Sequence[Any]]:
        """Begin a run as a generator: it yields values that Python reads and receives the numbers that Python then has.

        Args:
            batch: tensor leaves of the batch, in order.
            pending: as of :meth:`run`; done when the first values are there.
        """
        program, values = self._taking_over(pending)
        return program.talk(*self._inputs(program, batch, values))

    def ended(self, outputs: Sequence[Any]) -> tuple[Sequence[Any], Pending | None]:
        """Store the results of such a run. Returns the outputs of the captured graph and the deferred work."""
        self._store(outputs)
        return self._left_by(outputs)

    def run(
        self,
        batch: Sequence[Tensor],
        pending: Pending | None = None,
        question: Question | None = None,
    ) -> tuple[Sequence[Any], Pending | None]:
        """Run one iteration. Parameters, buffers and state are updated.

        Args:
            batch: tensor leaves of the batch, in order.
            pending: deferred work of the iteration before, done in this run; only if :meth:`can_follow`.
            question: asked as late as possible before this iteration changes anything or involves another rank. If it
                raises, nothing of the iteration is done; it is told whether the pending work is. Only if
                :meth:`can_ask`.

        Returns:
            the outputs of the captured graph, and what this iteration leaves undone.

        Raises:
            ReadMiss: Python would decide otherwise than at capture; the pending work is done, all else is unchanged.
        """
        self._question = question
        if self._trials:
            return self._try(self._trials[0], batch), None
        program, values = self._taking_over(pending)
        return self._left_by(self._execute(program, batch, values, program.run))

    def forget(self, other: Executable) -> None:
        """Drop the program that takes over another graph's deferred work."""
        self._after.pop(id(other), None)

    def clean_up(self, pending: Pending) -> None:
        """Do the deferred work of an iteration of this graph."""
        if self._cleanup is not None:
            with GraphSwitches(), ErrorsNamePlaces():
                self._cleanup.run(*pending.inputs)

    def finds_now(self, pending: Pending) -> bool:
        """Whether the tensors of pending work are still the ones found at its beginning."""
        if self._cleanup is None:
            return True
        try:
            now = self._cleanup.inputs((), pending.values)
        except KeyError:  # state of the optimizer is not there any more
            return False
        return all(new is old for new, old in zip(now, pending.inputs, strict=True) if isinstance(old, Tensor))

    # ------------------------------------------------------------------ pieces
    def _left_by(self, outputs: Sequence[Any]) -> tuple[Sequence[Any], Pending | None]:
        """The captured graph's outputs among those of a final graph, and what that leaves undone."""
        if self._cleanup is None:
            return outputs, None
        count = len(self.captured.signature.outputs)
        leaving = zip(outputs[count:], self._main.step.signature.outputs[count:], strict=True)
        values = tuple([value] if entry.key[1] else value for value, entry in leaving)
        return outputs[:count], Pending(self, values, self._cleanup.inputs((), values))

    def _program(self, step: ShardedStep, lower: Lowering | None = None) -> Program:
        readers = self.state.readers(step.signature.inputs, self.captured.constants)
        chosen = self._lower if lower is None else lower
        if not self._asks:
            return Program(step, readers, chosen)
        return Program(step, readers, lambda final: chosen(asking(final, self._ask)))

    def _ask(self, done: bool) -> None:
        if self._question is not None:
            self._question(done)
            self._question = None

    def _form(self, step: ShardedStep) -> fx.GraphModule:
        """The form in which a graph runs node by node."""
        return step.graph_module

    def _try(self, trial: FirstRun | Measurement, batch: Sequence[Tensor]) -> Sequence[Any]:
        """One of the runs before the graphs are final."""
        run = trial.interpreter().run
        undone = trial.undone(self._main.inputs(batch)) if isinstance(trial, FirstRun) else contextlib.nullcontext()
        with undone:
            outputs = self._execute(self._main, batch, (), run)
        self._tried(trial)
        return outputs

    def _tried(self, trial: FirstRun | Measurement) -> None:
        """Such a run is over; after the last one the graphs are final."""
        graphs = trial.ended()
        if graphs is None:
            return
        del self._trials[0]
        if graphs is self.graphs:
            return
        self.graphs = graphs
        self._main = self._program(graphs.setup or graphs.main)
        if graphs.cleanup is not None:
            # a rank may clean up alone, and lowering may have to speak with the others
            self._cleanup = self._program(graphs.cleanup, as_python)
            self._after[id(self)] = (self, self._program(graphs.main, self._lower_following()))

    def _lower_following(self) -> Lowering:
        return self._lower.following if isinstance(self._lower, Together) else self._lower

    def _taking_over(self, pending: Pending | None) -> tuple[Program, tuple[Any, ...]]:
        """What runs an iteration that begins with such work, and the values of the work."""
        return (self._main, ()) if pending is None else (self._following(pending.owner), pending.values)

    def _following(self, owner: Executable) -> Program:
        """This iteration with the work in it that one of ``owner`` left."""
        if id(owner) not in self._after:
            if self._follow is None or owner.graphs.cleanup is None:
                raise ValueError("nothing to follow: check can_follow() first")
            if len(self._after) > MOST_FOLLOWED:  # its own is the first one
                del self._after[list(self._after)[1]]
            step = self._follow(owner.graphs.cleanup, self.graphs.setup or self.graphs.main)
            self._after[id(owner)] = (owner, self._program(step, self._lower_following()))
        return self._after[id(owner)][1]

    def _execute(
        self, program: Program, batch: Sequence[Tensor], pending: Sequence[Any], run: Callable[..., Sequence[Any]]
    ) -> Sequence[Any]:
        """Run a graph, and store what it gives."""
        outputs = self._compute(program, batch, pending, run)
        self._store(outputs)
        return outputs

    def _inputs(self, program: Program, batch: Sequence[Tensor], pending: Sequence[Any]) -> Sequence[Any]:
        """The inputs of a run that begins, with its sizes."""
        if self.sizes is not None:
            self.sizes.begin(batch)
        return program.inputs(batch, pending)

    def _compute(
        self, program: Program, batch: Sequence[Tensor], pending: Sequence[Any], run: Callable[..., Sequence[Any]]
    ) -> Sequence[Any]:
        with GraphSwitches(), ErrorsNamePlaces():
            inputs = self._inputs(program, batch, pending)
            if self.state.streams is None:  # one device: the graph draws eager's own numbers
                with random_numbers_kept(draws=self._draws and self.decides):
                    outputs = run(*inputs)
            else:
                with self.state.streams.active(draws=self._draws):
                    try:
                        with collectives_ended():
                            outputs = run(*inputs)
                    except BaseException as error:
                        if self._question is not None or isinstance(error, ReadMiss):
                            self.state.streams.tick -= 1  # this run has not been
                        raise
        return outputs

    def _store(self, outputs: Sequence[Any]) -> None:
        """Outputs that are state go where it is kept."""
        skipped = self._found_inf is not None and bool(outputs[self._found_inf])
        for position, write in self._writers:
            if not (skipped and self.captured.signature.outputs[position].role in OF_THE_OPTIMIZER):
                write(outputs[position])


def skips_state(captured: CapturedStep) -> int | None:
    """The output that says whether a step was skipped, if state to be stored depends on it.

    It is the one value that the host reads for loss scaling: in a first step whose state begins as a gradient, and for
    optimizers that replace tensors or numbers of their state. torch's optimizers do not, after their first step.
    """
    signature = captured.signature
    stored = any(True for _ in signature.outputs_of(*OF_THE_OPTIMIZER))
    return next((i for i, _ in signature.outputs_of(OutputRole.FOUND_INF)), None) if stored else None
