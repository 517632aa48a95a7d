"""Twelve Hugging Face architectures: equal to one device, no activation moves.

CLIP is the exception that its own loss demands: a contrastive loss compares every row with every other one, so
embeddings and similarities (rows × projection, rows × rows) are exchanged in the loss and its gradient.
"""

from __future__ import annotations

import pytest

from lightning_spmd.stages.runtime.agreement.same_graphs import describe
from tests.helpers import zoo
from tests.helpers.activations import activation_collectives
from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_module

COUPLED = {"clip": 7}
"""Architectures whose loss couples rows, and how many collectives that takes at most."""


@pytest.mark.parametrize(
    "split",
    [(1, 3), pytest.param((3, 3), marks=pytest.mark.long), pytest.param((1, 3, 2), marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_architecture_equals_one_device_without_moving_activations(name: str, split: tuple[int, ...]) -> None:
    model, batch = zoo.build(name, sum(split))
    keys = [k for k, v in batch.items() if hasattr(v, "shape")]
    others = {k: v for k, v in batch.items() if k not in keys}
    captured, live = capture_module(
        model, lambda m, *values: m(**dict(zip(keys, values, strict=True)), **others).loss, [batch[k] for k in keys]
    )
    steps = assert_equals_one_device(captured, live, split)
    moved = [f"{n.name} {n.args[0].meta['val']}" for n in activation_collectives(steps[0])]
    assert len(moved) <= COUPLED.get(name, 0), moved
    assert all("works across the rows of the batch" in line for line in steps[0].fallbacks)
    assert bool(steps[0].fallbacks) == (name in COUPLED)
    assert len({tuple(describe(step)) for step in steps}) == 1  # or the ranks would refuse to run them together
