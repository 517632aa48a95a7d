"""Packed sequences: graphs for all lengths, with eager's bits on one device, and one device's numbers on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

from lightning_spmd import SPMDStrategy
from lightning_spmd.ir.operators.packed_rnn import PACKED_NOISE, PACKED_RNN, PACKED_RNN_BACKWARD
from lightning_spmd.stages.capture.follow.packed import LaterPacked
from tests.helpers.activations import activation_collectives
from tests.helpers.ranks import RankPool
from tests.helpers.simulated_training import SimulatedTraining, Step, largest_difference, train_eagerly
from tests.helpers.training import InOrder, assert_compiled, assert_equals_one_device
from tests.strategy.small import ROWS, Net, Quiet, assert_as_eager, run

UNITS = 10


def sequences(count: int, longest: int, *, padded: bool = False) -> list[tuple[Tensor, int, int]]:
    """Samples of random lengths: values, length, class."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for i in range(count):
        length = longest if padded and i % 4 == 0 else int(torch.randint(1, longest + 1, (1,), generator=generator))
        x = torch.randn(length, 6, generator=generator)
        kind = int(torch.randint(0, 3, (1,), generator=generator))
        found.append((F.pad(x, (0, 0, 0, longest - length)) if padded else x, length, kind))
    return found


def collate(samples: list[tuple[Tensor, int, int]]) -> tuple[Tensor, ...]:
    """Padded to the longest."""
    x, lengths, kinds = zip(*samples, strict=True)
    return pad_sequence(list(x), batch_first=True), torch.tensor(lengths), torch.tensor(kinds)


def batches(count: int = 5, longest: int = 16) -> DataLoader[Any]:
    """Batches of other lengths, each padded to its longest row."""
    return DataLoader(sequences(count * ROWS, longest), batch_size=ROWS, collate_fn=collate)  # type: ignore[arg-type]


def few() -> DataLoader[Any]:
    return batches(2)


def of_one_length() -> InOrder:
    """For ranks: rows of all batches are padded to one length, which some rows have."""
    return InOrder(sequences(4 * ROWS, 7, padded=True), ROWS, shuffle=False)


class Reads(Quiet):
    """Both ways; outputs up to each row's end and last states."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = self.layers()

    def layers(self) -> nn.Module:
        return nn.LSTM(6, UNITS // 2, bidirectional=True, batch_first=True)

    def forward(self, batch: Any) -> Tensor:
        x, lengths, _ = batch
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, (hidden, cell) = self.rnn(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        inside = torch.arange(out.shape[1], device=out.device) < lengths.unsqueeze(1)
        return self.last((out * inside.unsqueeze(2)).sum(1) / lengths.unsqueeze(1)) + hidden[-1, :, :3] + cell[0, :, :3]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch), batch[2])


class Sorted(Reads):
    """Time first, sorted by hand, a state that is given, a padding value that is not 0."""

    def layers(self) -> nn.Module:
        return nn.GRU(6, UNITS, num_layers=2)

    def forward(self, batch: Any) -> Tensor:
        x, lengths, _ = batch
        lengths, order = lengths.sort(descending=True)
        x = x[order].transpose(0, 1)
        state = torch.tanh(self.first(x.sum(0))).expand(2, -1, -1)
        out, hidden = self.rnn(pack_padded_sequence(x, lengths), state)
        out, _ = pad_packed_sequence(out, padding_value=-1.0)
        return self.last(out.mean(0) + hidden[1])[order.argsort()]


class Stacked(Reads):
    """Layers one after the other on what is packed; longer in the end than any row."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.RNN(UNITS, UNITS, nonlinearity="relu", bias=False)
        self.third = nn.LSTM(UNITS, 2 * UNITS, proj_size=UNITS)

    def forward(self, batch: Any) -> Tensor:
        packed = pack_padded_sequence(batch[0], batch[1], batch_first=True, enforce_sorted=False)
        out, (hidden, _) = self.third(self.second(self.rnn(packed)[0])[0])
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=20)
        return self.last(out.mean(1) + hidden[0])


class Listed(Reads):
    """A list of tensors is packed."""

    def forward(self, batch: Any) -> Tensor:
        rows = pack_sequence([row[:length] for row, length in zip(batch[0][:4], (4, 7, 1, 7), strict=True)], False)
        return self.last(self.rnn(rows)[1][0][-2:].mean(0).mean(0).repeat(2)).expand(len(batch[2]), -1)


@pytest.mark.parametrize("make", [Reads, Sorted, pytest.param(Stacked, marks=pytest.mark.long)])
def test_all_lengths_have_a_graph(make: type[Net]) -> None:
    """Fifteen batches of other lengths: bitwise, in graphs for the first two and one for all others."""
    assert assert_as_eager(make, data=batches).captures == 3


def test_a_list_of_tensors_is_packed() -> None:
    assert_as_eager(Listed, data=lambda: InOrder(sequences(2 * ROWS, 7, padded=True), ROWS), max_epochs=1)


@pytest.mark.long
@pytest.mark.parametrize("make", [Reads, Sorted])
def test_products_in_bf16_are_eager_s(make: type[Net]) -> None:
    assert_as_eager(make, data=few, max_epochs=1, precision="bf16-mixed")


