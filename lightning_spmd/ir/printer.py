"""A graph as readable Python: one line a node, with module, section, placement and bytes in a comment.

The first lines say what there is of everything::

    # 327 operators: 131 forward, 158 backward, 30 communication, 8 optimizer
    # inputs: 29 parameter 446,464 B; 2 batch 1,152 B
    # collectives: 2 all_reduce_ 446,468 B
    def step(
"""

from __future__ import annotations

import difflib
import operator
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import fx

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.ir.node_info import TensorSpec, info_of
from lightning_spmd.ir.signature import GraphInput, GraphOutput, Signature
from lightning_spmd.ir.verify import collective_name, collectives


def readable(graph_module: fx.GraphModule, signature: Signature) -> str:
    """The whole graph as text.

    Args:
        graph_module: the graph of a captured or sharded step.
        signature: its signature, printed as the arguments' and results' comments.
    """
    lines = [*totals(graph_module.graph, signature), "def step(", *_inputs(graph_module.graph, signature), "):"]
    place = ("", "")
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines += ["", "    return (", *_outputs(node, signature), "    )"]
            continue
        info = info_of(node)
        if (info.section, info.module) != place:
            place = (info.section, info.module)
            lines += ["", f"    # ---- {info.section}: {info.module or '(top)'}"]
        code = f"    {node.name} = {_call(node)}"
        lines.append(f"{code:<96}  # {_facts(node)}".rstrip())
    return "\n".join(lines) + "\n"


def totals(graph: fx.Graph, signature: Signature) -> list[str]:
    """Comment lines with counts and bytes: operators by section, inputs by role, collectives by kind.

    Args:
        graph: of a captured or sharded step.
        signature: its signature.
    """
    sections = Counter(str(info_of(n).section) for n in graph.nodes if n.op == "call_function")
    parts = ", ".join(f"{count} {section}" for section, count in sections.items())
    inputs = _summed((str(entry.role), _bytes(entry.value)) for entry in signature.inputs)
    moved = _summed(
        (collective_name(n), sum(_bytes(o.meta.get("val")) for o in n.all_input_nodes)) for n in collectives(graph)
    )
    return [
        f"# {sections.total()} operators{': ' if parts else ''}{parts}",
        f"# inputs: {inputs or 'none'}",
        f"# collectives: {moved or 'none'}",
    ]


def write_stage(
    directory: str | Path,
    name: str,
    graph_module: fx.GraphModule,
    signature: Signature,
    previous: Path | None = None,
) -> Path:
    """Write ``readable(...)`` to ``directory/name.py`` and return the path.

    Args:
        directory: created if missing.
        name: file name without suffix.
        graph_module: the graph.
        signature: its signature.
        previous: the result of the call for the stage before. A unified diff to it is written to
            ``directory/name.diff``; it is empty if nothing changed.

    Raises:
        ConfigurationError: the directory cannot be written.
    """
    path = Path(directory) / f"{name}.py"
    text = readable(graph_module, signature)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        why = f"{type(error).__name__}: {error.strerror}"
        raise ConfigurationError(f"dump_dir={str(directory)!r}: graphs cannot be written there ({why})") from error
    if previous is not None:
        before = previous.read_text(encoding="utf-8").splitlines(keepends=True)
        after = text.splitlines(keepends=True)
        difference = "".join(difflib.unified_diff(before, after, previous.name, path.name))
        path.with_suffix(".diff").write_text(difference, encoding="utf-8")
    return path


def _bytes(value: Any) -> int:
    return value.bytes if isinstance(value, TensorSpec) else 0


def _summed(items: Iterable[tuple[str, int]]) -> str:
    """``3 parameter 1,024 B; 1 batch 64 B`` of (kind, bytes) pairs; kinds without bytes show their number alone."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for kind, size in items:
        counts[kind] += 1
        sizes[kind] += size
    return "; ".join(f"{n} {kind}{f' {sizes[kind]:,} B' if sizes[kind] else ''}" for kind, n in counts.items())


def _inputs(graph: fx.Graph, signature: Signature) -> list[str]:
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return [
        f"    {node.name},  # {entry.role} {entry.name} {_describe(entry)}{' (mutated)' if entry.mutated else ''}"
        for node, entry in zip(placeholders, signature.inputs, strict=False)
    ]


def _outputs(node: fx.Node, signature: Signature) -> list[str]:
    values = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
    return [
        f"        {_text(value)},  # {entry.role} {entry.name} {_describe(entry)}".rstrip()
        for value, entry in zip(values, signature.outputs, strict=False)
    ]


def _describe(entry: GraphInput | GraphOutput) -> str:
    what = str(entry.value) if isinstance(entry.value, TensorSpec) else type(entry.value).__name__
    return " ".join([what, *map(str, entry.placements)])


def _call(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem:
        return f"{_text(node.args[0])}[{node.args[1]}]"
    target = str(node.target) if hasattr(node.target, "_schema") else getattr(node.target, "__name__", str(node.target))
    arguments = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    return f"{target}({', '.join(arguments)})"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        items: list[Any] = list(value)  # type: ignore[arg-type]
        inner = ", ".join(map(_text, items))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(items) == 1 else ''})"
    return repr(value) if not hasattr(value, "itemsize") else str(value)


def _facts(node: fx.Node) -> str:
    value = node.meta.get("val")
    parts: list[str] = []
    if isinstance(value, TensorSpec):
        placements = " ".join(map(str, node.meta.get("placements", ())))
        parts = [str(value), placements, f"{value.bytes} B"]
    elif isinstance(value, (int, float)):
        parts = [f"was {value!r}"]
    source = info_of(node).source
    return "  ".join(p for p in [*parts, source.rsplit("/", 1)[-1]] if p)
