"""The first run copies what lies otherwise than it is written, and leaves alone what kernels keep for themselves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx

from lightning_spmd.ir.guards import Guards
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.signature import GraphInput, InputRole, Signature
from lightning_spmd.ir.steps import CapturedStep, IterationGraphs, ShardedStep
from lightning_spmd.stages.runtime.executor import Executable
from lightning_spmd.stages.runtime.trial_runs.first_run import LayoutCheck
from lightning_spmd.stages.runtime.trial_runs.trial_runs import FirstRunError


def _doubled(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[fx.GraphModule, fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    double = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
    double.meta["val"] = TensorSpec(shape, stride, torch.float32, torch.device("cpu"))
    graph.output((double,))
    return fx.GraphModule(torch.nn.Module(), graph), double


def test_what_lies_otherwise_is_copied() -> None:
    module, double = _doubled((2, 3), (1, 2))
    check = LayoutCheck(module)
    (value,) = check.run(torch.ones(2, 3))
    assert check.repairs == [double]
    assert value.stride() == (1, 2)


def test_what_has_another_shape_is_opaque() -> None:
    """CuDNN keeps bytes for its backward whose number torch's shape functions say is zero."""
    module, _ = _doubled((0,), (1,))
    check = LayoutCheck(module)
    (value,) = check.run(torch.ones(2, 3))
    assert check.repairs == []
    assert value.shape == (2, 3)


ROLES = [InputRole.BUFFER, InputRole.OPTIMIZER_STATE, InputRole.PARAMETER]


def _executable(fail: Callable[[Tensor], Any], *, after_update: bool) -> tuple[Executable, list[Tensor]]:
    """A graph that counts twice, draws, perhaps updates, and fails."""
    live = [torch.zeros(3), torch.zeros(()), torch.zeros(3)]
    graph = fx.Graph()
    buffer, counter, parameter = (graph.placeholder(role.value) for role in ROLES)
    for node in (buffer, counter, *([parameter] if after_update else [])):
        graph.call_function(torch.ops.aten.add_.Tensor, (node, 1.0))
    graph.call_function(torch.ops.aten.rand.default, ([2],))
    graph.call_function(fail, (parameter,))
    graph.output(())
    entries = [
        GraphInput(role, (role.value,), role.value, TensorSpec.of(tensor), True)
        for role, tensor in zip(ROLES, live, strict=True)
    ]
    module, signature = fx.GraphModule(torch.nn.Module(), graph), Signature(tuple(entries), ())
    state = SimpleNamespace(readers=lambda *_: [lambda t=t: t for t in live], writers=lambda *_: [], streams=None)
    graphs = IterationGraphs(main=ShardedStep(module, signature, ()))
    return Executable(CapturedStep(module, signature, Guards()), graphs, cast(Any, state)), live


def _fail(_: Tensor) -> None:
    raise RuntimeError("no kernel")


def _fail_on_device(_: Tensor) -> None:
    raise torch.AcceleratorError("the device is gone")


def test_what_a_failed_run_counted_and_drew_is_undone() -> None:
    executable, live = _executable(_fail, after_update=False)
    random_state = torch.get_rng_state()
    with pytest.raises(FirstRunError, match="no kernel"):
        executable.run([])
    assert [t.sum().item() for t in live] == [0, 0, 0]
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("fail", [_fail, _fail_on_device])
def test_what_cannot_be_undone_is_no_reason_to_go_on_eagerly(fail: Callable[[Tensor], Any]) -> None:
    executable, _ = _executable(fail, after_update=fail is _fail)
    with pytest.raises(RuntimeError) as caught:
        executable.run([])
    assert not isinstance(caught.value, FirstRunError)
