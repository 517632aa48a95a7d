"""Every operator family: the ranks' local programs give what the one-device program gives, forward and backward.

Each case is a function of a batch of rows ``x`` (rows × 6 × 8) and parameters; its output's weighted sum is the loss,
so every gradient is exercised. Worlds of 2, 3 and 4 ranks, even and uneven.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_spmd.ir.steps import CapturedStep
from lightning_spmd.stages.expand import expand
from lightning_spmd.stages.expand.expand import ReplicationWarning
from tests.helpers.simulate import assert_equals_one_device, axes_for, expand_all
from tests.helpers.tiny_capture import capture_function

SPLITS = [(6, 6), (1, 6, 5)]
MORE_SPLITS = [(4, 4, 4), (3, 3, 3, 3), (7, 5)]
ROWS = 12

Case = Callable[[dict[str, Tensor], Tensor, Tensor], Any]
"""(parameters, x, integers) → output"""


def _parameters() -> dict[str, Tensor]:
    torch.manual_seed(1)
    shapes = {
        "square": (8, 8),
        "vector": (8,),
        "table": (10, 8),
        "row": (1, 6, 8),
        "channels": (6,),
        "kernel": (5, 6, 3),
    }
    return {n: torch.randn(s).requires_grad_() for n, s in shapes.items()}


def _attention(p: dict[str, Tensor], x: Tensor, i: Tensor) -> Tensor:
    q, k, v = (F.linear(x, p["square"]).unflatten(-1, (2, 4)).transpose(1, 2) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _masked_attention(p: dict[str, Tensor], x: Tensor, i: Tensor) -> Tensor:
    q = F.linear(x, p["square"]).unflatten(-1, (2, 4)).transpose(1, 2)
    mask = (i > 2)[:, None, None, :] | torch.eye(6, dtype=torch.bool)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def _scatter_rows(p: dict[str, Tensor], x: Tensor, i: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 6, 10)
    out.scatter_(2, i.unsqueeze(-1), 1.0)
    return out @ p["table"] * x


def _assign(p: dict[str, Tensor], x: Tensor, i: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 6, 8)
    out[:, 1:] = x[:, :-1] * p["vector"]
    out[:, 0] = x[:, 0]
    return out


CASES: dict[str, Case] = {
    "arithmetic": lambda p, x, i: (x * p["vector"] + p["row"] - 2 * x) / (1 + x.abs()) + p["vector"].exp(),
    "in_place": lambda p, x, i: (x * p["vector"]).add_(x).mul_(p["row"]).clamp_(-1, 1),
    "where": lambda p, x, i: torch.where(x > 0, x * p["vector"], p["row"]),
    "masked_fill": lambda p, x, i: (x * p["vector"]).masked_fill((i > 4).unsqueeze(-1), 0.5),
    "casts": lambda p, x, i: (x.double() * p["vector"].double()).float(),
    "activations": lambda p, x, i: F.gelu(F.silu(x * p["vector"])) + F.leaky_relu(x) + F.softplus(p["row"] * x),
    "more_activations": lambda p, x, i: (
        F.logsigmoid(x * p["row"]) + F.hardswish(x * p["row"]) + F.softshrink(x * p["row"])
    ),
    "integers": lambda p, x, i: x * p["row"] * (i // 2 + 3 - i % 4)[..., None],
    "fourier": lambda p, x, i: torch.fft.irfft(torch.fft.rfft(x * p["row"], dim=1) * 2, n=6, dim=1),
    "complex_numbers": lambda p, x, i: torch.view_as_real(torch.view_as_complex((x * p["row"]).unflatten(-1, (4, 2)))),
    "distances": lambda p, x, i: torch.cdist(x * p["row"], x + 1) + (x[:, 0, None] - p["table"]).square().mean(),
    "matrices": lambda p, x, i: torch.linalg.inv(x[:, :, :6] * p["row"][..., :6] + 9 * torch.eye(6)),
    "counts": lambda p, x, i: x * p["vector"] * torch.histc(i.float(), 4, 0, 9).sum() / 9,
    "glu": lambda p, x, i: F.glu(x * p["vector"], dim=-1),
    "prelu": lambda p, x, i: F.prelu(x, p["channels"]),
    "linear": lambda p, x, i: F.linear(x, p["square"], p["vector"]),
    "matmul_of_rows": lambda p, x, i: (x * p["vector"]) @ x.transpose(1, 2),
    "einsum": lambda p, x, i: torch.einsum("bij,jk,bik->bi", x, p["square"], x),
    "contraction_of_the_batch": lambda p, x, i: (x[:, 0].t() @ (x[:, 1] * p["vector"])).tanh(),
    "vectors": lambda p, x, i: (x[:, 0] @ p["vector"]).sin(),
    "baddbmm": lambda p, x, i: torch.baddbmm(p["row"][:, :, :6], x * p["vector"], x.transpose(1, 2), beta=0.5),
    "views": lambda p, x, i: (x * p["vector"]).reshape(-1, 8).view(-1, 6, 4, 2).permute(2, 0, 3, 1).flatten(2),
    "batch_behind_time": lambda p, x, i: (
        F.linear(x.transpose(0, 1).reshape(-1, 8), p["square"]).view(6, -1, 8).cumsum(0)
    ),
    "time_major_loss": lambda p, x, i: F.log_softmax((x * p["row"]).transpose(0, 1).flatten(0, 1), -1),
    "split": lambda p, x, i: sum(t * (k + 1) for k, t in enumerate((x * p["vector"]).chunk(4, -1))),
    "unbind": lambda p, x, i: torch.stack((x * p["vector"]).unbind(1)[::-1], dim=2),
    "cat": lambda p, x, i: torch.cat([p["row"].expand(x.shape[0], -1, -1)[:, :1], x, x * p["vector"]], 1),
    "select_and_slice": lambda p, x, i: (x * p["row"])[:, 1:5:2, :3] + (x * p["vector"])[:, 0, None, 2:5],
    "whole_slice": lambda p, x, i: (x * p["row"])[: x.shape[0]],
    "repeat": lambda p, x, i: (x * p["vector"]).repeat(1, 2, 1) * p["row"].repeat(x.shape[0], 2, 1),
    "expand": lambda p, x, i: p["row"].expand(x.shape[0], 6, 8) * x[:, :1].expand(-1, 6, -1),
    "flip_roll": lambda p, x, i: (x * p["row"]).flip(1).roll(2, -1),
    "tril": lambda p, x, i: torch.tril(x * p["row"]),
    "unfold": lambda p, x, i: (x * p["row"]).unfold(2, 4, 2),
    "diagonal": lambda p, x, i: (x * p["row"]).diagonal(dim1=1, dim2=2),
    "as_strided": lambda p, x, i: (x * p["row"]).contiguous().as_strided((x.shape[0], 5, 8), (48, 8, 1), 8),
    "one_row": lambda p, x, i: (x * p["row"])[3] * p["row"][0] + (x * p["row"])[-1],
    "squeeze": lambda p, x, i: (x * p["row"])[:, :1].squeeze(1).unsqueeze(-1),
    "factories": lambda p, x, i: (
        x * torch.arange(8.0) + torch.ones(x.shape[0], 1, 1) + x.new_zeros(x.shape) + p["vector"]
    ),
    "one_hot": lambda p, x, i: F.one_hot(i, 10).float() @ p["table"] * x,
    "scatter_into_zeros": _scatter_rows,
    "assign_into_zeros": _assign,
    "sums": lambda p, x, i: (x * p["row"]).sum(1) + x.mean((1, 2), keepdim=True)[:, 0] + x.amax(1) + x.logsumexp(1),
    "mean_over_everything": lambda p, x, i: (x * p["row"]).mean().exp(),
    "mean_over_the_batch": lambda p, x, i: (x - (x * p["row"]).mean(0)).pow(2),
    "max_over_the_batch": lambda p, x, i: x.detach().amax() * p["vector"] - x.detach().amin(0) * p["row"],
    "variance_over_the_batch": lambda p, x, i: x * (x.detach().var(0) + 1).rsqrt() * p["vector"] + x.detach().std(),
    "norms_of_rows": lambda p, x, i: (
        F.normalize(x * p["row"], dim=-1) + torch.linalg.vector_norm(x, dim=(1, 2))[:, None, None]
    ),
    "norm_of_everything": lambda p, x, i: x * x.detach().norm() * p["vector"] + x.detach().abs().max(),
    "any_all": lambda p, x, i: x * p["vector"] * (x > 2).any() + (x > -9).all(0) * p["row"],
    "softmax": lambda p, x, i: (x * p["row"]).softmax(1) + (x * p["row"]).log_softmax(-1) + x.cumsum(1),
    "sort_topk": lambda p, x, i: (x * p["row"]).topk(3, 1)[0] + (x * p["row"]).sort(1)[0][:, :3] + x.max(1)[0][:, None],
    "max_values": lambda p, x, i: (x * p["row"]).max(2)[0] + x.argmax(-1),
    "embedding": lambda p, x, i: F.embedding(i, p["table"]) * x,
    "padded_embedding": lambda p, x, i: F.embedding(i, p["table"], padding_idx=3) * x,
    "positions": lambda p, x, i: x + F.embedding(torch.arange(6), p["table"]) * x,
    "gather": lambda p, x, i: (x * p["row"]).gather(1, i[:, :, None].clamp(max=5).expand(-1, -1, 8)),
    "index_rows": lambda p, x, i: (x * p["row"])[torch.arange(x.shape[0]), i[:, 0].clamp(max=5)],
    "index_time": lambda p, x, i: (x * p["row"])[:, torch.tensor([0, 3, 3])],
    "index_table": lambda p, x, i: p["table"][i] * x + p["square"][:, i.clamp(max=7)].permute(1, 2, 0),
    "index_select": lambda p, x, i: (x * p["row"]).index_select(1, torch.tensor([0, 2])),
    "index_add_to_table": lambda p, x, i: (
        torch.zeros(10, 8).index_add(0, i.flatten(), (x * p["row"]).flatten(0, 1)).tanh()
    ),
    "scatter_add": lambda p, x, i: torch.zeros_like(x).scatter_add(
        1, i[:, :, None].clamp(max=5).expand(-1, -1, 8), x * p["row"]
    ),
    "bucketize": lambda p, x, i: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])) * p["row"],
    "convolution": lambda p, x, i: F.conv1d(x, p["kernel"], padding=1),
    "transposed_convolution": lambda p, x, i: F.conv_transpose1d(x, p["kernel"].transpose(0, 1)),
    "layer_norm": lambda p, x, i: F.layer_norm(x, (8,), p["vector"], p["vector"]),
    "rms_norm": lambda p, x, i: F.rms_norm(x, (8,), p["vector"]),
    "group_norm": lambda p, x, i: F.group_norm(x, 3, p["channels"], p["channels"]),
    "instance_norm": lambda p, x, i: F.instance_norm(x, weight=p["channels"], bias=p["channels"]),
    "batch_norm_statistics": lambda p, x, i: F.batch_norm(
        5 + x, None, None, p["channels"], p["channels"], training=True
    ),
    "attention": _attention,
    "masked_attention": _masked_attention,
    "cross_entropy": lambda p, x, i: F.cross_entropy(F.linear(x, p["table"]).flatten(0, 1), i.flatten()),
    "cross_entropy_ignore_and_weights": lambda p, x, i: F.cross_entropy(
        F.linear(x, p["table"]).flatten(0, 1), i.flatten(), weight=torch.arange(1.0, 11.0), ignore_index=3
    ),
    "cross_entropy_2d": lambda p, x, i: F.cross_entropy(
        F.linear(x, p["table"]).transpose(1, 2)[..., None], i[..., None]
    ),
    "cross_entropy_smooth": lambda p, x, i: F.cross_entropy(
        F.linear(x, p["table"]).flatten(0, 1), i.flatten(), label_smoothing=0.1, ignore_index=3
    ),
    "cross_entropy_smooth_weights": lambda p, x, i: F.cross_entropy(
        F.linear(x, p["table"]).flatten(0, 1), i.flatten(), label_smoothing=0.1, weight=torch.arange(1.0, 11.0)
    ),
    "cross_entropy_sum": lambda p, x, i: F.cross_entropy(
        F.linear(x, p["table"]).flatten(0, 1), i.flatten(), reduction="sum"
    ),
    "cross_entropy_rows": lambda p, x, i: F.cross_entropy(F.linear(x, p["table"])[:, 0], i[:, 0], reduction="none"),
    "cross_entropy_time_major": lambda p, x, i: F.cross_entropy(
        F.linear(x, p["table"]).transpose(0, 1).reshape(-1, 10), i.t().reshape(-1), ignore_index=3
    ),
    "soft_targets": lambda p, x, i: F.cross_entropy(F.linear(x, p["square"])[:, 0], x[:, 1].softmax(-1)),
    "mse": lambda p, x, i: F.mse_loss(x * p["row"], x) + F.mse_loss(x * p["row"], x, reduction="sum") * 0.01,
    "l1_huber": lambda p, x, i: (
        F.l1_loss(x * p["row"], x) + F.smooth_l1_loss(x * p["row"], x) + F.huber_loss(x * p["row"], x)
    ),
    "bce": lambda p, x, i: (
        F.binary_cross_entropy(torch.sigmoid(x * p["row"]), (x > 0).float())
        + F.binary_cross_entropy_with_logits(x * p["row"], (x > 0).float(), pos_weight=torch.arange(1.0, 9.0))
    ),
    "kl_nll": lambda p, x, i: (
        F.kl_div((x * p["row"]).log_softmax(-1), x.softmax(-1), reduction="batchmean")
        + F.poisson_nll_loss(x * p["row"], x.abs())
    ),
    "margins": lambda p, x, i: (
        F.multi_margin_loss((x * p["row"])[:, 0], i[:, 0].clamp(max=7))
        + F.soft_margin_loss(x * p["row"], (x > 0).float() * 2 - 1)
    ),
    "triplet": lambda p, x, i: F.triplet_margin_loss(x[:, 0] * p["vector"], x[:, 1], x[:, 2]),
    "pooling": lambda p, x, i: (
        F.max_pool1d(x * p["row"], 2) + F.avg_pool1d(x * p["row"], 2) + F.adaptive_avg_pool1d(x, 4)
    ),
    "resize": lambda p, x, i: (
        F.interpolate(x * p["row"], size=11, mode="linear") + F.interpolate(x * p["row"], size=11)
    ),
    "pad": lambda p, x, i: F.pad(x * p["row"], (1, 2)) + F.pad(x * p["row"], (1, 2), mode="reflect"),
    "images": lambda p, x, i: F.max_pool2d((x * p["row"])[:, None], 2) + F.adaptive_avg_pool2d(x[:, None], (3, 4)),
    "image_resize": lambda p, x, i: F.interpolate((x * p["row"])[:, None], scale_factor=2, mode="bilinear"),
    "patches": lambda p, x, i: F.unfold((x * p["row"])[:, None], 2),
    "list_ops": lambda p, x, i: torch._foreach_mul([x, x + 1], [p["row"], x])[1],
    "dropout_off": lambda p, x, i: F.dropout(x * p["row"], 0.0),
}


def captured_case(case: Case) -> tuple[CapturedStep, list[Tensor]]:
    torch.manual_seed(0)
    x, integers = torch.randn(ROWS, 6, 8), torch.randint(0, 10, (ROWS, 6))

    def function(p: dict[str, Tensor], _: dict[str, Tensor], x: Tensor, i: Tensor) -> Any:
        out = case(p, x, i)
        rows = out.shape[:1] == x.shape[:1]
        shape = out.shape[1:] if rows else out.shape
        scale = torch.linspace(0.5, 1.5, shape.numel()).view(shape)
        return (out * scale).sum() / ROWS + 0 * sum(q.sum() for q in p.values()), out

    return capture_function(function, _parameters(), {}, (x, integers))


def run(case: Case, splits: list[tuple[int, ...]]) -> None:
    captured, live = captured_case(case)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicationWarning)
        for split in splits:
            assert_equals_one_device(captured, live, split, floor=1.0)


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_device_computes(name: str) -> None:
    run(CASES[name], SPLITS)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_more_ranks_compute_what_one_device_computes(name: str) -> None:
    run(CASES[name], MORE_SPLITS)


@pytest.mark.parametrize("name", ["views", "attention", "pooling"])
def test_every_rank_finds_the_same_forms_by_itself(name: str) -> None:
    """Simulated ranks learn from the first one which forms all can take, to save time; real ones have nobody to ask."""
    captured, _ = captured_case(CASES[name])
    split = (1, 6, 5)
    for axis, step in zip(axes_for(split), expand_all(captured, split), strict=True):
        alone = expand(captured, (axis,))
        ours, theirs = ([n.format_node() for n in s.graph_module.graph.nodes] for s in (alone, step))
        assert ours == theirs
