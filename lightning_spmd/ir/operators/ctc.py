"""CTC over padded targets, as operators whose results are as large as the operands say, and not the lengths.

torch's kernel has a table of two places for each target of the longest sequence, so its size depends on data: a graph
would need the lengths as numbers, and each set of lengths another graph. Here the table has the width of the padded
targets. The kernels are torch's own, with lengths that are tensors, so values and gradients are eager's bits; and ranks
can split the sequences. Targets that are one list without padding are padded first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_spmd.ir.operators.library import define_operator

_LOSS = torch.ops.aten._ctc_loss.Tensor  # noqa: SLF001 - an operator's public name
_BACKWARD = torch.ops.aten._ctc_loss_backward.Tensor  # noqa: SLF001 - an operator's public name
_LENGTHS = "Tensor input_lengths, Tensor target_lengths"


def _padded(targets: Tensor, lengths: Tensor, width: int) -> Tensor:
    wanted = int(lengths.sum())
    if wanted != targets.shape[0]:
        raise RuntimeError(f"ctc_loss: target_lengths are {wanted} in all, and there are {targets.shape[0]} targets")
    padded = _padded_shape(targets, lengths, width).zero_()
    mine = torch.arange(width) < lengths.cpu().unsqueeze(1)
    padded[mine.to(padded.device)] = targets
    return padded


def _padded_shape(targets: Tensor, lengths: Tensor, width: int) -> Tensor:
    return targets.new_empty(lengths.shape[0], width)


def _forward(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    if not log_probs.shape[1]:  # a rank without sequences, which the kernel refuses
        return _forward_shapes(log_probs, targets)
    losses, table = _LOSS(log_probs, targets, lengths, target_lengths, blank, zero_infinity)
    return losses, F.pad(table, [0, _width(targets) - table.shape[2]])


def _backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    lengths: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    table: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    if not log_probs.shape[1]:
        return _backward_shapes(grad, log_probs)
    used = table[:, :, : 2 * int(target_lengths.max()) + 1].contiguous()
    return _BACKWARD(grad, log_probs, targets, lengths, target_lengths, losses, used, blank, zero_infinity)


def _width(targets: Tensor) -> int:
    return 2 * targets.shape[1] + 1


def _forward_shapes(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    times, rows, _classes = log_probs.shape
    return log_probs.new_empty(rows), log_probs.new_empty(rows, times, _width(targets))


def _backward_shapes(_: Tensor, log_probs: Tensor, *__: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


CTC_LOSS = define_operator(
    f"ctc_loss(Tensor log_probs, Tensor targets, {_LENGTHS}, int blank, bool zero_infinity) -> (Tensor, Tensor)",
    _forward,
    _forward_shapes,
)
CTC_LOSS_BACKWARD = define_operator(
    f"ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, {_LENGTHS}, Tensor neg_log_likelihood, "
    "Tensor log_alpha, int blank, bool zero_infinity) -> Tensor",
    _backward,
    _backward_shapes,
)
PAD_TARGETS = define_operator(
    "pad_targets(Tensor targets, Tensor lengths, SymInt width) -> Tensor", _padded, _padded_shape
)
