"""Values of tensors that Python reads: ``.item()``, ``float()``, ``if loss > 1``, ``x[:, : int(lengths.max())]``.

A number that is read is recorded (``host_scalar``), and what is computed from it too; nobody needs to know it as long
as it is only logged, or multiplies tensors. Where Python decides something with it, capture must know it: the trace
ends with :class:`ReadWanted`, which holds the graph up to there. All ranks run that on this step's batch, and the step
is traced again with the answer. The decision becomes a question that the graph asks in every step (``ir.reads``).

Until the last question a run must not change what outlives it: the graph writes into copies of its inputs before that,
and into the inputs afterwards (:func:`writes_apart`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.effects import draws_random
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import NodeInfo, Section, TensorSpec, info_of
from lightning_spmd.ir.reads import READ, Number, checks_of, holds
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.messages import batch_hook
from lightning_spmd.stages.capture.decisions import needed_for
from lightning_spmd.stages.capture.host_scalar import HostScalar, ScalarRecorder
from lightning_spmd.stages.capture.user_code import user_location

MOST_NUMBERS = 256
"""A tensor with more elements is not taken as Python's numbers."""
_aten = torch.ops.aten


class ReadWanted(BaseException):
    """Python needs the value of a tensor. No ``Exception``: the user's code shall not catch it.

    Args:
        place: ``file:line`` that needs it.
        numbers: the reads whose values are not known yet.
        seen: the values that were known, or found while tracing.

    Attributes:
        prefix: the graph whose outputs these values are, once it has been packed.
    """

    def __init__(self, place: str, numbers: tuple[int, ...], seen: Mapping[int, Number]) -> None:
        super().__init__(place)
        self.place = place
        self.numbers = numbers
        self.seen = dict(seen)
        self.prefix: CapturedStep | None = None


class UnknownValueError(CaptureError):
    """A step cannot be captured without the values that it reads; up to there it can."""


class Reads:
    """What one trace reads.

    Args:
        recorder: whose graph it is.
        graph: the graph.
        answers: known values, by the number of the read.

    Attributes:
        foresee: finds the number that a node reads, while the step is traced; None where that cannot be.
        role_of: gives the role of an input.
        behind: sections, besides the forward one, behind which Python may still decide.
        refusal: why this step may not decide by values of tensors, if so; by those of its batch it may, for they are
            known before it runs.
    """

    def __init__(self, recorder: ScalarRecorder, graph: fx.Graph, answers: Mapping[int, Number]) -> None:
        self.answers = dict(answers)
        self.foresee: Callable[[fx.Node], Number | None] = lambda _: None
        self.refusal: str | None = None
        self.behind: tuple[Section, ...] = ()
        self.role_of: Callable[[fx.Node], InputRole | None] = lambda _: None
        self.wanted: ReadWanted | None = None
        self.nodes: list[fx.Node] = []
        self._recorder = recorder
        self._graph = graph
        self._asked: list[int] = []
        self._checked: set[fx.Node] = set()

    def read(self, tensor: Tensor, source: fx.Node, info: NodeInfo) -> HostScalar:
        """The number in a tensor with one element.

        Args:
            tensor: the fake tensor.
            source: what produces it.
            info: of the new node.

        Raises:
            CaptureError: it is no number that a graph can hand on.
        """
        if tensor.dtype.is_complex:
            raise CaptureError("a complex number is read in Python, which one graph cannot express", user_location())
        node = self._graph.call_function(READ, (source,))
        sample = 1.0 if tensor.dtype.is_floating_point else tensor.dtype is torch.bool or 1
        node.meta.update(val=sample, info=info)
        self.nodes.append(node)
        number = len(self.nodes) - 1
        scalar = HostScalar(sample, node, self._recorder, lambda: self._ask(number))
        scalar.tensor = tensor
        return scalar

    def _ask(self, number: int) -> Number:
        node = self.nodes[number]
        place = user_location() or info_of(node).source
        if self.refusal is not None and not self._is_of_batch(node):
            raise CaptureError(self.refusal, place)
        sections = [info_of(n).section for n in self._graph.nodes if n.op == "call_function"]
        sections = [s for s in sections if s not in self.behind]
        if (section := max(sections, key=list(Section).index)) is not Section.FORWARD:
            raise CaptureError(
                f"a tensor's value decides something in the {section} part of the iteration or after it, which one "
                "graph cannot express; keep it a tensor (torch.where instead of `if`), or move the read to "
                f"{batch_hook('end')}",
                place,
            )
        if number not in self.answers and (foreseen := self.foresee(node)) is not None:
            self.answers[number] = foreseen
        if number not in self.answers and self.refusal is not None:
            raise CaptureError(self.refusal, place)
        if number not in self.answers:
            unknown = tuple(i for i in range(len(self.nodes)) if i not in self.answers)
            self.wanted = ReadWanted(place, unknown, self.answers)
            raise self.wanted
        self._asked.append(number)
        value = self.answers[number]
        node.meta["val"] = value
        return value

    def check(self, scalar: HostScalar, place: str) -> bool:
        """From here on the graph holds for the value that ``scalar`` has; whether somebody asks before it runs.

        Raises:
            CaptureError: it will never have that value again.
        """
        node = scalar.node
        if node is None or node in self._checked:
            return False
        if scalar.is_float() and self._changes(node):
            raise CaptureError(
                "a tensor's value is read as a plain float of Python (float(), a format, an argument), "
                f"{_read_by(node)}, which no graph can follow, and it changes in every step; log or "
                f"compute with the tensor or its .item(), or move the statement to {batch_hook('end')}",
                place,
            )
        value = scalar.value
        self._checked.add(node)
        if self.refusal is not None:
            return True
        asked = tuple(self.asked())
        check = self._graph.call_function(holds, (node, value, place, asked, *(self.nodes[i] for i in asked)))
        check.meta.update(val=None, info=info_of(node))
        return False

    def _is_of_batch(self, node: fx.Node) -> bool:
        """Whether a number follows from the batch alone."""
        given = (InputRole.BATCH, InputRole.SHARED_BATCH)
        needed = needed_for(self._graph, [node])
        return all(self.role_of(n) in given if n.op == "placeholder" else not draws_random(n) for n in needed)

    def _changes(self, node: fx.Node) -> bool:
        """Whether a number depends on what is another in every step."""
        found = _origins(node)
        moving = (InputRole.BATCH, InputRole.SHARED_BATCH, InputRole.PARAMETER)
        return any(draws_random(n) or self.role_of(n) in moving for n in found)

    def asked(self) -> dict[int, Number]:
        """The values that Python wanted to know, by the number of the read."""
        return {number: self.answers[number] for number in sorted(set(self._asked))}


