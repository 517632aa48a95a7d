"""Random numbers: over the axes that split a tensor each rank draws its own, over the others all draw the same.

The emitter marks every such node with ``meta["random"]``: the names of the axes that split it. The runtime keeps a
stream for each set of axes.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_spmd.stages.expand.call import LocalCall, Localizer, Rule, rowwise
from lightning_spmd.stages.expand.rules.factories import create
from lightning_spmd.stages.expand.rules.pointwise import elementwise, like

aten = torch.ops.aten

_IN_PLACE = [
    aten.bernoulli_, aten.uniform_, aten.normal_, aten.exponential_, aten.random_, aten.cauchy_, aten.geometric_,
    aten.log_normal_,
]  # fmt: skip
_LIKE = [aten.rand_like, aten.randn_like, aten.randint_like]
_VALUES = [
    aten.bernoulli, aten.native_dropout, aten.native_dropout_backward, aten.normal, aten.rrelu_with_noise,
    aten.rrelu_with_noise_backward, aten.rrelu_with_noise_functional, aten.poisson, aten.binomial,
]  # fmt: skip
_CREATED = [aten.rand, aten.randn, aten.randint]


def _size(call: LocalCall) -> dict[str, Any]:
    return {"size": call.output_shape()}


RULES: dict[Any, Rule] = {
    **dict.fromkeys(_IN_PLACE + _VALUES, elementwise),
    **dict.fromkeys(_LIKE, like),
    **dict.fromkeys(_CREATED, create),
    aten.multinomial: lambda call: rowwise(call, last=1),
}
LOCALIZERS: dict[Any, Localizer] = dict.fromkeys(_CREATED, _size)
