"""Step time, exposed communication, MFU and numbers of graphs reach the Trainer's loggers, and change nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import fx, nn
from torch.utils.data import DataLoader

from lightning_spmd import ConfigurationError, StepStatistics
from lightning_spmd.cost.peaks import known_peak
from lightning_spmd.ir.signature import Signature
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.stages.runtime import waiting
from lightning_spmd.stages.runtime.lowering import as_python
from lightning_spmd.stages.runtime.waiting import WaitMeter
from tests.helpers.ranks import RankPool
from tests.helpers.training import QUIET, Result, assert_bitwise, fit
from tests.strategy.hooks.test_overlap import SMALL, deferring
from tests.strategy.hooks.test_pauses import Deep, Six
from tests.strategy.small import Net, Quiet, loader_of, rows, run

ALWAYS = {"spmd/peak_memory_mib", "spmd/step_time_ms"}
OF_GRAPHS = {"spmd/captures", "spmd/graphs", "spmd/mfu", "spmd/samples_per_second"}


def ours(result: Result) -> dict[int, dict[str, float]]:
    """What the callback logged, by step."""
    return {step: row for step, row in result.to_logger if any(key.startswith("spmd/") for key in row)}


def others(result: Result) -> Result:
    """The run without it."""
    rest = [(s, row) for s, row in result.to_logger if not any(key.startswith("spmd/") for key in row)]
    return dataclasses.replace(result, to_logger=rest)


def test_one_device_logs_each_row_and_keeps_its_bits() -> None:
    found = run(Net, callbacks=lambda: [StepStatistics(peak_flops=1e6)], log_every_n_steps=4)
    logged = ours(found)
    assert list(logged) == [3, 7, 11, 15]
    assert set(logged[15]) == ALWAYS | OF_GRAPHS
    last = logged[15]
    assert last["spmd/captures"] == last["spmd/graphs"] == found.captures
    assert last["spmd/samples_per_second"] == pytest.approx(8e3 / last["spmd/step_time_ms"])
    # Forward and backward of the two layers; the first one's input needs no gradient.
    flops = 2 * 8 * (6 * 10 * 2 + 10 * 3 * 3)
    assert last["spmd/mfu"] == pytest.approx(flops / 1e6 / (1e-3 * last["spmd/step_time_ms"]))
    assert_bitwise(others(found), run(Net, log_every_n_steps=4))


def test_a_step_is_all_batches_up_to_an_update() -> None:
    """Two batches a step: twice the rows, and a row of the log where Lightning's own values have one."""
    found = run(Net, callbacks=lambda: [StepStatistics()], accumulate_grad_batches=2, log_every_n_steps=3)
    logged = ours(found)
    assert list(logged) == [2, 5, 8]
    for row in list(logged.values())[1:]:
        assert row["spmd/samples_per_second"] == pytest.approx(16e3 / row["spmd/step_time_ms"])


@pytest.mark.parametrize("strategy", ["spmd", "auto"])
def test_what_runs_eagerly_has_its_time_alone_and_says_so(
    strategy: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_spmd.strategy.notices.step_statistics.tell", said.append)

    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            loss.untyped_storage()  # memory, which a graph has not yet
            return loss

    found = run(Reads, strategy, callbacks=lambda: [StepStatistics()], log_every_n_steps=4)
    of_strategy = {"spmd/captures", "spmd/graphs"} if strategy == "spmd" else set()
    assert set(ours(found)[15]) == ALWAYS | of_strategy
    assert len(said) == 1
    assert "the time of a step and memory, and nothing else" in said[0]


def test_graphs_for_all_sizes_count_the_products_of_each_batch() -> None:
    """Batches of many sizes share a graph; MFU knows which was which."""

    class Loader(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            samples = rows(60)
            sizes = [8, 4, 7, 3, 6, 8, 4, 8, 4, 8]
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            batches = [samples[a : a + n] for a, n in zip(starts, sizes, strict=True)]
            return loader_of([tuple(map(torch.stack, zip(*b, strict=True))) for b in batches], size=None)  # type: ignore

    found = run(Quiet, data=Loader, callbacks=lambda: [StepStatistics(1e6)], max_epochs=1, log_every_n_steps=1)
    assert found.captures == 3
    for step, count in ((7, 8), (8, 4)):
        row = ours(found)[step]
        assert row["spmd/samples_per_second"] == pytest.approx(count * 1e3 / row["spmd/step_time_ms"])
        flops = 2 * count * (6 * 10 * 2 + 10 * 3 * 3)
        assert row["spmd/mfu"] == pytest.approx(flops / 1e6 / (1e-3 * row["spmd/step_time_ms"]))


def test_without_a_logger_it_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"logger=False.*give the Trainer a logger"):
        run(Net, callbacks=lambda: [StepStatistics()], logger=False)


@pytest.mark.parametrize("peak", [0, -1.0, float("inf"), True, "989e12"])
def test_a_peak_is_a_positive_number(peak: Any) -> None:
    with pytest.raises(ConfigurationError, match="peak_flops"):
        StepStatistics(peak_flops=peak)


def test_a_csv_file_has_the_columns(tmp_path: Any) -> None:
    logger = CSVLogger(str(tmp_path))
    settings = {**QUIET, "logger": logger, "max_steps": 6, "log_every_n_steps": 3, "limit_val_batches": 0}
    L.Trainer(strategy="spmd", devices=1, callbacks=[StepStatistics()], **settings).fit(Net(), loader_of(rows()))
    header = Path(logger.experiment.metrics_file_path).read_text().partition("\n")[0]
    for name in ("spmd/step_time_ms", "spmd/mfu", "spmd/captures", "loss_step"):
        assert name in header


def test_known_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA H100 PCIe": None, "NVIDIA H200": 989.4e12,
        "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA L40S": 362e12, "NVIDIA L40": None, "Tesla V100-SXM2-32GB": 15.7e12,
    }  # fmt: skip
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert known_peak(torch.device("cuda"), torch.bfloat16) == peak
    assert known_peak(torch.device("meta"), torch.float32) is None


