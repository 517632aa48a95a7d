"""When a graph may be used again, and how the reason reads when it may not."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_spmd.ir.guards import Guards, PredicateGuard, ValueGuard


def never() -> Any:
    raise AssertionError("was asked for")


@pytest.mark.parametrize(
    ("expected", "same", "other"), [(1, 1, 2), (1, 1, True), (1, 1, 1.0), (None, None, 0), ("a", "a", "b")]
)
def test_a_value_is_compared_with_its_type(expected: Any, same: Any, other: Any) -> None:
    now = [same]
    guard = ValueGuard("self.flag", lambda: now[0], expected)
    assert guard.failure() is None
    now[0] = other
    assert guard.failure() == f"self.flag changed from {expected!r} to {other!r}"


def test_an_attribute_that_went_is_a_change() -> None:
    holder: Any = type("Holder", (), {})()
    guard = ValueGuard("self.flag", lambda: holder.flag, 1)
    assert guard.failure() == "self.flag changed from 1 to '<missing>'"


def test_a_long_value_is_shortened() -> None:
    failure = ValueGuard("self.text", lambda: "b", "a" * 1000).failure()
    assert failure is not None
    assert len(failure) < 150


def test_a_decision_is_taken_again_with_the_inputs_of_now() -> None:
    guard = PredicateGuard(("a.py:1", "a.py:2"), (2, 0), lambda rate, count: (rate > 0.1, count), (True, 3))
    assert guard.failure([3, "unused", 0.5]) is None
    assert guard.failure([3, "unused", 0.05]) == "a decision at a.py:1 changed from True to False"
    assert guard.failure([4, "unused", 0.5]) == "a decision at a.py:2 changed from 3 to 4"


def test_the_first_reason_is_told_and_nothing_is_read_in_vain() -> None:
    flag = ValueGuard("self.flag", lambda: 2, 1)
    predicate = PredicateGuard(("a.py:1",), (0,), lambda value: (value,), (1,))
    assert Guards().failure(never) is None
    assert Guards([flag], predicate).failure(never) == "self.flag changed from 1 to 2"
    assert Guards([], predicate).failure(lambda: [2]) == "a decision at a.py:1 changed from 1 to 2"
    assert Guards([], predicate).failure(lambda: [1]) is None
