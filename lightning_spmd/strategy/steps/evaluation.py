"""Validation, test and predict steps as graphs: the forward pass alone, captured, expanded and run as in training.

With replicated parameters evaluation runs eagerly on each rank's rows, as Lightning does. If no rank has whole
parameters, a step is a graph on the global batch (``evaluating`` decides). Logged values are global; metrics and
predictions stay with the rank that has the rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from typing_extensions import override

from lightning_spmd.errors import BatchError, CaptureError, RankDisagreementError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import REPLICATE, Shard
from lightning_spmd.ir.signature import InputRole, OutputRole
from lightning_spmd.ir.stable_hash import stable_hash
from lightning_spmd.ir.steps import CapturedStep, Variant
from lightning_spmd.messages import speaking_of, warn
from lightning_spmd.stages.capture.batch.batch import Batch
from lightning_spmd.stages.capture.follow.eager_run import Abandoned
from lightning_spmd.stages.capture.follow.step_state import CannotBeFollowed
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.stages.runtime.trial_runs.trial_runs import FirstRunError
from lightning_spmd.strategy.graphs.building import CannotBeBuilt
from lightning_spmd.strategy.graphs.run_context import FellBack, RunContext, StepRequest
from lightning_spmd.strategy.ranks.boundary import ends_no_loop
from lightning_spmd.strategy.ranks.places import Moment, evaluation_moment
from lightning_spmd.strategy.steps.as_before import AsBefore
from lightning_spmd.strategy.steps.following import EndedByUser, Following
from lightning_spmd.strategy.steps.iteration import RunsAgain, TrainingIteration
from lightning_spmd.strategy.steps.last_resort import NoEagerWay
from lightning_spmd.strategy.steps.meeting import LookedAtRows
from lightning_spmd.strategy.steps.replay import replay, resolve

_ARGUMENTS = ("batch", "batch_idx", "dataloader_idx")
_CANNOT = (NoEagerWay, LookedAtRows, CannotBeFollowed, CannotBeBuilt, FirstRunError, CaptureError, BatchError)
"""What says, on all ranks, that a step can be no graph."""


class EvaluationSteps(TrainingIteration):
    """The graphs of one run's validation, test and predict steps.

    They are followed, agreed on, built and run like those of training. Capture and the origin of random numbers differ,
    and one method may run eagerly while the others stay graphs. A step that cannot be followed starts over, because no
    rank has whole parameters in the middle of it.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._eager: set[str] = set()
        self._method = ""
        self._discard = False
        self._now: Moment | None = None
        self._followings: dict[str, Following] = {}
        self._row_outputs = WeakKeyDictionary[Executable, dict[int, list[int]]]()

    def evaluate(self, method: str, args: tuple[Any, ...], *, turns: bool = False, discard: bool = False) -> Any:
        """Run one step.

        Args:
            method: ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
            args: its arguments as Lightning passes them: batch, batch index, index of the dataloader.
            turns: ranks whose batches have ended take part in the steps of others.
            discard: the step is only for the other ranks: nothing is logged or returned, and no metric is updated.

        Returns:
            what the method returns, with real tensors.

        Raises:
            FellBack: the step must run eagerly; nothing has been changed.
        """
        self._method, self._discard = method, discard
        arguments: dict[str, Any] = dict(zip(_ARGUMENTS, args, strict=False))
        batch = arguments.pop("batch")
        self._now = evaluation_moment(self.context.trainer, method, arguments, turns=turns)
        if method in self._eager:
            if self.context.control is not None:  # whole parameters are put together for the step by all ranks
                self._now.meet(self.context.control)
            raise FellBack
        if "dataloader_iter" in inspect.signature(getattr(self.context.module, method)).parameters:
            self._fall_back("it takes dataloader_iter, so it fetches its own data")
        if self.context.streams is not None:
            # a function of the place in the run: evaluation leaves no trace in training's random numbers, and a
            # resumed run evaluates with the numbers of the uninterrupted one
            trainer = self.context.trainer
            place = (trainer.global_step, trainer.current_epoch, method, *sorted(arguments.items()))
            self.context.streams.tick = stable_hash(place)
        before = AsBefore(self.context.module, tensors=not discard)
        try:
            try:
                returned = self._followed(batch, arguments, Variant.evaluation(method))
            except RunsAgain:
                before.put_back()
                returned = self._followed(batch, arguments, Variant.evaluation(method))
        except _CANNOT as error:
            self.flush()
            before.put_back()
            self._fall_back(self._reason(error))
        except EndedByUser as ended:
            raise ended.error from None
        if not discard:
            return returned
        before.put_back()
        return None

    @ends_no_loop
    def _followed(self, batch_tree: Any, arguments: dict[str, Any], variant: Variant) -> Any:
        """Run the user's Python on what stands for the batch of all ranks, and its graph."""
        following = self._followings.get(variant.method)
        is_first = following is None
        if following is None:
            following = Following(self.context, self.flush, self._left_for, self.gradients)
            self._followings[variant.method] = following
        batch = Batch(batch_tree, self._shared, part=self._has_part)
        with speaking_of(variant.method):
            request = StepRequest(batch, variant, arguments)
            part = self.table.step_key(request)
            self._met, following.graphs_infer = not is_first, torch.is_inference_mode_enabled()
            meeting = self._meeting(request)
            self.table.open.note(batch)
            vary = tuple(self.table.open.wanted(batch))
            pieces = self._pieces_of(request, meeting)
            beginning = functools.partial(self._run_beginning, request, pieces)
            with contextlib.nullcontext() if meeting is None else meeting.streams:
                try:
                    with torch.inference_mode(mode=False), torch.no_grad():  # the former's tensors know no versions
                        followed = following.step(batch, arguments, variant.method, part, meeting, beginning, vary)
                        pieces.end()
                    request = dataclasses.replace(request, program=followed.program)
                    executable, outputs = self._graph_of_followed(following, followed, request, meeting)
                except Abandoned:
                    self._shared |= set[str]() if meeting is None else meeting.shared
                    raise RunsAgain from None
                except RankDisagreementError as error:  # on its own rows each rank may do what it does
                    raise CannotBeFollowed(str(error)) from None
        if followed.program is not None:
            following.ran(followed.program, executable, part, self._found.index)
        values = followed.fill(resolve(executable.captured.returned, self._own_rows(executable, outputs), ()))
        if self._discard:
            return None
        batch.write_back()
        with self.context.step_context(variant.method):
            calls, rows = followed.queue.calls, 0 if meeting is None else meeting.rows
            is_global = meeting is not None
            followed.logged(replay(self.context.module, calls, values, batch.values, rows, is_global=is_global))
        return followed.returned

    def _reason(self, error: BaseException) -> str:
        """Why the step is not followed; of all ranks, who are here together, the first one that knows."""
        control = self.context.control
        told = [str(error)] if control is None else control.gather(str(error))
        return next(filter(None, told), "it cannot be followed")

    @override
    def _moment(self, request: StepRequest) -> Moment:
        return self._now or super()._moment(request)

    def _own_rows(self, executable: Executable, outputs: Sequence[Any]) -> Sequence[Any]:
        """Outputs of which every rank has the rows of all, as an operator without a sharding rule leaves them, cut."""
        own = list(outputs)
        for number, axis in enumerate(executable.graphs.main.axes):
            known = self._row_outputs.setdefault(executable, {})
            if number not in known:
                known[number] = _gathered_rows(executable, number)
            for position in known[number]:
                value = own[position]
                if isinstance(value, Tensor):
                    own[position] = value.narrow(0, axis.offset(axis.total), axis.split[axis.rank])
        return own

    @override
    def _fall_back(self, reason: str) -> NoReturn:
        self._eager.add(self._method)
        warn(f"strategy='spmd' runs {self._method} eagerly from here on, each rank on its own rows: {reason}")
        raise FellBack


