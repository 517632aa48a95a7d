"""All rows, those that matter most first."""

from tests.reliability import killed, loading, saving, stopped
from tests.reliability.fault import Fault

FAULTS: tuple[Fault, ...] = (*killed.FAULTS, *stopped.FAULTS, *saving.FAULTS, *loading.FAULTS)
