"""Gathers of activations beside those of parameters: what exists late never rides with what starts early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from lightning_spmd.ir.node_info import NodeInfo, Section
from lightning_spmd.ir.placement import Shard
from lightning_spmd.stages.passes import PassState, bucket_collectives, run_passes
from tests.stages.passes.local_programs import BATCH, PARAMETER, R, write
from tests.stages.passes.with_passes import assert_same_bits

aten = torch.ops.aten


@pytest.mark.parametrize("section", [Section.FORWARD, Section.BACKWARD])
def test_a_gathered_activation_does_not_ride_with_a_parameter_that_is_read_later(section: Section) -> None:
    """It once joined the second parameter's bucket, which starts when the first one's is waited."""

    def body(p: Any, x: fx.Node, *weights: fx.Node) -> Any:
        p.info = NodeInfo(section)
        first, second = (p.gather(w) for w in weights)
        x = p.call(aten.mm.default, x, first)
        x = p.call(aten.mm.default, x, first)
        whole = p.gather(x)
        return [(p.call(aten.mm.default, whole, second), R)]

    given = [
        (torch.randn(8, 16), Shard(0), BATCH),
        (torch.randn(16, 16), Shard(0), PARAMETER),
        (torch.randn(16, 2), Shard(0), PARAMETER),
    ]
    before, after = write(body, given), write(body, given)
    for step in after:
        run_passes(step, [bucket_collectives.PASS], PassState(bucket_size_mb=800 / 2**20))
    assert_same_bits(before, after, [tensor for tensor, *_ in given])
