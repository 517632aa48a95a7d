"""The line at the end of fit says times with the unit in which they are read."""

from __future__ import annotations

import pytest

from lightning_spmd.strategy.notices.run_account import milliseconds_or_seconds


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.00063, "0.63 ms"),
        (0.00918, "9.18 ms"),
        (0.009996, "10.0 ms"),
        (0.0263, "26.3 ms"),
        (0.917, "917 ms"),
        (0.9996, "1.00 s"),
        (1.21, "1.21 s"),
        (12.34, "12.3 s"),
        (1234.5, "1234 s"),
    ],
)
def test_times_have_three_digits_and_no_powers_of_ten(seconds: float, words: str) -> None:
    assert milliseconds_or_seconds(seconds) == words
