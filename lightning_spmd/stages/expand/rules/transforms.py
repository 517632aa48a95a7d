"""Fourier transforms, matrix decompositions, distances, counts: independent along every dimension not worked on."""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd.ir.placement import PARTIAL
from lightning_spmd.stages.expand.call import Layout, LocalCall, Localizer, OpCall, Rule, along, linear, rowwise

aten = torch.ops.aten


def _along_dims(call: OpCall) -> list[Layout]:
    """Transforms along ``dim``; linear in their first operand."""
    ndim = len(call.specs[0].shape)
    worked = {d % ndim for d in ([call["dim"]] if isinstance(call["dim"], int) else call["dim"])}
    found: list[Layout] = []
    for dim in range(ndim):
        if dim not in worked:
            found += along(call, [dim], [dim])
    return found + linear(call, (0,))


def _matrices(call: OpCall) -> list[Layout]:
    """Batches of matrices: every operand and output has the batch in front, of the same size."""
    batch = call.specs[0].shape[:-2]
    vectors = [call.index("pivots")] if "pivots" in call.arguments else []
    if call.op.overloadpacket.__name__ == "_linalg_solve_ex" and call.specs[1].shape == call.specs[0].shape[:-1]:
        vectors.append(1)  # a vector for each matrix
    ends = [1 if i in vectors else 2 for i in range(len(call.specs))]
    found: list[Layout] = []
    if any(s.shape[: len(s.shape) - end] != batch for s, end in zip(call.specs, ends, strict=True)):
        return found
    for dim in range(len(batch)):
        if all(s is None or not s.shape or s.shape[dim : dim + 1] == batch[dim : dim + 1] for s in call.outputs):
            outputs = [dim if s is not None and len(s.shape) > dim else None for s in call.outputs]
            found += along(call, [dim] * len(call.operands), outputs)
    return found


def _distances(call: OpCall) -> list[Layout]:
    """``cdist`` of (batch, points, width) and (batch, others, width), and its gradient."""
    ndim = len(call.shape)
    found: list[Layout] = []
    for dim in range(ndim - 2):
        if all(len(s.shape) == ndim and s.shape[dim] == call.shape[dim] for s in call.specs):
            found += along(call, [dim] * len(call.operands), [dim])
    forward = call.op.overloadpacket is not aten._cdist_backward
    if forward and all(len(s.shape) == ndim for s in call.specs):
        found += along(call, [ndim - 2, None], [ndim - 2]) + along(call, [None, ndim - 2], [ndim - 1])
    return found


def _counts(call: OpCall) -> list[Layout]:
    """Every rank counts its own elements; bounds taken from the data would differ from rank to rank."""
    if call.op.overloadpacket is aten.histc and call["min"] == 0 and call["max"] == 0:
        return []
    if call.op.overloadpacket is aten.bincount and call["minlength"] != call.shape[0]:
        return []
    return [c for d in range(len(call.specs[0].shape)) for c in along(call, [d] * len(call.operands), [PARTIAL])]


def _fill_along(call: OpCall) -> list[Layout]:
    ndim = len(call.shape)
    found: list[Layout] = []
    for dim in range(ndim):
        if dim != call["dim"] % ndim:
            found += along(call, [dim if len(s.shape) == ndim else None for s in call.specs], [dim])
    return found


def _same_dims(call: OpCall) -> list[Layout]:
    ndim = min(len(call.specs[0].shape), len(call.shape))
    found: list[Layout] = []
    for dim in range(ndim):
        if call.specs[0].shape[dim] == call.shape[dim]:
            found += along(call, [dim], [dim])
    return found


def _unfold_backward(call: OpCall) -> list[Layout]:
    ndim = len(call.shape)
    return [c for d in range(ndim) if d != call["dim"] % ndim for c in along(call, [d], [d])] + linear(call, (0,))


def _cross(call: OpCall) -> list[Layout]:
    return rowwise(call, [call["dim"]])


def _checks(call: OpCall) -> list[Layout]:
    """Raises if a factorization failed: every rank looks at its own."""
    return [c for d in range(len(call.specs[0].shape)) for c in along(call, [d], [None])]


def _named(*names: str) -> list[Any]:
    return [getattr(aten, n) for n in names if hasattr(aten, n)]


RULES: dict[Any, Rule] = {
    **dict.fromkeys(_named("_fft_r2c", "_fft_c2r", "_fft_c2c"), _along_dims),
    **dict.fromkeys(
        _named(
            "linalg_inv_ex", "linalg_cholesky_ex", "_linalg_svd", "_linalg_eigh", "linalg_qr", "linalg_lu_factor_ex",
            "_linalg_slogdet", "_linalg_det", "_linalg_solve_ex", "linalg_solve_triangular", "triangular_solve",
            "linalg_lu_solve", "cholesky_inverse", "linalg_matrix_exp",
        ),
        _matrices,
    ),
    **dict.fromkeys(_named("_cdist_forward", "_euclidean_dist", "_cdist_backward"), _distances),
    **dict.fromkeys(_named("histc", "bincount"), _counts),
    **dict.fromkeys(_named("index_fill", "index_copy"), _fill_along),
    **dict.fromkeys([*_named("view_as_real", "view_as_complex", "lift_fresh_copy"), aten.view.dtype], _same_dims),
    aten._linalg_check_errors: _checks,
    aten.unfold_backward: _unfold_backward,
    aten.linalg_cross: _cross,
}  # fmt: skip


def _input_sizes(call: LocalCall) -> dict[str, Any]:
    return {"input_sizes": call.output_shape()}


LOCALIZERS: dict[Any, Localizer] = {aten.unfold_backward: _input_sizes}
