"""NumPy arrays of tensors that go back into torch: lengths of packed sequences, statistics of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from tests.strategy.small import Quiet, assert_as_eager


class Back(Quiet):
    """As lengths, and as tensors in four ways."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 3, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        lengths = (batch[1] + 1).cpu().numpy()
        steps = batch[0].unsqueeze(1).expand(-1, 3, -1)
        _, hidden = self.rnn(pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False))
        copied, same = torch.tensor(batch[1].numpy()), torch.from_numpy(lengths)
        longer = (
            torch.as_tensor(lengths, dtype=torch.float32).mean() + torch.as_tensor(lengths, dtype=torch.float64).sum()
        )
        self.log("longest", float(lengths.max()))
        return F.cross_entropy(self(batch[0]) + hidden[0], batch[1]) * (copied + same).float().mean() * longer.float()


def test_arrays_become_tensors_again() -> None:
    """Was eager: ``pack_padded_sequence(x, lengths.cpu().numpy())``."""
    assert_as_eager(Back)
