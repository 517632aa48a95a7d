"""Samples of the operators in torch's own operator database, and the ways in which two ranks share their tensors."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# torch's own test helpers forbid everybody in the process to set backend flags; other tests set them
with mock.patch("torch.backends.disable_global_flags"):
    from torch.testing._internal.common_methods_invocations import op_db

_MOST_SAMPLES = 400
_MOST_PARAMETERS = 8
"""Dimensions of a sample's tensors that are split, at most."""


@dataclass(frozen=True)
class Sample:
    """One call of one operator.

    Args:
        operator: the operator's name in the database.
        number: which of the operator's samples.
        function: the operator.
        arguments: positional and keyword arguments, flattened; tensors are detached.
        tree: how they are put together.
        learnt: of each tensor, whether it may get a gradient.
        in_place: whether the first tensor is written into.
    """

    operator: str
    number: int
    function: Any
    arguments: tuple[Any, ...]
    tree: Any
    learnt: tuple[bool, ...]
    in_place: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [a for a in self.arguments if isinstance(a, Tensor)]

    def call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the operator returns for other tensors of the same shapes."""
        given = iter(tensors)
        flat = [next(given) if isinstance(a, Tensor) else a for a in self.arguments]
        args, kwargs = pytree.tree_unflatten(flat, self.tree)
        return [o for o in pytree.tree_leaves(self.function(*args, **kwargs)) if isinstance(o, Tensor)]

    def __str__(self) -> str:
        flat = [f"{str(a.dtype)[6:]}{list(a.shape)}" if isinstance(a, Tensor) else a for a in self.arguments]
        args, kwargs = pytree.tree_unflatten(flat, self.tree)
        given = [*map(str, args), *(f"{k}={v}" for k, v in kwargs.items())]
        return f"{self.operator}{'_' if self.in_place else ''}({', '.join(given)})"


@dataclass(frozen=True)
class Split:
    """Which tensors of a sample lie in pieces on two ranks.

    Args:
        tensors: positions among the sample's tensors: the leaves of a batch, or one parameter.
        shares: rows (or entries) of each rank.
        dim: the dimension of a parameter; None: rows of a batch.
    """

    tensors: tuple[int, ...]
    shares: tuple[int, int]
    dim: int | None = None

    @property
    def batch(self) -> tuple[int, ...]:
        """The tensors that are the batch."""
        return self.tensors if self.dim is None else ()

    def __str__(self) -> str:
        names = ", ".join(map(str, self.tensors))
        where = (
            f"batch of tensors {names}" if self.dim is None else f"tensor {names} as parameter, dimension {self.dim}"
        )
        return f"{where}, {self.shares[0]} + {self.shares[1]}"


def operators() -> dict[str, Any]:
    """The database's entries that take float64 on the CPU, by name."""
    return {op.full_name: op for op in op_db if op.supports_dtype(torch.float64, "cpu")}


def sample_of(function: Any, *args: Any, **kwargs: Any) -> Sample:
    """A sample of one's own; all floating-point tensors are learnt."""
    flat, tree = pytree.tree_flatten((args, kwargs))
    learnt = tuple(a.is_floating_point() or a.is_complex() for a in flat if isinstance(a, Tensor))
    return Sample(getattr(function, "__name__", "?"), 0, function, tuple(flat), tree, learnt)


def samples(op: Any, count: int | None = 4, *, in_place: bool = False) -> list[Sample]:
    """``count`` samples of an operator that differ as much as possible; None: all."""
    function = op.inplace_variant if in_place else op.op
    if function is None:
        return []
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd)
        made = list(itertools.islice(inputs, _MOST_SAMPLES))
    found = []
    for number, sample in enumerate(made):
        flat, tree = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        tensors = [a for a in flat if isinstance(a, Tensor)]
        if any(t.layout is not torch.strided or t.is_nested for t in tensors):
            continue
        plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in flat)
        learnt = tuple(t.requires_grad for t in tensors)
        found.append(Sample(op.full_name, number, function, plain, tree, learnt, in_place))
    return found if count is None else _different(found, count)


def _different(found: list[Sample], count: int) -> list[Sample]:
    """Samples of different shapes first, then with different other arguments; those that can be split before others."""
    groups: dict[Any, list[Sample]] = {}
    for sample in found:
        groups.setdefault(tuple(t.shape for t in sample.tensors), []).append(sample)
    # the last ones of a group are the least ordinary
    turns = [group[:: -1 if i % 2 else 1] for i, group in enumerate(groups.values())]
    rounds = [s for row in itertools.zip_longest(*turns) for s in row if s is not None]
    splittable = [s for s in rounds if s.tensors and s.tensors[0].ndim and s.tensors[0].shape[0] > 1]
    return [*splittable, *(s for s in rounds if s not in splittable)][:count]


def splits_of_rows(sample: Sample, turn: int, *, every: bool = False) -> list[Split]:
    """Ways to share the rows of a sample's first tensor, and of all tensors with as many.

    Args:
        sample: the sample.
        turn: which of the less telling ways to take along with the most telling one.
        every: all of them.
    """
    tensors = sample.tensors
    first = next((i for i, t in enumerate(tensors) if t.ndim and t.shape[0]), None)
    if first is None:
        return []
    rows = tensors[first].shape[0]
    shares = list(_shares(rows))
    alike = tuple(i for i, t in enumerate(tensors) if t.ndim and t.shape[0] == rows)
    if every:
        return [Split(leaves, s) for leaves in dict.fromkeys([(first,), alike]) for s in shares]
    found = [Split((first,), shares[0])]
    found += [Split((first,), shares[1 + turn % (len(shares) - 1)])] if len(shares) > 1 else []
    return found + ([Split(alike, shares[turn % len(shares)])] if len(alike) > 1 else [])


def _shares(rows: int) -> Iterator[tuple[int, int]]:
    """Shares of two ranks, the most telling first: one row, none, equal ones."""
    if rows > 1:
        yield (rows - 1, 1)
    if rows > 2:
        yield (1, rows - 1)
    yield (rows, 0)
    if rows % 2 == 0 and rows > 2:
        yield (rows // 2, rows // 2)
    yield (0, rows)


def splits_of_parameters(sample: Sample, *, every: bool = False) -> list[Split]:
    """Each dimension of each floating-point tensor, split over a tensor axis."""
    found = [
        Split((i,), (size // 2, size - size // 2), dim)
        for i, tensor in enumerate(sample.tensors)
        if tensor.is_floating_point() or tensor.is_complex()
        for dim, size in enumerate(tensor.shape)
        if size > 1
    ]
    return found if every else found[:_MOST_PARAMETERS]
