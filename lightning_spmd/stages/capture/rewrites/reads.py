"""Graphs with reads: a run changes nothing that outlives it until the last read, because it may be abandoned there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from lightning_spmd.errors import CaptureError
from lightning_spmd.ir.aliasing import storage_roots, written_arguments
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import TensorSpec, info_of
from lightning_spmd.ir.reads import checks_of
from lightning_spmd.ir.shared_memory import shared

_aten = torch.ops.aten


class UnknownValueError(CaptureError):
    """A step can be captured up to a read of values, and no further without them."""


def writes_apart(graph: fx.Graph, live: Mapping[fx.Node, torch.Tensor]) -> None:
    """Let a graph write into copies of its inputs until Python has read its last value.

    Args:
        graph: of a step.
        live: the tensors that are its inputs.

    Raises:
        CaptureError: another input is the same memory, and would not see what is written into a copy.
    """
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    checks = checks_of(graph)
    last_check = checks[-1] if checks else None
    if last_check is None:
        return
    roots = storage_roots(graph)
    writes, last = dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for node in nodes:
        for written in written_arguments(node):
            root = roots[written]
            if root.op == "placeholder":
                writes.setdefault(root, node)
                last[root] = node
    inputs = [(node.name, tensor) for node, tensor in live.items() if node.users]
    one_memory = {name for pair in shared(inputs) for name, _ in pair} if writes else set[str]()
    begin = first((n for n in nodes if n.op != "placeholder"), "node")
    for root, write in writes.items():
        if place[write] > place[last_check]:
            continue
        if root.name in one_memory:
            raise CaptureError(
                "a value is read behind a write into memory that two tensors share", info_of(write).source
            )
        spec: TensorSpec = root.meta["val"]
        with graph.inserting_before(begin):
            copy = graph.call_function(_aten.clone.default, (root,))
        copy.meta.update(val=spec, info=info_of(write))
        root.replace_all_uses_with(copy, delete_user_cb=lambda user, own=copy: user is not own)
        behind = max(last[root], last_check, key=place.__getitem__)
        with graph.inserting_after(behind):
            back = graph.call_function(_aten.copy_.default, (root, _as_written(copy)))
        back.meta.update(val=spec, info=info_of(behind))


def _as_written(node: fx.Node) -> fx.Node:
    """The last name of a tensor that is written whole. A reader of an earlier name depends on that name's placement."""
    while later := [user for user in node.users if user.args[:1] == (node,) and node in written_arguments(user)]:
        if later[-1].meta.get("val") != node.meta["val"]:
            break
        node = later[-1]
    return node
