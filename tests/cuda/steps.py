"""Steps of which a graph is more than forward, backward, update; what a rank of the lane has to know of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.utils.data import default_collate

from lightning_spmd.ir.reads import Number
from lightning_spmd.ir.steps import Variant
from tests.cuda.small_layers import SmallLayers
from tests.helpers.by_hand import MODULES as BY_HAND
from tests.helpers.by_hand import data
from tests.helpers.by_hand_rare import RARE
from tests.helpers.modules import GPT, samples
from tests.helpers.molecules import collate, molecules
from tests.strategy.batches import test_packed_sequences
from tests.strategy.local_cases import Chemist
from tests.strategy.reads_and_sizes import test_data_sizes, test_reads
from tests.strategy.small import rows


@dataclass(frozen=True)
class Step:
    """A kind of step.

    Args:
        make: makes its module.
        batch: of a rank, given its number and that of the rows.
        variant: part of the iteration.
        vary: sizes that its graph leaves open: of which leaf, which dimension.
        decides: whether values that Python reads decide something.
        answers: what a tensor has that Python reads, by its type.
    """

    make: Callable[[], L.LightningModule]
    batch: Callable[[int, int], Any]
    variant: Variant = Variant()
    vary: tuple[tuple[int, int], ...] = ()
    decides: bool = False
    answers: Mapping[type, Number] = field(default_factory=lambda: {bool: True, int: 2, float: 2.0})


def _small(_: int, count: int) -> Any:
    return default_collate(rows(count))


def _pairs(_: int, count: int) -> Any:
    return default_collate([data()[i] for i in range(count)])


def _tokens(_: int, count: int) -> Any:
    return default_collate(samples("gpt", count))


def _packed(_: int, count: int) -> Any:
    return default_collate(test_packed_sequences.sequences(count, 7, padded=True))


def _molecules(rank: int, count: int) -> Any:
    return collate(molecules(count + rank, seed=rank))


def _gpt() -> L.LightningModule:
    return GPT(optimizer="adamw_fused", dropout=0.0)


_DECIDING = (
    *(test_reads.Branches, test_reads.Cuts, test_reads.Lists, test_reads.LogsNumbers, test_reads.Weighs),
    test_reads.WithState,
)
STEPS: dict[str, Step] = {
    **{f"reads {make.__name__}": Step(make, _small, decides=True) for make in _DECIDING},
    "packed": Step(test_packed_sequences.Reads, _packed, decides=True),
    **{f"sizes of data {make.__name__}": Step(make, _small, decides=True) for make in test_data_sizes.WAYS},
    **{
        f"by hand {name}": Step(make, _pairs, Variant.optimized_by_hand(), decides=name == "LooksAtGradients")
        for name, make in {**BY_HAND, **RARE}.items()
        if name not in ("Plateau", "NothingToStep")  # they want more of a Trainer
    },
    "local": Step(Chemist, _molecules, Variant(own_batch=True)),
    "pauses": Step(_gpt, _tokens, Variant(expose_gradients=True)),
    "small layers": Step(SmallLayers, _small),
    "open sizes": Step(_gpt, _tokens, vary=((0, 1), (1, 1))),
}


def optimize_by_hand(strategy: SimpleNamespace, module: Any, optimizers: list[Any], schedulers: list[Any]) -> None:
    """Let ``self.optimizers()`` and what is called on it find what they ask a strategy for."""
    strategy._lightning_optimizers = [LightningOptimizer(optimizer) for optimizer in optimizers]
    for optimizer in strategy._lightning_optimizers:
        optimizer._strategy = strategy
    strategy.optimizers = optimizers
    strategy.lightning_module = module
    strategy.backward = lambda loss, _, *args, **options: loss.backward(*args, **options)
    strategy.optimizer_step = lambda optimizer, closure, **options: optimizer.step(closure, **options)
    module.trainer.optimizers = optimizers
    module.trainer.lr_scheduler_configs = schedulers
    module.trainer.training = True
    module.trainer.is_last_batch = False


def answer(answers: Mapping[type, Number], tensors: Sequence[Tensor]) -> list[Tensor]:
    """What is read, as if it had been computed: every element is the answer of its type."""
    return [torch.full(t.shape, answers[_type_of(t.dtype)], dtype=t.dtype) for t in tensors]


def _type_of(dtype: torch.dtype) -> type:
    return bool if dtype is torch.bool else float if dtype.is_floating_point else int


def on_gpu(value: Any, device: torch.device) -> Any:
    """A tensor as a fake one, inside a fake tensor mode; everything else as it is."""
    return torch.empty(value.shape, dtype=value.dtype, device=device) if isinstance(value, Tensor) else value
