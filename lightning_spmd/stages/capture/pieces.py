"""Capture of a step's beginning piece by piece: a piece holds what Python has called since it read last.

    loss = F.cross_entropy(self(x), y)
    kept.append(loss.item())             piece 1: x, y, weights → loss, and every value in between
    norm = (loss - best).norm().item()   piece 2: loss, best → norm, and every value in between

One trace records all pieces, so autograd and optimizers go on where they were. What a piece takes of earlier ones are
values with memory of their own, as they are by then. Views are made again of these: what a piece writes into a tensor,
its views show in the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from torch import fx, nn

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.aliasing import aliased_argument, written_arguments
from lightning_spmd.ir.guards import Guards
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.random_states import TorchRandomState
from lightning_spmd.ir.shared_memory import shared
from lightning_spmd.ir.signature import GraphInput, GraphOutput, InputRole, OutputRole, Signature
from lightning_spmd.ir.steps import CapturedStep, OutputRef
from lightning_spmd.stages.capture.follow.engine import Begin
from lightning_spmd.stages.capture.follow.notes import Note
from lightning_spmd.stages.capture.follow.program import Live, Program
from lightning_spmd.stages.capture.follow.worlds import CallByHand
from lightning_spmd.stages.capture.followed_by_hand import mark_updates
from lightning_spmd.stages.capture.followed_trace import FollowedTrace
from lightning_spmd.stages.capture.numbers.decisions import decision_program
from lightning_spmd.stages.capture.record.packing import remove_dead_nodes, with_mutations
from lightning_spmd.stages.capture.request import CaptureRequest


class PiecewiseTrace(FollowedTrace):
    """The capture of one step's beginning.

    Args:
        request: what is captured; its program is given with each piece.
    """

    def __init__(self, request: CaptureRequest) -> None:
        super().__init__(request, Program((), 0, (), None, frozenset(), Live(), is_beginning=True))
        self._random: TorchRandomState | None = None
        self._end: fx.Node | None = None
        self._roots: dict[fx.Node, fx.Node] = {}
        self._left: set[fx.Node] = set()
        self._written: set[fx.Node] = set()
        self._of_gradients: set[fx.Node] = set()
        self._decisions = 0

    def piece(self, program: Program) -> CapturedStep:
        """Capture the calls behind the last piece.

        Args:
            program: of the step up to a read; it begins with the calls of the pieces before.

        Raises:
            CaptureError: they cannot be a piece.
        """
        notes = [note for note in program.notes[self._values.done :] if not note.reads]
        if program.counts is not None or not all(map(self._is_recorded_at_once, notes)):
            raise CaptureError("sizes that values decide, and Python in a backward pass, need the whole beginning")
        self.program = program
        self._kinds |= {number: kind for note in notes for number, kind in note.met.items()}
        with self.recording():
            if self._random is not None:  # draws from equal states are taken for one draw and its repetition
                self._random.restore()
            with self.request.step_context():
                self._make(notes)
            wanted = [self.recorder.argument(self._values.of(want.source).detach()) for want in program.wants]
            self._random = TorchRandomState()
        self._values.done = len(program.notes)
        return self._cut(wanted)

    def _is_recorded_at_once(self, note: Note) -> bool:
        """Whether a call has neither a thread that waits for Python nor an optimizer whose step this trace follows."""
        if isinstance(note.func, CallByHand) and note.func.number is not None and self.by_hand is not None:
            return self.by_hand.swaps[note.func.number].is_torchs_own
        return not isinstance(note.func, Begin)

    def _cut(self, wanted: list[fx.Node]) -> CapturedStep:
        """What has been recorded since the last piece, as a graph of its own."""
        fresh = self._fresh()
        decisions = self.recorder.decisions[self._decisions :]
        self._decisions = len(self.recorder.decisions)
        before = _Before(lambda node: node in self._left or node in self.inputs.entries, fresh)
        before.need(operand for node in fresh for operand in node.all_input_nodes)
        before.need([*wanted, *(node for node, _, _ in decisions)])
        leaving = [node for node in fresh if self._roots[node] is node and _is_value(node)]
        self._left.update(leaving)

        cut, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        inputs: list[tuple[fx.Node, GraphInput]] = []
        for node in before.taken:
            copies[node] = cut.placeholder(node.name)
            copies[node].meta["val"] = node.meta["val"]
            kept = GraphInput(InputRole.KEPT, (node.name,), node.name, node.meta["val"])
            inputs.append((copies[node], self.inputs.entries.get(node, kept)))

        def copied(node: fx.Node) -> fx.Node:
            return copies[before.written.get(node, node)]

        for node in (*before.views, *fresh):
            copies[node] = cut.node_copy(node, copied)
        cut.output(tuple(copied(node) for node in (*wanted, *leaving))).meta["val"] = None
        outputs = [GraphOutput(OutputRole.LOGGED, (), f"read {i}", n.meta["val"]) for i, n in enumerate(wanted)]
        outputs += [GraphOutput(OutputRole.KEPT, (n.name,), n.name, n.meta["val"]) for n in leaving]
        asked = decision_program(cut, [(copied(node), value, where) for node, value, where in decisions])
        remove_dead_nodes(cut)
        return CapturedStep(
            private.GraphModule(nn.Module(), cut),
            Signature(with_mutations(cut, inputs), tuple(outputs)),
            Guards(self.guards(), asked and asked.guard([node for node, _ in inputs])),
            self._constants(),
            returned=[OutputRef(i) for i in range(len(wanted))],
            variant=self.request.variant,
            host_values=self._host_values,
            named=self._named,
        )

    def _fresh(self) -> dict[fx.Node, None]:
        """The calls recorded since the last piece, in order."""
        nodes = itertools.takewhile(lambda node: node is not self._end, reversed(self.recorder.graph.nodes))
        fresh = dict.fromkeys(reversed([node for node in nodes if node.op == "call_function"]))
        self._roots.update((node, node) for node in self.inputs.entries)
        for node in fresh:
            source = aliased_argument(node)
            self._roots[node] = node if source is None else self._roots[source]
            self._end = node
        if self.by_hand is not None:
            self._of_gradients.update(self.by_hand.gradients)
            mark_updates(fresh, self._roots, self.inputs, self._of_gradients)
        self._written.update(self._roots[written] for node in fresh for written in written_arguments(node))
        self._check_writes()
        return fresh

    def _check_writes(self) -> None:
        """A piece writes into copies of live tensors, and no other input sees that.

        Raises:
            CaptureError: one of them is the same memory.
        """
        if self._written.isdisjoint(self.inputs.live):
            return
        live = {node.name: (node, tensor) for node, tensor in self.inputs.live.items() if node.users}
        for pair in shared((name, tensor) for name, (_, tensor) in live.items()):
            if any(live[name][0] in self._written for name, _ in pair):
                raise CaptureError("a value is read behind a write into memory that two tensors share")


class _Before:
    """What a piece needs of those before it.

    Args:
        may_take: whether a node is an input of the step, or what an earlier piece has left.
        fresh: the piece's own nodes.

    Attributes:
        taken: the values that are inputs of the piece, in order.
        views: what is made again of them, in order.
        written: results of writes, with what was written into.
    """

    def __init__(self, may_take: Callable[[fx.Node], bool], fresh: Iterable[fx.Node]) -> None:
        self.taken: list[fx.Node] = []
        self.views: list[fx.Node] = []
        self.written: dict[fx.Node, fx.Node] = {}
        self._may_take, self._seen = may_take, set(fresh)

    def need(self, nodes: Iterable[fx.Node]) -> None:
        """These are operands of the piece."""
        for node in nodes:
            self._need(node)

    def _need(self, node: fx.Node) -> None:
        if node in self._seen:
            return
        self._seen.add(node)
        source = aliased_argument(node)
        if self._may_take(node):
            self.taken.append(node)
        elif source is None:
            raise CaptureError(f"{node.name} was made by an earlier piece, which did not leave it")
        elif source in written_arguments(node):
            self._need(source)
            self.written[node] = self.written.get(source, source)
        else:
            self.need(node.all_input_nodes)
            self.views.append(node)


def _is_value(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (TensorSpec, bool, int, float))
