"""Operators that depend on the memory layout of their operands: they get the captured layout.

Most operators accept any layout, and expansion need not know the layout of a gathered or reduced value. These depend on
it (and ``as_strided``, which addresses the storage behind its operand: ``storage.py``):

* fused optimizers walk the memory of parameter, gradient and state side by side;
* cuDNN's recurrent backward reads its forward kernel's result as that left it, whatever the strides say;
* determinants and solves factorize the transposed matrix if it is contiguous, and their derivatives, which read the
  factors, were recorded for the captured matrix: the gradient of another layout would be the transposed one;
* kernels of libraries and users may do anything.

For these, a value with another layout is first copied into the captured one. Decisions use only what all ranks see,
because the copy must be in every rank's graph. If shapes differ between ranks, a dimension of size one on this rank may
be larger elsewhere. A wrong layout is then an error, which replicates the operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from lightning_spmd.errors import ExpansionError
from lightning_spmd.ir.layout import is_dense, lies_as, walks_memory
from lightning_spmd.ir.node_info import spec_of
from lightning_spmd.ir.placement import Chunk, Placement, Shard, ShardAxis
from lightning_spmd.parallel.pieces import local_spec
from lightning_spmd.stages.expand.program.local_program import LocalProgram

aten = torch.ops.aten
_LOOKING = {
    aten._cudnn_rnn_backward.default,
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten._linalg_solve_ex.default,
}
_PLAIN_NAMESPACES = ("aten", "prims", "_c10d_functional")


def looks_at_memory(node: fx.Node) -> bool:
    """Whether the operator is one of those."""
    if walks_memory(node.target) or node.target in _LOOKING:
        return True
    return getattr(node.target, "namespace", "aten") not in _PLAIN_NAMESPACES


def as_captured(
    program: LocalProgram, operand: fx.Node, local: fx.Node, placements: Sequence[Placement], reader: fx.Node
) -> fx.Node:
    """``local``, this rank's part of ``operand``, in the captured memory layout; a copy if necessary.

    Args:
        program: the program to which a copy is appended.
        operand: the global value.
        local: this rank's part.
        placements: how the operand is split.
        reader: an operator that depends on the layout, or the graph's output.

    Raises:
        ExpansionError: the layout is wrong, and a copy would not help.
    """
    wanted = local_spec(spec_of(operand), placements, program.axes)
    if lies_as(spec_of(local), wanted):
        return local
    varies = any(_varies(p, axis) for p, axis in zip(placements, program.axes, strict=True))
    exact = walks_memory(reader.target)
    if not exact and (varies or not is_dense(wanted)):
        return local
    if varies or local.op == "placeholder" or not is_dense(wanted):
        raise ExpansionError(
            f"{operand.name} lies in memory with strides {spec_of(local).stride} on this rank and would have to with "
            f"{wanted.stride}"
        )
    new = program.call(aten.new_empty_strided.default, local, list(wanted.shape), list(wanted.stride))
    copy = program.call(aten.copy_.default, new, local)
    copy.meta["placements"] = tuple(placements)
    return copy


def _varies(placement: Placement, axis: ShardAxis) -> bool:
    """Whether the shapes of pieces may differ from rank to rank."""
    return isinstance(placement, Chunk) or (isinstance(placement, Shard) and not axis.is_even)