def _gathered_rows(executable: Executable, axis_number: int) -> list[int]:
    """Positions of the step's and metrics' outputs that hold the rows of all ranks of an axis that splits the batch."""
    step, captured = executable.graphs.main, executable.captured
    if not any(isinstance(e.placements[axis_number], Shard) for _, e in step.signature.inputs_of(InputRole.BATCH)):
        return []
    total, found = step.axes[axis_number].total, []
    for position, entry in step.signature.outputs_of(OutputRole.STEP_OUTPUT, OutputRole.METRIC_INPUT):
        spec = captured.signature.outputs[position].value
        whole = isinstance(spec, TensorSpec) and spec.shape[:1] == (total,)
        if whole and entry.placements[axis_number] == REPLICATE and not _is_state(captured, position):
            found.append(position)
    return found


def _is_state(captured: CapturedStep, position: int) -> bool:
    """Whether an output is computed from parameters and the like alone: its first dimension is not the batch's."""
    graph = captured.graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    roles = {node: entry.role for node, entry in zip(placeholders, captured.signature.inputs, strict=True)}
    outputs: Any = graph.output_node().args[0]
    seen: set[fx.Node] = set()
    todo: list[Any] = [outputs[position]]
    while todo:
        node = todo.pop()
        if isinstance(node, fx.Node) and node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    sources = {roles[node] for node in seen if node in roles}
    state = {InputRole.PARAMETER, InputRole.BUFFER, InputRole.CONSTANT}
    return InputRole.BATCH not in sources and bool(sources & state)
