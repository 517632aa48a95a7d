"""Sets of counts for which graphs are made that do for all counts."""

from __future__ import annotations

import itertools

from lightning_spmd.ir.counted import GRAPHS, samples_of


def test_of_any_two_counts_each_is_the_larger_one_in_some_set() -> None:
    sets = samples_of(6, range(6))[:GRAPHS]
    for i, j in itertools.combinations(range(6), 2):
        assert {one[i] > one[j] for one in sets} == {True, False}
    assert len({count for one in sets for count in one}) == 6 * GRAPHS


def test_counts_that_are_always_equal_are_so_in_each_set() -> None:
    for one in samples_of(3, (0, 0, 2)):
        assert one[0] == one[1] != one[2]
