"""Ranks that are not alike, memory that is not there, a port that is taken: said in words, with what helps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_spmd.errors import RankDisagreementError
from lightning_spmd.stages.runtime.agreement.lost_ranks import Peers, Process
from lightning_spmd.strategy.notices.advice import advice_on
from lightning_spmd.strategy.ranks.alike import check_alike, check_same_tensors, facts


def test_ranks_that_are_alike_go_on() -> None:
    check_alike([facts(), facts()])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch", "2.11.0"),
        ("torch.use_deterministic_algorithms", "True"),
        ("torch.set_default_dtype", "torch.float64"),
        ("float32 of matrix products", "medium"),
    ],
)
def test_the_first_difference_is_named_with_both_sides_and_the_fix(name: str, value: str) -> None:
    other = {**facts(), name: (facts()[name][0], value)}
    with pytest.raises(
        RankDisagreementError, match=rf"rank 0 has {name} \S+, rank 1 has {name} {value}: (set|install)"
    ):
        check_alike([facts(), other])


class _Sides:
    def __init__(self, *others: list[str]) -> None:
        self.others = others

    def gather(self, mine: list[str], _: Any) -> list[list[str]]:
        return [mine, *self.others]


@pytest.mark.parametrize("theirs", [["weight of shape [3, 2], float32"], ["weight of shape [4, 2], float32"], []])
def test_modules_of_other_shapes_are_told_before_gloo_ends_the_process(theirs: list[str]) -> None:
    module = torch.nn.Linear(2, 3, bias=False)
    control: Any = _Sides(theirs)
    if theirs[:1] == ["weight of shape [3, 2], float32"]:
        check_same_tensors(module, control)
        return
    with pytest.raises(RankDisagreementError, match=r"rank 0 has weight of shape \[3, 2\], float32, rank 1 has"):
        check_same_tensors(module, control)


def test_a_rank_that_was_too_slow_is_named_with_the_timeout() -> None:
    processes = [Process.this(), Process("another machine", 1)]
    error = RuntimeError("unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete")
    text = str(Peers(torch.distributed.HashStore(), 1, 0, processes).explain(error, "training batch 5"))
    assert "no sign of life of rank 1" in text
    assert "waited 6 s for it, which is the timeout" in text
    assert "SPMDStrategy(timeout=timedelta(seconds=...))" in text


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("Tensor.item() cannot be called on meta tensors"), False),  # none of a checkpoint's
    ],
)
def test_what_helps_where_memory_runs_out(error: BaseException, helps: Any) -> None:
    advice = advice_on(error)
    assert (advice is not None) is helps
    assert not helps or ("rematerialize" in advice and "zero3" in advice)  # type: ignore[operator]
