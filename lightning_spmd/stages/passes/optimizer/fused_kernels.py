"""Replace list operators that make up Adam, AdamW, SGD with momentum or Adagrad by torch's fused kernels.

Before, what ``fuse_optimizer`` makes, or an optimizer with ``foreach=True``::

    _foreach_lerp_(m, g, 1 - beta1); _foreach_mul_(v, beta2); _foreach_addcmul_(v, g, g, 1 - beta2)
    d = _foreach_sqrt(v); _foreach_div_(d, root of 1 - beta2 ** step); _foreach_add_(d, eps)
    _foreach_addcdiv_(p, m, d, -lr / (1 - beta1 ** step))

After, one pass over memory in place of seven::

    _fused_adam_(p, g, m, v, [], steps, lr=lr, beta1=beta1, beta2=beta2, ...)

Found by the flow of data through memory and by what the numbers were computed from, never by names; ``amsgrad``,
``nesterov``, ``dampening``, ``maximize`` and both kinds of weight decay included. ``lr`` and betas stay inputs. What
does not fit the formula exactly stays as it is: another reader of an intermediate value, tensors in different memory
orders, a step counter on another device.

Changes numerics: the fused kernels round otherwise (``docs/passes.md`` has the measurements), so this pass is not a
default. On other devices than the host it joins the operators first, which ``fuse_optimizer`` leaves alone there. Does
nothing to optimizers captured with ``fused=True``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lightning_spmd.ir.node_info import info_of, spec_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import forget_writes
from lightning_spmd.stages.passes.contract import GraphPass, PassState
from lightning_spmd.stages.passes.flat_buffers import is_dense
from lightning_spmd.stages.passes.optimizer.fuse_optimizer import join_updates
from lightning_spmd.stages.passes.optimizer.homes import UPDATE
from lightning_spmd.stages.passes.optimizer.lists import Each, is_number_call
from lightning_spmd.stages.passes.optimizer.matching import (
    Flow,
    Numbers,
    Unknown,
    matches,
    operand,
    operand_list,
    operator_name,
)

_aten = torch.ops.aten
_ADAM = _aten._fused_adam_.default
_ADAMW = _aten._fused_adamw_.default
_SGD = _aten._fused_sgd_.default
_ADAGRAD = _aten._fused_adagrad_.default
Nodes = list[fx.Node]


def use_fused_kernels(step: ShardedStep, state: PassState) -> None:
    """Replace known updates; see the module docstring for which, and when it does nothing."""
    graph = step.graph_module.graph
    join_updates(step, lambda _: True)
    counts: dict[str, int] = {}
    for node in list(graph.nodes):
        finders = _BY_END.get(operator_name(node), ()) if info_of(node).section in UPDATE else ()
        found = next((f for find in finders if (f := find(_Reader(graph, node))) is not None), None)
        if found is not None:
            name = _write(graph, node, found)
            counts[name] = counts.get(name, 0) + 1
    if counts:
        _erase_unread_numbers(graph)
        state.notes["use_fused_kernels"] = ", ".join(f"{count} {name}" for name, count in counts.items())


@dataclass
class _Found:
    """An update that is one kernel: what goes, who reads the result, and the call that takes its place."""

    target: Any
    gone: set[fx.Node]
    readers: list[fx.Node]
    lists: list[Nodes]
    numbers: dict[str, Any]


@dataclass
class _Reader:
    """Reads an update backwards from its last operator.

    Args:
        graph: the whole graph.
        end: the operator that writes the parameters.
        gone: the operators that were recognized so far.
    """

    graph: fx.Graph
    end: fx.Node
    gone: set[fx.Node] = field(default_factory=set[fx.Node])
    found: dict[Unknown, Any] = field(default_factory=dict[Unknown, Any])

    def __post_init__(self) -> None:
        self.flow = Flow(self.graph)
        self._numbers = Numbers()
        self.gone.add(self.end)

    def written(self, tensors: Nodes, reader: fx.Node, name: str) -> fx.Node | None:
        """The operator that wrote the list last."""
        node = self.flow.writer(tensors, reader, name)
        if node is not None:
            self.gone.add(node)
        return node

    def made(self, tensors: Nodes, name: str) -> fx.Node | None:
        """The operator that made the list, if nothing else reads what it made."""
        node = self.flow.maker(tensors, name)
        if node is None or any(user not in self.gone for t in tensors for user in t.users):
            return None
        self.gone |= {node, *tensors}
        return node

    def number(self, value: Any, pattern: Any) -> bool:
        """Whether a number that all parameters share is like the pattern."""
        return matches(pattern, self._numbers.at(value, 0), self.found)

    def each_number(self, value: Any, pattern: Callable[[fx.Node], Any], steps: Nodes) -> bool:
        """Whether the number of each parameter is like the pattern of its step counter."""
        return all(matches(pattern(s), self._numbers.at(value, i), self.found) for i, s in enumerate(steps))

    def steps(self, value: Any, count: int) -> Nodes | None:
        """The step counters that the numbers were computed from, one each, on the parameters' device."""
        found = [_counter(self._numbers.at(value, i)) for i in range(count)]
        device = spec_of(operand_list(self.end, 0)[0]).device
        return [s for s in found if s is not None and spec_of(s).device == device] if None not in found else None

    def gradients(self, gradients: Nodes, parameters: Nodes) -> tuple[Nodes, Any, bool]:
        """(gradients, weight decay, maximize): what was done to the gradients before the update."""
        decay: Any = 0.0
        added = self.flow.maker(gradients, "add")
        decays = added is not None and operand_list(added, 1) == parameters and "alpha" in added.kwargs
        if added is not None and decays and self.made(gradients, "add"):
            gradients, decay = operand_list(added, 0), added.kwargs["alpha"]
        negated = self.made(gradients, "neg")
        return (gradients if negated is None else operand_list(negated, 0)), decay, negated is not None

    def result(
        self, target: Any, updated: list[Nodes], read: list[Nodes], lists: list[Nodes], **numbers: Any
    ) -> _Found | None:
        """The update, if nothing looks at its intermediate states and the kernel takes its tensors."""
        kept = [t for tensors in updated for t in tensors]
        others = [t for tensors in read for t in tensors]
        if not _fit(updated, read[0]) or not self.flow.is_private(self.gone, kept, others):
            return None
        numbers = {k: self.found[v] if isinstance(v, Unknown) else v for k, v in numbers.items()}
        if any(isinstance(v, tuple) for v in numbers.values()):
            return None  # computed from others: there is no one node for it
        return _Found(target, self.gone, self.flow.readers_after(self.end, kept), lists, numbers)


