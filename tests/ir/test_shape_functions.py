"""Shapes that torch's own functions do not know are those of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spmd import _private_api as private
from lightning_spmd.ir.operators.shape_functions import empty_result

aten = torch.ops.aten
ENDS = torch.tensor([3, 5, 8], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("left", "right", "ends"),
    [
        ((8, 16), (3, 16, 24), ENDS),
        ((3, 8, 16), (3, 16, 24), None),
        ((16, 8), (8, 24), ENDS),
        ((3, 16, 16), (16, 8), ENDS),
    ],
    ids=["tokens", "batched", "gradient", "columns"],
)
def test_a_grouped_product_is_laid_out_as_its_kernel_does(
    dtype: torch.dtype, left: tuple[int, ...], right: tuple[int, ...], ends: Tensor | None
) -> None:
    a, b = torch.zeros(left, dtype=dtype), torch.zeros(right, dtype=dtype)
    wanted = torch._grouped_mm(a, b, offs=ends)
    found = empty_result(aten._grouped_mm.default, (a, b), {"offs": ends})
    assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


def test_a_grouped_product_of_what_does_not_fit_has_no_shape() -> None:
    with pytest.raises(RuntimeError, match=r"grouped product of \[8, 16\] and \[3, 8, 8\]"):
        empty_result(aten._grouped_mm.default, (torch.zeros(8, 16), torch.zeros(3, 8, 8), ENDS), {})


@pytest.mark.parametrize("first", [True, False])
def test_cudnns_results_have_time_outermost_and_hand_on_packed_weights(first: bool) -> None:
    rows, time, width = 4, 6, 8
    sizes = (rows, time, width) if first else (time, rows, width)
    with private.FakeTensorMode():
        x, state = torch.empty(sizes), torch.empty(1, rows, width)
        weights = [torch.empty(4 * width, width), torch.empty(4 * width, width)]
        options = (2, width, 0, 1, first, 0.0, True, False, [], None)
        output, *_, packed = empty_result(aten._cudnn_rnn.default, (x, weights, 2, None, state, state, *options), {})
        arguments = (x, weights, 2, packed, state, state, output, output, state, state, *options)
        reserve = torch.empty(0, dtype=torch.uint8)
        gradients = empty_result(aten._cudnn_rnn_backward.default, (*arguments, reserve, [True] * 4), {})
    strides = (width, rows * width, 1) if first else (rows * width, width, 1)
    assert packed.numel() == sum(w.numel() for w in weights)
    assert (output.shape, output.stride()) == (sizes, strides)
    assert (gradients[0].shape, gradients[0].stride()) == (sizes, strides)
    assert [g.shape for g in gradients[3]] == [w.shape for w in weights]


@pytest.mark.parametrize("name", ["index_put", "index_put_", "_unsafe_index_put"])
@pytest.mark.parametrize("shape", [(3, 4), (4,), (3, 1), (2, 4), (1, 3, 4), (4, 3)], ids=str)
def test_values_are_put_where_the_kernel_puts_them(name: str, shape: tuple[int, ...]) -> None:
    put, indices = getattr(aten, name).default, [torch.tensor([0, 2, 4])]

    def told(call: Callable[..., Tensor]) -> Any:
        try:
            return call(put, (torch.zeros(5, 4), indices, torch.zeros(shape)), {}).shape
        except RuntimeError as error:
            return str(error)

    wanted = told(lambda op, args, kwargs: op(*args, **kwargs))
    with private.FakeTensorMode(allow_non_fake_inputs=True):
        assert told(empty_result) == wanted


TRANSPOSED, CONTIGUOUS, LOSS = torch.zeros(5, 3, 4).transpose(0, 1), torch.zeros(3, 5, 4), torch.zeros(())
MEAN = torch.zeros(3, 1, 1)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("_log_softmax_backward_data", (TRANSPOSED, CONTIGUOUS, -1, torch.float32)),
        ("mse_loss_backward", (LOSS, TRANSPOSED, TRANSPOSED, 1)),
        ("smooth_l1_loss_backward", (LOSS, TRANSPOSED, TRANSPOSED, 1, 1.0)),
        ("huber_loss_backward", (LOSS, TRANSPOSED, TRANSPOSED, 1, 1.0)),
        ("log_sigmoid_forward", (TRANSPOSED,)),
        ("native_layer_norm_backward", (TRANSPOSED, TRANSPOSED, [5, 4], MEAN, MEAN, None, None, [True, False, False])),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_results_that_are_contiguous_whatever_the_operands_are(name: str, args: tuple[Any, ...]) -> None:
    op = getattr(aten, name).default

    def strides(made: Any) -> list[Any]:
        return [None if t is None else t.stride() for t in (made if isinstance(made, tuple) else [made])]

    wanted = strides(op(*args))
    with private.FakeTensorMode(allow_non_fake_inputs=True):
        assert strides(empty_result(op, args, {})) == wanted


@pytest.mark.parametrize(
    "name", ["upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"]
)
def test_resampled_batches_lie_as_those_of_kernels(name: str) -> None:
    op = getattr(aten, name).default
    dims = {"1": 1, "2": 2, "3": 3}[name[-2]]
    plain = torch.zeros(2, 3, *(5, 6, 7)[:dims])
    last = plain.movedim(1, -1).contiguous().movedim(-1, 1)
    for x in (plain, last, plain[:0], plain[..., 1:3], plain[:1].expand_as(plain), plain.double(), plain.bfloat16()):
        for size in ((9, 4, 8)[:dims], (5, 6, 7)[:dims]):
            args = (x, size, False, *(None,) * dims)
            wanted = op(*args)
            with private.FakeTensorMode(allow_non_fake_inputs=True):
                for found in (empty_result(op, args, {}), empty_result(getattr(aten, name).vec, (*args[:3], None), {})):
                    assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    with private.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="no size may be 0"):
        empty_result(op, (plain[:, :, :0], (4, 4, 4)[:dims], False, *(None,) * dims), {})