def _read_by(node: fx.Node) -> str:
    """What a number was read from, for somebody who has never seen the graph."""
    sources = [n.all_input_nodes[0] for n in _origins(node) if n.target is READ]
    return f"that of {_described(first(sources, 'tensor that was read'))}"


def _described(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"the input {node.name}"
    if node.target is operator.getitem:
        return _described(node.all_input_nodes[0])
    module = info_of(node).module
    return f"what {node.target} gives" + (f" in module {module!r}" if module else "")


def _origins(node: fx.Node) -> set[fx.Node]:
    found, todo = {node}, [node]
    while todo:
        for operand in todo.pop().all_input_nodes:
            if operand not in found:
                found.add(operand)
                todo.append(operand)
    return found


def writes_apart(graph: fx.Graph, *, prefix: bool = False) -> None:
    """Let a graph write into copies of its inputs until it can no longer end with a ``ReadMiss``.

    Args:
        graph: a captured one.
        prefix: it never writes into them; it is run to know a value.
    """
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    checks = checks_of(graph)
    last_check = checks[-1] if checks else None
    if last_check is None and not prefix:
        return
    roots = storage_roots(graph)
    writes, last = dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for node in nodes:
        for written in written_arguments(node):
            root = roots[written]
            if root.op == "placeholder":
                writes.setdefault(root, node)
                last[root] = node
    begin = first((n for n in nodes if n.op != "placeholder"), "node")
    for root, write in writes.items():
        if last_check is not None and not prefix and place[write] > place[last_check]:
            continue
        spec: TensorSpec = root.meta["val"]
        with graph.inserting_before(begin):
            copy = graph.call_function(_aten.clone.default, (root,))
        copy.meta.update(val=spec, info=info_of(write))
        root.replace_all_uses_with(copy, delete_user_cb=lambda user, own=copy: user is not own)
        if prefix or last_check is None:
            continue
        behind = max(last[root], last_check, key=place.__getitem__)
        with graph.inserting_after(behind):
            back = graph.call_function(_aten.copy_.default, (root, copy))
        back.meta.update(val=spec, info=info_of(behind))
