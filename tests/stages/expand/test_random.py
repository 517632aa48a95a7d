"""Random numbers: masks of split tensors are drawn per rank and say so; the rest is drawn alike everywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_spmd.ir.node_info import TensorSpec
from tests.helpers.activations import activation_collectives
from tests.helpers.simulate import expand_all
from tests.helpers.tiny_capture import capture_function

SPLIT = ("data_parallel",)


def _random_nodes(function: object) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    parameters = {"w": torch.ones(8).requires_grad_()}
    captured, _ = capture_function(lambda p, _, x: function(p, x), parameters, {}, [torch.randn(6, 8)])
    (step, *_) = expand_all(captured, (1, 3, 2))
    assert activation_collectives(step) == []
    nodes = [n for n in step.graph_module.graph.nodes if "random" in n.meta]
    return [(n.meta["random"], n.meta["val"].shape) for n in nodes if isinstance(n.meta["val"], TensorSpec)]


def test_a_dropout_mask_is_drawn_for_the_rows_of_the_rank() -> None:
    assert _random_nodes(lambda p, x: F.dropout(x * p["w"], 0.5).sum()) == [(SPLIT, (1, 8))]


def test_noise_on_a_parameter_is_the_same_everywhere() -> None:
    assert _random_nodes(lambda p, x: (x * F.dropout(p["w"], 0.5)).sum()) == [((), (8,))]


def test_noise_for_the_batch_is_created_as_the_rank_needs_it() -> None:
    assert _random_nodes(lambda p, x: (x * p["w"] + torch.randn(6, 8)).sum()) == [(SPLIT, (1, 8))]
    assert _random_nodes(lambda p, x: (x * p["w"] * torch.rand_like(x)).sum()) == [(SPLIT, (1, 8))]


def test_a_mask_per_row_made_in_place_is_kept_small() -> None:
    def drop_path(p: dict[str, Tensor], x: Tensor) -> Tensor:
        keep = x.new_empty((x.shape[0], 1)).bernoulli_(0.5)
        return (x * p["w"] * keep.div_(0.5)).sum()

    assert _random_nodes(drop_path) in ([(SPLIT, (1, 1))], [((), (6, 1))])
