"""Layers that are other operators on GPUs than on the host, all in one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategy.small import Quiet


class SmallLayers(Quiet):
    """Cells of one time step, a GRU, masked attention, ``logsigmoid``, writes by mask, tensors made in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.gru_cell, self.lstm_cell = nn.GRUCell(10, 10), nn.LSTMCell(10, 10, bias=False)
        self.gru = nn.GRU(5, 10, batch_first=True)
        self.attention = nn.MultiheadAttention(10, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = self.gru_cell(h, h) + self.lstm_cell(h)[0] + self.gru(h.view(-1, 2, 5))[0].mean(1)
        sequence = h[:, None].expand(-1, 4, -1)
        h = self.attention(sequence, sequence, sequence, key_padding_mask=h[:, :4] > 5, need_weights=False)[0].mean(1)
        made = torch.arange(10, device=h.device) * 0.1 + torch.ones(10).pin_memory().to(self.device, non_blocking=True)
        h = F.logsigmoid(h + made)
        h[h < -1] = 0.5
        h[:, 1:][h[:, 1:] > 2] = 0.0
        return self.last(h)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
