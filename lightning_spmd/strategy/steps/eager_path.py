"""The eager path: plain autograd, gradients averaged over the ranks after backward. For replicated parameters only.

It is what DDP computes (the mean of per-rank means), not one-device semantics, which is why it is announced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_spmd import _private_api as private
from lightning_spmd.errors import RankDisagreementError


def average_gradients(module: nn.Module) -> None:
    """Average ``p.grad`` over all ranks, in one flat all-reduce per dtype; sparse ones are gathered.

    A parameter without a gradient on all ranks keeps None; one with a gradient only on other ranks takes part with
    zeros. Averaging twice changes nothing, so this may follow every backward pass.

    Raises:
        RankDisagreementError: on every rank; a parameter is frozen on some of them alone.
    """
    named = dict(module.named_parameters())
    if not named:
        return
    parameters = list(named.values())
    trains = [int(p.requires_grad) for p in parameters]  # of all of them: ranks that differ send as many numbers
    kinds = [_kind(p.grad) if p.requires_grad else _NONE for p in parameters]
    largest = torch.tensor([kinds, trains, [-t for t in trains]], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    kinds, some, none = largest.tolist()
    for name, of_some, of_none in zip(named, some, none, strict=True):
        if of_some != -of_none:
            raise RankDisagreementError(
                f"{name}.requires_grad is {named[name].requires_grad} on rank {dist.get_rank()}, and not on all "
                "others: the ranks train one model. Freeze and unfreeze parameters on all ranks alike"
            )
    for p, kind in zip(parameters, kinds, strict=True):
        if kind > _DENSE:
            p.grad = _sparse_mean(p, kind - _DENSE)
    chosen = [p for p, kind in zip(parameters, kinds, strict=True) if kind == _DENSE]
    world_size = dist.get_world_size()
    for _, group in groupby(sorted(chosen, key=lambda p: str(p.dtype)), key=lambda p: p.dtype):
        members = list(group)
        for p in members:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([p.grad.reshape(-1) for p in members if p.grad is not None])
        dist.all_reduce(flat)
        flat /= world_size
        for p, piece in zip(members, flat.split([p.numel() for p in members]), strict=True):
            if p.grad is not None:
                p.grad.copy_(piece.view_as(p.grad))


_NONE, _DENSE = 0, 1
"""Kinds of gradients; above these a sparse one, by the number of its sparse dimensions."""


def _kind(gradient: Tensor | None) -> int:
    if gradient is None:
        return _NONE
    return _DENSE + (gradient.sparse_dim() if gradient.is_sparse else 0)


def _sparse_mean(parameter: Tensor, sparse_dim: int) -> Tensor:
    """The mean of what all ranks hold of a sparse gradient: their entries, one after the other."""
    gradient = torch.zeros_like(parameter).detach() if parameter.grad is None else parameter.grad
    own = (gradient if gradient.is_sparse else gradient.to_sparse(sparse_dim)).coalesce()
    counts = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([own.values().shape[0]], device=own.device))
    numbers = [int(count) for count in counts]
    indices = _gathered(own.indices().t(), numbers).t()
    mean = torch.sparse_coo_tensor(indices, _gathered(own.values(), numbers) / len(numbers), own.shape)
    return mean.coalesce()


def _gathered(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of all ranks, which have different numbers of them."""
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def add_gradients(module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Add a graph's gradients to ``p.grad``, as autograd would.

    Args:
        module: owner of the parameters.
        gradients: by the parameter's name.
    """
    if not gradients:
        return
    parameters = dict(module.named_parameters())
    for name, gradient in gradients.items():
        parameter, own = parameters[name], parameters[name].grad
        if isinstance(own, DTensor) and isinstance(gradient, DTensor):  # a hook has gone backward: as torch lays it out
            parameter.grad = own.redistribute(placements=gradient.placements).add_(gradient)
        else:
            parameter.grad = private.no_view(gradient) if own is None else own.add_(gradient)


def synced(closure: Callable[[], Any]) -> Callable[[], Any]:
    """An optimizer's closure for which every rank sees the mean loss, also as ``outputs["loss"]`` of callbacks.

    So an optimizer that looks at it (LBFGS) decides alike everywhere.
    """

    def run() -> Any:
        loss = closure()
        if loss is None:
            return None
        total = loss.detach().clone()
        dist.all_reduce(total)
        mean = total / dist.get_world_size()
        with torch.no_grad():
            loss.copy_(mean)  # Lightning keeps this tensor, a copy of its own
        return mean

    return run
