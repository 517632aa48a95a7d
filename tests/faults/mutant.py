"""What a fault is."""

from __future__ import annotations

from dataclasses import dataclass

CAPTURE, EXPAND, PASSES, PHASES = "capture", "expand", "passes", "phases"
RUNTIME, AGREEMENT, STATE, STRATEGY, CHECKPOINTS = "runtime", "agreement", "state", "strategy", "checkpoints"
FOLLOWED = "tests/strategy/following/test_followed_calls.py"
ONE_DEVICE = "tests/equality/test_one_device.py"
OPENED = "stages/capture/numbers/opened.py"
OPERATORS = "tests/stages/expand/test_operators.py"
PLAIN_NUMBERS = "tests/strategy/reads_and_sizes/test_plain_numbers.py"
PLANS = "tests/equality/test_plans.py"


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Args:
        name: what it does.
        stage: where it is.
        file: below the package.
        old: text that occurs once in the file.
        new: what takes its place.
        likely: tests that are likely to notice: files, test ids or beginnings of them.
    """

    name: str
    stage: str
    file: str
    old: str
    new: str
    likely: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The file with the fault in it.

        Raises:
            ValueError: the text to be replaced is not there, or more than once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}")
        return text.replace(self.old, self.new)
