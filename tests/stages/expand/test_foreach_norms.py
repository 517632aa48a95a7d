"""Norms of lists: eager's clipping asks for them in one call, and pieces are not gathered for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_spmd.parallel.parallel_plan import data_parallel_plan
from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_function


@pytest.mark.parametrize("sizes", [(8, 12), (8, 3)], ids=["every rank has a piece", "a rank has none"])
@pytest.mark.parametrize("power", [1.0, 2.0, 3.0, float("inf")], ids=str)
def test_norms_of_chunks_are_those_of_wholes(power: float, sizes: tuple[int, ...]) -> None:
    def step(p: dict[str, Tensor], _: object, x: Tensor) -> Tensor:
        return sum(((x * w).square().sum() for w in p.values()), x.new_zeros(()))

    def update(parameters: list[Tensor], gradients: list[Tensor]) -> None:
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, power)), power)
        torch._foreach_mul_(gradients, torch.clamp(0.5 / (total + 1e-6), max=1.0))
        torch._foreach_add_(parameters, gradients, alpha=-0.1)

    torch.manual_seed(0)
    parameters = {f"w{i}": torch.randn(n, requires_grad=True) for i, n in enumerate(sizes)}
    captured, live = capture_function(step, parameters, {}, [torch.randn(8, 1)], update=update)
    steps = assert_equals_one_device(
        captured, live, (2, 2, 2, 2), plan=data_parallel_plan("zero3", reduce_gradients=False)
    )
    gathers = [n for n in steps[0].graph_module.graph.nodes if "all_gather" in str(n.target)]
    assert len(gathers) == len(sizes)  # of the parameters
