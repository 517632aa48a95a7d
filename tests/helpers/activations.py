"""Which collectives of a step move activations."""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.signature import InputRole
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import collectives

_aten = torch.ops.aten
_ARRANGING = {
    _aten.stack.default, _aten.cat.default, _aten.view.default, _aten.clone.default, _aten.new_full.default,
}  # fmt: skip


def activation_collectives(step: ShardedStep) -> list[fx.Node]:
    """Collectives that move activations, which data parallelism never needs.

    Innocent are all-reduces of

    * one number, or per-channel statistics (all dimensions but one have at most two elements);
    * a gradient: as many elements as some parameter.

    So are gathers of what batch norm's kernels count a channel. Every other all-reduce, and every gather or scatter of
    more than one number a rank, is returned.
    """
    parameters = {
        entry.value.numel
        for _, entry in step.signature.inputs_of(InputRole.PARAMETER, InputRole.GRADIENT)
        if isinstance(entry.value, TensorSpec)
    }
    guilty: list[fx.Node] = []
    for node in collectives(step.graph_module.graph):
        spec = node.args[0].meta["val"] if isinstance(node.args[0], fx.Node) else None
        if not isinstance(spec, TensorSpec):
            guilty.append(node)
            continue
        statistic = spec.numel == 1 or math.prod(sorted(spec.shape)[:-1]) <= 2
        reduces = "all_reduce" in str(node.target)
        innocent = reduces and (statistic or spec.numel in parameters)
        if not (spec.numel == 1 or innocent or _is_made_of_statistics(node)):
            guilty.append(node)
    return guilty


def _is_made_of_statistics(node: fx.Node) -> bool:
    """Whether all that a collective sends are means and deviations a channel, as batch norm's kernel gives them."""
    found, todo = list[fx.Node](), list(node.all_input_nodes)
    while todo:
        value = todo.pop()
        plain = value.op == "call_function" and (value.target in _ARRANGING or value.target is operator.getitem)
        if plain and value.all_input_nodes:
            todo += value.all_input_nodes
        else:
            found.append(value)
    return all(value.target is _aten.batch_norm_stats.default for value in found)
