"""Hugging Face architectures on pieces of their sequences: one device's numbers, and nothing but keys is gathered."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import zoo
from tests.helpers.long_sequences import CONTEXT_PARALLEL, context_plan
from tests.helpers.simulate import assert_equals_one_device
from tests.helpers.tiny_capture import capture_module

WITHOUT_SEQUENCES = {"vit", "convnext"}
"""Pictures: their patches are made by a convolution, all ranks compute the same."""
GATHERED = {"clip": {"aten.index.Tensor", "nothing"}}
"""What picks one position of each sequence by its number."""
SHORT = {("t5", 2), ("mixtral", 4)}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=() if (name, ranks) in SHORT else pytest.mark.long)
        for name in zoo.NAMES
        for ranks in (2, 4)
    ],
)
def test_architecture_equals_one_device(name: str, ranks: int) -> None:
    torch.manual_seed(0)
    model, batch = zoo.build(name, 2)
    keys = [k for k, v in batch.items() if hasattr(v, "shape")]
    others = {k: v for k, v in batch.items() if k not in keys}
    captured, live = capture_module(
        model, lambda m, *values: m(**dict(zip(keys, values, strict=True)), **others).loss, [batch[k] for k in keys]
    )
    (step, *_) = assert_equals_one_device(captured, live, {CONTEXT_PARALLEL: (1,) * ranks}, plan=context_plan())
    named = {line.split()[0] for line in step.fallbacks}
    assert named <= ({"nothing"} if name in WITHOUT_SEQUENCES else GATHERED.get(name, set()))
