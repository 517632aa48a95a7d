"""Loss scaling on GPUs: the host reads nothing, and fused optimizers skip steps themselves."""

from __future__ import annotations

import pytest

from tests.cuda.facts import facts
from tests.cuda.ranks import Wanted
from tests.cuda.recordings import host_copies
from tests.helpers.fake_cuda.lane import Lane


@pytest.mark.parametrize(("plan", "count"), [("replicate", 1), ("replicate", 2), ("zero3", 2)])
def test_a_fused_step_is_skipped_without_a_read(lane: Lane, plan: str, count: int) -> None:
    found = lane.run(facts, Wanted("gpt", plan=plan, count=count, half=True))
    assert found.operators["aten._local_scalar_dense"] == 0
    assert not any("cpu" in device for device in found.devices)
    assert found.operators["aten._amp_foreach_non_finite_check_and_unscale_"] == 1
    assert found.operators["aten._amp_update_scale_"] == 1
    assert found.operators["aten._foreach_sub_.List"] >= 1  # counters of a skipped step
    reduced = found.operators["_c10d_functional.all_reduce"] + found.operators["_c10d_functional.all_reduce_"]
    plain = lane.run(facts, Wanted("gpt", plan=plan, count=count))
    before = plain.operators["_c10d_functional.all_reduce"] + plain.operators["_c10d_functional.all_reduce_"]
    assert reduced == before + (plan == "zero3")  # one number, of what each rank found in its parts


def test_other_optimizers_take_back_what_they_wrote(lane: Lane) -> None:
    """Each parameter, its two moments and its counter: a copy before, a choice after."""
    written = 4 * 17
    found = lane.run(facts, Wanted("gpt", optimizer="adamw", half=True))
    assert found.captured["aten.where.self_out"] == written
    plain = lane.run(facts, Wanted("gpt", optimizer="adamw", bf16=True))
    assert found.captured["aten.clone"] == plain.captured["aten.clone"] + written
    assert not found.fallbacks


def test_counters_on_the_host_wait_for_one_flag_in_front_of_the_step(lane: Lane) -> None:
    """As eager training does; behind the step the host would wait for that too."""
    copies, before = lane.run(host_copies, Wanted("gpt", optimizer="adamw", count=1, half=True))
    assert (copies, before) == (1, True)
    assert lane.run(host_copies, Wanted("gpt", count=1, half=True))[0] == 0