def test_waits_are_measured_where_somebody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two waits of known length; a graph that nobody asked about is the very one that there was."""
    now = iter(range(100))
    monkeypatch.setattr(waiting, "_WAIT", lambda tensor: next(now) and tensor)
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(2):
        value = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (value,))
    graph.output((value,))
    step = ShardedStep(fx.GraphModule(nn.Module(), graph), Signature((), ()), (object(),))  # type: ignore[arg-type]
    meter = WaitMeter()
    assert meter.timing(as_python) is as_python
    meter.wanted = True
    lowered: Callable[..., Any] = meter.timing(as_python)(step)
    monkeypatch.setattr(meter._clock, "mark", lambda: next(now), raising=False)
    assert meter.take() is None
    next(now)
    lowered(torch.ones(()))
    waits = meter.take()
    assert waits is not None
    assert [end - begin for begin, end in waits] == [2, 2]
    assert meter.take() is None
    meter.is_on = False
    lowered(torch.ones(()))
    assert meter.take() is None


# ---------------------------------------------------------------- several ranks
class Kept(L.Callback):
    """What is known at the end of a fit on a rank, and the table of its start."""

    def __init__(self) -> None:
        self.table: dict[str, str] = {}
        self.deferring = 0
        self.eager = -1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        account = trainer.strategy.accounts._current
        self.table = account.rows(trainer.strategy.mode, trainer.strategy.accounts.ran.executable)
        self.deferring, self.eager = deferring(trainer), account.eager


def of_rank(statistics: bool, pauses: bool = False) -> tuple[Result, Kept]:
    L.seed_everything(5, verbose=False)
    kept = Kept()
    callbacks = [kept, *([StepStatistics()] if statistics else []), *([Six("read", 2)] if pauses else [])]
    data = torch.randn(4 * 16, 32, generator=torch.Generator().manual_seed(4))
    options = {"overlap_iterations": True, "bucket_size_mb": SMALL}
    found, _ = fit(Deep(), DataLoader(data, batch_size=2), options, 2, callbacks, max_epochs=1, log_every_n_steps=8)
    return found, kept


@pytest.mark.matrix
def test_two_ranks_tell_what_communication_costs_and_go_on_overlapping(two_ranks: RankPool) -> None:
    found, plain = two_ranks.run(of_rank, True), two_ranks.run(of_rank, False)
    for (result, kept), (reference, before) in zip(found, plain, strict=True):
        assert kept.deferring == before.deferring > 0
        assert_bitwise(others(result), reference)
        last = ours(result)[15]
        assert 0 < last["spmd/exposed_communication_ms"] < last["spmd/step_time_ms"]
        assert last["spmd/samples_per_second"] == pytest.approx(4e3 / last["spmd/step_time_ms"])
        assert 0 < last["spmd/mfu"] < 1


def test_iterations_that_pause_are_graphs_in_the_table_and_in_the_log(two_ranks: RankPool) -> None:
    """Seen: the table of the start said that such a training runs eagerly, and its end line counted eager steps."""
    (result, kept), _ = two_ranks.run(of_rank, True, True)
    assert result.mode == "compiled"
    assert kept.table["training_step"].startswith("one graph")
    assert kept.eager == 0
    assert {"spmd/mfu", "spmd/exposed_communication_ms"} <= set(ours(result)[15])
