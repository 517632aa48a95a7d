"""Checks the options of ``SPMDStrategy`` that say how graphs are built."""

from __future__ import annotations

from typing import Any

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.stages import BuildOptions
from lightning_spmd.stages.passes import KNOWN_PASSES, PASSES, REDUCE_DTYPES, select


def checked_options(passes: list[Any] | None, bucket_size_mb: Any, reduce_dtype: Any, overlap: Any) -> BuildOptions:
    """What graphs are built with; ``SPMDStrategy`` says what each argument means.

    Raises:
        ConfigurationError: one of them has a value that it cannot have.
    """
    if bucket_size_mb != "auto" and (isinstance(bucket_size_mb, str) or not bucket_size_mb > 0):
        raise ConfigurationError(f"bucket_size_mb={bucket_size_mb!r}: give a number of MiB above 0, or 'auto'")
    if reduce_dtype not in (None, *REDUCE_DTYPES):
        raise ConfigurationError(f"reduce_dtype={reduce_dtype!r}: known are {list(REDUCE_DTYPES)}, or None")
    if overlap not in (True, False, "auto"):
        raise ConfigurationError(f"overlap_iterations={overlap!r}: give True, False or 'auto'")
    chosen = PASSES if passes is None else select(passes, KNOWN_PASSES)
    return BuildOptions(chosen, bucket_size_mb, reduce_dtype, overlap)
