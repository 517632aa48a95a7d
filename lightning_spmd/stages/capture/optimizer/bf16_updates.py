"""Updates of bfloat16 weights in float32: with masters that are kept, or with stochastic rounding.

A weight of bfloat16 has eight bits: an update of less than 1/256 of it is lost. The user's optimizer works on float32
tensors instead, whatever optimizer it is; its state is float32 too, for it follows these::

    plain          weight -= lr * gradient
    master         master = float32 of the weight, where that was changed; master -= lr * float32(gradient)
                   weight = bfloat16(master)                              rounded to nearest
    stochastic     wide = float32(weight); wide -= lr * float32(gradient)
                   weight = bfloat16(wide)                                up or down, by a draw: right on average

The master is an entry of the optimizer's state. It follows its weight: an element that is not the weight rounded was
changed from outside (by a callback, a checkpoint of weights alone), and begins anew as the weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from lightning_spmd.ir.node_info import Section
from lightning_spmd.stages.capture.optimizer.optimizer_swap import OptimizerSwap
from lightning_spmd.stages.capture.record.recorder import Recorder, in_section

Updates = Literal["plain", "master", "stochastic"]
KINDS: tuple[Updates, ...] = ("plain", "master", "stochastic")
MASTER = "master"
"""The key of the masters in the optimizer's state."""
_LOST_BITS = 16


@contextlib.contextmanager
def in_float32(kind: Updates, swap: OptimizerSwap, recorder: Recorder) -> Iterator[None]:
    """Inside, the optimizer has float32 tensors with float32 gradients in place of bfloat16 weights.

    Args:
        kind: how weights are made of them afterwards.
        swap: the optimizer on fakes.
        recorder: says which section of the iteration this is.
    """
    if kind == "plain":
        yield
        return
    params = [list(group["params"]) for group in swap.groups]
    with torch.no_grad(), in_section(recorder, Section.CLIP):
        trained = [p for group in params for p in group if p.dtype is torch.bfloat16 and p.grad is not None]
        pairs = [(p, _wide(p, swap, masters=kind == "master")) for p in trained]
    inner = {id(p): wide for p, wide in pairs}
    for group in swap.groups:
        group["params"] = [inner.get(id(p), p) for p in group["params"]]
    yield
    with torch.no_grad(), in_section(recorder, Section.OPTIMIZER):
        for p, wide in pairs:
            p.copy_(wide if kind == "master" else _rounded(wide))
    for p, wide in pairs:
        state = swap.state.pop(wide, {})
        swap.state[p] = {**state, MASTER: wide} if kind == "master" else state
    for group, before in zip(swap.groups, params, strict=True):
        group["params"] = before


def _wide(parameter: Tensor, swap: OptimizerSwap, *, masters: bool) -> Tensor:
    """The float32 tensor that the optimizer updates; it has the parameter's state."""
    state = swap.state.pop(parameter, {})
    if masters:
        wide = state.pop(MASTER, None)
        if wide is None:
            wide = torch.zeros_like(parameter, dtype=torch.float32)  # follows the weight at once
        torch.where(wide.to(torch.bfloat16) == parameter, wide, parameter, out=wide)
    else:
        wide = parameter.detach().float()
    if state:
        swap.state[wide] = state
    gradient = parameter.grad
    wide.grad = None if gradient is None else gradient.float()
    return wide


def _rounded(wide: Tensor) -> Tensor:
    """Stochastic rounding: float32 values that bfloat16 can represent, the nearer one with the higher probability."""
    bits = wide.view(torch.int32)
    noisy = torch.randint_like(bits, 1 << _LOST_BITS).add_(bits).bitwise_and_(-1 << _LOST_BITS)
    return torch.where(wide == wide, noisy.view(torch.float32), wide)  # the bits of a NaN may become a number's
