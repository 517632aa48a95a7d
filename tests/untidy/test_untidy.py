"""Untidy steps train bit for bit as without the strategy, in weights, in what Python keeps and in what it writes.

``python -m tests.untidy`` says of each case how it ran.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.ranks import RankPool
from tests.helpers.training import Result
from tests.untidy.cases import CASES, PARTS
from tests.untidy.not_yet import NOT_YET, NOT_YET_ON_RANKS, PARTLY_EAGER
from tests.untidy.running import (
    NEAR,
    Outcome,
    differences,
    disagreements,
    run_all_on_ranks,
    run_case,
    run_on_ranks,
)
from tests.untidy.untidy import STEPS, Untidy

SAMPLE = (
    "Dataclass",
    "SortedRows",
    "BestSoFar",
    "PrintedAndCompared",
    "MemoryBank",
    "OwnFunction",
    "LogsByValue",
    "TwoOptimizers",
)
"""Of most parts of the cases: on two ranks the default tests train these."""


def _parameters(faults: dict[str, str]) -> list[Any]:
    """All cases; those with a fault may fail."""
    marks = {name: [pytest.mark.xfail(reason=reason, strict=False)] for name, reason in faults.items()}
    return [pytest.param(name, marks=marks.get(name, [])) for name in CASES]


def test_every_case_is_in_the_list() -> None:
    found = {
        kind.__name__
        for part in PARTS
        for kind in vars(part).values()
        if isinstance(kind, type) and issubclass(kind, Untidy) and "training_step" in vars(kind)
    }
    assert found == set(CASES)
    assert set(NOT_YET) <= set(CASES)
    assert set(NOT_YET_ON_RANKS) <= set(CASES)


def _outcome(**changed: Any) -> Outcome:
    result = Result(losses=[1.0, 2.0], weights={"w": torch.ones(2)})
    same: dict[str, Any] = {"kept": [{"a": 1, "b": 0.5}], "text": "loss 1.25\nbest 1", "random_states": {"torch": "a"}}
    return Outcome(**{"result": result, **same, "runs": STEPS, "graph_steps": 0, "seconds": 0.0, **changed})


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"result": Result([1.0, 2.0 + 1e-9], weights={"w": torch.ones(2)})}, "losses[1]"),
        ({"result": Result([1.0, 2.0], weights={"w": torch.ones(3)})}, "weights.w"),
        ({"kept": [{"a": 1.0, "b": 0.5}]}, "kept[0].a"),
        ({"kept": [{"b": 0.5, "a": 1}]}, "kept[0]: keys"),
        ({"kept": []}, "kept: 0 items"),
        ({"text": "loss 1.25\nbest 2"}, "text, line 2"),
        ({"random_states": {"torch": "b"}}, "state of torch"),
    ],
)
def test_each_kind_of_difference_is_found(changed: dict[str, Any], found: str) -> None:
    (difference,) = differences(_outcome(**changed), _outcome())
    assert difference.startswith(found)


def test_ranks_may_round_otherwise() -> None:
    ours = _outcome(result=Result([1.0, 2.0 + 1e-6], weights={"w": torch.ones(2)}), text="loss 1.26\nbest 1")
    assert differences(ours, _outcome(), NEAR) == []
    assert differences(_outcome(text="loss 1.25\nworst 1"), _outcome(), NEAR) != []
    assert differences(_outcome(text="loss 1.35\nbest 1"), _outcome(), NEAR) != []


@pytest.mark.parametrize("name", _parameters(NOT_YET))
def test_a_step_trains_as_eagerly(name: str) -> None:
    theirs, ours = run_case(name, "auto"), run_case(name, "spmd")
    assert differences(ours, theirs) == []
    assert ours.runs == theirs.runs == STEPS
    assert (ours.graph_steps == STEPS) == (name not in PARTLY_EAGER)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_eager_training_repeats_itself(name: str) -> None:
    assert differences(run_case(name, "auto"), run_case(name, "auto")) == []


def _faults_on_ranks(name: str, ours: list[Outcome]) -> list[str]:
    alike = [] if CASES[name].draws else differences(ours[0], run_case(name, "auto"), NEAR)
    return [*alike, *disagreements(ours)]


def test_two_ranks_train_some_as_one_device(two_ranks: RankPool) -> None:
    ran = run_all_on_ranks(SAMPLE, two_ranks)
    assert {name: faults for name, ours in ran.items() if (faults := _faults_on_ranks(name, ours))} == {}
    assert {name: ours[0].how for name, ours in ran.items() if ours[0].how != "graph"} == {}
    assert {name: ours[0].runs for name, ours in ran.items() if ours[0].runs != STEPS} == {}


@pytest.mark.long
@pytest.mark.parametrize("name", _parameters(NOT_YET_ON_RANKS))
def test_two_ranks_train_as_one_device(two_ranks: RankPool, name: str) -> None:
    assert _faults_on_ranks(name, run_on_ranks(name, two_ranks)) == []
