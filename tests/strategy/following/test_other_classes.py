"""Tensors of classes that make torch's calls themselves, and modes that see operators: graphs have torch's own tensors.

Such steps run eagerly, with a line; what is no tensor makes calls that are followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.ranks import RankPool
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device, deviation
from tests.strategy.small import ROWS, Quiet, assert_as_eager, rows, run


class Tagged(Tensor):
    """Results of calls on it are of this class."""


class Noted(Tensor):
    """Carries a note along, as MONAI's ``MetaTensor`` does."""

    note: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, cls):
            made.note = next((a.note for a in args if isinstance(a, cls)), None)
        return made


class Doubles(Tensor):
    """Wraps a tensor, and doubles what layers compute, below torch's functions."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*tree_map(lambda a: a.inner if isinstance(a, cls) else a, args), **(kwargs or {}))
        return found * 2 if func is torch.ops.aten.addmm.default else found


class Wraps:
    """No tensor, and takes part in torch's calls all the same."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*[a.tensor if isinstance(a, cls) else a for a in args], **(kwargs or {})))


class Scales(TorchDispatchMode):
    """Changes what an operator computes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 1.5 if func is torch.ops.aten.addmm.default else found


class Keeps(Quiet):
    """Logs what Python sees."""

    def see(self, value: float) -> None:
        self.log("seen", value)


class LossOfATensor(Keeps):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch).as_subclass(Tensor)


class InTheMiddle(Keeps):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.first(batch[0]).as_subclass(Tagged)
        self.see(float(type(hidden.tanh()) is Tagged))
        return F.cross_entropy(self.last(hidden.tanh()), batch[1])


class OfTheBatch(Keeps):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch[0].as_subclass(Noted)
        rows.note = batch_idx
        out = self(rows)
        self.see(float(out.note))
        return F.cross_entropy(out, batch[1])


class ABuffer(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((6,), 2.0).as_subclass(Tagged))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Wrapped(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Doubles(x))


class UnderAMode(Keeps):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with Scales():
            return self.loss(batch)


class CountsFlops(Keeps):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            loss = self.loss(batch)
        self.see(float(counter.get_total_flops()))
        return loss


class Forward(Keeps):
    """Differentiates forward by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with forward_ad.dual_level():
            slope = forward_ad.unpack_dual(self(forward_ad.make_dual(batch[0], torch.ones_like(batch[0])))).tangent
        return self.loss(batch) + slope.square().mean()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (LossOfATensor, "as_subclass"),
        (InTheMiddle, "as_subclass"),
        (OfTheBatch, "as_subclass"),
        (ABuffer, "Tagged"),
        (Wrapped, "Doubles"),
        (UnderAMode, "Scales"),
        (CountsFlops, "FlopCounterMode"),
        (Forward, "forward_ad"),
    ],
)
def test_what_graphs_do_not_know_is_eager_with_its_line(make: type[Keeps], named: str) -> None:
    warnings = assert_as_eager(make, mode="eager", max_epochs=2).warnings
    ours = [w for w in warnings if "'spmd'" in w and named in w]
    assert any(f"{__file__}:" in w or "small.py:" in w for w in ours), warnings


class Collated(InOrder):
    """Batches of a class of one's own."""

    def _loader(self, data: Sequence[Any], shuffle: bool) -> DataLoader[Any]:
        def collate(samples: Any) -> Any:
            x = torch.stack([x for x, _ in samples]).as_subclass(Noted)
            x.note = 7
            return x, torch.stack([y for _, y in samples])

        loader = super()._loader(data, shuffle)
        return DataLoader(data, loader.batch_size, sampler=loader.sampler, collate_fn=collate)  # type: ignore[arg-type]


class Reads(Keeps):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.see(float(self(batch[0]).note))
        return self.loss(batch)


def _collated() -> Collated:
    return Collated(rows(), ROWS)


def test_a_batch_of_such_a_class_is_itself() -> None:
    result = assert_as_eager(Reads, mode="eager", data=_collated)
    assert result.final["seen"] == 7
    assert any("the batch has a tensor of class Noted" in w for w in result.warnings)


@pytest.mark.parametrize(
    ("make", "data"), [(Reads, _collated), (InTheMiddle, None), (ABuffer, None), (UnderAMode, None)]
)
def test_on_two_ranks_such_steps_are_one_devices(two_ranks: RankPool, make: type[Keeps], data: Any) -> None:
    reference = run(make, "auto", data=data or (lambda: InOrder(rows(), ROWS)), max_epochs=2)
    for result in two_ranks.run(run, make, "spmd", 2, data=data, max_epochs=2):
        assert result.captures == 0
        assert deviation(result, reference).weights < 1e-6


class OnWrappers(Keeps):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(Wraps(batch[0])).tensor, batch[1])


class WithoutFunctions(Keeps):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch._C.DisableTorchFunction():
            return self.loss(batch)


class OfParameters(Keeps):
    """A subclass of nn.Parameter leaves calls to torch."""

    class Named(nn.Parameter):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.first.weight = self.Named(self.first.weight.detach())


@pytest.mark.parametrize("make", [OnWrappers, WithoutFunctions, OfParameters])
def test_what_leaves_results_to_torch_is_a_graph(two_ranks: RankPool, make: type[Keeps]) -> None:
    assert_compiled(assert_as_eager(make, max_epochs=2))
    results = two_ranks.run(run, make, "spmd", 2, max_epochs=2)
    assert_compiled(*results)
    assert_equals_one_device(results, run(make, "auto", data=lambda: InOrder(rows(), ROWS), max_epochs=2))
