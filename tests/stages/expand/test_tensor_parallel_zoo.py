"""Hugging Face models under the plan that is found in their graphs: one device's numbers, Megatron's collectives."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_spmd.parallel.parallel_plan import MeshPlan, ReplicatedPlan
from lightning_spmd.stages.expand import expand
from lightning_spmd.stages.expand.auto_plan import find_plan
from tests.helpers import zoo
from tests.helpers.simulate import assert_equals_one_device, axes_for
from tests.helpers.tiny_capture import capture_module
from tests.stages.expand.test_sharded_state import UPDATES
from tests.stages.expand.test_tensor_parallel import collectives_of, tensor_plan

# Two layers: 2 each; the lookup; two numbers a row and the loss. Backward: 2 each, the head, the norm of the gradients.
LANGUAGE = (8, 6)
NAMES: dict[str, tuple[int, int] | None] = {
    "gpt2": LANGUAGE,
    "llama": LANGUAGE,
    "opt": LANGUAGE,
    "gemma2": LANGUAGE,
    "qwen3": (8, 10),  # and the norms of each head's queries and keys, which all heads share
    "vit": (4, 5),
    "t5": None,  # its table of distances is whole, and each rank has the gradient of its heads' columns
    "bert_cls": (6, 6),
}


BESIDE_DATA = ("gpt2", "bert_cls")
"""By default with a data axis of uneven rows beside the tensor axis; the others in the long matrix."""


@pytest.mark.parametrize(
    ("name", "sequence", "data"),
    [
        pytest.param(
            name,
            sequence,
            data,
            marks=() if (sequence, data) == (n % 2 == 0, name in BESIDE_DATA) else pytest.mark.long,
        )
        for n, name in enumerate(NAMES)
        for sequence in (False, True)
        for data in (False, True)
    ],
)
def test_the_found_plan_equals_one_device(name: str, sequence: bool, data: bool) -> None:
    model, batch = zoo.build(name, 4)
    keys = [k for k, v in batch.items() if hasattr(v, "shape")]
    others: dict[str, Any] = {k: v for k, v in batch.items() if k not in keys}
    captured, live = capture_module(
        model,
        lambda m, *values: m(**dict(zip(keys, values, strict=True)), **others).loss,
        [batch[k] for k in keys],
        update=UPDATES["lists"],
    )
    plan = tensor_plan(model, find_plan(captured, 2), 2, sequence=sequence)
    if not sequence:
        alone = expand(captured, (axes_for((1, 1), "tensor_parallel")[0],), plan)
        expected = NAMES[name]
        assert expected is None or collectives_of(alone) == tuple({"all_reduce": n} for n in expected)
        assert alone.fallbacks == []
    mesh: dict[str, tuple[int, ...]] = {"tensor_parallel": (1, 1)}
    if data:
        mesh, plan = mesh | {"data_parallel": (1, 3)}, MeshPlan({**plan.axes, "data_parallel": ReplicatedPlan()})
    assert_equals_one_device(captured, live, mesh, plan=plan, floor=0.1)
