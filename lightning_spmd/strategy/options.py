"""Checks of the options of ``SPMDStrategy``."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.stages import BuildOptions
from lightning_spmd.stages.passes import OFFLOAD_ACTIVATIONS, PASSES, REDUCE_DTYPES, REMATERIALIZE, GraphPass, select
from lightning_spmd.stages.runtime.lowering import MODES

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(" + "|".join(_UNITS) + r")\s*")


def checked_options(
    passes: list[Any] | None,
    bucket_size_mb: Any,
    reduce_dtype: Any,
    overlap: Any,
    rematerialize: Any = None,
    lowering: Any = "none",
    cuda_graphs: Any = False,
    offload_activations: Any = None,
    loss_chunks: Any = None,
) -> BuildOptions:
    """The options that graphs are built with; ``SPMDStrategy`` documents each.

    Raises:
        ConfigurationError: one of them has an invalid value.
    """
    if bucket_size_mb != "auto" and not (_is_number(bucket_size_mb) and 0 < bucket_size_mb < math.inf):
        raise ConfigurationError(f"bucket_size_mb={bucket_size_mb!r}: give a number of MiB above 0, or 'auto'")
    if not _is_one_of(reduce_dtype, (None, *REDUCE_DTYPES)):
        raise ConfigurationError(f"reduce_dtype={reduce_dtype!r}: known are {list(REDUCE_DTYPES)}, or None")
    if not _is_one_of(overlap, (True, False, "auto")):
        raise ConfigurationError(f"overlap_iterations={overlap!r}: give True, False or 'auto'")
    if not _is_one_of(lowering, MODES):
        raise ConfigurationError(f"lowering={lowering!r}: give one of {list(MODES)}")
    if not _is_one_of(cuda_graphs, (True, False)):
        raise ConfigurationError(f"cuda_graphs={cuda_graphs!r}: give True or False")
    if not isinstance(passes, (list, tuple, NoneType)):
        example = passes if isinstance(passes, str) else PASSES[0].name
        raise ConfigurationError(f"passes={passes!r}: give a list of names, such as [{example!r}]")
    chosen = PASSES if passes is None else select(passes, PASSES)
    give_back, move = (
        _of_pass(wanted, asked, chosen)
        for wanted, asked in ((REMATERIALIZE, rematerialize), (OFFLOAD_ACTIVATIONS, offload_activations))
    )
    if move is not None and cuda_graphs:
        raise ConfigurationError(
            f"offload_activations={offload_activations!r} and cuda_graphs=True: copies that run beside the kernels "
            "cannot be recorded; use one of the two"
        )
    chunks, chunk_bytes = _chunks_or_bytes(loss_chunks)
    return BuildOptions(
        chosen, bucket_size_mb, reduce_dtype, overlap, give_back, lowering, bool(cuda_graphs), offload_activations=move,
        loss_chunks=chunks, loss_bytes=chunk_bytes,
    )  # fmt: skip


def check_offload(offload_activations: Any, device: torch.device) -> None:
    """Check that activations can be offloaded.

    Raises:
        ConfigurationError: training does not run on a GPU.
    """
    if offload_activations is not None and device.type != "cuda":
        raise ConfigurationError(
            f"offload_activations moves activations from a GPU's memory to the host's, and training runs on "
            f"{device.type!r}, whose activations are in host memory already; leave it out, or save memory with "
            "rematerialize=..."
        )


def check_switches(**switches: Any) -> None:
    """Check boolean options.

    Raises:
        ConfigurationError: one of them is not a boolean.
    """
    for name, value in switches.items():
        if type(value) is not bool:
            raise ConfigurationError(f"{name}={value!r}: give True or False")


def check_processes(backend: Any, timeout: Any) -> None:
    """Check backend and timeout of the process group.

    Raises:
        ConfigurationError: torch.distributed has no such backend, or the timeout is not a duration.
    """
    known = sorted({"gloo", "nccl", "mpi", "ucc", *torch.distributed.Backend.backend_list} - {"undefined"})
    parts = [] if backend is None else [p.rpartition(":")[2] for p in str(backend).split(",")]
    if not isinstance(backend, (str, type(None))) or not set(parts) <= set(known):
        raise ConfigurationError(
            f"process_group_backend={backend!r}: give one of {', '.join(known)}, one for each kind of device such as "
            "'cpu:gloo,cuda:nccl', or None"
        )
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise ConfigurationError(
            f"timeout={timeout!r}: give a datetime.timedelta above 0, such as timedelta(seconds=600), or None"
        )


def _is_number(value: Any) -> bool:
    """Whether it is a number of Python or NumPy; neither an array nor a boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_one_of(value: Any, allowed: Sequence[Any]) -> bool:
    """Like ``in``, but arrays are allowed and 1 is not True."""
    return any(type(value) is type(other) and value == other for other in allowed)


def check_sizes(**sizes: Any) -> None:
    """Check numbers of ranks.

    Raises:
        ConfigurationError: one of them is not a positive integer.
    """
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigurationError(f"{name}={size!r}: give a whole number of at least 1")


def checked_folder(folder: Any) -> Path | None:
    """The folder that graphs are written to.

    Raises:
        ConfigurationError: it is not a path.
    """
    if folder is not None and not isinstance(folder, (str, Path)):
        raise ConfigurationError(f"dump_dir={folder!r}: give the path of a folder, or None")
    return None if folder is None else Path(folder)


def checked_choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    """The value of an option with a few choices.

    Raises:
        ConfigurationError: it is none of them.
    """
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r}: give one of {', '.join(map(repr, choices))}")
    return value


def _of_pass(wanted: GraphPass, value: Any, chosen: Sequence[GraphPass]) -> float | int | None:
    """The value of a pass's option, which has the name of the pass."""
    found = _share_or_bytes(wanted.name, value)
    if found is not None and wanted.name not in [p.name for p in chosen]:
        raise ConfigurationError(
            f"{wanted.name}={value!r} needs the pass {wanted.name!r}, which passes=[...] leaves out"
        )
    return found


def _chunks_or_bytes(value: Any) -> tuple[int | None, int | None]:
    """(how many chunks a loss is computed in, how many bytes one may take): one of them, or neither."""
    if value is None:
        return None, None
    if isinstance(value, numbers.Integral) and _is_number(value) and int(value) >= 2:
        return int(value), None
    size = _bytes_of(value)
    if not 1 <= size < math.inf:
        raise ConfigurationError(
            f"loss_chunks={value!r}: give the number of chunks that a loss is computed in, 2 or more; or the bytes "
            "that one of them may take, a string such as '256MiB' (KiB, MiB or GiB); or None"
        )
    return None, int(size)


def _bytes_of(value: Any) -> float:
    """The bytes that a string says, 0 if it says none."""
    found = _BYTES.fullmatch(value) if isinstance(value, str) else None
    return 0.0 if found is None else float(found[1]) * _UNITS[found[2]]


def _share_or_bytes(option: str, value: Any) -> float | int | None:
    """The value of an option about activations: a share to free as a float, bytes to leave as an integer."""
    if value is None:
        return None
    if _is_number(value) and 0 < value <= 1:
        return float(value)
    size = _bytes_of(value)
    if not 1 <= size < math.inf:
        raise ConfigurationError(
            f"{option}={value!r}: give the share of the activations' bytes to give back, a number above 0 and at "
            "most 1; or the bytes to leave on each device, a string such as '512MiB' (KiB, MiB or GiB); or None"
        )
    return int(size)