def _counter(expression: Any) -> fx.Node | None:
    """The one step counter in an expression."""
    if not isinstance(expression, tuple):
        return None
    if expression[0] == "item":
        return expression[1]
    found = {counter for part in expression[1:] if (counter := _counter(part)) is not None}
    return found.pop() if len(found) == 1 else None


def _fit(updated: list[Nodes], gradients: Nodes) -> bool:
    """Whether the kernel may walk parameter, gradient and state side by side."""
    for same in zip(*updated, gradients, strict=True):
        specs = [spec_of(n) for n in same]
        if len({(s.shape, s.stride, s.dtype, s.device) for s in specs}) != 1 or not is_dense(specs[0]):
            return False
    return len({(spec_of(p).dtype, spec_of(p).device) for p in updated[0]}) == 1


# ---------------------------------------------------------------- the known updates
def _adam(reader: _Reader) -> _Found | None:
    lr, beta1, beta2, eps = Unknown(), Unknown(), Unknown(), Unknown()
    end = reader.end
    parameters, averages, roots = (operand_list(end, i) for i in range(3))
    added = reader.written(roots, end, "add_")
    divided = added and reader.written(roots, added, "div_")
    root = divided and reader.made(roots, "sqrt")
    if added is None or divided is None or root is None:
        return None
    squares = largest = operand_list(root, 0)
    maximum = reader.written(largest, root, "maximum_")
    if maximum is not None:
        squares = operand_list(maximum, 1)
    product, lerp = reader.written(squares, maximum or root, "addcmul_"), reader.written(averages, end, "lerp_")
    scaled = product and reader.written(squares, product, "mul_")
    steps = reader.steps(operand(end, 3), len(parameters))
    if product is None or lerp is None or scaled is None or not steps:
        return None
    gradients = operand_list(lerp, 1)
    step_size, root_of_correction = _adam_corrections(lr, beta1, beta2)
    fits = (
        operand_list(product, 1) == gradients == operand_list(product, 2)
        and reader.each_number(operand(end, 3), step_size, steps)
        and reader.each_number(operand(divided, 1), root_of_correction, steps)
        and reader.number(operand(added, 1), eps)
        and reader.number(operand(lerp, 2), ("sub", 1, beta1))
        and reader.number(operand(scaled, 1), beta2)
        and reader.number(operand(product, 3), ("sub", 1, beta2))
    )
    if not fits:
        return None
    gradients, decay, maximize = reader.gradients(gradients, parameters)
    decoupled = None if decay != 0.0 else _decoupled_decay(reader, parameters, lr)
    amsgrad = maximum is not None
    return reader.result(
        _ADAM if decoupled is None else _ADAMW,
        [parameters, averages, squares, *([largest] if amsgrad else [])],
        [gradients, steps],
        [parameters, gradients, averages, squares, largest if amsgrad else [], steps],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=decay if decoupled is None else decoupled,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
    )


