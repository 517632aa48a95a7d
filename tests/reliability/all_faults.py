"""All rows, those that matter most first."""

from tests.reliability import killed, loading, numbers, saving, sharing, stopped, unlike
from tests.reliability.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *killed.FAULTS,
    *stopped.FAULTS,
    *saving.FAULTS,
    *loading.FAULTS,
    *unlike.FAULTS,
    *numbers.FAULTS,
    *sharing.FAULTS,
)
