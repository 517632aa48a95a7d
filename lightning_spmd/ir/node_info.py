"""Facts that every node of every graph carries in ``node.meta``.

``meta["val"]``   what the node produces: :class:`TensorSpec`, a Python number, or a tuple/list of these
``meta["info"]``  :class:`NodeInfo`: which module, which part of the iteration, which line of the user's code
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

TERM = "term"
"""Key in ``node.meta``: in a graph of a rank's own batch, :class:`Term`: what leaves it for all ranks."""

SUBJECT = "subject"
"""Key in ``node.meta`` of a collective: what it moves, by names that are the same on ranks with other graphs."""

SHARE = "share"
"""Key in ``node.meta`` of a grouped product: the share of rows that a rank multiplies if experts get equally many."""

BALANCED = "balanced"
"""Key in ``node.meta``: the value has as many rows as its spec says if experts get equally many. Else it has others."""

TAIL = "tail"
"""Key in ``node.meta``: index of the deferred tail of the iteration before that a node belongs to."""


class Section(enum.StrEnum):
    """Part of the training iteration that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The origin of a node.

    Args:
        section: part of the iteration.
        module: fully qualified name of the module whose forward made it (for backward nodes, whose gradient it
            computes).
        source: ``file:line`` of the user's code, empty if unknown.
        default: torch's default dtype where an operator of others was called.
        autocast: device types with autocast there, with its dtype; other operators are recorded below it.
    """

    section: Section
    module: str = ""
    source: str = ""
    default: torch.dtype = torch.float32
    autocast: tuple[tuple[str, torch.dtype], ...] = ()


@dataclass(frozen=True, slots=True)
class Term:
    """A value of a rank's own batch is this rank's term of a reduction over all ranks.

    Args:
        op: the reduction.
        name: of the result, the same on all ranks whatever their graphs look like.
        is_gradient: of a parameter.
    """

    op: Literal["sum", "max", "min"]
    name: str
    is_gradient: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides (in elements), dtype and device of a tensor, without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a (fake or real) tensor with strided layout."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


_UNKNOWN = NodeInfo(Section.FORWARD)


def info_of(node: fx.Node) -> NodeInfo:
    """The node's facts, or empty ones for nodes that have none (inputs, output)."""
    return node.meta.get("info") or _UNKNOWN


def named(node: fx.Node) -> str:
    """A node as messages name it: operator, module, the user's line."""
    info = info_of(node)
    module = f" in module {info.module!r}" if info.module else ""
    target = getattr(node.target, "__name__", node.target) if str(node.target).startswith("<") else node.target
    return f"{target}{module}" + (f" at {info.source}" if info.source else "")


def tell_place(error: BaseException, what: str) -> None:
    """Let an error that running a node raised name it, as :func:`named` does, once."""
    if not getattr(error, "__notes__", None):
        error.add_note(f"raised where a graph of strategy='spmd' runs {what}")


def value_of(node: fx.Node) -> Any:
    """What a node produces: a TensorSpec, a number, or a tuple of these."""
    return node.meta.get("val")


def spec_of(node: fx.Node) -> TensorSpec:
    """The TensorSpec of a node that produces one tensor.

    Raises:
        TypeError: if the node produces something else.
    """
    value = node.meta.get("val")
    if not isinstance(value, TensorSpec):
        raise TypeError(f"node {node.name} produces {type(value).__name__}, not one tensor")
    return value
