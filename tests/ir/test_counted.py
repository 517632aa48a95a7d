"""Sets of counts for which graphs are made that do for all counts."""

from __future__ import annotations

import itertools

import pytest

from lightning_spmd.ir.counted import GRAPHS, CountFits, mixed, samples_of, samples_within, told_apart
from lightning_spmd.ir.sizes import Counts, Formula
from lightning_spmd.ir.unify import Apart


def test_of_any_two_counts_each_is_the_larger_one_in_some_set() -> None:
    sets = samples_of(6)[:GRAPHS]
    for i, j in itertools.combinations(range(6), 2):
        assert {one[i] > one[j] for one in sets} == {True, False}
    assert len({count for one in sets for count in one}) == 6 * GRAPHS


@pytest.mark.parametrize("number", [1, 5, 60])
def test_what_is_rounded_is_no_multiple(number: int) -> None:
    for one, other, third in zip(*samples_of(number)[:GRAPHS], strict=True):
        for divisor in range(2, 17):
            slopes = {(b // divisor - a // divisor) / (b - a) for a, b in ((one, other), (one, third))}
            assert len(slopes) == 2


def test_sets_fulfill_conditions() -> None:
    below = samples_within(2, {}, [Formula("s0 < 50"), Formula("s1 > 20 * s0")])
    assert all(2 <= one < 50 and other > 20 * one for one, other in below)
    assert len({one for one, _ in below}) == len(below)
    assert all(one[0] == 7 for one in samples_within(2, {0: 7}, []))
    asked = [Formula("s0 < 50"), Formula("s1 > 20 * s0"), Formula("s2 < s1")]
    near = samples_within(3, {}, asked, before=[(*one, 100) for one in below], among=[2])
    assert [one[:2] for one in near] == below
    assert all(one[2] < one[1] for one in near)
    with pytest.raises(Apart, match="hardly any"):
        samples_within(1, {}, [Formula("s0 < 4")])


def test_sets_are_found_where_few_fulfill_all_conditions() -> None:
    windows = [(f"s{i}", f"s{i + 1}") for i in range(0, 12, 2)]
    conditions = [Formula(f"{end} <= 12") for _, end in windows] + [
        Formula(f"{end} - {at} >= 2") for at, end in windows
    ]
    for sample in samples_within(12, {2: 0}, conditions):
        assert sample[2] == 0
        assert all(at + 2 <= end <= 12 for at, end in zip(sample[::2], sample[1::2], strict=True))
    conditions = [Formula("s0 <= 12"), Formula("(s0 + s1) % 8 == 0"), Formula("(s0 + s1) * 3 == (s0 + s1) // 8 * 24")]
    for seed in range(8):
        for one, other, _ in samples_within(3, {}, conditions, {2: Formula("s0 + s1")}, seed):
            assert one <= 12
            assert (one + other) % 8 == 0


def test_sums_that_are_equal_in_some_sets_have_a_formula() -> None:
    sets = [(3, 7, 10), (11, 5, 4), (8, 11, 2)]
    found = CountFits(Counts(3), sets).formula(tuple(6 * sum(one) + 1 for one in sets))
    assert [found.at(one) for one in ((1, 2, 3), (9, 9, 9))] == [37, 163]


def test_mixed_counts_fulfill_conditions() -> None:
    found = mixed(2, 16, {}, {}, [Formula("s0 + s1 < 20")])
    assert len(found) == 16
    assert all(sum(one) < 20 for one in found)


def test_samples_tell_formulas_apart_and_from_constants() -> None:
    samples, length = [(2, 6), (3, 7), (5, 9), (4, 8)], Formula("s1 - s0")
    assert not told_apart([(0, length)], samples, {}, {})
    assert told_apart([(0, length)], samples, {}, {}, [(0, Formula("s1 - s0 == 4"))])
    assert told_apart([(0, length)], [(2, 6), (3, 9), *samples[2:]], {}, {})
    assert not told_apart([(0, Formula("s0 // 2")), (1, Formula("(s0 + 1) // 2"))], [(2, 6), (4, 8), (6, 9)], {}, {})