class LooksInside(Reads):
    """Entries are embedded and the loss is of entries; layers read what was made of them."""

    def forward(self, batch: Any) -> Tensor:
        packed = pack_padded_sequence(batch[0], batch[1], batch_first=True, enforce_sorted=False)
        other = PackedSequence(torch.tanh(self.first(packed.data))[:, :6], *packed[1:])
        out, _ = self.rnn(other)
        kinds = pack_padded_sequence(batch[2].unsqueeze(1).expand(-1, batch[0].shape[1]), batch[1], True, False)
        return F.cross_entropy(self.last(out.data), kinds.data) + out.batch_sizes.sum() * 1e-3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch)


class Replaces(Reads):
    """The same with ``_replace`` and ``to``, and rows again in the end."""

    def forward(self, batch: Any) -> Tensor:
        packed = pack_padded_sequence(batch[0], batch[1], batch_first=True, enforce_sorted=False).to(torch.float32)
        packed = packed._replace(data=packed.data.sin())
        out, (hidden, _) = self.rnn(packed)
        rows, _ = pad_packed_sequence(out._replace(data=out.data.square()), batch_first=True)
        return self.last(rows.sum(1))[packed.sorted_indices][packed.unsorted_indices] + hidden[0, :, :3]


@pytest.mark.parametrize("make", [LooksInside, Replaces])
def test_entries_are_in_eager_s_order(make: type[Net]) -> None:
    assert_as_eager(make, data=few, max_epochs=1)


