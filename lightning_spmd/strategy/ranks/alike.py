"""Compares what must be equal on all ranks before the first graph: versions, and settings that change numbers."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import torch
from torch import nn

from lightning_spmd.errors import RankDisagreementError
from lightning_spmd.stages.runtime.agreement.control import ControlPlane, Place

_FIX = {
    "version": "install the same one on every node, and start all ranks with the same Python",
    "setting": "set it in the script itself, which every rank runs, or in the environment of all ranks",
}


def facts() -> dict[str, tuple[str, str]]:
    """Kind and value of each compared fact."""
    precision = {
        "torch": ("version", torch.__version__),
        "lightning": ("version", version("lightning")),
        "torch.use_deterministic_algorithms": ("setting", str(torch.are_deterministic_algorithms_enabled())),
        "torch.set_default_dtype": ("setting", str(torch.get_default_dtype())),
        "float32 of matrix products": ("setting", _matmul_precision()),
    }
    return {**precision, "processor": ("processor", platform.machine())}


def check_same_tensors(module: nn.Module, control: ControlPlane | None) -> None:
    """Compare parameters and buffers before they are sent. gloo ends a process that receives more than it has room for.

    Raises:
        RankDisagreementError: on every rank, with the first difference.
    """
    if control is None:
        return
    named = [*module.named_parameters(), *module.named_buffers()]
    mine = [f"{name} of shape {list(t.shape)}, {str(t.dtype)[6:]}" for name, t in named]
    sides = control.gather(mine, Place("the setup of the module"))
    for rank, side in enumerate(sides):
        for ours, theirs in itertools.zip_longest(sides[0], side, fillvalue="nothing more"):
            if ours != theirs:
                raise RankDisagreementError(
                    f"the ranks did not build the same module: rank 0 has {ours}, rank {rank} has {theirs}. What "
                    "decides this must be the same on all ranks"
                )


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by torch's other interface, and guarded with the graph
        return "set for a backend"


def check_alike(sides: Sequence[Mapping[str, tuple[str, str]]]) -> None:
    """Compare the facts of all ranks.

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
