"""Capture of a step that was followed: its noted calls are made on fake tensors under the recorder.

The rest of the iteration is Lightning's, in its order: backward pass, clipping, the optimizer's step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError, NoCommonGraphError, none_swallowed
from lightning_spmd.ir.aliasing import storage_roots
from lightning_spmd.ir.guards import Guards, ValueGuard
from lightning_spmd.ir.layout import densely
from lightning_spmd.ir.node_info import Section, TensorSpec, spec_of
from lightning_spmd.ir.reads import HandedCounts, HandOver
from lightning_spmd.ir.same_value import same_tensor
from lightning_spmd.ir.several_optimizers import parts_of
from lightning_spmd.ir.signature import MOVES, InputRole, OutputRole, Signature
from lightning_spmd.ir.steps import CapturedStep, OutputRef
from lightning_spmd.ir.unify import Apart
from lightning_spmd.stages.capture.batch.own_batch import OwnBatch
from lightning_spmd.stages.capture.follow.engine import Engine, is_of_loss
from lightning_spmd.stages.capture.follow.matching import decides_as_torch
from lightning_spmd.stages.capture.follow.notes import Given, Note, Outside, Place, gradient_in_parts, sized, tensors_in
from lightning_spmd.stages.capture.follow.placeholders import place_of_gone, without_history
from lightning_spmd.stages.capture.follow.program import Live, Log, Program, Want
from lightning_spmd.stages.capture.follow.sizes import with_sizes
from lightning_spmd.stages.capture.follow.told import put_number
from lightning_spmd.stages.capture.follow.values import Values
from lightning_spmd.stages.capture.follow.worlds import CallByHand
from lightning_spmd.stages.capture.followed_by_hand import InGraph, mark_updates
from lightning_spmd.stages.capture.numbers.decisions import Decision, decision_program
from lightning_spmd.stages.capture.numbers.host_scalar import HostScalar, scalar_of
from lightning_spmd.stages.capture.numbers.opened import Made, Untold, open_numbers, samples_of, taken_as_plain
from lightning_spmd.stages.capture.optimizer.accumulation import accumulated
from lightning_spmd.stages.capture.optimizer.bf16_updates import in_float32
from lightning_spmd.stages.capture.optimizer.loss_scaling import LossScaling
from lightning_spmd.stages.capture.optimizer.newborn_state import OnBirths, constants_among, make_state, newborn_state
from lightning_spmd.stages.capture.optimizer.optimizer_swap import OptimizerSwap, check_step, swaps_of
from lightning_spmd.stages.capture.optimizer.own_backward import check_backward, leaves_of
from lightning_spmd.stages.capture.record.around_trace import explained, grad_mode, name_of_part, random_state_kept
from lightning_spmd.stages.capture.record.inputs import InputTable, global_spec
from lightning_spmd.stages.capture.record.packing import Outputs, parameter_names, remove_dead_nodes, with_mutations
from lightning_spmd.stages.capture.record.recorder import Recorder, in_section
from lightning_spmd.stages.capture.record.surroundings import (
    hooks_guard,
    settings_guard,
    submodules_guard,
    tensor_kinds_guard,
    trained_guard,
)
from lightning_spmd.stages.capture.request import CaptureRequest
from lightning_spmd.stages.capture.rewrites.reads import writes_apart
from lightning_spmd.stages.capture.rewrites.simplify import simplify_strided_gradients
from lightning_spmd.stages.capture.rewrites.weight_casts import share_weight_casts
from lightning_spmd.stages.capture.sizes.data_sizes import DataSizes
from lightning_spmd.stages.capture.user_code import located_at

_MOST_SAMPLES = 8
"""Of other numbers with which a step is recorded."""


def capture_followed(request: CaptureRequest, on_births: OnBirths | None = None) -> CapturedStep:
    """The graph of a step that was followed.

    Args:
        request: what is captured.
        on_births: is called with the state that the first step would create, if it can be an input of this graph
            already. None: the graph creates it.

    Raises:
        CaptureError: a call in it, or the optimizer, does something that one graph cannot express.
    """
    program = request.program
    if program is None and not request.variant.forward:  # an update alone
        program = Program((), 0, (), None, frozenset(), Live())
    if program is None:
        raise CaptureError("the step was not followed")
    try:
        return _with_open_numbers(request, FollowedTrace(request, program), on_births)
    except CaptureError:
        # torch may have no form of a call, or of its gradient, for recorded numbers
        numbers = program.live.numbers.keys()
        depths = {note.depth for note in program.notes if note.writes or any(note.trained)}
        of_gradients = frozenset(key for key in numbers if key[0] in depths)
        for plain in dict.fromkeys(filter(None, (of_gradients, frozenset(numbers)))):
            with contextlib.suppress(CaptureError):
                return _with_open_numbers(request, FollowedTrace(request, program, plain), on_births)
        raise


def _with_open_numbers(request: CaptureRequest, trace: FollowedTrace, on_births: OnBirths | None) -> CapturedStep:
    """The graph of a trace, for other numbers as well where it has any as constants."""
    was_born = trace.record(on_births)
    if not was_born and (asked := trace.taken_as_plain()):
        try:
            trace.recorder.decisions[:] = _opened(trace, asked)
        except (Apart, CaptureError) as error:
            if trace.plain_numbers:  # a graph for each number, each of them captured in several ways
                raise CaptureError(str(error)) from None
    return trace.packed()


def _opened(trace: FollowedTrace, asked: Sequence[tuple[int, Place]]) -> list[Decision]:
    """The decisions of a trace, whose graph gets formulas of numbers that it has as constants.

    Args:
        trace: of the step.
        asked: the numbers, by depth and place.

    Raises:
        Apart: there are none.
        CaptureError: the step cannot be recorded with other numbers.
    """
    others, numbers = list[Made](), trace.program.live.numbers
    samples = samples_of([numbers[key] for key in asked])
    for sample in samples:
        other = trace.with_numbers(dict(zip(asked, sample, strict=True)))
        other.record(None)
        if not trace.has_constants_of(other):
            raise Apart("a tensor is made of a number")
        others.append(other.made)
        if len(others) == len(samples):
            try:
                return open_numbers(trace.made, others)
            except Untold as error:
                if len(samples) == _MOST_SAMPLES:
                    raise Apart(str(error)) from None
                at = [trace.number_nodes[key] for key in asked].index(error.root)
                samples.append((*sample[:at], error.value, *sample[at + 1 :]))
    raise RuntimeError("unreachable: there are samples")


class FollowedTrace:
    """The state of one capture.

    Args:
        request: what is captured.
        program: its noted calls.
        plain_numbers: what calls get as plain numbers of Python's, by depth and place.

    Attributes:
        swaps: the optimizers that work on fake tensors in this trace, by number.
        own: what goes to all ranks of a batch that is a rank's own.
        plain_numbers: as above.
        number_nodes: what gives numbers of calls in the graph, by depth and place.
    """

    def __init__(
        self,
        request: CaptureRequest,
        program: Program,
        plain_numbers: Collection[tuple[int, Place]] = (),
    ) -> None:
        self.request = request
        self.program = program
        self.number_nodes: dict[tuple[int, Place], fx.Node] = {}
        self.plain_numbers = plain_numbers
        self.fake_mode = private.FakeTensorMode(allow_non_fake_inputs=True)
        self.recorder = Recorder(self.fake_mode, split=request.rows is not None)
        self.inputs = InputTable(self.recorder, self.fake_mode)
        self.outputs = Outputs(self.recorder)
        self.names = parameter_names(request.module, request.update.optimizer)
        self.swaps: dict[int, OptimizerSwap] = {}
        self.scaling = LossScaling(request.update.scaler, request.update.device, self.inputs)
        self.own: OwnBatch | None = None
        self._values = Values(self._fake, Engine(self._on_thread))
        if self.program.samples:
            self._values.instead[Tensor.__setitem__] = put_number
        self._behind: list[Note] = []  # the calls from the backward pass on, if Python runs in it
        if program.counts is not None:
            numbers = program.at or program.live.counts
            self._values.number = lambda leaf: with_sizes(leaf, numbers)
        self.by_hand: InGraph | None = None
        self._values.world = InGraph(self.recorder)
        if request.update.optimizer is not None and request.variant.by_hand:
            swaps = swaps_of(parts_of(request.update.optimizer), self.names, self.inputs)
            called = {note.func.number for note in program.notes if isinstance(note.func, CallByHand)}
            self.swaps = {i: swap for i, swap in enumerate(swaps) if swap.is_torchs_own or i in called}
            self.by_hand = self._values.world = InGraph(self.recorder, swaps)
        elif request.update.optimizer is not None:
            self.swaps = {0: OptimizerSwap(request.update.optimizer, self.names, self.inputs)}
        self._kinds = {n: kind for note in program.notes for n, kind in note.met.items()}
        self._batch: list[Tensor] = []
        self._has_begun = False
        self._outside: dict[int, Tensor] = {}
        self._reads = 0
        self._decided: list[int] = []  # so many decisions had been made at each read
        self._note: Note | None = None  # that is made
        self.recorder.data_sizes = DataSizes(self.recorder.call, self._count)
        self._values.on_same = self.recorder.data_sizes.same
        self._handed: dict[tuple[int, Place], Any] = {}  # numbers that Python has once it has read
        if request.batch is not None and request.variant.own_batch:
            self.own = OwnBatch(request.batch, request.update.device, self.recorder.node_of, self.outputs.add)
        self._positions: dict[int, int] = {}  # of wants among the outputs
        self._of_all_ranks: list[Any] = []  # of a rank's own batch: the loss, and what is logged
        self._host_values: dict[str, Callable[[], Any]] = {}
        self._named: dict[str, Callable[[], Tensor]] = {}
        self._readers: dict[int, Callable[[], Tensor]] = {}  # of constants that each step hands over

    def record(self, on_births: OnBirths | None) -> bool:
        """Record it; ``on_births`` as in :func:`capture_followed`. Returns whether state was made."""
        request = self.request
        with contextlib.closing(self._values.engine), self.recording():
            automatic = None if self.by_hand is not None else request.update.optimizer
            if automatic is None:
                self.forward()
            else:
                self.iteration(self.trained_parameters(automatic), automatic)
            self.collect_state()
        if on_births is not None and all(swap.is_torchs_own for swap in self.swaps.values()):
            return self._bear(on_births)
        return False

    @property
    def made(self) -> Made:
        """What was recorded."""
        numbers = {node: self.program.live.numbers[key] for key, node in self.number_nodes.items()}
        return Made(self.recorder.graph, self.recorder.decisions, numbers)

    def taken_as_plain(self) -> list[tuple[int, Place]]:
        """The numbers that the graph has as constants, and of which torch does the same with others."""
        found = set(taken_as_plain(self.made))
        functions = {note.depth: note.func for note in self.program.notes}
        return [k for k, node in self.number_nodes.items() if node in found and decides_as_torch(functions[k[0]])]

    def with_numbers(self, numbers: Mapping[tuple[int, Place], Any]) -> FollowedTrace:
        """A trace of the same step with other numbers.

        Args:
            numbers: these, by depth and place.
        """
        live = dataclasses.replace(self.program.live, numbers={**self.program.live.numbers, **numbers})
        program = dataclasses.replace(self.program, live=live)
        return FollowedTrace(self.request, program, self.plain_numbers)

    def has_constants_of(self, other: FollowedTrace) -> bool:
        """Whether the tensors that torch made while both were recorded are the same."""
        mine, its = self.recorder.constants, other.recorder.constants
        made = [i for i in range(len(mine)) if i not in self._readers]
        return len(mine) == len(its) and all(same_tensor(mine[i], its[i]) for i in made)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which calls are recorded. It may be entered again, to go on."""
        request = self.request
        if request.variant.backward and (reason := request.came_late()) is not None:
            raise CaptureError(reason)
        with contextlib.ExitStack() as stack:
            stack.enter_context(grad_mode(request.variant))
            stack.enter_context(random_state_kept())
            if not self._has_begun:
                for fqn, (table, key) in private.tensor_slots(request.module).items():
                    if table[key] is not None:
                        self.twin("parameter" if isinstance(table[key], nn.Parameter) else "buffer", fqn, table[key])
            for swap in self.swaps.values():
                stack.enter_context(swap.active())
            if request.update.optimizer is not None:
                stack.enter_context(self.scaling.active())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(request.surroundings())
            stack.enter_context(self._values.kept_casts())
            if not self._has_begun:
                self._make_batch()
            self._has_begun = True
            stack.enter_context(self.fake_mode)
            stack.enter_context(self.recorder)
            optimizer = request.update.optimizer
            with explained(self.recorder, lambda: name_of_part(self.recorder, optimizer)), none_swallowed():
                yield

    def _bear(self, on_births: OnBirths) -> bool:
        """Make inputs of the state that the step creates, if it depends on no value. Returns whether there are any."""
        constants = constants_among(self.inputs.entries, self._constants())
        births = newborn_state(self.recorder.graph, self.outputs.of(OutputRole.OPTIMIZER_STATE), constants)
        if not births:
            return False
        on_births(make_state(births, constants))
        self.outputs.drop(OutputRole.OPTIMIZER_STATE)
        for (owner, key), node in births.items():
            born = self.inputs.placeholder(InputRole.OPTIMIZER_STATE, (owner, key), f"{owner}/{key}", spec_of(node))
            node.replace_all_uses_with(born)
            self.outputs.replace(node, born)
        state = {e.key: n for n, e in self.inputs.entries.items() if e.role is InputRole.OPTIMIZER_STATE}
        for swap in self.swaps.values():
            swap.arrange(state)
        return True

    def _make_batch(self) -> None:
        batch, changed = self.request.batch, dict[int, bool]()
        for note in self.program.notes:
            if note.func is Tensor.requires_grad_ and type(note.args[0]) is Given:
                changed.setdefault(note.args[0].position, not note.args[1])
        for position, index in enumerate(() if batch is None else batch.tensors):
            live = batch.values[index]  # type: ignore[union-attr]
            shared = batch.is_shared(index)  # type: ignore[union-attr]
            spec = self.request.sizes.spec(position, global_spec(live, None if shared else self.request.rows))
            role = InputRole.SHARED_BATCH if shared else InputRole.BATCH
            fake = self.inputs.fresh_tensor(spec, role, (position,), f"batch{batch.paths[index]}")  # type: ignore[union-attr]
            self._batch.append(fake.requires_grad_(bool(changed.get(position, live.requires_grad))))

    def twin(self, kind: str, fqn: str, tensor: Tensor) -> Tensor:
        """The graph input of a tensor of the module."""
        role = InputRole.PARAMETER if kind == "parameter" else InputRole.BUFFER
        name = self.names.get(id(tensor), fqn)
        return self.inputs.tensor(tensor, role, (name,), name)

    def trained_parameters(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        """(name, fake) of tensors that get gradients: the optimizer's parameters, or all of the module's in split mode.

        Also of what got one in earlier micro-batches, and is frozen by now.
        """
        wanted = {id(p) for g in optimizer.param_groups for p in g["params"]}
        found = []
        for live, name in self.inputs.live_parameters(self.names):
            fake = self.inputs.fake_of(live)
            if fake is not None and (self.request.variant.expose_gradients or id(fake) in wanted):
                found += [(name, fake)] if fake.requires_grad or name in self.request.update.accumulators else []
        return found

    # ------------------------------------------------------------------ tensors and numbers of the notes
    def _fake(self, source: Given | Outside) -> Tensor:
        if type(source) is Given:
            return self._batch[source.position]
        number = source.number  # type: ignore[union-attr]
        if number not in self._outside:
            with private.disable_dispatch_modes():
                fake = self._outside[number] = self._from_outside(number)
                if fake.is_leaf and number in self._kinds:  # it may be frozen since
                    fake.requires_grad_(self._kinds[number].trained)
        return self._outside[number]

    def _from_outside(self, number: int) -> Tensor:
        live, live_tensors = self.program.live.outside[number], self.program.live
        read = lambda: live_tensors.outside[number]  # noqa: E731
        fake = self.inputs.fake_of(live)
        node = None if fake is None else self.recorder.node_of(fake)
        if fake is not None and node is not None:
            if self.inputs.entries[node].role is InputRole.BUFFER:  # the step may have put another one in its place
                self._named[self.inputs.entries[node].key[0]] = read
            return fake
        name = gradient_in_parts(self._kinds[number].name) if number in self._kinds else None
        if name is not None:
            return self.inputs.tensor(live, InputRole.GRADIENT, (name,), f"gradient of {name}")
        index = len(self.recorder.constants)
        self.recorder.constants.append(live)
        self._readers[index] = read
        key = (index, MOVES) if id(live) in self._live_gradients else (index,)
        place = place_of_gone(live)
        twin = live if place is None else live.detach()
        fake = self.inputs.tensor(twin, InputRole.CONSTANT, key, f"tensor {number}", self._shape_of(number))
        if place is None:
            return fake
        gone, node = without_history(fake, place), self.recorder.node_of(fake)
        if node is not None:
            self.recorder.bind(gone, node)
        return gone

    def _shape_of(self, number: int) -> list[int] | None:
        """The shape of a tensor from outside for these counts, if Python tells it."""
        told = (note for note in self.program.notes if note.func is sized and note.args[0] == Outside(number))
        note = next(told, None)
        return None if note is None else list(map(self._values.number, note.args[1:]))

    @functools.cached_property
    def _live_gradients(self) -> set[int]:
        """The ``id`` of each ``p.grad``, which is another tensor in most steps."""
        with private.no_torch_functions():
            parameters = [table[key] for table, key in private.tensor_slots(self.request.module).values()]
            return {id(p.grad) for p in parameters if isinstance(p, nn.Parameter)}

    def _numbers_of(self, note: Note) -> dict[Place, Any]:
        found: dict[Place, Any] = {}
        live = self.program.live
        for (depth, place), value in live.numbers.items():
            if depth != note.depth:
                continue
            number = self._handed.get((depth, place))
            if number is None:
                name = f"{note.name} {depth} {'.'.join(map(str, place))}"
                self._host_values[name] = functools.partial(_number, live, (depth, place))
                number = self.inputs.scalar(value, InputRole.HOST_VALUE, (name,), name)
            scalar = scalar_of(number)
            if scalar is not None and scalar.node is not None:
                self.number_nodes[depth, place] = scalar.node
                if (depth, place) in self.plain_numbers:
                    number = self.recorder.decide(scalar)
            found[place] = number
        return found

    def _hand_over(self, note: Note) -> None:
        """Record a read: the graph hands values to Python."""
        tensors = [t.detach() for t in tensors_in(self._values.arguments(note, {}))]
        self._hands(note, tensors, self._handed_counts(note, ()) if note.counts else None)

    def _handed_counts(self, note: Note, parts: Sequence[int]) -> HandedCounts:
        counts, live, place = self.program.counts, self.program.live, note.counts
        if counts is None:
            raise ValueError("a program without counts has a call that counts")
        told = lambda: live.counts[place.start : place.stop]  # noqa: E731
        return HandedCounts(counts, place.start, len(place), told, note.source, parts)

    def _hands(self, note: Note, tensors: Sequence[Tensor], counts: HandedCounts | None) -> None:
        """Hand values to Python, and make inputs of the numbers that it computed with them."""
        live, numbers = self.program.live, self.program.numbers_behind(note)
        told = self.program.told_behind(note)
        target = HandOver(self._reads, functools.partial(_numbers, live, numbers), counts, told=told)
        self._reads += 1
        self._decided.append(len(self.recorder.decisions))
        sources = [self.recorder.argument(t) for t in tensors]
        graph = self.recorder.graph
        node = graph.call_function(target, tuple(sources))
        node.meta.update(val=tuple(live.numbers[key] for key in numbers), info=self.recorder.info())
        for index, key in enumerate(numbers):
            number = graph.call_function(operator.getitem, (node, index))
            number.meta.update(val=live.numbers[key], info=node.meta["info"])
            self._handed[key] = HostScalar(live.numbers[key], number, self.recorder).as_symbol()

    # ------------------------------------------------------------------ results as large as the data say
    def _count(self, *tensors: Tensor) -> list[int]:
        """Hand Python the data-dependent sizes of a call's results."""
        note, program = self._note, self.program
        if note is None or program.counts is None or len(tensors) != len(note.counts):
            raise CaptureError("a tensor with a data-dependent size is created where its size cannot be read")
        live, place, number = program.live, note.counts, program.counts.length
        parts = () if program.at is None else program.at[number + place.start : number + place.stop]
        self._hands(note, tensors, self._handed_counts(note, parts))
        return list((live.counts if program.at is None else program.at)[place.start : place.stop])

    # ------------------------------------------------------------------ the forward part
    def forward(self) -> Tensor | None:
        """Run the forward part. Returns the loss, or None if the batch is skipped."""
        request, program = self.request, self.program
        notes = list(program.notes)
        begin = next((i for i, note in enumerate(notes) if is_of_loss(note.func)), len(notes))
        self._values.engine.scaled = self.scaling.scaled
        with request.step_context():
            self._tell(0)
            self._make(notes[:begin])
        if program.loss is None:
            self._make(notes[begin:])
            self._tell(None)
            return None
        loss = self._values.of(program.loss)
        if not loss.requires_grad:
            raise CaptureError("the loss that training_step returns does not depend on any trained parameter")
        self._behind = notes[begin:]
        if not self._behind:
            self._tell(None)
        shown = loss.detach()
        if self.own is not None:
            logs = [self._logged(index) for index in range(len(program.logs))]
            loss, shown, self._of_all_ranks = self.own.weigh(loss, logs, self._batch)
        position = self.outputs.add(shown, OutputRole.LOSS, (), "loss")
        self._of_all_ranks.insert(0, OutputRef(position))
        return loss if request.update.loss_divisor == 1 else loss / request.update.loss_divisor

    def _logged(self, index: int) -> tuple[Log, Any, Any]:
        """A call of ``self.log``, with its value and its rows in the graph."""
        wants = self.program.wants
        log, positions = self.program.logs[index], {wants[i]: position for i, position in self._positions.items()}

        def place(what: str, source: Want | bool | None) -> Any:
            if isinstance(source, Want) and source not in positions:
                raise CaptureError("self.log in the backward pass, on a batch of each rank's own", log.source or None)
            if isinstance(source, Want):
                return self.outputs.values[positions[source]]
            if source is None:
                return None
            name, live = f"{what} {index} {log.name}", self.program.live
            self._host_values[name] = lambda: live.logged[what, index]
            return self.inputs.scalar(live.logged[what, index], InputRole.HOST_VALUE, (name,), name)

        return log, place("value", log.value), place("rows", log.rows)

    def _make(self, notes: Sequence[Note]) -> None:
        """Perform calls under the recorder."""
        for note in notes:
            with located_at(note.source):
                self.recorder.module_path[-1] = note.module
                if note.reads:
                    self._hand_over(note)
                self._note, self.recorder.data_sizes.slot, self.recorder.autocast = note, 0, note.around.autocast or ()
                decided = len(self.recorder.decisions)
                self._values.run(note, self._numbers_of(note))
                note.decides = note.decides or (bool(note.free) and len(self.recorder.decisions) > decided)
                self._check_sizes(note)
                self._note, self.recorder.autocast = None, ()
            self._tell(note.depth + 1)

    def _check_sizes(self, note: Note) -> None:
        """That what a call gives for the counts with which a graph for all is made is as large as its formulas say.

        Raises:
            NoCommonGraphError: it is not.
        """
        counts = self.program.at if self.program.samples else None
        if counts is None:
            return
        for made, spec in zip(note.made, note.specs_at(counts), strict=True):
            if self._values.made[made].shape != spec.shape:
                place = f" at {note.source}" if note.source else ""
                raise NoCommonGraphError(f"{note.name}{place} gives something of another size than was found")

    # ------------------------------------------------------------------ the rest of the iteration
    def iteration(self, trained: list[tuple[str, Tensor]], optimizer: Optimizer) -> None:
        """Run the variant's part of an iteration, with the fake parameters that get gradients, by name."""
        request, variant = self.request, self.request.variant
        gradients: dict[str, Tensor] = {}
        loss: Tensor | None = None
        if variant.forward:
            with torch.enable_grad():
                loss = self.forward()
                if loss is not None:
                    scaled = self.scaling.scaled(loss)
                    with in_section(self.recorder, Section.BACKWARD):
                        gradients = self.backward(scaled, [pair for pair in trained if pair[1].requires_grad])
        with torch.no_grad(), in_section(self.recorder, Section.BACKWARD):
            gradients = self._add_accumulated(gradients, trained)
        if not variant.apply:
            for name, gradient in gradients.items():
                if name not in request.update.accumulators:  # an accumulator is an input, updated in place
                    self.outputs.add(gradient, OutputRole.GRADIENT, (name,), f"gradient of {name}")
            return
        for name, gradient in gradients.items() if variant.pauses else ():
            self.outputs.add(gradient, OutputRole.SHOWN_GRADIENT, (name,), f"gradient of {name}")
        for name, parameter in trained:
            parameter.grad = gradients.get(name)
        self.swaps[0].check_is_there()
        with in_float32(request.update.bf16_updates, self.swaps[0], self.recorder):
            with in_section(self.recorder, Section.CLIP):
                self.scaling.unscale(optimizer, looked_already=variant.expose_gradients)
                if request.update.clip is not None:
                    request.update.clip(optimizer)
            check_step(optimizer)
            with in_section(self.recorder, Section.OPTIMIZER):
                self.scaling.step(optimizer, self._new_state, loss)
        if self.scaling.found is not None:
            self.outputs.add(self.scaling.found, OutputRole.FOUND_INF, (), "found_inf")

    def changes(self) -> Iterator[tuple[OutputRole, tuple[Any, ...], str, Any]]:
        """State and hyper-parameters that optimizers created or rebound."""
        return itertools.chain.from_iterable(swap.changes() for swap in self.swaps.values())

    def _new_state(self) -> list[Tensor]:
        """Tensors of the optimizer's state that the step made."""
        return [v for role, _, _, v in self.changes() if role is OutputRole.OPTIMIZER_STATE and isinstance(v, Tensor)]

    def backward(self, loss: Tensor, trained: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The gradients of the loss; Python that runs in its backward pass is a part of it."""
        if not self._behind:
            return self._gradients(loss, trained)
        found: dict[str, Tensor] = {}
        self._values.engine.of_loss = lambda: found.update(self._gradients(loss, trained))
        with torch.no_grad():
            self._make(self._behind)
        self._tell(None)
        return found

    def _gradients(self, loss: Tensor, trained: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The gradients of the loss, by name of the parameter, in the layout that ``p.grad`` would have."""
        asked = [p for _, p in trained]
        others = self._asked_beside(loss, asked)
        if others is None:
            check_backward(loss, asked)
        found = torch.autograd.grad(loss, [*asked, *(others or ())], allow_unused=True)[: len(asked)]
        taken = self.inputs.storages()
        gradients: dict[str, Tensor] = {}
        with torch.no_grad():
            for (name, parameter), of_loss in zip(trained, found, strict=True):
                gradient = self._with_added(parameter, of_loss)
                if gradient is not None:  # two parameters may have one gradient tensor: clipping would write twice
                    owned = accumulated(parameter, None, gradient, taken, in_place=False)
                    gradients[name] = owned if self.own is None else self.own.gradient(name, owned)
                elif self.own is not None and name in self.request.needed:
                    gradients[name] = self.own.no_gradient(name, parameter)
        return gradients

    def _with_added(self, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a parameter with what backward passes within that of the loss have added."""
        for of, added in self.program.added:
            if self._values.of(of) is parameter:
                now = self._values.of(added)
                return now if gradient is None else now + gradient
        return gradient

    def _asked_beside(self, loss: Tensor, trained: list[Tensor]) -> list[Tensor] | None:
        """Other tensors whose gradients are requested, so that everything runs that ``loss.backward()`` would run.

        None: the same runs without.
        """
        known = {id(parameter) for parameter in trained}
        return [leaf for leaf in leaves_of([loss]) if id(leaf) not in known] if self._behind else None

    def _add_accumulated(self, gradients: dict[str, Tensor], trained: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
        for name, parameter in trained:
            if name in self.request.update.accumulators:
                held = self.inputs.fresh_tensor(
                    densely(TensorSpec.of(parameter)), InputRole.GRADIENT, (name,), f"gradient of {name}"
                )
                gradients[name] = self._accumulated(held, gradients.get(name))
        return gradients

    def _accumulated(self, held: Tensor, gradient: Tensor | None) -> Tensor:
        """The held gradient plus the new one; in place while gradients are only collected.

        What is applied must be a tensor of its own: clipping and optimizers may write into gradients, and what is
        held is this rank's share of them.
        """
        if not self.request.variant.apply:
            return held if gradient is None else held.add_(gradient)
        return held.clone() if gradient is None else held + gradient

    @contextlib.contextmanager
    def _on_thread(self) -> Iterator[None]:
        """A context for the engine's thread, which records too."""
        with self.fake_mode, _Through(self.recorder):
            yield

    @functools.cached_property
    def _told(self) -> dict[int | None, list[int]]:
        """The wanted results, by the number of calls after which they are taken."""
        told: dict[int | None, list[int]] = {}
        for index, want in enumerate(self.program.wants):
            told.setdefault(want.after, []).append(index)
        return told

    def _tell(self, after: int | None) -> None:
        for index in self._told.get(after, ()):
            want = self.program.wants[index]
            value = self._values.of(want.source).detach()
            if after is None:
                self._positions[index] = self.outputs.add(value, want.role, want.key, f"kept {index}")
            else:
                self._positions[index] = self.outputs.add_as_it_is(value, want.role, f"told {index}")

    # ------------------------------------------------------------------ packing
    def _has_stepped(self, number: int) -> bool:
        """Whether the graph holds a step of an optimizer."""
        return self.request.variant.apply and (self.by_hand is None or number in self.by_hand.stepped)

    def guards(self) -> list[ValueGuard]:
        """The guards of every graph of an iteration."""
        request, optimizer = self.request, self.request.update.optimizer
        return [
            submodules_guard(request.module),
            tensor_kinds_guard(request.module),
            settings_guard(),
            *([] if optimizer is None else [trained_guard(request.module, optimizer)]),
            *([hooks_guard(request.module, optimizer, request.trainer)] if request.variant.backward else []),
            *(guard for i, swap in self.swaps.items() for guard in swap.guards(stepped=self._has_stepped(i))),
            *([] if optimizer is None else self.scaling.guards()),
        ]

    def _constants(self) -> list[Callable[[], Tensor]]:
        """How each constant is read."""
        tensors = enumerate(self.recorder.constants)
        return [self._readers.get(i) or functools.partial(_itself, t) for i, t in tensors]

    def collect_state(self) -> None:
        """Make outputs of state that optimizers created or rebound.

        Raises:
            CaptureError: the step of one changes what Python may have looked at since.
        """
        if self.program.is_beginning or (self.by_hand is None and not self.request.variant.apply):
            return
        for role, key, name, value in self.changes():
            if self.by_hand is not None and role is OutputRole.HYPER_PARAMETER:
                raise CaptureError(f"a step changes {name}, which Python may read before a graph has run")
            self.outputs.add(value, role, key, name)

    def packed(self) -> CapturedStep:
        """The graph of what was recorded."""
        recorder, graph = self.recorder, self.recorder.graph
        decisions = decision_program(graph, recorder.decisions)
        stretches = itertools.pairwise((0, *self._decided))
        before_reads = [decision_program(graph, recorder.decisions[begin:end]) for begin, end in stretches]
        graph.output(self.outputs.packed()).meta["val"] = None
        simplify_strided_gradients(graph)
        share_weight_casts(graph, self.inputs.nodes_of(InputRole.PARAMETER))
        writes_apart(graph, self.inputs.live)
        remove_dead_nodes(graph)
        if self.by_hand is not None:
            mark_updates(graph.nodes, storage_roots(graph), self.inputs, set(self.by_hand.gradients))
        self.inputs.drop_unused(keep=decisions.inputs if decisions else ())
        graph.lint()
        inputs = self.inputs.in_order()
        placeholders = [node for node, _ in inputs]
        predicate = decisions.guard(placeholders) if decisions else None
        at_reads = [program and program.guard(placeholders) for program in before_reads]
        wanted: list[Any] = [OutputRef(self._positions[i]) for i in range(len(self.program.wants))]
        if self.own is not None:
            wanted += self._of_all_ranks
        return CapturedStep(
            private.GraphModule(nn.Module(), graph),
            Signature(with_mutations(graph, inputs), tuple(self.outputs.entries)),
            Guards(self.guards(), predicate, at_reads),
            self._constants(),
            returned=wanted,
            variant=self.request.variant,
            host_values=self._host_values,
            named=self._named,
            own_batch=None if self.own is None else self.own.facts,
        )


class _Through(private.TorchDispatchMode):
    """The recorder's mode on another thread.

    Args:
        recorder: records.
    """

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.__torch_dispatch__(func, types, args, kwargs)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _numbers(live: Live, keys: Sequence[tuple[int, Place]]) -> tuple[Any, ...]:
    return tuple([live.numbers[key] for key in keys])


def _number(live: Any, key: Any) -> Any:
    return live.numbers[key]
