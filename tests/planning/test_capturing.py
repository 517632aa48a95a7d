"""Capture for a plan: as in training, on parameters without memory."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_spmd._private_api import FakeTensor
from lightning_spmd.errors import CaptureError, ConfigurationError
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.signature import InputRole

from .common import ROWS, WIDTH, Tied, captured

NUMBERS = WIDTH * WIDTH + WIDTH + 1


def _bytes(part: Any, role: InputRole) -> int:
    """Of the inputs of a role, step counters left out."""
    entries = [e.value for _, e in part.captured.signature.inputs_of(role)]
    return sum(spec.bytes for spec in entries if isinstance(spec, TensorSpec) and spec.shape)


def test_parameters_have_no_memory_and_state_is_that_of_a_later_step() -> None:
    found = captured()
    assert all(isinstance(p.data, FakeTensor) for p in found.module.parameters())
    (part,) = found.parts
    assert _bytes(part, InputRole.PARAMETER) == 4 * NUMBERS
    assert _bytes(part, InputRole.OPTIMIZER_STATE) == 2 * 4 * NUMBERS


def test_state_that_begins_as_the_gradient_is_an_input() -> None:
    (part,) = captured(make=lambda: Tied(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))).parts
    assert _bytes(part, InputRole.OPTIMIZER_STATE) == 4 * NUMBERS


def test_the_batch_is_that_of_all_data_ranks() -> None:
    found = captured(batches=8)
    ((_, batch),) = found.parts[0].captured.signature.inputs_of(InputRole.BATCH)
    assert batch.value.shape == (8 * ROWS, WIDTH)
    assert (found.rows, found.global_rows) == (ROWS, 8 * ROWS)


def test_what_is_shared_stays_shared_when_the_precision_converts() -> None:
    (part,) = captured(precision="bf16-true").parts
    assert _bytes(part, InputRole.PARAMETER) == 2 * NUMBERS


@pytest.mark.parametrize(("pieces", "times"), [(2, [1, 1]), (5, [1, 3, 1])])
def test_accumulated_batches_are_parts_of_one_iteration(pieces: int, times: list[int]) -> None:
    found = captured(accumulate_grad_batches=pieces)
    assert [part.times for part in found.parts] == times
    assert [part.variant.apply for part in found.parts] == [False] * (len(times) - 1) + [True]
    assert _bytes(found.parts[-1], InputRole.GRADIENT) == 4 * NUMBERS


class Watched(Tied):
    """Looks at gradients before the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        sum(float(p.grad.sum()) for p in self.parameters() if p.grad is not None)


def test_hooks_that_see_gradients_split_the_iteration() -> None:
    found = captured(make=Watched)
    assert [(p.variant.forward, p.variant.apply) for p in found.parts] == [(True, False), (False, True)]
    assert _bytes(found.parts[1], InputRole.OPTIMIZER_STATE) == 2 * 4 * NUMBERS


class ByHand(Tied):
    """Two steps of the optimizer in one of training."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


def test_optimization_by_hand_is_one_part() -> None:
    (part,) = captured(make=ByHand).parts
    assert part.variant.by_hand
    assert _bytes(part, InputRole.OPTIMIZER_STATE) == 2 * 4 * NUMBERS


class Searches(Tied):
    """Its optimizer calls the step as often as it likes."""

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.LBFGS(p))


def test_a_training_that_runs_eagerly_cannot_be_planned() -> None:
    with pytest.raises(ConfigurationError, match="runs eagerly"):
        captured(make=Searches)


class Looks(Tied):
    """Decides by a value."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else -loss


class LooksAtAFilledOne(Tied):
    """Decides by what was a table, until a value of the batch was written into it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        table = torch.arange(4.0)
        table[0] = batch.sum().detach()
        loss = super().training_step(batch, batch_idx)
        return loss if table.diff().min() == 1 else -loss


@pytest.mark.parametrize("make", [Looks, LooksAtAFilledOne])
def test_a_step_that_is_no_graph_is_named(make: type[Tied]) -> None:
    with pytest.raises(CaptureError, match=r"decides by the value of a tensor(.|\n)*test_capturing.py:\d+"):
        captured(make=make)


class LooksAtATable(Tied):
    """Decides by what follows from numbers, as language models do that ask whether positions are packed."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if (torch.arange(batch.shape[1]).diff() == 1).all() else loss.exp()


def test_what_follows_from_numbers_is_known() -> None:
    (part,) = captured(make=LooksAtATable).parts
    assert all(node.target is not torch.ops.aten.exp.default for node in part.captured.graph_module.graph.nodes)


class Late(L.LightningModule):
    """Makes its layers where Lightning wants large ones."""

    def configure_model(self) -> None:
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_layers_of_configure_model_have_no_memory() -> None:
    found = captured(make=Late)
    assert all(isinstance(p.data, FakeTensor) for p in found.module.parameters())


class Recurrent(Tied):
    """Reads rows one number after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(1, 4, batch_first=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.rnn(batch[..., :3].unsqueeze(-1))[0].square().mean()


@pytest.mark.parametrize("batches", [1, 8])
def test_an_lstm_is_planned_as_graphs_on_several_cpus_run_it(batches: int) -> None:
    """Seen: a plan was refused with the words about oneDNN's LSTM that a training on one CPU gets."""
    found = captured(batches, Recurrent)
    names = {str(n.target) for n in found.parts[0].captured.graph_module.graph.nodes if n.op == "call_function"}
    assert not any("mkldnn" in name for name in names)
    (remark,) = found.remarks
    assert remark.startswith("rnn (LSTM): counted operator by operator")
