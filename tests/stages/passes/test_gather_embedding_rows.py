"""Rows of an embedding's gradient are gathered where the table would be dearer to reduce."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_spmd import SPMDStrategy
from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.node_info import spec_of
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import collectives
from lightning_spmd.stages.passes import PassState, bucket_collectives, gather_embedding_rows, run_passes
from lightning_spmd.stages.passes.contract import GraphPass
from tests.helpers.models import Block
from tests.helpers.ranks import RankPool
from tests.helpers.simulate import expand_all, run_global, run_ranks
from tests.helpers.tiny_capture import capture_module
from tests.helpers.training import InOrder, Result, _different, assert_equals_one_device, deviation, fit
from tests.stages.expand.test_models import sgd

PASS = gather_embedding_rows.PASS
WORDS = 2048
aten = torch.ops.aten
functional = torch.ops._c10d_functional


class Table(nn.Module):
    """Rows of a table through element-wise operators: their gradients are the same bits on one rank and on several."""

    def __init__(self, words: int = WORDS, width: int = 16, *, first: bool = True, padding: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=padding)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.words(x if self.first else x.t())) * torch.linspace(0.1, 3.0, self.words.embedding_dim)


class WordsGPT(nn.Module):
    """A transformer block over a vocabulary that is large for its batches; the head may be the table."""

    def __init__(self, *, tied: bool = False, words: int = WORDS) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, 32), nn.Embedding(64, 32)
        self.block, self.head = Block(32, 2), nn.Linear(32, words, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.block(h))


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


def next_word(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def tokens(rows: int = 6, words: int = WORDS, seed: int = 0) -> Tensor:
    """Few different words, so that every rank looks up the same ones several times."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(words, generator=generator)[:9]
    return chosen[torch.randint(0, len(chosen), (rows, 13), generator=generator)]


def captured(model: nn.Module, loss: Any = mean, x: Tensor | None = None, update: Any = sgd) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return capture_module(model, loss, (tokens() if x is None else x,), update=update)


def gathered(step: Any, split: tuple[int, ...] = (3, 3), **options: Any) -> list[ShardedStep]:
    return [run_passes(s, [PASS], PassState(**options)) for s in expand_all(step, split)]


def gathers(step: ShardedStep) -> list[fx.Node]:
    return [n for n in collectives(step.graph_module.graph) if "all_gather" in str(n.target)]


@pytest.mark.parametrize("padding", [None, 5])
@pytest.mark.parametrize("split", [(3, 3), (2, 2, 2)], ids=str)
def test_the_table_gets_the_bits_of_one_device_which_reducing_it_does_not_give(split: Any, padding: Any) -> None:
    step, live = captured(Table(padding=padding))
    _, (want, *_) = run_global(step, live)
    _, (got, *_) = run_ranks(gathered(step, split), live)
    _, (reduced, *_) = run_ranks(expand_all(step, split), live)
    assert torch.equal(want, got)
    assert not torch.equal(want, reduced), "the case shows nothing: the sums have one order only"
    torch.testing.assert_close(reduced, want, rtol=1e-6, atol=1e-7)


def test_rows_and_indices_travel_instead_of_the_table() -> None:
    step, _ = captured(Table())
    (plain, *_), (after, *_) = expand_all(step, (3, 3)), gathered(step)
    assert {tuple(spec_of(n).shape) for n in gathers(after)} == {(2 * 3 * 13, 16), (2 * 3 * 13,)}
    moved = [sum(spec_of(n).bytes for n in collectives(s.graph_module.graph)) for s in (plain, after)]
    assert moved[0] - WORDS * 16 * 4 == moved[1] - 2 * 3 * 13 * (16 * 4 + 8)
    assert sum(1 for n in after.graph_module.graph.nodes if n.target is aten.embedding_dense_backward.default) == 1


def test_indices_start_at_once_and_the_table_is_made_where_it_is_read() -> None:
    step, _ = captured(WordsGPT(), next_word)
    (after, *_) = [run_passes(s, [bucket_collectives.PASS], PassState()) for s in gathered(step)]
    order = {node: i for i, node in enumerate(after.graph_module.graph.nodes)}
    indices, rows = sorted(gathers(after), key=order.__getitem__)
    assert spec_of(indices).dtype == torch.int64
    first = next(n for n in order if n.target is aten.embedding.default)
    assert order[indices] < order[first]
    made = next(n for n in order if n.target is aten.embedding_dense_backward.default and WORDS in n.args)
    assert order[rows] < order[made]
    assert made.next.target is torch.ops.aten._foreach_add_.List or made.next.target is functional.wait_tensor.default


