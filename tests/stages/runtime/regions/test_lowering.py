"""How regions are chosen, and that whatever goes wrong with one costs that one only."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spmd.cache import the_store
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.runtime.lowering import LoweringContext
from lightning_spmd.stages.runtime.regions import choice, code, trial
from lightning_spmd.stages.runtime.regions.lowering import LoweredStep, RegionLowering
from lightning_spmd.stages.runtime.trial_runs.profile import RUNS
from tests.stages.runtime.regions.cases import Compiler, Fault, capture, chain, compiler

__all__ = ["compiler"]


def run(step: LoweredStep, live: Sequence[Tensor], times: int = 1) -> Sequence[Tensor]:
    with torch.no_grad():
        for _ in range(times - 1):
            step(*live)
        return step(*live)


def expected(step: ShardedStep, live: Sequence[Tensor]) -> Sequence[Tensor]:
    with torch.no_grad():
        return step.graph_module.forward(*live)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(one, other, strict=True))


def test_regions_run_after_a_run_that_compares_them(compiler: Compiler) -> None:
    step, live = chain()
    lowered = LoweredStep(step, "inductor", LoweringContext())
    right = expected(step, live)
    compiler.fault = lambda _inputs, outputs: [output * 1.00001 for output in outputs]
    assert same(run(lowered, live), right)  # compared, and not yet used
    assert len(lowered.regions) > 2
    assert not same(run(lowered, live), right)
    compiler.fault = None
    assert same(run(lowered, live), right)


FAULTS: dict[str, Fault] = {
    "off by": lambda _, right: [value * 1.01 for value in right],
    "not finite": lambda _, right: [value / 0 for value in right],
    "strides": lambda _, right: [value.t().contiguous().t() if value.dim() == 2 else value * 2 for value in right],
    "is torch.float64": lambda _, right: [value.double() for value in right],
    "raised KeyError": lambda _, right: {}["k"],
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_region_with_wrong_results_stays_as_its_operators(compiler: Compiler, words: str) -> None:
    step, live = chain()
    right = expected(step, live)
    compiler.fault = FAULTS[words]
    first: list[Any] = []
    compiler.only = lambda function: function is first[0] if first else not first.append(function)
    lowered = LoweredStep(step, "inductor", LoweringContext())
    with pytest.warns(UserWarning, match=words) as caught:
        assert same(run(lowered, live), right)
    assert len(caught) == 1
    assert len(lowered.regions) > 1
    assert same(run(lowered, live), right)


def test_a_sum_that_is_nothing_but_roundings_is_no_difference(compiler: Compiler) -> None:
    x = torch.randn(4096, 4)
    x -= x.double().mean(0).float()

    def loss(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return (p["w"] * 0).sum(), (x * 1.0).sum(0) * 1e-3

    step, live = capture(loss, x)
    turned: Fault = lambda inputs, right: [  # noqa: E731
        (inputs[-1].flip(0) * 1.0).sum(0) * 1e-3 if value.shape == (4,) else value for value in right
    ]
    compiler.fault = turned
    lowered = LoweredStep(step, "inductor", LoweringContext())
    right = run(lowered, live)
    assert not torch.allclose(right[1], run(lowered, live)[1], rtol=1e-4, atol=0.0)
    compiler.fault = lambda inputs, right: [value + 0.01 for value in right]
    with pytest.warns(UserWarning, match="off by"):
        run(LoweredStep(step, "inductor", LoweringContext()), live)


def test_what_is_not_rounded_between_operators_is_no_difference(compiler: Compiler) -> None:
    """As a GPU's code does it; beside operators that want all of their inputs in one precision."""
    x = torch.randn(64, 16, dtype=torch.bfloat16)

    def loss(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
        normed = torch.nn.functional.layer_norm(x.float(), (16,), p["w"][0])
        return (p["w"] * 0).sum(), (x * 1.0).sum(0).float(), normed.detach()

    def not_rounded(inputs: Sequence[Tensor], right: Sequence[Tensor]) -> Sequence[Tensor]:
        whole = next((value.float().sum(0) for value in inputs if value.dtype == torch.bfloat16), None)
        return [whole if value.shape == (16,) and whole is not None else value for value in right]

    step, live = capture(loss, x)
    compiler.fault = not_rounded
    lowered = LoweredStep(step, "inductor", LoweringContext())
    run(lowered, live)
    assert torch.equal(run(lowered, live)[1], x.float().sum(0))
    compiler.fault = lambda inputs, right: [value * 1.1 for value in not_rounded(inputs, right)]
    with pytest.warns(UserWarning, match="off by"):
        run(LoweredStep(step, "inductor", LoweringContext()), live)


def test_results_that_share_storage_are_noticed(compiler: Compiler) -> None:
    step, live = chain()
    compiler.fault = lambda inputs, right: [inputs[0].view_as(v) if v.shape == inputs[0].shape else v for v in right]
    lowered = LoweredStep(step, "inductor", LoweringContext())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(lowered, live)
    texts = [str(w.message) for w in caught]
    assert any("shares its storage with another value" in text for text in texts)


def test_a_region_that_cannot_be_compiled_stays_as_its_operators(compiler: Compiler) -> None:
    step, live = chain()
    right = expected(step, live)
    compiler.refuses = True
    lowered = LoweredStep(step, "inductor", LoweringContext())
    with pytest.warns(UserWarning, match="and 2 other regions as operators: RuntimeError: out of registers$") as caught:
        assert same(run(lowered, live), right)
    assert len(caught) == 1
    assert not lowered.regions
    assert same(run(lowered, live), right)
    assert code.CODES.counts.failed > 0


def test_inputs_that_lie_otherwise_run_the_operators(compiler: Compiler) -> None:
    step, live = chain()
    right = expected(step, live)
    lowered = LoweredStep(step, "inductor", LoweringContext())
    run(lowered, live)

    def asserts(_inputs: Sequence[Tensor], _right: Sequence[Tensor]) -> Sequence[Tensor]:
        raise AssertionError("expected size 4==4, stride 1==4 at dim=0\nand more lines")

    compiler.fault = asserts
    with pytest.warns(UserWarning, match="as operators: expected size 4==4, stride 1==4 at dim=0$") as caught:
        assert same(run(lowered, live, 3), right)
    assert len(caught) == len(lowered.regions)


def with_times(monkeypatch: pytest.MonkeyPatch, lowered: float) -> None:
    """Operators of a region take a second, its code so many."""
    turns = iter([1.0, lowered] * 1000)
    monkeypatch.setattr(trial, "_seconds", lambda _side, _inputs: next(turns))


@pytest.mark.parametrize(("seconds", "kept"), [(0.5, True), (0.99, False), (2.0, False)])
def test_auto_keeps_what_is_faster(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, seconds: float, kept: bool
) -> None:
    step, live = chain()
    right = expected(step, live)
    monkeypatch.setattr(choice, "CALL", -1.0)  # every region promises to be worth it
    with_times(monkeypatch, seconds)
    lowered = LoweredStep(step, "auto", LoweringContext())
    assert same(run(lowered, live, RUNS), right)
    assert compiler.compiled == 0
    assert same(run(lowered, live), right)
    assert compiler.compiled > 0
    assert bool(lowered.regions) == kept
    assert same(run(lowered, live), right)


def test_auto_compiles_nothing_that_saves_less_than_compiling_takes(compiler: Compiler) -> None:
    step, live = chain()
    lowered = LoweredStep(step, "auto", LoweringContext(steps_left=lambda: 10))
    assert same(run(lowered, live, 5), expected(step, live))
    assert compiler.compiled == 0


def test_a_second_start_compiles_nothing_and_a_damaged_entry_is_made_anew(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, live = chain()
    run(LoweredStep(step, "inductor", LoweringContext()), live)
    kinds = compiler.compiled
    assert code.CODES.counts == code.Counts(compiled=kinds, seconds=code.CODES.counts.seconds)

    code.CODES.forget()
    run(LoweredStep(step, "inductor", LoweringContext()), live)
    assert code.CODES.counts == code.Counts(loaded=kinds)

    code.CODES.forget()
    folder = the_store().folder
    assert folder is not None
    path = next((folder / f"{code.KIND}.entries").iterdir())
    path.write_bytes(path.read_bytes()[:-3])
    run(LoweredStep(step, "inductor", LoweringContext()), live)
    assert (code.CODES.counts.compiled, code.CODES.counts.loaded) == (1, kinds - 1)


def test_code_that_cannot_be_loaded_is_made_anew(compiler: Compiler) -> None:
    step, live = chain()
    run(LoweredStep(step, "inductor", LoweringContext()), live)
    kinds = compiler.compiled
    code.CODES.forget()
    compiler.sources.clear()
    run(LoweredStep(step, "inductor", LoweringContext()), live)
    assert (code.CODES.counts.compiled, code.CODES.counts.loaded) == (kinds, 0)


@pytest.mark.parametrize("change", ["threads", "torch", "settings"])
def test_another_environment_is_another_entry(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    step, live = chain()
    run(LoweredStep(step, "inductor", LoweringContext()), live)
    kinds = compiler.compiled
    code.CODES.forget()
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9.9")
    else:
        monkeypatch.setattr(code, "_settings", lambda _threads: f"other {change}")
    run(LoweredStep(step, "inductor", LoweringContext()), live)
    assert compiler.compiled == 2 * kinds


def test_graphs_that_follow_do_as_was_decided_and_ask_nobody(compiler: Compiler) -> None:
    (step, live), (other, _) = chain(), chain()
    right = expected(step, live)
    asked: list[object] = []

    def gather(value: object) -> list[object]:
        asked.append(value)
        return [value]

    lowering = RegionLowering("inductor", LoweringContext(gather=gather))
    deciding = lowering(step)
    assert isinstance(deciding, LoweredStep)
    assert not deciding.is_settled
    run(deciding, live)
    assert deciding.is_settled
    before = len(asked)
    compiler.fault = lambda _inputs, outputs: [output * 1.00001 for output in outputs]
    with torch.no_grad():
        got = lowering.following(other)(*live)
    assert not same(got, right)  # regions ran
    assert len(asked) == before


# ---------------------------------------------------------------- several ranks
class Meeting:
    """Gathers values of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._values: dict[int, Any] = {}
        self._barrier = threading.Barrier(size, timeout=60)

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def gathered(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            everyone = [self._values[i] for i in sorted(self._values)]
            self._barrier.wait()
            return everyone

        return gathered


def on_ranks(work: Callable[[int, Callable[[Any], list[Any]]], Any], size: int = 2) -> list[Any]:
    meeting, results = Meeting(size), [None] * size

    def one(rank: int) -> None:
        results[rank] = work(rank, meeting.gather(rank))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_what_one_rank_cannot_use_no_rank_uses(compiler: Compiler) -> None:
    step, live = chain()
    right = expected(step, live)
    failing: list[int] = []

    def work(rank: int, gather: Callable[[Any], list[Any]]) -> LoweredStep:
        def told(value: Any) -> list[Any]:
            if rank == 1 and isinstance(value, dict) and all(isinstance(v, trial.Verdict) for v in value.values()):
                failing.append(min(value))
                value = {**value, min(value): trial.Verdict("another one on this rank")}
            return gather(value)

        lowered = LoweredStep(step, "inductor", LoweringContext(rank, told))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert same(run(lowered, live, 2), right)
        return lowered

    chosen = [sorted(lowered.regions) for lowered in on_ranks(work)]
    assert chosen[0] == chosen[1] != []
    assert failing[0] not in chosen[0]


def test_the_slowest_rank_counts(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    step, live = chain()
    monkeypatch.setattr(choice, "CALL", -1.0)

    def work(rank: int, gather: Callable[[Any], list[Any]]) -> LoweredStep:
        def told(value: Any) -> list[Any]:
            if isinstance(value, dict) and all(isinstance(v, trial.Verdict) for v in value.values()):
                value = {number: trial.Verdict("", 1.0, 0.5 if rank == 0 else 1.5) for number in value}
            return gather(value)

        lowered = LoweredStep(step, "auto", LoweringContext(rank, told))
        run(lowered, live, RUNS + 2)
        return lowered

    assert [len(lowered.regions) for lowered in on_ranks(work)] == [0, 0]


def test_ranks_that_find_other_regions_use_none(compiler: Compiler) -> None:
    (one, live), (other, _) = chain(), chain()
    for node in list(other.graph_module.graph.nodes)[-6:-2]:
        node.meta["random"] = "not for regions"

    def work(rank: int, gather: Callable[[Any], list[Any]]) -> LoweredStep:
        lowered = LoweredStep((one, other)[rank], "inductor", LoweringContext(rank, gather))
        run(lowered, live, 2)
        return lowered

    assert [len(lowered.regions) for lowered in on_ranks(work)] == [0, 0]
    assert compiler.compiled == 0


def test_code_of_a_gpu_gets_aligned_inputs() -> None:
    memory = torch.arange(64.0)
    odd = [
        memory[1:17].view(4, 4),
        memory[3:5].expand(3, 2),
        memory[1:33].view(4, 8)[:, ::2],
        memory[5:].as_strided((4, 4), (1, 4)),
        memory[16:20],
    ]
    seen: list[Tensor] = []
    code.aligned(lambda inputs: seen.extend(inputs) or ())(list(odd))
    for value, got in zip(odd, seen, strict=True):
        assert torch.equal(value, got)
        assert value.stride() == got.stride()
        assert got.data_ptr() % 16 == 0
    assert seen[-1] is odd[-1]
