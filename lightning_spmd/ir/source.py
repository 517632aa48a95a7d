"""A graph as one Python function, a line an operator.

Unlike the code that fx writes, a line calls the dispatcher's entry at once instead of looking for it under
``torch.ops``: of the microseconds that an operator costs on the host that is one. And a result takes the memory of an
operand that nothing needs any more, where the operator can write there (``in_place.py``).
"""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
import operator
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, cast

import torch
from torch import fx

from lightning_spmd import _private_api as private
from lightning_spmd.ir.bindings import METHOD, binding_of
from lightning_spmd.ir.default_dtype import as_recorded
from lightning_spmd.ir.in_place import in_place
from lightning_spmd.ir.node_info import named, spec_of, tell_place
from lightning_spmd.ir.reads import hands_over
from lightning_spmd.ir.sizes import Counts, Formula, Size, SizeFloat, Sizes

aten = torch.ops.aten
_SIGNS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "truediv": "{} / {}",
    "pow": "{} ** {}",
    "neg": "-{}",
    "getitem": "{}[{}]",
}
"""How Python writes functions of the module ``operator``."""
_programs = itertools.count()


_owners: dict[str, list[str | None]] = {}
"""Of each line of a graph's function but the first one, what it runs, for messages; by the name of its file."""


class ErrorsNamePlaces:
    """What is raised inside by a line of a graph's function names the operator, its module and the user's line."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        while isinstance(error, Exception) and trace is not None:
            lines = _owners.get(trace.tb_frame.f_code.co_filename, [])
            number = trace.tb_lineno - 2  # after "def"
            what = lines[number] if 0 <= number < len(lines) else None
            if what is not None:
                tell_place(error, what)
            trace = trace.tb_next


def pause(*values: Any) -> tuple[Any, ...]:
    """In a graph: its function is a generator, and hands these values over here before it goes on."""
    return values


def function_of(
    graph_module: fx.GraphModule, *, talks: bool = False, again: Mapping[fx.Node, Callable[[], Any]] | None = None
) -> Callable[..., Any]:
    """What takes the values of the graph's inputs in order, and gives its outputs.

    Args:
        graph_module: the graph.
        talks: it is a generator, which yields what it hands over to Python, by hand-over, and is sent the numbers for
            the last one; the others want none.
        again: inputs that Python may change until it has read last, and what reads them behind that.

    Raises:
        ValueError: the graph calls modules or methods.
    """
    return _Writer(graph_module, talks=talks, again=again or {}).function()


class _Writer:
    """Writes the source of a graph and compiles it.

    Args:
        graph_module: the graph, and what its ``get_attr`` nodes name.
        talks: whether it yields what it hands over.
        again: inputs that are read once more behind the last of these places.
    """

    def __init__(
        self, graph_module: fx.GraphModule, *, talks: bool, again: Mapping[fx.Node, Callable[[], Any]]
    ) -> None:
        self._module, self._talks, self._again = graph_module, talks, again
        self._numbers: dict[Sizes, dict[Formula, str]] = {}
        self._before: list[str] = []  # lines that come before the next node's
        self._graph = graph_module.graph
        self._globals: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self._owners: list[str | None] = []
        self._taken = {node.name for node in self._graph.nodes}
        self._in_place = in_place(self._graph)

    def function(self) -> Callable[..., Any]:
        """The callable."""
        source = self._source()
        name = f"<graph {next(_programs, 0)} of strategy='spmd'>"
        exec(compile(source, name, "exec"), self._globals)
        function = self._globals.pop("step")
        _owners[name] = self._owners
        weakref.finalize(function, _owners.pop, name, None)
        # so that a traceback out of an operator shows the line
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        weakref.finalize(function, linecache.cache.pop, name, None)
        return function

    def _source(self) -> str:
        last = self._last_readers()
        together: list[fx.Node] = []  # one after another, whose values are handed over at the last of them
        last_handed = ([None] + [node for node in self._graph.nodes if hands_over(node)])[-1]
        parameters: list[str] = []
        lines: list[str] = []
        for node in self._graph.nodes:
            if node.op == "placeholder":
                parameters.append(node.name)
                if not node.users:
                    lines.append(f"    {node.name} = None")
                continue
            together.append(node)
            if self._talks and hands_over(node):
                if hands_over(node.next) and not node.users:
                    continue
                statement = f"{node.name} = yield ({', '.join(map(self._handed, together))},)"
            else:
                statement = self._statement(node)
            lines += [f"    {line}" for line in self._before]
            self._before.clear()
            lines.append("    " + statement)
            unused = [operand.name for each in together for operand in last.get(each, ())]
            if unused and node.op != "output":
                lines[-1] += f"; {' = '.join(unused)} = None"
            together.clear()
            self._owners += [None] * (len(lines) - 1 - len(self._owners)) + [named(node)]
            if node is last_handed:
                lines += [f"    {n.name} = {self._constant(r, n.name)}()" for n, r in self._again.items() if n.users]
        for sizes, names in self._numbers.items():
            if isinstance(sizes, Counts):
                continue
            ask = self._constant(sizes.now(list(names)), "sizes")
            self._owners.insert(0, None)
            lines.insert(0, f"    {''.join(f'{name}, ' for name in names.values())}= {ask}()")
        return f"def step({', '.join(parameters)}):\n" + "\n".join(lines) + "\n"

    def _number(self, number: Size | SizeFloat) -> str:
        """The name of a number that follows from the sizes of the batch."""
        names = self._numbers.setdefault(number.sizes, {})
        if number.formula not in names:
            name = f"size_{len(self._taken)}"
            while name in self._taken:
                name += "_"
            self._taken.add(name)
            names[number.formula] = name
            if isinstance(number.sizes, Counts):  # known in the middle of the run, and before who needs it
                known = self._constant(number.sizes.current, "counts")
                self._before.append(f"{name} = {number.formula.of(known)}")
        return names[number.formula]

    def _last_readers(self) -> dict[fx.Node, list[fx.Node]]:
        """The values that nothing needs any more after a node."""
        found: dict[fx.Node, list[fx.Node]] = {}
        seen: set[fx.Node] = set()
        for node in reversed(self._graph.nodes):
            for operand in node.all_input_nodes:
                if operand not in seen:
                    seen.add(operand)
                    found.setdefault(node, []).append(operand)
        return found

    def _statement(self, node: fx.Node) -> str:
        if node.op == "output":
            return f"return {self._value(node.args[0])}"
        if node.op == "get_attr":
            value: Any = operator.attrgetter(str(node.target))(self._module)
            return f"{node.name} = {self._constant(value, 'constant')}"
        if node.op != "call_function":
            raise ValueError(f"graphs of iterations have no {node.op} nodes: {node.format_node()}")
        if node.target is pause:
            return f"yield {self._value(tuple(node.args))}"
        call = self._call(node)
        return f"{node.name} = {call}" if node.users else call

    def _handed(self, node: fx.Node) -> str:
        """The source of the values that Python gets."""
        target: Any = node.target
        return f"{self._constant(target.handed, f'{target}_to_python')}({self._value(tuple(node.args))})"

    def _call(self, node: fx.Node) -> str:
        target, args = self._in_place.get(node, (node.target, node.args))
        arguments = [self._value(a) for a in args]
        sign = _SIGNS.get(target.__name__) if getattr(target, "__module__", "") == "_operator" else None
        if sign is not None:
            return sign.format(*(f"({a})" if a.startswith("-") else a for a in arguments))
        words = {k: self._value(v) for k, v in node.kwargs.items()}
        arguments += [f"**{{{k!r}: {v}}}" if keyword.iskeyword(k) else f"{k}={v}" for k, v in words.items()]
        called = private.entry_of(target)
        if target is aten.nonzero_static.default and spec_of(node).device.type == "cpu":
            called = _positions
        elif (binding := binding_of(target, args, node.kwargs)) == METHOD:
            method = target._schema.name.rpartition("::")[2]  # noqa: SLF001 - as everywhere in torch
            return f"{arguments[0]}.{method}({', '.join(arguments[1:])})"
        elif binding is not None:
            called = binding
        return f"{self._constant(as_recorded(node, called), _name_of(target))}({', '.join(arguments)})"

    def _value(self, argument: object) -> str:
        """The source of an argument."""
        value: Any = argument
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, (Size, SizeFloat)):
            return self._number(value)
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if type(value) is slice:
            return f"slice({self._value(value.start)}, {self._value(value.stop)}, {self._value(value.step)})"
        if isinstance(value, tuple):
            return "(" + "".join(f"{self._value(v)}, " for v in cast("tuple[Any, ...]", value)) + ")"
        if isinstance(value, list):
            return "[" + ", ".join(self._value(v) for v in cast("list[Any]", value)) + "]"
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
            return "{" + ", ".join(f"{k!r}: {self._value(v)}" for k, v in items) + "}"
        return self._constant(value, "constant")

    def _constant(self, value: Any, kind: str) -> str:
        """A global name for an object."""
        if id(value) not in self._known:
            base = "".join(c if c.isalnum() else "_" for c in kind)
            name, number = base, 0
            while name in self._taken:
                number += 1
                name = f"{base}_{number}"
            self._taken.add(name)
            self._known[id(value)] = name
            self._globals[name] = value  # which keeps it alive, and so its id its own
        return self._known[id(value)]


_nonzero = private.entry_of(aten.nonzero.default)


def _positions(mask: torch.Tensor, *, size: int, **others: Any) -> torch.Tensor:
    """``nonzero_static`` on the host, whose kernel takes four times as long as that of ``nonzero``."""
    found = _nonzero(mask)
    return found if found.shape[0] == size else aten.nonzero_static.default(mask, size=size, **others)


def _name_of(target: Any) -> str:
    """How the line of a call names what it calls."""
    name: Any = getattr(target, "__name__", "call")
    return str(target) if private.entry_of(target) is not target else str(name)