def _adam_corrections(lr: Any, beta1: Any, beta2: Any) -> tuple[Callable[[fx.Node], Any], Callable[[fx.Node], Any]]:
    """What ``addcdiv_`` multiplies by and what the root of the squares is divided by, for a step counter."""

    def correction(beta: Any, step: fx.Node) -> Any:
        return ("sub", 1, ("pow", beta, ("item", step)))

    return (
        lambda step: ("neg", ("truediv", lr, correction(beta1, step))),
        lambda step: ("pow", correction(beta2, step), 0.5),
    )


def _decoupled_decay(reader: _Reader, parameters: Nodes, lr: Unknown) -> Any | None:
    """AdamW's weight decay, if that is what the parameters were multiplied by before the update."""
    decay = Unknown()
    scaled = reader.flow.writer(parameters, reader.end, "mul_")
    if scaled is None or not reader.number(operand(scaled, 1), ("sub", 1, ("mul", lr, decay))):
        return None
    reader.gone.add(scaled)
    return reader.found[decay]


def _adagrad(reader: _Reader) -> _Found | None:
    lr, lr_decay, eps = Unknown(), Unknown(), Unknown()
    end = reader.end
    parameters, gradients, roots = (operand_list(end, i) for i in range(3))
    added = reader.written(roots, end, "add_")
    root = added and reader.made(roots, "sqrt")
    sums = operand_list(root, 0) if root is not None else []
    product = root and reader.written(sums, root, "addcmul_")
    steps = reader.steps(operand(end, 3), len(parameters))
    if added is None or product is None or not steps:
        return None

    def step_size(step: fx.Node) -> Any:
        return ("neg", ("truediv", lr, ("add", 1, ("mul", ("sub", ("item", step), 1), lr_decay))))

    fits = (
        operand_list(product, 1) == gradients == operand_list(product, 2)
        and reader.number(operand(product, 3, 1), 1)
        and reader.each_number(operand(end, 3), step_size, steps)
        and reader.number(operand(added, 1), eps)
    )
    if not fits:
        return None
    gradients, decay, maximize = reader.gradients(gradients, parameters)
    lists = [parameters, gradients, sums, steps]
    read = [gradients, steps]
    numbers = {"lr": lr, "lr_decay": lr_decay, "weight_decay": decay, "eps": eps, "maximize": maximize}
    return reader.result(_ADAGRAD, [parameters, sums], read, lists, **numbers)


def _sgd(reader: _Reader) -> _Found | None:
    lr, momentum, dampening = Unknown(), Unknown(), Unknown()
    end = reader.end
    parameters, buffers = operand_list(end, 0), operand_list(end, 1)
    if not buffers or not reader.number(end.kwargs.get("alpha"), ("neg", lr)):
        return None
    ahead = reader.made(buffers, "add")  # nesterov: gradient plus momentum times buffer
    if ahead is not None:
        buffers = operand_list(ahead, 1)
    added = reader.written(buffers, ahead or end, "add_")
    scaled = added and reader.written(buffers, added, "mul_")
    if added is None or scaled is None or not reader.number(operand(scaled, 1), momentum):
        return None
    gradients = operand_list(added, 1)
    if ahead is not None:
        nesterov = operand_list(ahead, 0) == gradients and reader.number(ahead.kwargs.get("alpha"), momentum)
        if not nesterov:
            return None
    if "alpha" not in added.kwargs:
        reader.found[dampening] = 0.0
    elif not reader.number(added.kwargs["alpha"], ("sub", 1, dampening)):
        return None
    gradients, decay, maximize = reader.gradients(gradients, parameters)
    numbers = {"weight_decay": decay, "momentum": momentum, "lr": lr, "dampening": dampening}
    flags = {"nesterov": ahead is not None, "maximize": maximize, "is_first_step": False}
    lists = [parameters, gradients, buffers]
    return reader.result(_SGD, [parameters, buffers], [gradients], lists, **numbers, **flags)


_BY_END: dict[str, tuple[Callable[[_Reader], _Found | None], ...]] = {"addcdiv_": (_adam, _adagrad), "add_": (_sgd,)}
"""What the last operator of each update is."""


# ---------------------------------------------------------------- how
def _write(graph: fx.Graph, end: fx.Node, found: _Found) -> str:
    with graph.inserting_before(end):
        node = graph.call_function(found.target, tuple(found.lists), found.numbers)
    node.meta.update(val=None, info=info_of(end))
    for reader in found.readers:
        forget_writes(reader)  # it counts the writes of several operators
    for old in reversed([n for n in graph.nodes if n in found.gone]):
        graph.erase_node(old)
    return str(found.target).removeprefix("aten.").removesuffix(".default")


def _erase_unread_numbers(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        numbers = isinstance(node.target, Each) or is_number_call(node) or node.target is operator.getitem
        if numbers and not node.users and info_of(node).section in UPDATE:
            graph.erase_node(node)


PASS = GraphPass(
    "use_fused_kernels",
    use_fused_kernels,
    after=frozenset({"bucket_collectives", "split_optimizer", "fuse_optimizer"}),
    changes_numerics=True,
)