@pytest.mark.parametrize("split", [(3, 3), (2, 2, 2)], ids=str)
def test_a_transformer_trains_like_one_device(split: Any) -> None:
    step, live = captured(WordsGPT(), next_word)
    state = PassState()
    passes = [PASS, bucket_collectives.PASS]
    steps = [run_passes(s, passes, state) for s in expand_all(step, split)]
    assert len(gathers(steps[0])) == 2, "rows of the position embedding are partial sums"
    assert "rows gathered" in state.notes["gather_embedding_rows"]
    (loss, *_), weights = run_global(step, live)
    (got_loss, *_), got = run_ranks(steps, live)
    torch.testing.assert_close(got_loss, loss, rtol=1e-6, atol=0)
    for a, b in zip(got, weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


CONDITIONS: dict[str, tuple[Any, Any, Any, Any]] = {
    "tied to the head": (lambda: WordsGPT(tied=True), next_word, None, (3, 3)),
    "small vocabulary": (lambda: Table(64), mean, tokens(words=64), (3, 3)),
    "uneven ranks": (Table, mean, None, (2, 4)),
    "many ranks": (lambda: Table(512), mean, tokens(128, 512), (1,) * 128),
}


@pytest.mark.parametrize("case", CONDITIONS)
def test_the_table_is_reduced_where_gathering_is_wrong_or_dearer(case: str) -> None:
    make, loss, x, split = CONDITIONS[case]
    step, _ = captured(make(), loss, x)
    (before, *_) = expand_all(step, split)
    names = [str(n) for n in before.graph_module.graph.nodes]
    state = PassState()
    gather_embedding_rows.gather_embedding_rows(before, state)
    assert [str(n) for n in before.graph_module.graph.nodes] == names
    assert state.notes == {}


def test_gradients_that_leave_unreduced_are_left_alone() -> None:
    step, _ = captured(Table(), update=None)
    assert [n for s in gathered(step) for n in gathers(s)] == []


def test_batches_split_along_the_second_dimension_are_right_too() -> None:
    """Sequence first: ranks' rows interleave in the global order, so only rounding differs."""
    step, live = captured(Table(first=False))
    steps = gathered(step)
    assert len(gathers(steps[0])) == 2
    _, (want, *_) = run_global(step, live)
    _, (got, *_) = run_ranks(steps, live)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_a_narrower_reduction_makes_the_table_cheaper() -> None:
    x = tokens(40)
    step, _ = captured(Table(1024, 8), mean, x)
    assert len(gathers(gathered(step, (20, 20))[0])) == 2
    assert gathers(gathered(step, (20, 20), reduce_dtype="bf16")[0]) == []


def test_the_verifier_catches_rows_that_are_not_waited_for() -> None:
    def forget(step: ShardedStep, state: PassState) -> None:
        gather_embedding_rows.gather_embedding_rows(step, state)
        (wait,) = gathers(step)[-1].users
        wait.replace_all_uses_with(gathers(step)[-1])
        step.graph_module.graph.erase_node(wait)

    (step, *_) = expand_all(captured(Table())[0], (3, 3))
    with pytest.raises(VerificationError, match="'forget' broke the graph"):
        run_passes(step, [GraphPass("forget", forget)], PassState())


# ---------------------------------------------------------------- through the Trainer
class WordsModule(L.LightningModule):
    """Trains WordsGPT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = WordsGPT()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = next_word(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)


def _train(ranks: int, passes: list[str] | None = None, folder: str | None = None) -> Result:
    data = InOrder(list(tokens(8 * 6, seed=4)), 8)
    strategy: Any = "auto" if ranks == 1 else SPMDStrategy(passes=passes, dump_dir=folder)
    return fit(
        WordsModule(), data, strategy, ranks, max_steps=6, accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )[0]  # fmt: skip


def test_training_on_two_ranks_equals_one_device_and_hardly_differs_from_reducing(
    two_ranks: RankPool, tmp_path: Any
) -> None:
    ours = two_ranks.run(_train, 2, None, str(tmp_path))
    assert any("all_gather_into_tensor" in f.read_text() for f in tmp_path.glob("*gather_embedding_rows.py"))
    assert_equals_one_device(ours, _train(1))
    reduced = two_ranks.run(_train, 2, ["bucket_collectives"])
    found = deviation(ours[0], reduced[0])
    assert found.loss < 1e-5, found
    assert found.weights < 1e-4, found
    assert _different(ours[0].weights, ours[1].weights) == []
