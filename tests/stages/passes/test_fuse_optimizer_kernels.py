"""Known updates become torch's fused kernels, within rounding; everything else stays as it is."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_spmd.errors import VerificationError
from lightning_spmd.ir.node_info import NodeInfo, Section, TensorSpec
from lightning_spmd.ir.placement import REPLICATE
from lightning_spmd.ir.printer import readable
from lightning_spmd.ir.signature import GraphInput, InputRole, Signature
from lightning_spmd.ir.steps import ShardedStep
from lightning_spmd.ir.verify import stamp_writes
from lightning_spmd.stages.passes import KNOWN_PASSES, PASSES, GraphPass, PassState, run_passes
from lightning_spmd.stages.passes.optimizer import fused_kernels
from tests.helpers.ranks import RankPool
from tests.helpers.simulate import axes_for, run_ranks
from tests.helpers.training import TrainingCase, assert_bitwise, assert_compiled, deviation
from tests.stages.passes.captured_training import assert_bits_stay, captured_training, passed
from tests.stages.passes.test_fuse_optimizer_training import BEFORE, run
from tests.stages.passes.with_passes import targets

JOINED = [*BEFORE, "fuse_optimizer"]
KERNELS = [*JOINED, "use_fused_kernels"]
KNOWN = {
    "adam": "_fused_adam_",
    "adam_foreach": "_fused_adam_",
    "adamw": "_fused_adamw_",
    "adamw_amsgrad_foreach": "_fused_adamw_",
    "sgd": "_fused_sgd_",
    "sgd_dampening": "_fused_sgd_",
    "sgd_foreach": "_fused_sgd_",
    "adagrad": "_fused_adagrad_",
}
UNKNOWN = ("rmsprop_centered", "nadam", "radam", "adamax", "adadelta", "lion")


def _both(pool: RankPool, case: TrainingCase, folder: Path) -> tuple[list[Any], list[Any], str]:
    fused, joined = pool.run(run, case, KERNELS, folder), pool.run(run, case, JOINED)
    assert_compiled(*fused, *joined)
    return fused, joined, max(folder.glob("*_use_fused_kernels.py")).read_text()


@pytest.mark.parametrize("optimizer", KNOWN)
def test_known_updates_become_one_kernel(optimizer: str) -> None:
    scheduler = "cosine" if optimizer == "adagrad" else "one_cycle"
    case = TrainingCase("mlp", optimizer, batches=3, groups=True, eps=1e-5, scheduler=scheduler, dropout=0.0)
    for captured, live in captured_training(case):
        fused, joined = passed(captured, KERNELS), passed(captured, JOINED)
        wanted, got = run_ranks(joined, live), run_ranks(fused, live)
        for want, have in zip((*wanted[0], *wanted[1]), (*got[0], *got[1]), strict=True):
            if isinstance(want, Tensor):
                torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)
        text = readable(fused[0].graph_module, fused[0].signature)
    assert f"aten.{KNOWN[optimizer]}" in text
    assert "_foreach_addcdiv_" not in text
    assert "_foreach_mul_" not in text


@pytest.mark.parametrize("optimizer", UNKNOWN)
def test_other_updates_keep_their_bits(optimizer: str) -> None:
    case = TrainingCase("mlp", optimizer, batches=3, dropout=0.0)
    for step in assert_bits_stay(case, JOINED, "use_fused_kernels"):
        assert "_fused_" not in readable(step.graph_module, step.signature)


def _trained(names: Iterable[str], *short: str) -> list[object]:
    return [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in names]


@pytest.mark.parametrize("optimizer", _trained(KNOWN, "adagrad"))
def test_known_updates_are_one_kernel_and_agree_within_rounding(
    two_ranks: RankPool, optimizer: str, tmp_path: Path
) -> None:
    scheduler = "cosine" if optimizer == "adagrad" else "one_cycle"  # which moves betas and momentum, too
    case = TrainingCase("mlp", optimizer, batches=6, groups=True, eps=1e-5, scheduler=scheduler)
    fused, joined, graph = _both(two_ranks, case, tmp_path)
    assert f"aten.{KNOWN[optimizer]}" in graph
    assert "_foreach_addcdiv_" not in graph
    assert "_foreach_mul_" not in graph
    for ours, theirs in zip(fused, joined, strict=True):
        found = deviation(ours, theirs)
        assert found.loss <= 1e-6, found
        assert found.weights <= 1e-5, found
        assert ours.captures == theirs.captures, "a scheduler must not need a new graph"


@pytest.mark.parametrize("optimizer", _trained(UNKNOWN))
def test_other_updates_stay_as_they_are(two_ranks: RankPool, optimizer: str, tmp_path: Path) -> None:
    fused, joined, graph = _both(two_ranks, TrainingCase("mlp", optimizer, batches=8), tmp_path)
    assert "_fused_" not in graph.replace("_fused_kernels", "")
    for ours, theirs in zip(fused, joined, strict=True):
        assert_bitwise(ours, theirs)


def test_the_pass_is_known_but_no_default_because_it_changes_numerics() -> None:
    assert fused_kernels.PASS in KNOWN_PASSES
    assert fused_kernels.PASS not in PASSES
    assert fused_kernels.PASS.changes_numerics


# ---------------------------------------------------------------- on a small graph
def momentum_step(looked_at: bool = False, strides: tuple[int, int] = (3, 1)) -> ShardedStep:
    """SGD with momentum on two parameters; somebody may read a buffer before it is complete."""
    graph, inputs = fx.Graph(), []
    spec = TensorSpec((4, 3), (3, 1), torch.float32, torch.device("cpu"))
    gradient = TensorSpec((4, 3), strides, torch.float32, torch.device("cpu"))

    def add(role: InputRole, name: str, value: Any) -> fx.Node:
        node = graph.placeholder(f"{role}_{name}")
        node.meta["val"] = value
        key = (name, "momentum_buffer") if role is InputRole.OPTIMIZER_STATE else (name,)
        inputs.append(GraphInput(role, key, name, value, role != InputRole.GRADIENT, (REPLICATE,)))
        return node

    def call(target: Any, value: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        node.meta.update(val=value, info=NodeInfo(Section.OPTIMIZER))
        return node

    p = [add(InputRole.PARAMETER, n, spec) for n in "ab"]
    b = [add(InputRole.OPTIMIZER_STATE, n, spec) for n in "ab"]
    g = [add(InputRole.GRADIENT, n, gradient) for n in "ab"]
    lr, momentum = add(InputRole.HYPER_PARAMETER, "lr", 0.1), add(InputRole.HYPER_PARAMETER, "momentum", 0.9)
    early = call(torch.ops.aten.sum.default, TensorSpec((), (), torch.float32, spec.device), p[0])
    call(torch.ops.aten._foreach_mul_.Scalar, None, b, momentum)
    if looked_at:
        call(torch.ops.aten.sum.default, early.meta["val"], b[0])
    call(torch.ops.aten._foreach_add_.List, None, b, g)
    call(torch.ops.aten._foreach_add_.List, None, p, b, alpha=call(operator.neg, -0.1, lr))
    graph.output(())
    stamp_writes(graph)
    return ShardedStep(fx.GraphModule(nn.Module(), graph), Signature(tuple(inputs)), (axes_for((2, 2))[0],))


def values() -> list[Any]:
    torch.manual_seed(0)
    return [*(torch.randn(4, 3) for _ in range(6)), 0.1, 0.9]


def test_the_kernel_computes_what_the_operators_did() -> None:
    plain, fused, one, other = momentum_step(), momentum_step(), values(), values()
    state = PassState()
    run_passes(fused, [fused_kernels.PASS], state)
    assert [t for t in targets(fused) if "sum" not in t] == ["_fused_sgd_.default"]
    assert state.notes["use_fused_kernels"] == "1 _fused_sgd_"
    plain.graph_module(*one)
    fused.graph_module(*other)
    for want, have in zip(one, other, strict=True):
        torch.testing.assert_close(have, want) if isinstance(want, Tensor) else None


@pytest.mark.parametrize("step", [momentum_step(looked_at=True), momentum_step(strides=(1, 4))], ids=["read", "order"])
def test_an_update_that_the_kernel_cannot_do_exactly_stays(step: ShardedStep) -> None:
    before = targets(step)
    run_passes(step, [fused_kernels.PASS], PassState())
    assert targets(step) == before


def test_the_verifier_catches_a_kernel_before_a_reader_of_the_old_parameter() -> None:
    def break_it(step: ShardedStep, state: PassState) -> None:
        fused_kernels.use_fused_kernels(step, state)
        nodes = list(step.graph_module.graph.nodes)
        kernel = next(n for n in nodes if "_fused_sgd_" in str(n.target))
        next(n for n in nodes if n.op == "call_function").prepend(kernel)

    with pytest.raises(VerificationError, match="'broken' broke the graph"):
        run_passes(momentum_step(), [GraphPass("broken", break_it)], PassState())
