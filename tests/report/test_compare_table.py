"""The table of a comparison from numbers written by hand."""

from __future__ import annotations

import json

import pytest

from lightning_spmd.errors import ConfigurationError
from lightning_spmd.report.compare_table import Comparison
from lightning_spmd.report.measure import Amount, SideResult
from lightning_spmd.report.sides import NAMES, side_of, spmd_side
from lightning_spmd.strategy.spmd_strategy import SPMDStrategy


def side(name: str, *milliseconds: float, **settings: object) -> SideResult:
    return SideResult(name, [m / 1e3 for m in milliseconds], rows=8, **settings)  # type: ignore[arg-type]


DDP = side("ddp", 10, 20, 30, memory=[2**20, 3 * 2**20], losses=[2.0, 2.0], sent=[2.0**20])
SPMD = side("spmd", 5, 10, 15, memory=[2**20], losses=[2.5], notes=["runs [this] compiled"])
BROKEN = SideResult("fsdp2", reason="ValueError: no [layers]")


def comparison(*sides: SideResult, spmd: tuple[str, ...] = ("spmd",)) -> Comparison:
    return Comparison(list(sides), Amount(3, 1, 1), 2, spmd)


def cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.split("│")[1:2] and line.split("│")[1].strip() == name)
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_ratios_are_to_the_first_and_to_ours() -> None:
    row = comparison(DDP, SPMD).row(SPMD)
    assert (row["median_seconds"], row["ratio_to_first"], row["ratio_to_spmd"]) == (0.01, 0.5, 1.0)
    assert row["samples_per_second"] == pytest.approx(800)
    assert row["loss_difference"] == pytest.approx(0.25)
    assert comparison(DDP, SPMD).row(DDP)["ratio_to_spmd"] == 2.0
    assert comparison(DDP, SPMD).row(DDP)["peak_memory_bytes"] == 2 * 2**20  # the median round


def test_a_side_that_could_not_run_is_nobodys_measure() -> None:
    found = comparison(BROKEN, SPMD, DDP)
    assert found.first is SPMD
    assert found.row(BROKEN) == {"name": "fsdp2", "reason": "ValueError: no [layers]", "notes": []}
    text = found.table_text()
    assert cells(text, "fsdp2")[1] == "-"
    assert "fsdp2: did not run: ValueError: no [layers]" in text
    assert "spmd: runs [this] compiled" in text
    assert comparison(BROKEN).first is None
    assert "÷ first" in comparison(BROKEN).table_text()


def test_columns_nobody_has_numbers_for_are_left_out() -> None:
    text = comparison(DDP, SPMD).table_text()
    assert "2 ranks, 1 rounds of 3 steps" in text
    assert cells(text, "ddp") == ["ddp", "20.0", "12.0-28.0", "1.000", "2.000", "400.0", "2.0", "1.00", "2", "0.0e+00"]
    assert cells(text, "spmd") == ["spmd", "10.0", "6.0-14.0", "0.500", "1.000", "800.0", "1.0", "-", "2.5", "2.5e-01"]
    alone = comparison(side("auto", 10, 10), spmd=()).table_text()
    assert cells(alone, "auto") == ["auto", "10.0", "10.0-10.0", "1.000", "800.0", "-", "-", "-"]
    assert "sent MiB" not in alone


def test_json_holds_what_the_table_holds() -> None:
    found = json.loads(comparison(DDP, SPMD, BROKEN).json_text())
    assert (found["ranks"], found["steps"], found["warmup"], found["rounds"]) == (2, 3, 1, 1)
    assert [s["name"] for s in found["sides"]] == ["ddp", "spmd", "fsdp2"]
    assert found["sides"][0]["seconds"] == [0.01, 0.02, 0.03]
    assert found["sides"][0]["sent_bytes_per_step"] == 2**20


@pytest.mark.parametrize(
    ("settings", "message"), [((1, 1, 1), "--steps 1"), ((2, 0, 1), "--warmup 0"), ((2, 1, 0), "--rounds 0")]
)
def test_a_plan_that_is_too_small_is_named(settings: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}: give at least"):
        Amount(*settings)
    assert Amount(5, 2, 1).batches == 8


def test_every_side_makes_its_strategy_anew() -> None:
    for name in NAMES:
        made = side_of(name)
        assert made.name == name
        assert made.strategy() is not made.strategy() or name == "auto"
    assert side_of("ddp:3").strategy()._ddp_kwargs == {"bucket_cap_mb": 3.0, "gradient_as_bucket_view": True}
    strategy = spmd_side("ours", {"data_parallel": "zero2"}).strategy()
    assert isinstance(strategy, SPMDStrategy)
    assert strategy.parallel_options.data_parallel == "zero2"


@pytest.mark.parametrize(
    ("name", "message"),
    [("dpd", "Did you mean 'ddp'"), ("ddp:0", "a number above 0"), ("ddp:many", "a number above 0")],
)
def test_a_wrong_side_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        side_of(name)
    with pytest.raises(
        ConfigurationError, match="SPMDStrategy has no option 'bucket'; .*Did you mean 'bucket_size_mb'"
    ):
        spmd_side("ours", {"bucket": 3})
