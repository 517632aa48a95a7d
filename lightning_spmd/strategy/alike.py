"""What must be the same on all ranks before the first graph is built: versions, and settings that change numbers."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import torch

from lightning_spmd.errors import RankDisagreementError

_FIX = {
    "version": "install the same one on every node, and start all ranks with the same Python",
    "setting": "set it in the script itself, which every rank runs, or in the environment of all ranks",
}


def facts() -> dict[str, tuple[str, str]]:
    """Kind and value of each."""
    precision = {
        "torch": ("version", torch.__version__),
        "lightning": ("version", version("lightning")),
        "torch.use_deterministic_algorithms": ("setting", str(torch.are_deterministic_algorithms_enabled())),
        "torch.set_default_dtype": ("setting", str(torch.get_default_dtype())),
        "float32 of matrix products": ("setting", _matmul_precision()),
    }
    return {**precision, "processor": ("processor", platform.machine())}


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by torch's other interface, and guarded with the graph
        return "set for a backend"


def check_alike(sides: Sequence[Mapping[str, tuple[str, str]]]) -> None:
    """Compare what all ranks say.

    Raises:
        RankDisagreementError: on every rank, with the first difference.
    """
    for name, (kind, value) in sides[0].items():
        for rank, side in enumerate(sides):
            if side[name][1] != value and kind in _FIX:
                raise RankDisagreementError(
                    f"the ranks do not have the same {name}: rank 0 has {name} {value}, rank {rank} has {name} "
                    f"{side[name][1]}: {_FIX[kind]}"
                )