class Drops(Reads):
    """Draws as many numbers as there are entries."""

    def layers(self) -> nn.Module:
        return nn.LSTM(6, UNITS // 2, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)


class Twice(Reads):
    """A penalty on a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        loss = super().training_step((x, *batch[1:]), batch_idx)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


def test_a_gradient_that_is_differentiated_again_is_eager_s() -> None:
    assert_as_eager(Twice, "eager", data=few, max_epochs=1)


class Writes(Reads):
    """Rows are other ones after they were packed; outputs and lengths after they were padded."""

    name = "rows"

    def forward(self, batch: Any) -> Tensor:
        x, lengths = self.first(batch[0])[..., :6], batch[1].clone()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        written = {"rows": x, "data": x.data, "lengths": lengths}.get(self.name)
        if written is not None:
            written.mul_(0).add_(1)
        out, _ = self.rnn(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        padded.mul_(3.0)
        again, _ = pad_packed_sequence(out, batch_first=True) if self.name == "outputs" else (padded, None)
        return self.last(padded.sum(1) + again.sum(1))


class WritesData(Writes):
    name = "data"


class WritesLengths(Writes):
    name = "lengths"


class WritesOutputs(Writes):
    name = "outputs"


@pytest.mark.parametrize("make", [Writes, WritesData, WritesLengths, WritesOutputs])
def test_packed_is_what_was_there_then(make: type[Net]) -> None:
    assert_as_eager(make, data=few, max_epochs=1)


class WritesLast(Writes):
    name = "nothing"


def test_what_was_padded_may_be_written_into() -> None:
    assert_as_eager(WritesLast, data=few, max_epochs=1)


class Unsorted(Sorted):
    """What torch refuses."""

    def forward(self, batch: Any) -> Tensor:
        return self.last(self.rnn(pack_padded_sequence(batch[0].transpose(0, 1), batch[1]))[1][1])


def test_dropout_between_layers_draws_eager_s_numbers() -> None:
    assert_as_eager(Drops, data=few, max_epochs=1)


def test_what_torch_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(RuntimeError, match="sorted in decreasing order"):
        run(Unsorted, data=few)


# ------------------------------------------------------------------ ranks
LAYERS: list[Callable[[], nn.RNNBase]] = [
    lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    lambda: nn.LSTM(3, 4, proj_size=2),
    lambda: nn.GRU(3, 4, bias=False),
    lambda: nn.RNN(3, 4, nonlinearity="relu"),
]


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize(
    ("sort", "batch_first", "split"), [(True, True, (0, 4)), (True, False, (1, 3)), (False, True, (1, 3))]
)
def test_rows_stay_where_they_are(
    make: Callable[[], nn.RNNBase], *, sort: bool, batch_first: bool, split: tuple[int, int]
) -> None:
    """Ranks without a row, with one and with more: no activation moves."""
    torch.manual_seed(1)
    lengths = torch.tensor([2, 5, 1, 3])
    batch = [torch.randn(4, 5, 3), lengths if sort else lengths.sort(descending=True).values]

    def loss(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        out, hidden = layer(pack_padded_sequence(x, lengths, batch_first, enforce_sorted=not sort))
        # a graph does not begin where Python reads, as whether one row is as long as x
        rows = out.rows.padded if isinstance(out, LaterPacked) else pad_packed_sequence(out, batch_first)[0]
        states = hidden if isinstance(hidden, tuple) else (hidden,)
        return rows.square().mean() + sum(state.sin().mean() for state in states)

    one, other = Step(make(), loss), Step(make(), loss)
    other.load_state_dict(one.state_dict())
    optimizers = [torch.optim.SGD(step.parameters(), lr=0.1) for step in (one, other)]
    ranks = SimulatedTraining(one, optimizers[0], split)
    ours = [ranks.train(batch) for _ in range(2)]
    assert ours == pytest.approx(train_eagerly(other, optimizers[1], [batch] * 2), rel=1e-5)
    assert float(largest_difference(one, optimizers[0], other, optimizers[1]).split()[0]) < 1e-5
    (steps,) = [steps for _, _, steps in ranks.graphs]
    assert activation_collectives(steps[0]) == []
    assert steps[0].fallbacks == []


def test_each_rank_draws_for_its_own_rows() -> None:
    def loss(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        return layer(pack_padded_sequence(x, lengths, True, enforce_sorted=False))[1].mean()

    step = Step(nn.GRU(3, 4, 2, dropout=0.5), loss)
    ranks = SimulatedTraining(step, torch.optim.SGD(step.parameters(), lr=0.1), (1, 3))
    ranks.train([torch.randn(4, 5, 3), torch.tensor([2, 5, 1, 3])])
    ((_, _, steps),) = ranks.graphs
    for of_rank in steps:
        (noise,) = of_rank.graph_module.graph.find_nodes(op="call_function", target=PACKED_NOISE)
        assert noise.meta["random"] == ("data_parallel",)
        assert of_rank.fallbacks == []


def on_two(make: type[Net], devices: int, plan: str = "replicate", **settings: Any) -> Any:
    return run(make, SPMDStrategy(data_parallel=plan) if devices > 1 else "auto", devices, **settings)


@pytest.mark.parametrize(
    ("make", "plan"), [(Reads, "zero3"), pytest.param(Stacked, "replicate", marks=pytest.mark.long)]
)
def test_ranks_give_one_device_s_numbers(make: type[Net], plan: str, two_ranks: RankPool) -> None:
    ours = two_ranks.run(on_two, make, 2, plan, data=of_one_length, max_epochs=1)
    assert_compiled(*ours)
    assert_equals_one_device(ours, on_two(make, 1, data=of_one_length, max_epochs=1))


class Ragged(InOrder):
    """Each rank pads to the longest of its own rows."""

    def _loader(self, data: Any, shuffle: bool) -> DataLoader[Any]:
        plain = super()._loader(data, shuffle)
        return DataLoader(data, batch_size=plain.batch_size, sampler=plain.sampler, collate_fn=collate)


def ragged() -> Ragged:
    return Ragged(sequences(3 * ROWS, 12), ROWS)


class Decides(Sorted):
    """Python decides by the batch, on each rank by its own."""

    def forward(self, batch: Any) -> Tensor:
        x, lengths, kinds = batch
        scale = 2.0 if lengths.min().item() > 1 else 1.0
        return super().forward((x[:, : int(lengths.max())] * scale, lengths, kinds))


class DecidesByWeights(Decides):
    """What no rank knows before the step."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) * (2.0 if self.last.weight.sum() > 0 else 1.0)


@pytest.mark.parametrize("make", [Decides, pytest.param(DecidesByWeights, marks=pytest.mark.long)])
def test_each_rank_pads_and_decides_for_itself(two_ranks: RankPool, make: type[Decides]) -> None:
    """In graphs: what follows from a rank's own batch is asked before its step, of weights in it; weights are DDP's."""
    ours = two_ranks.run(run, make, "spmd", 2, data=ragged, max_epochs=1)
    assert_compiled(*ours)
    theirs = two_ranks.run(run, make, "ddp_find_unused_parameters_true", 2, data=ragged, max_epochs=1)
    for mine, its in zip(ours, theirs, strict=True):
        for name, weight in its.weights.items():
            assert torch.allclose(mine.weights[name], weight, rtol=1e-5, atol=1e-7), name


# ------------------------------------------------------------------ the operator
@pytest.mark.parametrize("lost", [False, True])
def test_a_lost_reserve_costs_a_forward_pass_and_no_bit(*, lost: bool) -> None:
    """Weights that were moved in between are the ones whose gradient is computed."""
    torch.manual_seed(1)
    layer = nn.GRU(3, 4)
    x, lengths, state = torch.randn(5, 2, 3), torch.tensor([5, 2]), torch.zeros(1, 2, 4)
    wanted = [False, False, True, True, True, True]
    how = ("GRU", True, 1, False, True, False, False, None, True, False, wanted)
    weights = [w.detach().clone() for w in layer.parameters()]
    out, hidden, reserve = PACKED_RNN(x, lengths, [state], weights, *how)
    weights = [w.clone() for w in weights] if lost else weights
    found = PACKED_RNN_BACKWARD([out, None], x, lengths, [state], weights, reserve, wanted, *how, [])
    eager, _ = pad_packed_sequence(layer(pack_padded_sequence(x, lengths))[0])
    assert torch.equal(eager, out)
    for ours, theirs in zip(found, torch.autograd.grad(eager, list(layer.parameters()), out), strict=True):
        assert torch.equal(ours, theirs)
    assert hidden.shape == (1, 2, 4)
