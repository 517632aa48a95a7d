"""Capture: runs one iteration on fake tensors under the recorder and packs the result as a CapturedStep.

The order is Lightning's: training_step under the precision plugin's context, loss divided by the number of accumulated
batches, backward, gradient accumulation, clipping through ``configure_gradient_clipping``, ``optimizer.step()``.
Everything the user wrote runs as it is; nothing is imitated. Of evaluation steps there is the first part alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError, none_swallowed
from lightning_spmd.ir.guards import BatchGuard, Guards
from lightning_spmd.ir.several_optimizers import parts_of
from lightning_spmd.ir.signature import InputRole, OutputRole, Signature
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages.capture import assigned
from lightning_spmd.stages.capture.appended_lists import Place, lists_followed
from lightning_spmd.stages.capture.around_trace import (
    explained,
    grad_mode,
    modules_followed,
    name_of_part,
    random_state_kept,
)
from lightning_spmd.stages.capture.batch import Looks
from lightning_spmd.stages.capture.by_hand import ByHand, check_by_hand
from lightning_spmd.stages.capture.counted_rows import refuse_counts
from lightning_spmd.stages.capture.decisions import decision_program
from lightning_spmd.stages.capture.foresight import foresee
from lightning_spmd.stages.capture.holders import Attributes
from lightning_spmd.stages.capture.inputs import global_spec
from lightning_spmd.stages.capture.iteration_trace import IterationTrace
from lightning_spmd.stages.capture.log_recorder import LogRecorder
from lightning_spmd.stages.capture.metric_values import with_loss
from lightning_spmd.stages.capture.number_functions import numbers_followed
from lightning_spmd.stages.capture.optimizer_swap import OptimizerSwap, OptimizerSwaps
from lightning_spmd.stages.capture.own_batch import OwnBatch
from lightning_spmd.stages.capture.packing import (
    remove_dead_nodes,
    with_mutations,
)
from lightning_spmd.stages.capture.prefix import pack_prefix
from lightning_spmd.stages.capture.python_state import PythonState
from lightning_spmd.stages.capture.reads import ReadWanted, writes_apart
from lightning_spmd.stages.capture.request import CaptureRequest, Trace
from lightning_spmd.stages.capture.returned_loss import loss_of
from lightning_spmd.stages.capture.side_effects import complain_about_new_tensors
from lightning_spmd.stages.capture.simplify import simplify_strided_gradients
from lightning_spmd.stages.capture.trainer_view import learning_rates_followed, trainer_seen_as
from lightning_spmd.stages.capture.weight_casts import share_weight_casts
from lightning_spmd.stages.capture.wiring import connect


def trace(request: CaptureRequest) -> Trace:
    """Trace one variant of the training iteration.

    Raises:
        CaptureError: training_step or the optimizer does something that one graph cannot express.
    """
    looks = Looks()
    grown: set[Place] = set()
    while True:
        known = len(looks.read), len(grown)
        try:
            found = _Capture(request, looks, grown).run()
        except Exception:
            # otherwise the step read a non-tensor leaf of the batch: again, with its value; or a list on the module
            # grew: again, with its items as recorded calls
            if (len(looks.read), len(grown)) == known or looks.refused is not None:
                raise
            continue
        if (len(looks.read), len(grown)) == known:
            return found


class _Capture(IterationTrace):
    """The state of one capture."""

    def __init__(self, request: CaptureRequest, looks: Looks, grown: set[Place]) -> None:
        super().__init__(request)
        self.looks = looks
        self.grown = grown
        self.logs = LogRecorder(self.outputs.add, self.outputs.add_as_it_is)
        optimizer = request.optimizer
        self.by_hand: ByHand | None = None
        if optimizer is not None and request.variant.by_hand:
            check_by_hand(request)
            self.swap = OptimizerSwaps(parts_of(optimizer), self.names, self.inputs)
            self.by_hand = ByHand(request.trainer, self.swap, self.names, self.inputs, self.logs, request.presumed)
        elif optimizer is not None:
            self.swap = OptimizerSwap(optimizer, self.names, self.inputs)
        self.python = PythonState(
            request.module,
            optimizer,
            request.trainer,
            self.inputs.fake_of,
            self._host_value,
            lambda: bool(self.logs.calls),
        )
        connect(self.recorder, self.inputs, self.python, self.logs)
        foresee(self.recorder, self.inputs, request.answers)
        self.python.draws.may_be_skipped = lambda: self.scaling.is_updating(self.recorder.section)
        self.returned: Any = None
        self._fakes: list[Tensor] = []  # of the batch
        if request.batch is not None and request.variant.own_batch:
            self.recorder.reads.refusal = "the value of a tensor decides something, on each rank that of its own batch"
            self.own = OwnBatch(request.batch, request.device, self.recorder.node_of, self.outputs.add)
        self.cleared: tuple[str, ...] = ()

    def _host_value(self, name: str, value: Any) -> Any:
        found = self.inputs.scalar(value, InputRole.HOST_VALUE, (name,), name)
        steps = 0 if self.by_hand is None or name != "trainer.global_step" else self.by_hand.steps
        return found + steps if steps else found

    def run(self) -> Trace:
        if self.request.variant.backward and (reason := self.request.came_late()) is not None:
            raise CaptureError(reason)
        try:
            self._record()
        except ReadWanted as wanted:
            pack_prefix(wanted, self.request, self.recorder, self.inputs, self.python)
            raise
        effects = assigned.others(self.python.effects, self.request.assigned)
        return Trace(self._finish(), effects, effects[0].error(self.python.watch.codes) if effects else None)

    def _record(self) -> None:
        request = self.request
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.python.following(request.moving, self._host_value))
            stack.enter_context(grad_mode(request.variant))
            stack.enter_context(random_state_kept())
            stack.enter_context(self.python.kept())
            slots = stack.enter_context(private.module_tensors_replaced(request.module, self.twin))
            if self.swap is not None:
                stack.enter_context(self.swap.active())
                stack.enter_context(self.scaling.active())
            stack.enter_context(trainer_seen_as(request.module, self.python.view))
            stack.enter_context(learning_rates_followed(request.trainer, self._host_value))
            stack.enter_context(self.logs.active(request.module))
            stack.enter_context(modules_followed(request.module, self.recorder))
            stack.enter_context(numbers_followed(self.recorder, self.python.draws.functions))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(request.surroundings())
            batch = self._fake_batch()
            automatic = None if self.by_hand is not None else request.optimizer
            trained = [] if automatic is None else self.trained_parameters(automatic)
            stack.enter_context(self.python.observed())
            stack.enter_context(lists_followed(request.module, self.grown, self._appended))
            stack.enter_context(self.fake_mode)
            stack.enter_context(self.recorder)
            if self.by_hand is not None:
                for part in self.by_hand.optimizers:
                    self.python.sightings.root(Attributes, part, "optimizer").see("step")
                stack.enter_context(self.by_hand.active())
            with explained(self.recorder, lambda: name_of_part(self.recorder, request.optimizer)):
                with none_swallowed(), self.python.watch.active(), self.looks.followed():
                    if self.by_hand is not None:
                        with torch.enable_grad():
                            self._step_alone(batch)
                    elif request.optimizer is None:
                        self._step_alone(batch)
                    else:
                        self.iteration(batch, trained, request.optimizer)
                if self.recorder.reads.wanted is not None:  # the user's code has caught it
                    raise self.recorder.reads.wanted
                self.looks.check()
                self._collect(slots)
                self.inputs.complain_about_attributes(self.python.watch.codes)

    def _appended(self, place: Place, item: Any) -> None:
        # what training keeps is of the global batch, as its loss is; evaluation keeps the rank's own rows
        role = OutputRole.LOGGED if self.request.variant.backward else OutputRole.STEP_OUTPUT
        if self.request.variant.backward:
            assigned.refuse_memory(f"{place[0] or 'self'}.{place[1]}", item, self.inputs)
        self.logs.record(place[0], "append", role, (place[1], item), {})

    def _fake_batch(self) -> Any:
        batch = self.request.batch
        if batch is None:
            return None
        fakes = {}
        for position, index in enumerate(batch.tensors):
            live = batch.values[index]
            shared = batch.is_shared(index)
            spec = self.request.seen_as(position, global_spec(live, None if shared else self.request.rows))
            role = InputRole.SHARED_BATCH if shared else InputRole.BATCH
            fake = self.inputs.fresh_tensor(spec, role, (position,), f"batch{batch.paths[index]}")
            fakes[index] = fake.requires_grad_(live.requires_grad)
        self._fakes = list(fakes.values())
        return batch.rebuild(fakes, self.looks)

    # ------------------------------------------------------------------ the iteration
    def _step_alone(self, batch: Any) -> None:
        """Validation, test, predict, or training by hand: what the method returns leaves the graph, whatever it is."""
        self.returned = self.logs.lift(self._call(batch), OutputRole.STEP_OUTPUT, self.request.variant.method)

    def _call(self, batch: Any) -> Any:
        request = self.request
        arguments = {k: self._host_value(k, v) if type(v) is int else v for k, v in request.arguments.items()}
        with request.step_context():
            return getattr(request.module, request.variant.method)(batch, *arguments.values())

    @override
    def before_step(self, optimizer: Optimizer) -> None:
        self.python.sightings.root(Attributes, optimizer, "optimizer").see("step")

    @override
    def forward(self, batch: Any) -> Tensor | None:
        request = self.request
        returned = with_loss(self._call(batch))
        loss = loss_of(returned, request, scaled=self.scaling.scaler is not None)
        if loss is None:
            return None
        shown = loss.detach()
        if self.own is not None:
            loss, shown, returned = self.own.weigh(loss, returned, self.logs.calls, self.outputs.values, self._fakes)
        self.outputs.add(shown, OutputRole.LOSS, (), "loss")
        self.returned = self.logs.lift(returned, OutputRole.STEP_OUTPUT, "training_step")
        return loss if request.loss_divisor == 1 else loss / request.loss_divisor

    # ------------------------------------------------------------------ packing
    def _collect(self, slots: list[tuple[dict[str, Any], str, str, Any]]) -> None:
        self.python.draws.record(self.logs.record)
        self.puts = assigned.record(self.request, self.python.spy, self.logs, self.inputs)
        complain_about_new_tensors(self.request.module, {fqn for _, _, fqn, _ in slots})
        for tensors, key, fqn, replacement in slots:
            now = tensors.get(key)
            if now is not replacement and isinstance(now, Tensor):
                self.outputs.add(now.detach(), OutputRole.BUFFER, (fqn,), fqn)
        self.cleared = () if self.by_hand is None else self.by_hand.collect(self.outputs)
        self.collect_state()

    def _finish(self) -> CapturedStep:
        recorder, request, graph = self.recorder, self.request, self.recorder.graph
        program = decision_program(graph, recorder.decisions)
        graph.output(self.outputs.packed(by_hand=self.by_hand is not None)).meta["val"] = None
        simplify_strided_gradients(graph)
        share_weight_casts(graph, self.inputs.nodes_of(InputRole.PARAMETER))
        writes_apart(graph)
        remove_dead_nodes(graph)
        if self.by_hand is not None:
            self.by_hand.mark_updates(graph)
        self.inputs.drop_unused(keep=program.inputs if program else ())
        graph.lint()
        inputs = self.inputs.in_order()
        refuse_counts(request.batch, inputs)
        present = None if self.by_hand is None else self.by_hand.present()
        guards = [*self.guards(), *([] if present is None else [present.guard()])]
        read = [] if request.batch is None else request.batch.guarded_values(self.looks)
        leaves = [BatchGuard(path, value) for path, value in read]
        predicate = program.guard([node for node, _ in inputs]) if program else None
        signature = Signature(with_mutations(graph, inputs), tuple(self.outputs.entries))
        return CapturedStep(
            private.GraphModule(nn.Module(), graph),
            signature,
            Guards(guards, leaves, predicate, self.python.guard(self.grown)),
            [self.python.reader_of(t) for t in recorder.constants],
            self.logs.calls,
            self.returned,
            request.variant,
            self.python.host_values(request.moving),
            {**assigned.writers(self.puts), **self.python.draws.writers()},
            None if self.own is None else self.own.facts,
            self.cleared,
            present,
            recorder.reads.asked(),
            self.python.draws.drawn,
        )
