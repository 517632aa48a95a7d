"""A call that is known gives what FakeTensorMode gives: shapes, memory, storages, the operand itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir import known_results
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.stages.capture.record.fake_calls import FakeCalls, flat
from tests.operators.cases import operators, samples


class AskedTwice(private.TorchDispatchMode):
    """Compares what a call gives by FakeTensorMode, at its first and at its second time."""

    def __init__(self, calls: FakeCalls) -> None:
        super().__init__()
        self.calls = calls
        self.known = 0
        self.different: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        expected = func(*args, **kwargs)
        given = [a for a in flat(args, kwargs) if isinstance(a, Tensor)]
        first = self.calls.make(func, args, kwargs)
        before = len(known_results._results)
        again = self.calls.make(func, args, kwargs)
        self.known += len(known_results._results) == before
        told = [described(out, given) for out in (expected, first, again)]
        if told[0] != told[1] or told[0] != told[2]:
            self.different.append(f"{func}: {told[0]}, {told[1]}, {told[2]}")
        return expected


def described(out: Any, given: list[Tensor]) -> list[Any]:
    """All that may be asked of what a call gives."""
    found: list[Any] = []
    for value in flat(out):
        if not isinstance(value, Tensor):
            found.append(value)
            continue
        same = next((i for i, t in enumerate(given) if t is value), None)
        storage = next((i for i, t in enumerate(given) if private.storage_of(t) == private.storage_of(value)), None)
        lies = (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.is_neg())
        found.append((type(value), same, storage, lies, value.requires_grad, value.is_inference()))
    return found


def asked_twice(run: Callable[..., Any], tensors: list[Tensor], around: Any) -> AskedTwice:
    """Run something on fake tensors, every call of it twice."""
    mode = private.FakeTensorMode(allow_non_fake_inputs=True)
    asked = AskedTwice(FakeCalls(mode))
    fakes = [mode.from_tensor(t, static_shapes=True) for t in tensors]
    with around, mode, asked:
        run(fakes)
    return asked


def _every_operator() -> Iterator[tuple[str, Any]]:
    for name, op in operators().items():
        for in_place in (False, True):
            for sample in samples(op, 2, in_place=in_place):
                yield f"{name}{'_' if in_place else ''}", sample


@pytest.mark.long
@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_every_operator_known_or_not(around: Any) -> None:
    different, known = [], 0
    for name, sample in _every_operator():
        try:
            asked = asked_twice(sample.call, [t.clone() for t in sample.tensors], around())
        except Exception:  # its shape depends on data, or torch has no shape function for it
            continue
        known += asked.known
        different += [f"{name}: {line}" for line in asked.different]
    assert known > 1000
    assert not different, "\n".join(different)


def _calls(tensors: list[Tensor]) -> None:
    x, weight = tensors
    y = x.t()
    y = y[1:, ::2]
    for piece in y.split(2):
        piece.mul_(2).add_(1)
    y = x.expand(3, *x.shape)[1].unsqueeze(0).view(-1)
    torch._foreach_add_([x, weight], 1.0)
    torch.nn.functional.layer_norm(x, x.shape[1:])
    torch.ops.aten._unsafe_view(y, [y.numel()])
    x.unbind(1)
    torch.unsafe_split(x, 2)
    x[[2, 0], :, None]
    torch.nn.functional.batch_norm(x, torch.zeros(6), torch.ones(6), training=True)
    (x @ weight).detach().add_(y.sum())
    x.transpose_(0, 1)
    x.squeeze_()
    x.as_strided((2, 2), (1, 3), 1)
    torch.add(x, 1, out=torch.empty(0))
    torch.view_as_complex(torch.zeros(4, 2)).conj().imag.clone()
    torch.full((3,), 2).to(torch.float16)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_calls_of_every_kind_known_or_not(around: Any) -> None:
    tensors = [torch.arange(24.0).view(4, 6), torch.ones(6, 3)]
    asked = asked_twice(_calls, tensors, around())
    assert not asked.different
    assert asked.known > 20


def test_what_numbers_give_keeps_its_value_wherever_else_it_was_asked() -> None:
    mode = private.FakeTensorMode(allow_non_fake_inputs=True)
    call = torch.ops.aten.div.Tensor_mode, (16, 8), {"rounding_mode": "trunc"}
    known_results.remember(known_results.key_of(*call, lambda value: value), TensorSpec.of(torch.tensor(2)))
    with mode:
        assert int(FakeCalls(mode).make(*call)) == 2


def test_default_dtype_and_changed_shapes_are_seen() -> None:
    mode = private.FakeTensorMode()
    calls, divide = FakeCalls(mode), torch.ops.aten.div.Tensor
    with mode, torch.no_grad():
        whole = torch.ones(2, 3, dtype=torch.int64)
        assert calls.make(divide, (whole, 2), {}).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert calls.make(divide, (whole, 2), {}).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert calls.make(divide, (whole, 2), {}).dtype == torch.float32
        assert calls.make(divide, (whole.t_(), 2), {}).shape == (3, 2)


def test_rows_that_a_mask_chooses_are_not_those_that_numbers_choose() -> None:
    mode = private.FakeTensorMode()
    calls, index = FakeCalls(mode), torch.ops.aten.index.Tensor
    with mode, torch.no_grad():
        rows = torch.ones(4, 3)
        for _ in range(2):
            assert calls.make(index, (rows, [torch.zeros(2, dtype=torch.int64)]), {}).shape == (2, 3)
            with pytest.raises(private.DynamicOutputShapeException):
                calls.make(index, (rows, [torch.ones(4, dtype=torch.bool)]), {})


def test_operators_of_others_are_asked_each_time() -> None:
    sizes = iter([2, 5])
    library = torch.library.Library("known_results_test", "DEF")
    library.define("odd(Tensor x) -> Tensor")
    library.impl("odd", lambda x: x.new_empty(next(sizes)), "Meta")
    mode = private.FakeTensorMode()
    calls = FakeCalls(mode)
    with mode, torch.no_grad():
        odd = torch.ops.known_results_test.odd.default
        found = [calls.make(odd, (torch.ones(3),), {}).shape[0] for _ in range(2)]
    assert found == [2, 5]


def test_a_copy_of_a_fake_tensor_is_of_the_same_mode() -> None:
    with private.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state: Any = torch.zeros(3)
        copied = copy.deepcopy(state)
    assert copied.fake_mode is state.fake_mode is mode
    assert copied is not state
