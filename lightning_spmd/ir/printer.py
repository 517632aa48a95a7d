"""A graph as readable Python: one line a node, with module, section, placement and bytes in a comment."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

from torch import fx

from lightning_spmd.ir.node_info import TensorSpec, info_of
from lightning_spmd.ir.signature import GraphInput, GraphOutput, Signature


def readable(graph_module: fx.GraphModule, signature: Signature) -> str:
    """The whole graph as text.

    Args:
        graph_module: the graph of a captured or sharded step.
        signature: its signature, printed as the arguments' and results' comments.
    """
    lines = ["def step(", *_inputs(graph_module.graph, signature), "):"]
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


def write_stage(directory: str | Path, name: str, graph_module: fx.GraphModule, signature: Signature) -> Path:
    """Write ``readable(...)`` to ``directory/name.py`` and return the path."""
    path = Path(directory) / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(readable(graph_module, signature))
    return path


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
