"""A pass list is checked before anything runs, and a broken pass is named."""

from __future__ import annotations

import pytest

from lightning_spmd import SPMDStrategy
from lightning_spmd.errors import ConfigurationError, VerificationError
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import collectives
from lightning_spmd.stages.passes import PASSES, GraphPass, PassState, check_order, run_passes, select
from tests.helpers.simulate import expand_all
from tests.stages.expand.test_models import captured_model


def _nothing(_: ShardedStep, __: PassState) -> None:
    pass


def test_a_pass_whose_requirement_is_missing_is_named() -> None:
    late = GraphPass("second", _nothing, requires=frozenset({"first"}))
    with pytest.raises(ConfigurationError, match=r"'second' requires \['first'\]"):
        check_order([late])
    check_order([GraphPass("first", _nothing), late])


def test_a_pass_that_must_come_after_another_is_named() -> None:
    first = GraphPass("first", _nothing, after=frozenset({"second"}))
    with pytest.raises(ConfigurationError, match=r"'first' must come after \['second'\]"):
        check_order([first, GraphPass("second", _nothing)])
    check_order([first])


def test_an_unknown_pass_name_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown pass 'fuse'.*bucket_collectives"):
        SPMDStrategy(passes=["fuse"])
    with pytest.raises(ConfigurationError, match="twice"):
        select([PASSES[0], PASSES[0].name], PASSES)


def test_a_bucket_size_that_is_no_size_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="bucket_size_mb=0"):
        SPMDStrategy(bucket_size_mb=0)


def test_a_pass_that_reads_a_gradient_before_it_is_reduced_is_caught_and_named() -> None:
    def forget_to_wait(step: ShardedStep, _: PassState) -> None:
        started = next(iter(collectives(step.graph_module.graph)))
        (wait,) = started.users
        wait.replace_all_uses_with(started)
        step.graph_module.graph.erase_node(wait)

    captured, _ = captured_model("mlp")
    (step, *_) = expand_all(captured, (3, 3))
    with pytest.raises(VerificationError, match="'forget' broke the graph"):
        run_passes(step, [GraphPass("forget", forget_to_wait)], PassState())


@pytest.mark.parametrize("graph_pass", PASSES, ids=lambda p: p.name)
def test_contracts_name_passes_that_there_are(graph_pass: GraphPass) -> None:
    assert graph_pass.requires | graph_pass.after <= {p.name for p in PASSES}
